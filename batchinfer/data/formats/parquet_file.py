"""Reader of Parquet files: rows are counted by the footer, and read in bounded memory."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.formats.first_bytes import HEAD_BYTES, format_advice
from batchinfer.data.shard_schemas import with_schema
from batchinfer.data.wide_rows import BATCH_BYTES, Dictionaries, decoded, dictionaries_of, joined
from batchinfer.records import Shard

MAGIC = b"PAR1"
OTHER_FORMATS = "for another format set input.format, or end its name in .jsonl, .csv, .tsv or .arrow"
BUFFER_BYTES = 1 << 20  # read-ahead per column
STORE_BUFFER_BYTES = 8 << 20  # the same for objects, each read of which is a request
PROBE_ROWS = 8  # rows decoded first to learn how wide rows are


def inspect(shard: Shard, source: pa.NativeFile) -> Shard:
    """Return the shard with its rows counted, its schema and the digest of its footer.

    Raises:
        OSError, ValueError, ArrowException: the file is damaged, or no Parquet file.
    """
    footer = _read_footer(source, shard.size_bytes)
    # parse the bytes that were read: for an object, to read the footer again would be another request
    whole = MAGIC + footer + len(footer).to_bytes(4, "little") + MAGIC
    with pq.ParquetFile(pa.BufferReader(whole)) as parquet:
        found = replace(
            shard,
            footer=hashlib.blake2b(footer, digest_size=16).hexdigest(),
            num_rows=parquet.metadata.num_rows,
        )
        return with_schema(found, parquet.schema_arrow)


def schema_of(source: pa.NativeFile) -> pa.Schema:
    """Return the schema of the file's columns."""
    with pq.ParquetFile(source) as parquet:
        return parquet.schema_arrow


def opened(source: pa.NativeFile, columns: list[str], *, is_object: bool) -> tuple[pq.ParquetFile, Dictionaries]:
    """Open a file to read these columns; also return how to read their dictionaries."""
    metadata = pq.read_metadata(source)
    dictionaries = dictionaries_of(source, metadata, columns)
    file = pq.ParquetFile(
        source,
        metadata=metadata,
        read_dictionary=dictionaries.unresolved,
        pre_buffer=False,
        buffer_size=STORE_BUFFER_BYTES if is_object else BUFFER_BYTES,
        page_checksum_verification=True,
    )
    return file, dictionaries


def batches(
    file: pq.ParquetFile, dictionaries: Dictionaries, columns: list[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows with some of their columns; without any, batches have a column `rows` of nulls."""
    if not columns:
        for first in range(0, file.metadata.num_rows, batch_rows):
            counted = pa.nulls(min(batch_rows, file.metadata.num_rows - first))
            yield pa.RecordBatch.from_arrays([counted], names=["rows"])
        return
    row_bytes = _row_bytes(file, columns, look=not dictionaries.unresolved)
    rows = max(1, min(batch_rows, dictionaries.most_rows, BATCH_BYTES // row_bytes))
    yield from joined(_decoded_batches(file, columns, rows), batch_rows)


def _decoded_batches(file: pq.ParquetFile, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
    num_rows = 0
    for batch in file.iter_batches(batch_size=rows, columns=columns, use_threads=False):
        yield from decoded(batch.select(columns), num_rows)
        num_rows += len(batch)


def _row_bytes(file: pq.ParquetFile, columns: list[str], *, look: bool) -> int:
    """Return an estimate of the bytes of a row: of the widest row group, or more if the first rows need more.

    Args:
        look: decode the first rows, too: repeated texts are short in the file but long in memory.
    """
    wanted = set(columns)
    widest = 1
    for group in range(file.metadata.num_row_groups):
        chunks = [file.metadata.row_group(group).column(leaf) for leaf in range(file.metadata.num_columns)]
        size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in wanted)
        widest = max(widest, size // max(1, file.metadata.row_group(group).num_rows))
    if not look:
        return widest
    for batch in file.iter_batches(batch_size=PROBE_ROWS, columns=columns, use_threads=False):
        return max(widest, batch.nbytes // max(1, batch.num_rows))
    return widest


def _read_footer(file: pa.NativeFile, size_bytes: int) -> bytes:
    # file   PAR1 | data pages ... | footer | length of the footer (4 bytes) | PAR1
    if size_bytes == 0:
        raise ValueError("it is empty")
    head = file.read(4)
    file.seek(max(size_bytes - 8, 0))
    tail = file.read(8)
    footer_bytes = int.from_bytes(tail[:4], "little")
    if tail[4:] == b"PARE":
        raise ValueError("it is an encrypted Parquet file")
    if head != MAGIC:
        file.seek(0)
        advice = format_advice(file.read(HEAD_BYTES), "parquet") or f"; {OTHER_FORMATS}"
        raise ValueError(f"it is not a Parquet file{advice}")
    if tail[4:] != MAGIC or footer_bytes > size_bytes - 12:
        raise ValueError("its end is missing or damaged (a Parquet file ends with its footer)")
    file.seek(size_bytes - 8 - footer_bytes)
    return file.read(footer_bytes)
