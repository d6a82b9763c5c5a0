"""Values that a row may give as JSON text or as Arrow structs: tools, sampling, and their nulls that may be values."""

import json
from collections.abc import Container, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.config import JobConfig
from batchinfer.data.columns import is_json, is_text, list_lengths, without_dictionary
from batchinfer.sanitize import error_text

DATE = "strftime_now"  # transformers' name for the function by which chat templates write the date


class RowError(ValueError):
    """A row makes no prompt; the message is its error."""


def json_value(column: str, text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        RowError: the text is not valid JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{column} is not valid JSON: {error_text(error)}") from None


def tool_list(column: str, value: Any) -> list[dict[str, Any]] | None:
    """Return a row's tools as a list; None if the row has none.

    Args:
        value: a list of objects, one object, or JSON text of either.

    Raises:
        RowError: the value is something else.
    """
    tools = json_value(column, value) if isinstance(value, str) else without_nulls(value)
    if tools is None:
        return None
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"{column} is not a list of tools, each an object")
    return tools


def without_nulls(value: Any) -> Any:
    """Return the value without null fields: in Parquet all structs of a column have the same fields."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


# keys of JSON Schema for which null is a value like any other
VALUES = ("default", "const")
_NAMES = ("properties", "patternProperties", "$defs", "definitions")  # whose keys are names of parameters and the like


def first_lost_null(column: pa.Array, keys: Sequence[str] = VALUES) -> tuple[int, str] | None:
    """Return the first row with a null that may be a value, and its key; None if there is none.

    A struct with other fields, all of them null, does not count: the row probably does not have this struct.

    Args:
        column: structs, lists of structs, or texts, which cannot have such a null.
        keys: the keys of VALUES that count.
    """
    found = [lost for lost in _lost_nulls(column, np.arange(len(column)), "") if lost[1] in keys]
    return min(found, default=None)


def _lost_nulls(values: pa.Array, rows: np.ndarray, name: str) -> Iterator[tuple[int, str]]:
    """Yield the first row, for each key of each struct in `values`, that has null there.

    Args:
        rows: [len(values)] the row of the column that each value is in.
        name: the key of the values.
    """
    kind = values.type
    if hasattr(kind, "value_type") and not pa.types.is_dictionary(kind):
        yield from _lost_nulls(values.flatten(), np.repeat(rows, list_lengths(values)), name)
    if not pa.types.is_struct(kind):
        return
    is_there = values.is_valid()
    rows, values = rows[is_there.to_numpy(zero_copy_only=False)], values.filter(is_there)
    parts = {part.name: values.field(index) for index, part in enumerate(kind)}
    has_value = {key: part.is_valid().to_numpy(zero_copy_only=False) for key, part in parts.items()}
    others = [mask for key, mask in has_value.items() if key not in VALUES]
    is_own = np.any(others, axis=0) if others else np.ones(len(rows), bool)
    for key in VALUES if name not in _NAMES else ():
        if key in parts and len(lost := rows[is_own & ~has_value[key]]):
            yield int(lost[0]), key
    for key, part in parts.items():
        yield from _lost_nulls(part, rows, key)


_NO_TOOLS = r"\A\s*(\[\s*\]|null)\s*\z"  # as JSON text, in the form of Arrow's expressions


class _Request(msgspec.Struct):
    """A request as the formats of OpenAI write it, read for its tools alone."""

    tools: Any = None


def tools_column(job: JobConfig) -> str | None:
    """Return the input column that holds the tools of rows, None if rows have none of their own."""
    if job.input.format == "openai":
        return "request"
    return job.input.tools if isinstance(job.input.tools, str) else None


def rows_with_tools(job: JobConfig, batch: pa.RecordBatch, bad: Container[int]) -> int:
    """Return the number of rows of a batch that have tools of their own, without bad rows."""
    name = tools_column(job)
    if name not in batch.schema.names:
        return 0
    found = have_tools(without_dictionary(batch[name]), are_requests=job.input.format == "openai").to_pylist()
    return sum(has_tools and row not in bad for row, has_tools in enumerate(found))


def rows_with_calls(job: JobConfig, batch: pa.RecordBatch, bad: Container[int]) -> int:
    """Return the number of rows of a batch whose messages have tool calls, without bad rows."""
    name = "request" if job.input.format == "openai" else job.input.messages
    if name not in batch.schema.names or job.input.format == "sharegpt":
        return 0
    values = without_dictionary(batch[name])
    values = values.storage if is_json(values.type) else values
    if is_text(values.type):
        texts = enumerate(values.to_pylist())
        found = {row for row, text in texts if text is not None and '"tool_calls"' in text and _text_calls(text)}
    else:
        found = _rows_of_calls(values)
    return sum(row not in bad for row in found)


def _text_calls(text: str) -> bool:
    """Return whether the messages in a JSON text, or those of a request, have tool calls."""
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return False
    messages = messages.get("messages") if isinstance(messages, dict) else messages
    return isinstance(messages, list) and any(isinstance(one, dict) and one.get("tool_calls") for one in messages)


def _rows_of_calls(messages: pa.Array) -> set[int]:
    """Return the rows of lists of messages as structs that have tool calls."""
    kind = getattr(messages.type, "value_type", None)
    if kind is None or not pa.types.is_struct(kind) or kind.get_field_index("tool_calls") < 0:
        return set()
    rows = np.repeat(np.arange(len(messages)), list_lengths(messages)).tolist()
    calls = pc.struct_field(messages.flatten(), "tool_calls").to_pylist()
    return {row for row, value in zip(rows, calls, strict=True) if value}


class _ChatRequest(msgspec.Struct):
    """The parts of a request in OpenAI's format that show whether a chat names its date."""

    messages: Any = None
    chat_template_kwargs: Any = None


def chats_without_date(batch: pa.RecordBatch, bad: Container[int]) -> int:
    """Return the number of OpenAI's requests in a batch that are chats and name no date, without bad rows."""
    texts = enumerate(without_dictionary(batch["request"]).to_pylist() if "request" in batch.schema.names else [])
    requests = [
        msgspec.json.decode(text, type=_ChatRequest) for row, text in texts if text is not None and row not in bad
    ]
    return sum(one.messages is not None and DATE not in (one.chat_template_kwargs or {}) for one in requests)


def have_tools(values: pa.Array | pa.ChunkedArray, *, are_requests: bool) -> pa.Array | pa.ChunkedArray:
    """Return for each row whether it has tools.

    Args:
        values: a list of tools, a struct or JSON text of them; or requests.
        are_requests: whether values are JSON of requests, for input.format = "openai".
    """
    if are_requests:
        requests = (None if text is None else msgspec.json.decode(text, type=_Request) for text in values.to_pylist())
        return pa.array([request is not None and request.tools is not None for request in requests], pa.bool_())
    if is_text(values.type):
        return pc.fill_null(pc.invert(pc.match_substring_regex(values, _NO_TOOLS)), False)
    is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
    return pc.fill_null(pc.greater(pc.list_value_length(values), 0), False) if is_list else pc.is_valid(values)
