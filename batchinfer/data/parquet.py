"""Files of the run folder, in Parquet or lines: published whole or not at all, with checksums; errors of damage."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from batchinfer.manifest import ChecksummedWriter, Manifest
from batchinfer.records import DamagedFileError
from batchinfer.sanitize import first_line
from batchinfer.whole_files import Publisher, published

# In the metadata of a table that is in no manifest: the checksum of the file with _NO_SEAL in this place.
_SEAL, _NO_SEAL = b"batchinfer.xxh3", b"0" * 32
_VALUE_AT = len(_SEAL) + 2  # behind the key: Thrift's type of field and length
_NAME = b"batchinfer.name"  # in the metadata of such a table, with its folder: steps/<session>-00003.parquet
_DISTINCT = ("row", "id")  # columns whose values hardly repeat
# pyarrow's errors for a damaged file: ArrowInvalid is a ValueError, ArrowMemoryError comes from absurd sizes
DAMAGE = (OSError, ValueError, MemoryError, pa.ArrowException)


@contextmanager
def table_writer(
    target: Path,
    schema: pa.Schema,
    *,
    plain: str | None = None,
    scratch: Path | None = None,
    manifest: Manifest | None = None,
    publisher: Publisher | None = None,
) -> Iterator[pq.ParquetWriter]:
    """Open a writer of `target`, which appears whole or not at all; each batch or table becomes one row group.

    Args:
        plain: a column of lists of token ids to store without a dictionary, which for ids that hardly repeat doubles
            the time and hides common prefixes from the compression. The ids' low bytes lie together, then the next
            ones, which are mostly zeros: a fifth less is written, in two thirds of the time. Columns of distinct values
            have no dictionary either, and the column `row`, which must be there, is stored as differences. All other
            columns must be flat then.
        scratch, publisher: see `whole_files.published`.
        manifest: gets the file's checksums; if None, the file contains its own checksum (see `sealed_table`).

    Raises:
        ConfigError: the folder cannot be written.
    """
    dictionary = [name for name in schema.names if name not in (plain, *_DISTINCT)] if plain is not None else True
    with published(target, scratch, publisher=publisher) as temporary, open(temporary, "w+b") as file:
        checked = None if manifest is None else ChecksummedWriter(file)
        special = {f"{plain}.list.element": "BYTE_STREAM_SPLIT", "row": "DELTA_BINARY_PACKED"}
        encoding = special if plain is not None else None
        with pq.ParquetWriter(
            checked or file, schema, compression="zstd", use_dictionary=dictionary, column_encoding=encoding
        ) as writer:
            yield writer
            if checked is None:
                writer.add_key_value_metadata({_NAME: _name_of(target), _SEAL: _NO_SEAL})
        if checked is None:
            _seal(file)
        if manifest is not None and checked is not None:
            manifest.add(target, checked.checksums)


@contextmanager
def lines_writer(
    target: Path, *, scratch: Path, manifest: Manifest, publisher: Publisher
) -> Iterator[Callable[[bytes], object]]:
    """Open a file of lines, which appears whole or not at all; yields the function that writes bytes.

    Args, Raises: see `table_writer`.
    """
    with published(target, scratch, publisher=publisher) as temporary, open(temporary, "wb") as file:
        checked = ChecksummedWriter(file)
        yield checked.write
        manifest.add(target, checked.checksums)


@contextmanager
def own_file(path: Path, **remedy: str) -> Iterator[None]:
    """Convert read errors of a file of the run folder to DamagedFileError.

    Args:
        remedy: of DamagedFileError.

    Raises:
        DamagedFileError: the file is missing or damaged.
    """
    try:
        yield
    except DamagedFileError:
        raise
    except DAMAGE as error:
        raise DamagedFileError(path, first_line(error), **remedy) from None


@contextmanager
def own_parquet(path: Path, manifest: Manifest) -> Iterator[pq.ParquetFile]:
    """Open a table of the run folder for reading; its bytes are compared with the manifest's checksums.

    Raises:
        DamagedFileError: the file is missing or damaged.
    """
    with own_file(path), open_parquet(path, manifest) as file:
        yield file


def check_columns(path: Path, manifest: Manifest, columns: list[str]) -> None:
    """Read columns of a table of the run folder and compare their bytes with the manifest's checksums.

    No thread of Arrow is left behind, since callers of jobs from Python read early rows.

    Raises:
        DamagedFileError: the file is missing or damaged.
    """
    with own_file(path), pa.PythonFile(manifest.open(path), mode="r") as source:
        file = pq.ParquetFile(source, pre_buffer=False)
        for group in range(file.num_row_groups):
            file.read_row_group(group, columns=columns, use_threads=False)


def open_parquet(path: Path, manifest: Manifest) -> pq.ParquetFile:
    """Open a table for many reads, each within `own_file`; its bytes are compared with the manifest's checksums."""
    return pq.ParquetFile(pa.PythonFile(manifest.open(path), mode="r"))


