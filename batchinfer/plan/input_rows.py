"""Check of rows whose column types do not show whether the job can read them: chats as JSON text, lines of a batch.

The first row that the job can read ends the search. Nulls do not count.
"""

import json
from typing import Any

import pyarrow as pa

from batchinfer.config import JobConfig
from batchinfer.data.column_checks import prompt_settings
from batchinfer.data.columns import column_type, is_text, python_values
from batchinfer.data.formats.line_rows import bad_lines
from batchinfer.data.formats.names import is_of_lines
from batchinfer.data.formats.values import in_words
from batchinfer.data.inputs import read_batches
from batchinfer.data.shard_schemas import shard_schema
from batchinfer.plan.input_columns import assignments
from batchinfer.records import ConfigError, Shard


def check_rows(job: JobConfig, shards: list[Shard]) -> None:
    """Refuse input in which no row is a chat, or a request of a batch, as the job says.

    Raises:
        ConfigError: names the content of the first row and the setting that reads it.
        InputError, StoreError, RunMismatchError: a shard cannot be read (any more).
    """
    readable = [shard for shard in shards if shard.problem is None]
    if job.input.format == "openai":
        _check_requests(job, readable)
    elif job.input.messages is not None:
        _check_chats(job, job.input.messages, readable)


def _check_requests(job: JobConfig, shards: list[Shard]) -> None:
    first = None
    for shard in shards:
        for batch in read_batches(shard, ["custom_id", "url"], s3=job.s3):
            errors = bad_lines(batch)
            named = zip(batch["custom_id"].to_pylist(), batch["url"].to_pylist(), strict=True)
            for row, (custom_id, url) in enumerate(named):
                # even an unsupported request has a url, or a custom_id and no missing field
                if url is not None or (custom_id is not None and not errors[row].endswith(" is missing")):
                    return
                first = first or f"{shard.path}: {errors[row]}"
    if first is not None:
        raise ConfigError(
            f"input.format is 'openai', but no line of the input is a request of an OpenAI batch, with custom_id and "
            f"body; the first: {first}; leave input.format out and name the column of the prompts, as "
            "`batchinfer init` does"
        )


def _check_chats(job: JobConfig, name: str, shards: list[Shard]) -> None:
    first = None
    for shard in shards:
        kind = column_type(shard_schema(shard), name)
        if kind is None or pa.types.is_null(kind):
            continue
        if not is_text(kind):
            return  # check_columns checks the type
        for batch in read_batches(shard, [name], s3=job.s3):
            for value in python_values(batch[name]):
                if isinstance(value, str):
                    found = _parsed(value)
                    if _is_chat(found, "from" if job.input.format == "sharegpt" else "role"):
                        return
                    first = first or f"that of {shard.path} is {_told(found, name, shard)}"
    if first is not None:
        raise ConfigError(f"input.messages: no row of column {name!r} holds a chat; {first}")


def _parsed(text: str) -> Any:
    """Return the value of a JSON text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _is_chat(value: Any, key: str) -> bool:
    return isinstance(value, list) and (not value or any(isinstance(turn, dict) and key in turn for turn in value))


def _told(value: Any, name: str, shard: Shard) -> str:
    """Return the kind of a value in words, and the setting that reads it if there is one."""
    try:
        settings = prompt_settings(pa.infer_type([value]))
    except pa.ArrowException:
        settings = None
    if settings is None:
        return in_words(value)
    words, keys = settings
    # only lines may have token ids as text
    if keys.keys() == {"messages"} or ("token_ids" in keys and not is_of_lines(shard.format)):
        return in_words(value)
    return f"{words}: set {assignments(keys, name)} instead"
