"""Parquet in and out: reading input shards in bounded memory, writing whole files or none."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.config import DEFAULT_S3, S3Config, is_uri
from batchinfer.data.columns import plain_type
from batchinfer.data.schemas import OUTPUTS, OUTPUTS_WITH_REASONING
from batchinfer.data.stores import StoreFile
from batchinfer.data.wide_rows import BATCH_BYTES, Dictionaries, decoded, look_up
from batchinfer.manifest import ChecksummedWriter, Manifest
from batchinfer.records import ConfigError, DamagedFileError, InputError, RunMismatchError, Shard
from batchinfer.rundir import published
from batchinfer.sanitize import clip

BUFFER_BYTES = 1 << 20  # read-ahead per column
STORE_BUFFER_BYTES = 8 << 20  # the same for objects, each read of which is a request
PROBE_ROWS = 8  # rows decoded first to learn how wide rows are
# what pyarrow raises for a damaged file: ArrowInvalid is a ValueError, ArrowMemoryError comes from absurd sizes
DAMAGE = (OSError, ValueError, MemoryError, pa.ArrowException)


def shard_schema(shard: Shard, s3: S3Config = DEFAULT_S3) -> pa.Schema:
    """The shard's Arrow schema, from its footer.

    Raises:
        InputError: the file is no longer readable.
        StoreError, RunMismatchError: the same of an object; it is another one now.
    """
    with _open(shard, s3) as (file, _):
        return file.schema_arrow


def column_type(schema: pa.Schema, name: str) -> pa.DataType | None:
    """The type of a column, dictionaries and views resolved to what they hold; None when it is missing or ambiguous."""
    index = schema.get_field_index(name)
    return None if index < 0 else plain_type(schema.field(index).type)


def read_batches(
    shard: Shard, columns: list[str], batch_rows: int = 1024, *, s3: S3Config = DEFAULT_S3
) -> Iterator[pa.RecordBatch]:
    """Read some columns of a shard in order, a few megabytes at a time however large its row groups and dictionaries.

    Args:
        columns: names that the shard has (see `shard_schema`); empty gives batches that only count rows.
        batch_rows: most rows per batch; wide rows come in smaller batches.

    Raises:
        InputError: the file is damaged, does not hold as many rows as its footer says, or has a row of more than
            wide_rows.ROW_BYTES.
        StoreError: its store fails.
        RunMismatchError: the object was replaced, perhaps while it was read.
    """
    num_rows = 0
    with _open(shard, s3, columns) as (file, dictionaries):
        for batch in _damage_named(shard, _decode(file, columns, batch_rows, dictionaries)):
            num_rows += batch.num_rows
            yield batch
    if is_uri(shard.path):
        with _opened_object(shard, s3):
            pass  # it is still the same
    if num_rows != shard.num_rows:
        raise InputError(f"{shard.path} holds {num_rows} rows, not the {shard.num_rows} listed; restore the file")


@contextmanager
def table_writer(
    target: Path,
    schema: pa.Schema,
    *,
    plain: str | None = None,
    scratch: Path | None = None,
    manifest: Manifest | None = None,
) -> Iterator[pq.ParquetWriter]:
    """Write `target` so that it appears whole or not at all; each batch or table handed in is a row group of its own.

    Args:
        plain: a column to store without a dictionary. For token ids, which hardly repeat, a dictionary doubles the
            time and hides common prefixes from the compression. All other columns must be flat ones then.
        scratch: as `published` has it.
        manifest: vouches for the file once it is there.

    Raises:
        ConfigError: the folder cannot be written.
    """
    dictionary = [name for name in schema.names if name != plain] if plain is not None else True
    with published(target, scratch=scratch) as temporary, open(temporary, "wb") as file:
        checked = ChecksummedWriter(file)
        with pq.ParquetWriter(
            checked, schema, compression="zstd", use_dictionary=dictionary, write_page_checksum=manifest is None
        ) as writer:
            yield writer
    if manifest is not None:
        manifest.add(target, checked.checksums)


@contextmanager
def own_file(path: Path) -> Iterator[None]:
    """Reading a file that this program wrote into the run folder.

    Raises:
        DamagedFileError: the file is missing or damaged.
    """
    try:
        yield
    except DamagedFileError:
        raise
    except DAMAGE as error:
        raise DamagedFileError(path, first_line(error)) from None


def read_rows(path: Path, manifest: Manifest | None = None) -> list[dict[str, Any]]:
    """All rows of a small table of the run folder.

    Args:
        manifest: that vouches for it, if one does.

    Raises:
        DamagedFileError: it is missing or damaged.
    """
    with own_file(path):
        # opened once: a session's row is replaced while others read it
        source = pa.OSFile(str(path)) if manifest is None else pa.PythonFile(manifest.open(path), mode="r")
        with source:
            rows: list[dict[str, Any]] = pq.read_table(source, page_checksum_verification=True).to_pylist()
    return rows


def id_type(shards: list[Shard], id_column: str, s3: S3Config = DEFAULT_S3) -> pa.DataType:
    """The type of the outputs' id column: int64 when every shard that has ids has integers that fit, else text."""
    found = [column_type(schema, id_column) for _, schema in _readable(shards, s3)]
    kinds = [kind for kind in found if kind is not None and not pa.types.is_null(kind)]
    fits = all(pa.types.is_integer(kind) and kind != pa.uint64() for kind in kinds)
    return pa.int64() if kinds and fits else pa.string()


