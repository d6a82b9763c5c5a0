"""Reader of Arrow IPC files (Feather 2) and streams, in slices of a few megabytes."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from batchinfer.data.formats.lines import HashedBytes
from batchinfer.data.shard_schemas import with_schema
from batchinfer.data.wide_rows import BATCH_BYTES, bytes_of_rows, decoded, runs_of_rows
from batchinfer.records import Shard

_FILE, _FEATHER_1 = b"ARROW1", b"FEA1"


def inspect(shard: Shard, source: pa.NativeFile) -> Shard:
    """Return the shard with its rows counted, its schema and its bytes hashed.

    Raises:
        OSError, ValueError: the file is damaged, or no Arrow file.
    """
    hashed = HashedBytes(source)
    footer = hashed.digest()
    if hashed.num_bytes == 0:
        raise ValueError("it is empty")
    schema = schema_of(source)
    num_rows = sum(batch.num_rows for batch in _raw(source, schema.names[:1]))
    return with_schema(replace(shard, footer=footer, size_bytes=hashed.num_bytes, num_rows=num_rows), schema)


def schema_of(source: pa.NativeFile) -> pa.Schema:
    """Return the schema of the file's columns."""
    return _opened(source).schema


def batches(source: pa.NativeFile, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows with some of their columns, as plain types (see columns.plain_type).

    Raises:
        OSError, ValueError: the file is damaged.
    """
    num_rows = 0
    for whole in _raw(source, columns or schema_of(source).names[:1]):
        whole.validate(full=True)  # else Arrow follows damaged offsets to any place in memory
        batch = whole.select(columns) if columns else pa.record_batch([pa.nulls(len(whole))], names=["rows"])
        row_bytes = np.sum([bytes_of_rows(column) for column in batch.columns], axis=0)
        for first, end in runs_of_rows(row_bytes, BATCH_BYTES, batch_rows):
            yield from decoded(batch.slice(first, end - first), num_rows + first)
        num_rows += len(whole)


def _raw(source: pa.NativeFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
    schema = schema_of(source)
    wanted = [schema.get_field_index(name) if schema.names.count(name) == 1 else 0 for name in columns]
    reader = _opened(source, wanted)
    if isinstance(reader, pa.RecordBatchFileReader):
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        yield from reader


def _opened(
    source: pa.NativeFile, columns: list[int] | None = None
) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    source.seek(0)
    head = source.read(len(_FILE))
    source.seek(0)
    if head.startswith(_FEATHER_1):
        raise ValueError("it is Feather of version 1; write it as version 2")
    options = pa.ipc.IpcReadOptions(included_fields=sorted(columns or []), use_threads=False)
    return (pa.ipc.open_file if head == _FILE else pa.ipc.open_stream)(source, options=options)
