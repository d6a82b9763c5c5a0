"""Reading of files of lines: decompressed, hashed, and cut into lines of limited length."""

import io
from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa
from xxhash import xxh3_128

MOST_LINE_BYTES = 64 << 20
CHUNK_BYTES = 8 << 20  # of an object, each read of which is a request
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
COMPRESSED = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}

Record = tuple[int, int, dict[str, object] | str]
"""A row: (number of its first line from 1, bytes, values by column or the error sentence).

A BadRow is a bad row with some of its values.
"""


class BadRow(dict[str, object]):
    """The known values of a bad row, with its error sentence."""

    def __init__(self, values: dict[str, object], sentence: str) -> None:
        super().__init__(values)
        self.sentence = sentence


class Bytes(Protocol):
    """A file that can be read from its beginning."""

    def read(self, size: int = -1, /) -> bytes: ...


class HashedBytes(io.RawIOBase):
    """A file whose bytes are hashed while they are read; `digest` reads the rest of the file."""

    def __init__(self, source: Bytes) -> None:
        super().__init__()
        self._source, self._hasher = source, xxh3_128()
        self.num_bytes = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self._hasher.update(data)
        self.num_bytes += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def digest(self) -> str:
        """Return the hex digest of the whole file (XXH3, 128 bits)."""
        while self.read(CHUNK_BYTES):
            pass
        return str(self._hasher.hexdigest())


def decompressed(source: HashedBytes, compression: str | None) -> io.BufferedReader:
    """Return a reader of the file's decompressed content, which raises OSError for damaged data.

    Args:
        compression: "gzip", "zstd" or None.
    """
    if compression is None:
        return io.BufferedReader(source, CHUNK_BYTES)
    chunks = pa.PythonFile(io.BufferedReader(source, CHUNK_BYTES), mode="r")
    return io.BufferedReader(pa.CompressedInputStream(chunks, compression), CHUNK_BYTES)


def numbered_lines(content: io.BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    """Yield (number from 1, bytes with the line's end) of each line; None for a line of more than MOST_LINE_BYTES.

    Raises:
        ValueError: the text is UTF-16, or compressed.
    """
    number = 0
    while line := content.readline(MOST_LINE_BYTES + 1):
        number += 1
        if number == 1:
            if line.startswith(UTF16):
                raise ValueError("it is UTF-16 text; convert it to UTF-8")
            if suffix := next((suffix for start, suffix in COMPRESSED.items() if line.startswith(start)), None):
                raise ValueError(f"its content is compressed; let its name end with {suffix}, or decompress it")
            line = line.removeprefix(BYTE_ORDER_MARK)
        if len(line) <= MOST_LINE_BYTES:
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = content.readline(CHUNK_BYTES)
        yield number, None


def too_long(number: int) -> str:
    """Return the error sentence of a line of more than MOST_LINE_BYTES."""
    return f"line {number} is longer than {MOST_LINE_BYTES} bytes"
