"""The kept columns of a shard, read in step with its outputs."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from batchinfer.config import DEFAULT_S3, S3Config
from batchinfer.data.columns import column_type
from batchinfer.data.inputs import read_batches
from batchinfer.data.kept_fields import cast_kept_columns
from batchinfer.data.shard_schemas import shard_schema
from batchinfer.data.wide_rows import bytes_of_rows, runs_of_rows
from batchinfer.records import Shard

KEPT_BYTES = 64 << 20  # of kept values that are returned at a time; a larger row is returned alone


class KeptRows:
    """A cursor over the kept columns of one shard; memory holds one batch of it and the returned values."""

    def __init__(self, shard: Shard, kept: list[pa.Field], s3: S3Config = DEFAULT_S3) -> None:
        self._shard, self._kept = shard, kept
        present = shard_schema(shard) if kept else pa.schema([])
        names = [field.name for field in kept if column_type(present, field.name) is not None]
        self._batches = read_batches(shard, names, s3=s3) if names else None
        self._batch = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in kept], schema=pa.schema(kept))
        self._base = 0  # row number of the batch's first row

    def of(self, rows: pa.Array) -> Iterator[tuple[int, list[pa.ChunkedArray]]]:
        """Yield (number of rows, their kept values) until all `rows` are done; calls come in the order of rows."""
        if self._batches is None:
            yield len(rows), [pa.chunked_array([pa.nulls(len(rows), field.type)]) for field in self._kept]
            return
        held: list[pa.RecordBatch] = []
        num_bytes = 0
        for part, part_bytes in self._parts(rows.to_numpy(), self._batches):
            if held and num_bytes + part_bytes > KEPT_BYTES:
                yield _joined(held)
                held, num_bytes = [], 0
            held.append(part)
            num_bytes += part_bytes
        if held:
            yield _joined(held)

    def _parts(self, rows: np.ndarray, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield the kept values in parts that are small enough to be copied, each with its size in bytes."""
        while len(rows):
            while rows[0] >= self._base + len(self._batch):
                self._base += len(self._batch)
                self._batch = cast_kept_columns(next(batches), self._kept, self._shard)
            here, rows = np.split(rows, [np.searchsorted(rows, self._base + len(self._batch))])
            row_bytes = np.sum([bytes_of_rows(column) for column in self._batch.columns], axis=0)[here - self._base]
            for first, end in runs_of_rows(row_bytes, KEPT_BYTES, len(here)):
                yield self._batch.take(pa.array(here[first:end] - self._base)), int(row_bytes[first:end].sum())


def _joined(parts: list[pa.RecordBatch]) -> tuple[int, list[pa.ChunkedArray]]:
    table = pa.Table.from_batches(parts)
    return len(table), table.columns
