"""Files of lines: decompressed as they are read, hashed on the way, and cut into lines of bounded length."""

import io
from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa
from xxhash import xxh3_128

MOST_LINE_BYTES = 64 << 20
CHUNK_BYTES = 8 << 20  # of an object, each read of which is a request
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF16 = (b"\xff\xfe", b"\xfe\xff")

Record = tuple[int, int, dict[str, object] | str]
"""(number of its first line from 1, bytes, its values by column or the sentence that says why there are none).

A BadRow has some of its values although it is bad.
"""


class BadRow(dict[str, object]):
    """What is known of a row that is bad, and why it is."""

    def __init__(self, values: dict[str, object], sentence: str) -> None:
        super().__init__(values)
        self.sentence = sentence


class Bytes(Protocol):
    """A file that can be read from its beginning."""

    def read(self, size: int = -1, /) -> bytes: ...


class HashedBytes(io.RawIOBase):
    """What is read of a file, hashed as it passes; `digest` reads what nobody has read."""

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
        """Hex digest of the whole file (XXH3 of 128 bits)."""
        while self.read(CHUNK_BYTES):
            pass
        return str(self._hasher.hexdigest())


def decompressed(source: HashedBytes, compression: str | None) -> io.BufferedReader:
    """The content of a file that may be compressed with gzip or zstd; damage is an OSError."""
    if compression is None:
        return io.BufferedReader(source, CHUNK_BYTES)
    chunks = pa.PythonFile(io.BufferedReader(source, CHUNK_BYTES), mode="r")
    return io.BufferedReader(pa.CompressedInputStream(chunks, compression), CHUNK_BYTES)


def numbered_lines(content: io.BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    """(number from 1, the line with its end) of each line; None for one of more than MOST_LINE_BYTES.

    Raises:
        ValueError: the text is UTF-16.
    """
    number = 0
    while line := content.readline(MOST_LINE_BYTES + 1):
        number += 1
        if number == 1:
            if line.startswith(UTF16):
                raise ValueError("it is UTF-16 text; convert it to UTF-8")
            line = line.removeprefix(BYTE_ORDER_MARK)
        if len(line) <= MOST_LINE_BYTES:
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = content.readline(CHUNK_BYTES)
        yield number, None


def too_long(number: int) -> str:
    """What is said of a line that is not held."""
    return f"line {number} is longer than {MOST_LINE_BYTES} bytes"
