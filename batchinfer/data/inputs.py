"""The shards' rows, whatever the format."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import pyarrow as pa

from batchinfer.config import DEFAULT_S3, S3Config, is_uri
from batchinfer.data.formats import arrow_ipc, line_rows, parquet_file
from batchinfer.data.formats.first_bytes import HEAD_BYTES
from batchinfer.data.parquet import DAMAGE
from batchinfer.data.shard_schemas import folder_values, with_schema
from batchinfer.data.shards import is_same
from batchinfer.data.stores import StoreFile
from batchinfer.data.wide_rows import BATCH_BYTES
from batchinfer.records import InputError, RunMismatchError, Shard
from batchinfer.sanitize import first_line


def first_bytes(shard: Shard, s3: S3Config = DEFAULT_S3) -> bytes:
    """Return the first bytes of a shard's file, HEAD_BYTES at most.

    Raises:
        InputError: the file is no longer readable.
        StoreError, RunMismatchError: the object is no longer readable; it was replaced.
    """
    with _opened(shard, s3) as source, _read_by(shard):
        return bytes(source.read(HEAD_BYTES))


def with_schemas(shards: list[Shard], s3: S3Config = DEFAULT_S3) -> list[Shard]:
    """Return the shards of a run folder, each with its schema.

    Run folders of earlier versions have schemas of lines only; those of Parquet and Arrow files are read again.

    Raises:
        InputError: a file cannot be read (any more).
        StoreError, RunMismatchError: an object cannot be read (any more), or was replaced.
    """
    return [shard if shard.schema or shard.problem is not None else _with_schema(shard, s3) for shard in shards]


def _with_schema(shard: Shard, s3: S3Config) -> Shard:
    with _opened(shard, s3) as source, _read_by(shard):
        schema_of = arrow_ipc.schema_of if shard.format == "arrow" else parquet_file.schema_of
        return with_schema(shard, schema_of(source))


def read_batches(
    shard: Shard, columns: list[str], batch_rows: int = 1024, *, s3: S3Config = DEFAULT_S3
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a shard in order with some of its columns, a few megabytes at a time.

    Args:
        columns: names that the shard has (see `shard_schemas.shard_schema`). Without any, batches have the column
            `rows` of nulls, to count rows by. Batches of lines have line_rows.ROW_ERROR as their last column.
        batch_rows: most rows per batch; wide rows come in smaller batches.

    Raises:
        InputError: the file is damaged, has another number of rows than was counted, or has a row of more than
            wide_rows.ROW_BYTES.
        StoreError: the object store fails.
        RunMismatchError: the file or object was replaced, perhaps while it was read; or the file is gone.
    """
    try:
        yield from _read(shard, columns, batch_rows, s3)
    except InputError:
        _refuse_other_file(shard, s3)
        raise
    _refuse_other_file(shard, s3)


def _read(shard: Shard, columns: list[str], batch_rows: int, s3: S3Config) -> Iterator[pa.RecordBatch]:
    num_rows = 0
    constants = {name: value for name, value in folder_values(shard).items() if name in columns}
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
                # else Arrow's allocator keeps the memory of large batches: three times the memory in use
                pa.default_memory_pool().release_unused()
    if is_uri(shard.path):
        with _opened(shard, s3):
            pass  # raises if the object was replaced meanwhile
    if num_rows != shard.num_rows:
        raise InputError(f"{shard.path} holds {num_rows} rows, not the {shard.num_rows} listed; restore the file")


def _refuse_other_file(shard: Shard, s3: S3Config) -> None:
    """Raise RunMismatchError if another file than the one that was inspected is in its place, or none."""
    if is_uri(shard.path):
        return
    try:
        if is_same(shard, s3):
            return
    except InputError as error:
        raise RunMismatchError(str(error)) from None
    raise shard.changed()


# ---- reading


def _with_constants(batch: pa.RecordBatch, columns: list[str], constants: Mapping[str, str | None]) -> pa.RecordBatch:
    """Return the batch with `columns` in their order; a column in `constants` has one value in every row."""
    repeated = {name: pa.repeat(pa.scalar(value, pa.string()), len(batch)) for name, value in constants.items()}
    names = [*columns, *(name for name in batch.schema.names if name == line_rows.ROW_ERROR)]
    arrays = [repeated[name] if name in repeated else batch[name] for name in names]
    return pa.RecordBatch.from_arrays(arrays, names=names)


@contextmanager
def _opened(shard: Shard, s3: S3Config) -> Iterator[pa.NativeFile]:
    """Open the shard's file, or the object if it is still the planned one."""
    if not is_uri(shard.path):
        with ExitStack() as stack:
            with _read_by(shard):
                # batches of an Arrow file may be of any size: the kernel can drop the pages of a mapped file
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
    # a separate loop, so that an error of the consumer is never reported as damage of the shard
    while True:
        try:
            batch = next(batches, None)
        except DAMAGE as error:
            raise InputError(f"{shard.path} is damaged: {first_line(error)}") from None
        if batch is None:
            return
        yield batch