def read_rows(path: Path, manifest: Manifest | None = None) -> list[dict[str, Any]]:
    """Return all rows of a small table of the run folder.

    Args:
        manifest: has the file's checksums; if None, the table has its own checksum (see `sealed_table`).

    Raises:
        DamagedFileError: the file is missing or damaged.
    """
    with own_file(path):
        # opened once: a session's row may be replaced while it is read
        source = sealed_table(path) if manifest is None else pa.PythonFile(manifest.open(path), mode="r")
        with source:
            rows: list[dict[str, Any]] = pq.read_table(source, page_checksum_verification=True).to_pylist()
    return rows


def sealed_table(source: Path | bytes) -> pa.BufferReader:
    """Return a reader of a table that contains its own checksum, after the checksum was compared.

    A table of an earlier version has no such checksum, only those of its pages, or does not contain its name.

    Args:
        source: the table's file or its bytes.

    Raises:
        OSError, ValueError: the table cannot be read, is damaged, or took another one's place (use within `own_file`).
    """
    data = source if isinstance(source, bytes) else source.read_bytes()
    key_at = data.rfind(_SEAL)
    if key_at >= 0:
        start, end = key_at + _VALUE_AT, key_at + _VALUE_AT + len(_NO_SEAL)
        digest = xxhash.xxh3_128()
        for part in (memoryview(data)[:start], _NO_SEAL, memoryview(data)[end:]):
            digest.update(part)
        if data[start:end] != digest.hexdigest().encode():
            raise ValueError("its bytes are not those that were written")
    if isinstance(source, Path):
        found = pq.read_metadata(pa.BufferReader(data))
        name = (found.metadata or {}).get(_NAME, _name_of(source))
        is_of_session = source.parent.parent.name == "stats"
        if name != _name_of(source) or (is_of_session and "session" not in found.schema.names):
            raise ValueError("it is another table")
    return pa.BufferReader(data)


def check_sealed(path: Path, *, shown: Path | None = None, **remedy: str) -> None:
    """Check a table that contains its own checksum.

    Args:
        shown, remedy: path and remedy of DamagedFileError; None: `path`.

    Raises:
        DamagedFileError: the file is missing or damaged.
    """
    with own_file(shown or path, **remedy):
        pq.read_metadata(sealed_table(path))  # a table that was cut has lost the checksum, and its end


def _name_of(path: Path) -> bytes:
    return os.fsencode(f"{path.parent.name}/{path.name}")


def _seal(file: BinaryIO) -> None:
    """Write the checksum of a table over the zeros that its metadata has for it."""
    file.seek(0)
    content = file.read()
    # the last occurrence: the smallest and largest values of columns come before the metadata
    file.seek(content.rindex(_SEAL) + _VALUE_AT)
    file.write(xxhash.xxh3_128_hexdigest(content).encode())
