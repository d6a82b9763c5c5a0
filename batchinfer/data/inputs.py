"""The shards' columns and rows, whatever their format."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import pyarrow as pa

from batchinfer.config import DEFAULT_S3, S3Config, is_uri
from batchinfer.data.columns import plain_type
from batchinfer.data.folders import partition_values
from batchinfer.data.formats import arrow_ipc, line_rows, parquet_file
from batchinfer.data.formats.first_bytes import HEAD_BYTES
from batchinfer.data.parquet import DAMAGE
from batchinfer.data.stores import StoreFile
from batchinfer.data.wide_rows import BATCH_BYTES
from batchinfer.records import InputError, Shard
from batchinfer.sanitize import first_line


def shard_schema(shard: Shard, s3: S3Config = DEFAULT_S3) -> pa.Schema:
    """The shard's Arrow schema: what its file says, or what was found in its lines, and what its folders' names add.

    Raises:
        InputError: the file is no longer readable.
        StoreError, RunMismatchError: the same of an object; it is another one now.
    """
    schema = _file_schema(shard, s3)
    for name in partition_values(shard.path).keys() - set(schema.names):
        schema = schema.append(pa.field(name, pa.string()))
    return schema


def _file_schema(shard: Shard, s3: S3Config) -> pa.Schema:
    if shard.schema:
        return line_rows.schema_of(shard)
    with _opened(shard, s3) as source, _read_by(shard):
        return arrow_ipc.schema_of(source) if shard.format == "arrow" else parquet_file.schema_of(source)


def first_bytes(shard: Shard, s3: S3Config = DEFAULT_S3) -> bytes:
    """What a shard's file begins with, HEAD_BYTES at most.

    Raises:
        InputError, StoreError, RunMismatchError: as of `shard_schema`.
    """
    with _opened(shard, s3) as source, _read_by(shard):
        return bytes(source.read(HEAD_BYTES))


def column_type(schema: pa.Schema, name: str) -> pa.DataType | None:
    """The type of a column as batches have it (columns.plain_type); None when it is missing or ambiguous."""
    index = schema.get_field_index(name)
    return None if index < 0 else plain_type(schema.field(index).type)


def read_batches(
    shard: Shard, columns: list[str], batch_rows: int = 1024, *, s3: S3Config = DEFAULT_S3
) -> Iterator[pa.RecordBatch]:
    """Read some columns of a shard in order, a few megabytes at a time however large the file's own parts are.

    Args:
        columns: names that the shard has (see `shard_schema`); empty gives batches that only count rows. Those of
            lines have line_rows.ROW_ERROR behind them.
        batch_rows: most rows per batch; wide rows come in smaller batches.

    Raises:
        InputError: the file is damaged, does not hold as many rows as were counted, or has a row of more than
            wide_rows.ROW_BYTES.
        StoreError: its store fails.
        RunMismatchError: the file or object was replaced, perhaps while it was read.
    """
    num_rows = 0
    constants = {name: value for name, value in partition_values(shard.path).items() if name in columns}
    if constants:
        own = set(_file_schema(shard, s3).names)
        constants = {name: value for name, value in constants.items() if name not in own}
    asked, columns = columns, [name for name in columns if name not in constants]
    with _opened(shard, s3) as source:
        if shard.format == "parquet":
            with _read_by(shard):
                found = parquet_file.opened(source, columns, is_object=is_uri(shard.path))
            batches = parquet_file.batches(*found, columns, batch_rows)
        elif shard.format == "arrow":
            batches = arrow_ipc.batches(source, columns, batch_rows)
        else:
            batches = line_rows.batches(shard, source, columns, batch_rows)
        for batch in _damage_named(shard, batches):
            num_rows += batch.num_rows
            is_large = batch.nbytes >= BATCH_BYTES // 2
            yield _with_constants(batch, asked, constants) if constants else batch
            if is_large:
                # Arrow's allocator would keep what large batches took, three times as much as is ever in use
                pa.default_memory_pool().release_unused()
    if is_uri(shard.path):
        with _opened(shard, s3):
            pass  # it is still the same
    if num_rows != shard.num_rows:
        raise InputError(f"{shard.path} holds {num_rows} rows, not the {shard.num_rows} listed; restore the file")


def id_type(shards: list[Shard], id_column: str, s3: S3Config = DEFAULT_S3) -> pa.DataType:
    """The type of the outputs' id column: int64 when every shard that has ids has integers that fit, else text.

    A shard may have doubles beside others with integers: pandas makes them of integers with nulls.
    """
    found = [column_type(schema, id_column) for _, schema in schemas_of_rows(shards, s3)]
    kinds = [kind for kind in found if kind is not None and not pa.types.is_null(kind)]
    integers = [kind for kind in kinds if pa.types.is_integer(kind)]
    fits = pa.uint64() not in kinds and all(kind == pa.float64() for kind in kinds if kind not in integers)
    return pa.int64() if integers and fits else pa.string()


def schemas_of_rows(shards: list[Shard], s3: S3Config = DEFAULT_S3) -> list[tuple[Shard, pa.Schema]]:
    """Return the readable shards that have rows, each with its schema; all readable ones if none has rows.

    The types of a shard without rows describe nothing: pandas writes an empty frame with types of its own.

    Raises:
        InputError, StoreError, RunMismatchError: as of `shard_schema`.
    """
    readable = [shard for shard in shards if shard.problem is None]
    with_rows = [shard for shard in readable if shard.num_rows] or readable
    return [(shard, shard_schema(shard, s3)) for shard in with_rows]


# ---- reading


def _with_constants(batch: pa.RecordBatch, columns: list[str], constants: Mapping[str, str | None]) -> pa.RecordBatch:
    """The batch with these columns, some of which are the same in every row."""
    repeated = {name: pa.repeat(pa.scalar(value, pa.string()), len(batch)) for name, value in constants.items()}
    names = [*columns, *(name for name in batch.schema.names if name == line_rows.ROW_ERROR)]
    arrays = [repeated[name] if name in repeated else batch[name] for name in names]
    return pa.RecordBatch.from_arrays(arrays, names=names)


@contextmanager
def _opened(shard: Shard, s3: S3Config) -> Iterator[pa.NativeFile]:
    """The file, or the object if it is the one that was planned."""
    if not is_uri(shard.path):
        with ExitStack() as stack:
            with _read_by(shard):
                # the batches of an Arrow file may be of any size: mapped ones take no memory that cannot be given back
                opened = pa.memory_map if shard.format == "arrow" else pa.OSFile
                source = stack.enter_context(opened(shard.path))
            yield source
        return
    with StoreFile(shard.path, s3) as file:
        if (file.size_bytes, file.version) != (shard.size_bytes, shard.version):
            raise shard.changed()
        yield pa.PythonFile(file, mode="r")


@contextmanager
def _read_by(shard: Shard) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        raise InputError(f"{shard.path} cannot be read: {first_line(error)}") from None


def _damage_named(shard: Shard, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    # a loop of its own, so that an error of the consumer is never taken for damage of the shard
    while True:
        try:
            batch = next(batches, None)
        except DAMAGE as error:
            raise InputError(f"{shard.path} is damaged: {first_line(error)}") from None
        if batch is None:
            return
        yield batch
