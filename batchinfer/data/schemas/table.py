"""Definition of tables, and types and columns that several tables have."""

from dataclasses import dataclass

import pyarrow as pa

TOKEN_IDS = pa.list_(pa.int32())
_TOKEN, _TEXT, _LOGPROB = ("token_id", pa.int32()), ("token", pa.string()), ("logprob", pa.float32())
LOGPROBS = pa.list_(pa.struct([_TOKEN, _LOGPROB, ("top", pa.list_(pa.struct([_TOKEN, _LOGPROB])))]))
LOGPROBS_WITH_TEXTS = pa.list_(
    pa.struct([_TOKEN, _TEXT, _LOGPROB, ("top", pa.list_(pa.struct([_TOKEN, _TEXT, _LOGPROB])))])
)


@dataclass(frozen=True, slots=True)
class Column:
    """A column: name, Arrow type and meaning with unit."""

    name: str
    type: pa.DataType
    doc: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the run folder."""

    name: str
    doc: str
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([(column.name, column.type) for column in self.columns])


def table(name: str, doc: str, *columns: tuple[str, pa.DataType, str]) -> Table:
    return Table(name, doc, tuple(Column(*column) for column in columns))


KEY = (
    ("shard", pa.int32(), "index of the input shard in run.json"),
    ("row", pa.int64(), "position of the row in its shard, from 0"),
    ("sample", pa.int32(), "0 .. n - 1"),
)
# counts of one request
COMPUTED = (
    ("replicated_tokens", pa.int32(), "prompt tokens computed on a second rank, too (below 0: not, against the plan)"),
    ("recomputed_tokens", pa.int32(), "prompt tokens that its rank computed again: their pages had been given up"),
    ("computed_tokens", pa.int32(), "prompt tokens that ran for it, the last two columns' among them"),
)
