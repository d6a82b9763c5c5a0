"""Tables of our own in Parquet, and files of lines: written whole or not at all; what damage of files looks like."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.manifest import ChecksummedWriter, Manifest
from batchinfer.records import DamagedFileError
from batchinfer.rundir import published
from batchinfer.sanitize import clip

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
def lines_writer(target: Path, *, scratch: Path, manifest: Manifest) -> Iterator[Callable[[bytes], object]]:
    """Write a file of lines so that it appears whole or not at all; gives what takes the next bytes.

    Args, Raises: as `table_writer`.
    """
    with published(target, scratch=scratch) as temporary, open(temporary, "wb") as file:
        checked = ChecksummedWriter(file)
        yield checked.write
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


def first_line(error: BaseException) -> str:
    """The first line of an error, without its closing full stop."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return clip((text.strip().splitlines() or [type(error).__name__])[0].rstrip("."))