def kept_fields(shards: list[Shard], keep_columns: list[str], s3: S3Config = DEFAULT_S3) -> list[pa.Field]:
    """The kept columns as the outputs have them: one nullable type each that holds the values of every shard.

    Raises:
        ConfigError: a column is in no shard, has the name of an output column, or types that do not go together.
    """
    for name in keep_columns:
        if name in (*OUTPUTS.schema.names, *OUTPUTS_WITH_REASONING.schema.names):
            raise ConfigError(f"output.keep_columns names {name!r}, which outputs have already; rename it in the input")
    if not keep_columns:
        return []
    schemas = _readable(shards, s3)
    if not schemas:
        return [pa.field(name, pa.null()) for name in keep_columns]
    return [_kept_field(schemas, name) for name in keep_columns]


def _kept_field(schemas: list[tuple[Shard, pa.Schema]], name: str) -> pa.Field:
    kept, kept_from = None, None
    for shard, schema in schemas:
        if len(schema.get_all_field_indices(name)) > 1:
            raise ConfigError(f"output.keep_columns names {name!r}, which {shard.path} has more than once; rename one")
        kind = column_type(schema, name)
        if kind is None:
            continue
        wider = kind if kept is None else _common_type(kept, kind)
        if wider is None:
            raise ConfigError(
                f"output.keep_columns names {name!r}, which is {kept} in {kept_from} but {kind} in {shard.path}; "
                "convert one of them"
            )
        if wider != kept:
            kept, kept_from = wider, shard.path
    if kept is None:
        raise ConfigError(f"output.keep_columns names {name!r}, which no shard has; remove it or correct the name")
    return pa.field(name, kept)


def _common_type(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    if first == second:
        return first
    try:
        schemas = [pa.schema([("value", kind)]) for kind in (first, second)]
        wider = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None
    # Arrow would also turn text into bytes, and unsigned 64-bit integers into signed ones
    is_faithful = wider not in (pa.binary(), pa.large_binary()) and pa.uint64() not in (first, second)
    return wider if is_faithful or pa.null() in (first, second) else None


def _readable(shards: list[Shard], s3: S3Config) -> list[tuple[Shard, pa.Schema]]:
    return [(shard, shard_schema(shard, s3)) for shard in shards if shard.problem is None]


# ---- reading


@contextmanager
def _open(shard: Shard, s3: S3Config, columns: Sequence[str] = ()) -> Iterator[tuple[pq.ParquetFile, Dictionaries]]:
    """The file, to read these columns, and what their dictionaries are like."""
    if is_uri(shard.path):
        with (
            _opened_object(shard, s3) as source,
            _parquet_file(shard, pa.PythonFile(source, mode="r"), STORE_BUFFER_BYTES, columns) as found,
        ):
            yield found
        return
    with ExitStack() as stack:
        with _read_by(shard):
            file = stack.enter_context(pa.OSFile(shard.path))
        yield stack.enter_context(_parquet_file(shard, file, BUFFER_BYTES, columns))


@contextmanager
def _parquet_file(
    shard: Shard, source: pa.NativeFile, buffer_bytes: int, columns: Sequence[str]
) -> Iterator[tuple[pq.ParquetFile, Dictionaries]]:
    with _read_by(shard):
        metadata = pq.read_metadata(source)
        dictionaries = look_up(source, metadata, columns)
        file = pq.ParquetFile(
            source,
            metadata=metadata,
            read_dictionary=dictionaries.unresolved,
            pre_buffer=False,
            buffer_size=buffer_bytes,
            page_checksum_verification=True,
        )
    with file:
        yield file, dictionaries


@contextmanager
def _read_by(shard: Shard) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        raise InputError(f"{shard.path} cannot be read: {first_line(error)}") from None


@contextmanager
def _opened_object(shard: Shard, s3: S3Config) -> Iterator[StoreFile]:
    """The object of a shard, if it is the one that was planned."""
    with StoreFile(shard.path, s3) as source:
        if (source.size_bytes, source.version) != (shard.size_bytes, shard.version):
            raise RunMismatchError(
                f"{shard.path} changed after it was planned; restore it, or plan into another output.dir"
            )
        yield source


def _decode(
    file: pq.ParquetFile, columns: list[str], batch_rows: int, dictionaries: Dictionaries
) -> Iterator[pa.RecordBatch]:
    if not columns:
        for first in range(0, file.metadata.num_rows, batch_rows):
            counted = pa.nulls(min(batch_rows, file.metadata.num_rows - first))
            yield pa.RecordBatch.from_arrays([counted], names=["rows"])
        return
    row_bytes = _row_bytes(file, columns, look=not dictionaries.unresolved)
    rows = max(1, min(batch_rows, dictionaries.most_rows, BATCH_BYTES // row_bytes))
    num_rows = 0
    for batch in file.iter_batches(batch_size=rows, columns=columns, use_threads=False):
        yield from decoded(batch.select(columns), num_rows)
        num_rows += len(batch)


def _row_bytes(file: pq.ParquetFile, columns: list[str], *, look: bool) -> int:
    """How wide rows are, by the widest row group and by a look at the first rows.

    The look is for repeated texts, which are short in the file but long in memory.
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


def first_line(error: BaseException) -> str:
    """The first line of an error, without its closing full stop."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return clip((text.strip().splitlines() or [type(error).__name__])[0].rstrip("."))
