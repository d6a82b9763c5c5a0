"""Batches of rows of limited size in memory, although a dictionary in a file makes a few bytes any number of bytes.

Text columns with a large dictionary are read as indices; slice by slice, indices are replaced by values.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.data.columns import is_text, plain_type
from batchinfer.data.plain_arrays import list_bounds, plain_array, runs_of, with_plain_dictionary

BATCH_BYTES = 8 << 20  # decoded bytes that one batch should stay under
ROW_BYTES = 1 << 30  # most decoded bytes of one row
DICTIONARY_BYTES = 32 << 20  # larger ones are not resolved while reading
DECODED_BYTES = 256 << 20  # most bytes of a batch whose smaller dictionaries are resolved while reading


class WideRowError(ValueError):
    """A row of more than ROW_BYTES."""


@dataclass(frozen=True, slots=True)
class Dictionaries:
    """A plan to read columns with dictionaries in bounded memory.

    unresolved: paths of the leaf columns to read as indices into their dictionaries.
    most_rows: most rows of a batch, so that it has at most DECODED_BYTES if no row has a list.
    """

    unresolved: list[str]
    most_rows: int


def dictionaries_of(source: pa.NativeFile, metadata: pq.FileMetaData, columns: Sequence[str]) -> Dictionaries:
    """Decide how to read the text columns among `columns`, by the sizes in the headers of dictionary pages."""
    unresolved: dict[str, None] = {}
    largest = 1
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(metadata.num_columns)):
            path = chunk.path_in_schema
            if path.split(".")[0] not in columns or chunk.physical_type != "BYTE_ARRAY":
                continue
            num_bytes = _dictionary_bytes(source, chunk) if chunk.has_dictionary_page else 0
            # a column with many values outside of its dictionary is not read as indices: Arrow would add all of them
            if num_bytes > DICTIONARY_BYTES and chunk.total_uncompressed_size - num_bytes < DECODED_BYTES:
                unresolved[path] = None
            else:
                largest = max(largest, num_bytes)
    return Dictionaries(list(unresolved), max(1, DECODED_BYTES // largest))


def _dictionary_bytes(source: pa.NativeFile, chunk: pq.ColumnChunkMetaData) -> int:
    """Return the uncompressed bytes of a chunk's dictionary page, or an upper bound."""
    most = chunk.total_uncompressed_size
    if most <= BATCH_BYTES // 8 or not chunk.dictionary_page_offset:
        return int(most)
    # Thrift's compact form: 0x15, the page's type, 0x15, its size, ...; numbers are doubled and in groups of seven bits
    found = re.match(
        rb"\x15[\x80-\xff]*[\0-\x7f]\x15([\x80-\xff]*[\0-\x7f])", source.read_at(32, chunk.dictionary_page_offset)
    )
    if found is None:
        return int(most)
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(found[1])) // 2


def decoded(batch: pa.RecordBatch, first_row: int) -> Iterator[pa.RecordBatch]:
    """Yield slices of the batch of about BATCH_BYTES, with columns of plain types (see columns.plain_type).

    Raises:
        WideRowError: a row has more than ROW_BYTES; the message counts rows from `first_row`.
    """
    if all(plain_type(kind) == kind for kind in batch.schema.types):
        yield batch
        return
    row_bytes = np.sum([bytes_of_rows(column) for column in batch.columns], axis=0)
    if (row_bytes > ROW_BYTES).any():
        row = int(np.argmax(row_bytes > ROW_BYTES))
        raise WideRowError(f"row {first_row + row} holds {row_bytes[row]} bytes, more than {ROW_BYTES}")
    columns_of_batch = [with_plain_dictionary(column) for column in batch.columns]
    for first, end in runs_of_rows(row_bytes, BATCH_BYTES, len(batch)):
        columns = [plain_array(column.slice(first, end - first)) for column in columns_of_batch]
        yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def joined(batches: Iterator[pa.RecordBatch], most_rows: int) -> Iterator[pa.RecordBatch]:
    """Join batches of fewer rows as long as they have at most `most_rows` rows and BATCH_BYTES together.

    A file with a dictionary is read a few rows at a time, because each row may have the largest value. Rows are rarely
    that large, and checking many small batches takes longer than checking few full ones.
    """
    group: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if group and (rows + batch.num_rows > most_rows or size + batch.nbytes > BATCH_BYTES):
            yield _one_batch(group)
            group, rows, size = [], 0, 0
        group.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
    if group:
        yield _one_batch(group)


def _one_batch(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    return next(iter(pa.Table.from_batches(batches).combine_chunks().to_batches()), batches[0])


def runs_of_rows(row_bytes: np.ndarray, most_bytes: int, most_rows: int) -> Iterator[tuple[int, int]]:
    """Yield runs [first, end) of rows with limited bytes and rows; a row of more bytes gets a separate run."""
    ends, first = np.cumsum(row_bytes), 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        fitting = int(np.searchsorted(ends, before + most_bytes, side="right"))
        end = max(first + 1, min(fitting, first + most_rows))
        yield first, end
        first = end


def bytes_of_rows(array: pa.Array) -> np.ndarray:
    """Return [R] int64, the bytes of each row's values."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    if pa.types.is_dictionary(kind):
        of_value = bytes_of_rows(array.dictionary)
        return of_value[array.indices.fill_null(0).to_numpy()] if len(of_value) else np.zeros(len(array), np.int64)
    if pa.types.is_run_end_encoded(kind):
        return bytes_of_rows(array.values)[runs_of(array)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        ends = np.cumsum(np.concatenate([[0], bytes_of_rows(array.values)]))[array.offsets.to_numpy()]
        return np.diff(ends)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        before = np.cumsum(np.concatenate([[0], bytes_of_rows(array.values)]))
        starts, ends = list_bounds(array)
        return before[ends] - before[starts]
    if pa.types.is_struct(kind):
        return np.sum([bytes_of_rows(part) for part in array.flatten()], axis=0, initial=0) + np.zeros(
            len(array), np.int64
        )
    if is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return _bytes_of_views(array)
    if pa.types.is_primitive(kind) and kind.bit_width >= 8:
        return np.full(len(array), kind.bit_width // 8)
    return np.full(len(array), array.nbytes // max(1, len(array)))


def _bytes_of_views(array: pa.Array) -> np.ndarray:
    # a view   length (4 bytes) | the value, or its first bytes and the place of the whole value (12 bytes)
    if len(array) == 0:
        return np.zeros(0, np.int64)
    views = np.frombuffer(array.buffers()[1], np.int32, count=4 * (array.offset + len(array))).reshape(-1, 4)
    is_valid = array.is_valid().to_numpy(zero_copy_only=False)
    return np.where(is_valid, views[array.offset :, 0], 0).astype(np.int64)
