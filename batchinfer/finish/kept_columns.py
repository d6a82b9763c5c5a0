"""The kept columns of a shard, read beside its outputs from start to end."""

import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.config import DEFAULT_S3, S3Config
from batchinfer.data.inputs import column_type, read_batches, shard_schema
from batchinfer.data.kept_fields import conformed
from batchinfer.records import Shard


class KeptRows:
    """A cursor over the kept columns of one shard; memory holds a few batches of it."""

    def __init__(self, shard: Shard, kept: list[pa.Field], s3: S3Config = DEFAULT_S3) -> None:
        self._shard, self._schema = shard, pa.schema(kept)
        present = shard_schema(shard, s3) if kept else pa.schema([])
        self._names = [field.name for field in kept if column_type(present, field.name) is not None]
        self._batches = read_batches(shard, self._names, s3=s3) if self._names else iter(())
        self._buffer = self._schema.empty_table()
        self._base = 0  # row of the buffer's first line

    def take(self, rows: pa.Array) -> list[pa.ChunkedArray]:
        """The kept values of some rows; calls come in the order of the rows."""
        if len(self._schema) == 0 or len(rows) == 0:
            return [pa.chunked_array([], field.type) for field in self._schema]
        first, last = rows[0].as_py(), rows[-1].as_py()
        if not self._names:
            return [pa.chunked_array([pa.nulls(len(rows), field.type)]) for field in self._schema]
        self._buffer = self._buffer.slice(first - self._base)
        self._base = first
        parts = [self._buffer]
        while self._base + sum(len(part) for part in parts) <= last:
            parts.append(pa.Table.from_batches([conformed(next(self._batches), list(self._schema), self._shard)]))
        self._buffer = pa.concat_tables(parts)
        picked = self._buffer.take(pc.subtract(rows, self._base))
        return list(picked.columns)
