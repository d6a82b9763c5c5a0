"""Tables of our own in Parquet, and files of lines: written whole or not at all; what damage of files looks like."""

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

# In the metadata of a table that nobody vouches for: the checksum of the file as it is with _NO_SEAL there.
_SEAL, _NO_SEAL = b"batchinfer.xxh3", b"0" * 32
_VALUE_AT = len(_SEAL) + 2  # behind the key: Thrift's type of field and length
# what pyarrow raises for a damaged file: ArrowInvalid is a ValueError, ArrowMemoryError comes from absurd sizes
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
    """Write `target` so that it appears whole or not at all; each batch or table handed in is a row group of its own.

    Args:
        plain: a column to store without a dictionary. For token ids, which hardly repeat, a dictionary doubles the
            time and hides common prefixes from the compression. All other columns must be flat ones then.
        scratch, publisher: as `published` has them.
        manifest: vouches for the file; None: the file does so itself, see `sealed_table`.

    Raises:
        ConfigError: the folder cannot be written.
    """
    dictionary = [name for name in schema.names if name != plain] if plain is not None else True
    with published(target, scratch, publisher=publisher) as temporary, open(temporary, "w+b") as file:
        checked = None if manifest is None else ChecksummedWriter(file)
        with pq.ParquetWriter(checked or file, schema, compression="zstd", use_dictionary=dictionary) as writer:
            yield writer
            if checked is None:
                writer.add_key_value_metadata({_SEAL: _NO_SEAL})
        if checked is None:
            _seal(file)
        if manifest is not None and checked is not None:
            manifest.add(target, checked.checksums)


@contextmanager
def lines_writer(
    target: Path, *, scratch: Path, manifest: Manifest, publisher: Publisher
) -> Iterator[Callable[[bytes], object]]:
    """Write a file of lines so that it appears whole or not at all; gives what takes the next bytes.

    Args, Raises: as `table_writer`.
    """
    with published(target, scratch, publisher=publisher) as temporary, open(temporary, "wb") as file:
        checked = ChecksummedWriter(file)
        yield checked.write
        manifest.add(target, checked.checksums)


@contextmanager
def own_file(path: Path, **remedy: str) -> Iterator[None]:
    """Reading a file that this program wrote into the run folder.

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
    """A table that this program wrote into the run folder and the manifest vouches for, for reading.

    Raises:
        DamagedFileError: the file is missing or damaged.
    """
    with own_file(path), pq.ParquetFile(pa.PythonFile(manifest.open(path), mode="r")) as file:
        yield file


def read_rows(path: Path, manifest: Manifest | None = None) -> list[dict[str, Any]]:
    """All rows of a small table of the run folder.

    Args:
        manifest: that vouches for it, if one does.

    Raises:
        DamagedFileError: it is missing or damaged.
    """
    with own_file(path):
        # opened once: a session's row is replaced while others read it
        source = sealed_table(path) if manifest is None else pa.PythonFile(manifest.open(path), mode="r")
        with source:
            rows: list[dict[str, Any]] = pq.read_table(source, page_checksum_verification=True).to_pylist()
    return rows


def sealed_table(source: Path | bytes) -> pa.BufferReader:
    """A table that nobody vouches for, for reading, once it is known to be what was written.

    One of an earlier version has no seal, and is believed but for its pages' own checksums.

    Args:
        source: its file, or the bytes of it.

    Raises:
        OSError, ValueError: it cannot be read, or is damaged; for `own_file`.
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
    return pa.BufferReader(data)


def check_sealed(path: Path, **remedy: str) -> None:
    """Compare a table that nobody vouches for with its own checksum.

    Args:
        remedy: of DamagedFileError.

    Raises:
        DamagedFileError: it is missing or damaged.
    """
    with own_file(path, **remedy):
        sealed_table(path)


def _seal(file: BinaryIO) -> None:
    """Put the checksum of a table where its metadata has room for it."""
    file.seek(0)
    content = file.read()
    # the last place: columns' smallest and largest values come before it
    file.seek(content.rindex(_SEAL) + _VALUE_AT)
    file.write(xxhash.xxh3_128_hexdigest(content).encode())
