"""The input of a job: its shards, checks that the settings fit them, and the common arguments of planning steps."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from datetime import date

import pyarrow as pa

from batchinfer.config import JobConfig
from batchinfer.data.encoders import Encoders
from batchinfer.data.formats.values import column_roles
from batchinfer.data.overrides import check_thinking, warnings_of
from batchinfer.data.row_values import tools_column
from batchinfer.data.shard_schemas import shard_schema
from batchinfer.data.shards import find_shards
from batchinfer.manifest import Manifest
from batchinfer.model.config import ModelConfig
from batchinfer.plan.earlier_run import Learned
from batchinfer.plan.earlier_tokens import EarlierTokens
from batchinfer.plan.input_columns import check_columns
from batchinfer.plan.input_rows import check_rows
from batchinfer.plan.reuse import EarlierAnswers
from batchinfer.progress import Stage, note
from batchinfer.records import ConfigError, InputError, Shard
from batchinfer.run.store.open import storage_of
from batchinfer.rundir import RunDir


def find_inputs(job: JobConfig, encoders: Encoders, *, strict: bool) -> tuple[list[Shard], list[pa.Field]]:
    """Return the job's shards, and the kept columns as fields of the outputs.

    Raises:
        InputError: no shard can be read; or `strict` and one cannot.
        ConfigError: the job's settings do not fit the input.
        StoreError: an object store does not answer, or refuses the request.
    """
    with Stage("planning", "looking through the inputs"):
        roles = column_roles(job, encoders.columns)
        shards = find_shards(job.input.files, storage_of(job).run.root, job.s3, format=job.input.format, roles=roles)
        _check_shards(shards, strict=strict)
        return shards, _check_input(job, shards, encoders)


def _check_shards(shards: list[Shard], *, strict: bool) -> None:
    bad = [shard for shard in shards if shard.problem is not None]
    for shard in bad:
        note(f"warning: {shard.path} cannot be read: {shard.problem}")
    if bad and strict:
        raise InputError(f"{bad[0].path} cannot be read: {bad[0].problem}; repair it, or run without --strict")
    refuse_unreadable_input(shards)


def refuse_unreadable_input(shards: list[Shard]) -> None:
    """Raise InputError if no shard can be read."""
    if all(shard.problem is not None for shard in shards):
        first = f"{shards[0].path}: {shards[0].problem}"
        if len(shards) == 1:
            raise InputError(f"the only input shard cannot be read: {first}")
        raise InputError(f"none of the {len(shards)} input shards can be read; the first: {first}")


def _check_input(job: JobConfig, shards: list[Shard], encoders: Encoders) -> list[pa.Field]:
    """Refuse settings that do not fit the input; return the kept columns as fields of the outputs."""
    if job.output.reasoning == "deepseek_r1" and not encoders.ends_thinking:
        raise ConfigError(
            "output.reasoning is 'deepseek_r1', but the model's tokenizer has no token </think> or [/THINK]; use 'none'"
        )
    try:
        check_thinking(job.sampling.to_sampling(), encoders.ends_thinking)
    except ConfigError as error:
        raise ConfigError(f"sampling.{error}") from None
    for sentence in warnings_of(job.sampling.to_sampling()):
        note(f"warning: sampling.structured_outputs: {sentence}")
    if not encoders.writes_tools and job.input.tools is not None and tools_column(job) is None:
        warn_of_tools(job)
    if encoders.lacks_date and job.input.format != "openai":
        warn_of_date(job)
    kept = check_columns(job, shards, encoders.columns)
    readable = [shard for shard in shards if shard.problem is None]
    if not any(shard.num_rows for shard in readable):
        note(f"warning: the input has no rows; {readable[0].path} has columns, but nothing below them")
    check_rows(job, shards)
    _warn_of_unused(job, readable, encoders.columns)
    return kept


def _warn_of_unused(job: JobConfig, shards: list[Shard], columns: Collection[str]) -> None:
    """Warn of columns that are named as a key of [input] is, such as the rows' tools, and that the job does not use.

    Args:
        columns: those that the templates read.
    """
    inputs = job.input
    used = {*columns, *job.output.keep_columns, inputs.prompt, inputs.user, inputs.messages, inputs.token_ids}
    names = [] if inputs.format == "openai" else ["sampling"]
    if names and (inputs.messages is not None or inputs.user is not None):
        names += ["tools", "chat_template_kwargs"]
    for name in names:
        if getattr(inputs, name) is not None or name in used:
            continue
        if found := next((shard for shard in shards if name in shard_schema(shard).names), None):
            note(
                f"warning: {found.path} has a column {name!r}, which the job does not use; set input.{name} = "
                f"{json.dumps(name)} if it is meant so"
            )


def warn_of_tools(job: JobConfig) -> None:
    """Warn that the model's chat template does not write tools."""
    tools = "the lines' tools" if job.input.tools is None else "input.tools"
    note(
        f"warning: the chat template of {job.model.path} does not write tools, so the model does not see {tools}; give "
        "the folder a template that writes tools"
    )


def warn_of_calls(job: JobConfig, num_rows: int) -> None:
    """Warn that the model's chat template does not write the tool calls of earlier messages."""
    note(
        f"warning: the chat template of {job.model.path} does not write tool calls, so the model does not see the "
        f"tool_calls in the messages of {num_rows:,} {'row' if num_rows == 1 else 'rows'}; give the folder a template "
        "that writes tool calls"
    )


def warn_of_date(job: JobConfig) -> None:
    """Warn that chats get the date that the model's chat template has in its text, or none."""
    note(
        f"warning: the chat template of {job.model.path} writes today's date with transformers and vLLM, but a fixed "
        "date or none here, where a prompt must not depend on the day; name the date: "
        f'input.chat_template_kwargs = {{ strftime_now = "{date.today()}" }}'
    )


@dataclass(frozen=True, slots=True)
class Prepared:
    """Job, run folder, model, tokenizer and statistics of earlier runs that the steps of planning use."""

    job: JobConfig
    run: RunDir
    manifest: Manifest  # checksums of the plan's files
    encoders: Encoders
    model: ModelConfig
    learned: Learned
    earlier: EarlierTokens
    answers: EarlierAnswers | None  # of an earlier run
    kept: list[pa.Field]  # kept input columns as fields of the outputs
