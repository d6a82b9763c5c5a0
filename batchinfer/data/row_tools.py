"""Detection of rows with tools, for every form of the column of tools."""

from collections.abc import Container
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.config import JobConfig
from batchinfer.data.columns import is_text, without_dictionary

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
