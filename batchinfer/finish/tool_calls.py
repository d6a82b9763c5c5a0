"""The tool calls in answers: calls that the model wrote, of tools that the row offers."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa

from batchinfer.config import JobConfig
from batchinfer.data.columns import column_type
from batchinfer.data.row_values import tool_list
from batchinfer.data.schemas.outputs import TOOL_CALLS
from batchinfer.data.shard_schemas import shard_schema
from batchinfer.finish.answers import Answer, AnswerReader
from batchinfer.finish.kept_columns import KeptRows
from batchinfer.finish.offered_tools import Call, OfferedTools
from batchinfer.records import Shard

TOOL_LISTS = 64  # parsed lists in the cache; the rows of a job mostly share a few


class ToolCalls:
    """The tool calls in the answers of one shard.

    The tools of rows are read from the input like kept columns, and only for rows whose answers have calls.
    """

    def __init__(self, job: JobConfig, shard: Shard, reader: AnswerReader) -> None:
        self._reader = reader
        self._tools = _RowTools(job, shard)

    def add(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the output rows with their calls in the column tool_calls; batches come in the order of the rows."""
        place = rows.schema.get_field_index("tool_calls")
        return rows.set_column(place, rows.schema.field(place), self._of(rows))

    def _of(self, rows: pa.RecordBatch) -> pa.Array:
        """Return the calls of rows: null if there is no text, a call cannot be read, or no tool fits it."""
        texts, reasons = rows["text"].to_pylist(), rows["finish_reason"].to_pylist()
        answers = [
            None if text is None else self._reader.read(text, is_cut=reason == "length")
            for text, reason in zip(texts, reasons, strict=True)
        ]
        found: list[list[Call] | None] = [None if answer is None or answer.calls is None else [] for answer in answers]
        calling = [place for place, answer in enumerate(answers) if answer is not None and answer.calls]
        tools_of_rows = self._tools.of(rows["row"].take(pa.array(calling, pa.int64())))
        for place, tools in zip(calling, tools_of_rows, strict=True):
            answer = answers[place]
            assert answer is not None
            found[place] = tools.calls(answer)
        return pa.array(found, TOOL_CALLS)


def call_ids(answer: Answer, names: list[str], keys: list[str]) -> list[str]:
    """Return an id for each call, in a form that the model's chat template accepts when the calls come back in a chat.

    Kimi-K2's template writes the id without the name, so the model's own id (functions.NAME:0) is kept. Mistral's
    templates accept only ids of nine letters and digits. If the model wrote an id twice, all calls get new ids.

    Args:
        names: names of the called tools.
        keys: a distinct key for each call.
    """
    form = answer.form
    if form is None or answer.calls is None:
        return [f"call_{key}" for key in keys]
    made = [form.make_id(name, key, place) for place, (name, key) in enumerate(zip(names, keys, strict=True))]
    ids = [
        written.id if written.id is not None and form.ids is not None and form.ids.takes(written.id, name) else new
        for written, name, new in zip(answer.calls, names, made, strict=True)
    ]
    return ids if len(set(ids)) == len(ids) else made


class _RowTools:
    """The tools of a shard's rows: from the job, from a column, or from the requests of an OpenAI batch."""

    def __init__(self, job: JobConfig, shard: Shard) -> None:
        self._job, self._shard = job, shard
        is_openai, tools = job.input.format == "openai", job.input.tools
        self._column = "request" if is_openai else tools if isinstance(tools, str) else None
        self._of_value = _tools_of_request if is_openai else _tools_of
        self._of_job = OfferedTools([tools] if isinstance(tools, dict) else tools if isinstance(tools, list) else [])
        self._rows: KeptRows | None = None  # opened for the first row that needs it

    def of(self, rows: pa.Array) -> Iterator[OfferedTools]:
        """Yield the tools of each row; calls come in the order of the rows."""
        if self._column is None or len(rows) == 0:
            yield from [self._of_job] * len(rows)
            return
        if self._rows is None:
            kind = column_type(shard_schema(self._shard), self._column)
            self._rows = KeptRows(self._shard, [pa.field(self._column, kind or pa.null())], self._job.s3)
        for _, (values,) in self._rows.of(rows):
            yield from (self._of_value(value.as_py()) for value in values)


def _tools_of(value: Any) -> OfferedTools:
    return _tools_of_text(value) if isinstance(value, str) else OfferedTools(tool_list("input.tools", value))


@lru_cache(TOOL_LISTS)
def _tools_of_text(text: str) -> OfferedTools:
    return OfferedTools(tool_list("input.tools", text))


class _Request(msgspec.Struct):
    """A request as data/formats/openai_batch.py writes it."""

    tools: msgspec.Raw = msgspec.Raw(b"null")


def _tools_of_request(text: str) -> OfferedTools:
    return _tools_of_text(bytes(msgspec.json.decode(text, type=_Request).tools).decode())
