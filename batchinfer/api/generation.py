"""`generate`: a job over data in memory, which is written as the job's only shard."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from batchinfer.api.answers import Answers
from batchinfer.api.call_folder import call_folder
from batchinfer.api.display import Progress, check_progress
from batchinfer.api.job import Job, Start
from batchinfer.api.job_keys import ModelKeys
from batchinfer.api.process import CommandProcess
from batchinfer.api.prompts import are_json_chats, reader_of, write_shard
from batchinfer.api.settings import KINDS, Settings, parts_of, with_keys_of, working_folder
from batchinfer.config import job_of_table
from batchinfer.config.model_folder import model_folder
from batchinfer.data.tokenizer import has_chat_template
from batchinfer.records import ConfigError
from batchinfer.run.store.open import storage_of

SHARD = "prompts.parquet"
INPUT = "-input"  # suffix of the folder next to the run folder, in which only files of the run may be
_CALL = Path("generate()")  # in messages, in place of the job file's path
_COLUMNS = ("id", "chat_template_kwargs", "tools", "choices", "sampling")  # keys of [input] that may name columns


@overload
def generate(
    data: Any, *, model: str | Path | ModelKeys, stream: Literal[False] = False, **settings: Unpack[Settings]
) -> Answers: ...


@overload
def generate(
    data: Any, *, model: str | Path | ModelKeys, stream: Literal[True], **settings: Unpack[Settings]
) -> Iterator[dict[str, Any]]: ...


@overload
def generate(
    data: Any, *, model: str | Path | ModelKeys, stream: bool, **settings: Unpack[Settings]
) -> Answers | Iterator[dict[str, Any]]: ...


@with_keys_of(Settings)
def generate(
    data: Any,
    *,
    model: str | Path | ModelKeys,
    user: str | None = None,
    messages: str | None = None,
    prompt: str | None = None,
    token_ids: str | None = None,
    raw: bool = False,
    stream: bool = False,
    progress: Progress = True,
    **settings: Any,
) -> Answers | Iterator[dict[str, Any]]:
    """Answer all prompts on this machine; a row that cannot be answered gets the status 'error'.

    >>> answers = batchinfer.generate(
    ...     ["The ferry", "The baker"], model="sample_data/model", dtype="float32", max_tokens=3
    ... )
    >>> answers.select(["row", "status", "completion_tokens"]).to_pylist()[1]
    {'row': 1, 'status': 'ok', 'completion_tokens': 3}
    >>> chats = [[{"role": "user", "content": "What is 2 plus 3?"}]]
    >>> rows = batchinfer.generate(chats, model="sample_data/model", max_tokens=3, stream=True)
    >>> [row["row"] for row in rows]
    [0]

    Args:
        data: a list or Series of texts, of lists of messages or of lists of token ids (ids are row numbers); a list of
            rows as dicts, or a dict of columns; or a table: of Arrow (Table, RecordBatchReader, Dataset), a Hugging
            Face Dataset, or any table that exports Arrow data (pandas, polars, DuckDB). One text or one chat is one
            row. A row may also be a numpy array.
        model: the model folder, or a dict of the keys of [model].
        user, messages, prompt, token_ids: name of the column of user's messages (text), chats, raw texts or token ids.
            If unset, the rows of a list are the prompts; of a table, the only column whose type can be one of these, or
            the first with a usual name ("messages", then "prompt", "question", …).
        raw: texts of `data` go to the model as they are; by default they are user's messages if the model has a chat
            template.
        stream: yield each row once when it is durable, in any order; the job runs while the iterator is read.
        progress: True: the command's bars on a terminal, a bar in a notebook, elsewhere a line now and then; False:
            nothing; "tqdm": bars everywhere; or a function, which is called in this thread with a title ("tokenise",
            "load", "work", "tokens", "finish"), the number done and the total; "load" counts bytes of weights, "work"
            requests.
        settings: keys of [sampling] (max_tokens is required), dtype, and the other parts of a job file as dicts:
            cluster={"prefill_ranks": 2}. output: the run folder, or a dict. If unset, the run folder is temporary and
            is removed after the call, also if the call is interrupted. With a run folder, the same call continues an
            interrupted one. The schema in structured_outputs={"json": …} may be a pydantic model or a dataclass.

    Returns:
        A table with the columns of outputs/ (`batchinfer schema --stats`) in input order; with `stream`, an iterator of
        rows as dicts.

    Raises:
        ConfigError, InputError: a setting or the data is wrong.
        RunMismatchError: the run folder belongs to other data or settings.
        BatchinferError: the model cannot be used, or its ranks fail; see records.py for the classes.
        KeyboardInterrupt: finished requests are kept if output names a run folder.
    """
    columns = {"user": user, "prompt": prompt, "messages": messages, "token_ids": token_ids}
    parts = parts_of({"model": model, **settings})
    return answer(data, columns, parts, raw=raw, stream=stream, progress=progress)


def answer(
    data: Any,
    columns: Mapping[str, str | None],
    parts: dict[str, dict[str, Any]],
    *,
    raw: bool,
    stream: bool,
    progress: Progress,
    start: Start = CommandProcess,
) -> Answers | Iterator[dict[str, Any]]:
    """Run a job over data (see `generate`).

    Args:
        columns: the named column of prompts by its kind, None for kinds without a name.
        raw: texts go to the model as they are, also if the model has a chat template.
        parts: the parts of a job file.
        start: starts the job's command.
    """
    check_progress(progress)
    for key, value in (("raw", raw), ("stream", stream)):
        if not isinstance(value, bool):
            raise ConfigError(f"{key} is {value!r}; give True or False")
    named = {kind: name for kind, name in columns.items() if name is not None}
    with ExitStack() as stack:
        job = _job(data, named, parts, stack, start, raw=raw)
        if stream:
            return _rows(job, progress, stack.pop_all())
        job.run(progress=progress)
        return job.outputs()


def _job(
    data: Any, named: dict[str, str], parts: dict[str, dict[str, Any]], stack: ExitStack, start: Start, *, raw: bool
) -> Job:
    """Write the rows to a folder next to the run folder and return the job; `stack` removes temporary folders."""
    inputs, outputs = parts["input"], parts["output"]
    named |= {kind: inputs.pop(kind) for kind in (*KINDS, "template") if kind in inputs}
    others = {name for key in _COLUMNS if isinstance(name := inputs.get(key, key), str)}
    system = inputs.get("system")
    reader, found = reader_of(
        data, named, others, outputs.get("keep_columns"), system if isinstance(system, str) else ""
    )
    if found.keys() == {"prompt"} and not named and not raw and _has_chat_template(parts.get("model", {})):
        reader, are_chats = are_json_chats(reader, found["prompt"])
        found = {"messages" if are_chats else "user": found["prompt"]}
    if "dir" not in outputs:
        outputs["dir"] = str(stack.enter_context(call_folder()) / "run")
    inputs |= {"files": [SHARD], **found}
    config = job_of_table(parts, _CALL, working_folder())
    run = storage_of(config).run
    shard = run.root.with_name(run.root.name + INPUT) / SHARD
    write_shard(reader, shard, run.run_json, config.output.shared_group)
    files = config.input.model_copy(update={"files": [glob.escape(str(shard))]})
    return Job.of(config.model_copy(update={"input": files}), start)


def _has_chat_template(model: Mapping[str, Any]) -> bool:
    """Return whether the model folder of the keys of [model] has a chat template."""
    path = model.get("path")
    return isinstance(path, str) and has_chat_template(Path(model_folder(working_folder(), path)))


def _rows(job: Job, progress: Progress, stack: ExitStack) -> Iterator[dict[str, Any]]:
    with stack:
        yield from job.rows(progress=progress)
