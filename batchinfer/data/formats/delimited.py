"""Reader of CSV and TSV: a header, and rows with the same number of fields; other rows are bad rows."""

import csv
import io
from collections.abc import Iterator

from batchinfer.data.formats.lines import Record, numbered_lines, too_long
from batchinfer.sanitize import count_text

MOST_FIELD_CHARS = 16 << 20


class _Texts:
    """The lines of a file as text, for Python's csv reader.

    number: of the line read last. not_utf8: number of the last line that was not UTF-8.
    """

    def __init__(self, content: io.BufferedReader) -> None:
        self._lines = numbered_lines(content)
        self.number = self.num_bytes = self.not_utf8 = 0

    def __iter__(self) -> "_Texts":
        return self

    def __next__(self) -> str:
        self.number, line = next(self._lines)
        if line is None:
            raise ValueError(too_long(self.number))
        self.num_bytes += len(line)
        try:
            return line.decode()
        except UnicodeDecodeError:
            self.not_utf8 = self.number
            return line.decode(errors="replace")


def csv_rows(content: io.BufferedReader, delimiter: str) -> tuple[list[str], Iterator[Record]]:
    """Return the header of a file, and its rows with values as text; an empty field is null, a blank line no row.

    Raises:
        ValueError: the file is empty, its header is not sound, or a line is too long.
    """
    csv.field_size_limit(MOST_FIELD_CHARS)
    texts = _Texts(content)
    reader = csv.reader(texts, delimiter=delimiter, strict=True)
    header = _header(reader, texts)
    return header, _records(reader, texts, header)


def _records(reader: Iterator[list[str]], texts: _Texts, header: list[str]) -> Iterator[Record]:
    while True:
        first, before = texts.number + 1, texts.num_bytes
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield first, texts.num_bytes - before, f"line {first} is not valid CSV: {_reason(error)}"
            continue
        if fields:
            yield first, texts.num_bytes - before, _values(first, fields, header, texts.not_utf8 >= first)


def _header(reader: Iterator[list[str]], texts: _Texts) -> list[str]:
    try:
        header = next(reader, None)
    except csv.Error as error:
        raise ValueError(f"its header is not valid CSV: {_reason(error)}") from None
    if not header:
        raise ValueError("it has no header; the first line of a CSV file names its columns")
    if texts.not_utf8:
        raise ValueError("its header is not valid UTF-8")
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"its header names {twice!r} more than once")
    return header


def _reason(error: csv.Error) -> str:
    # Python's own sentence is about the mode in which a program opens a file
    is_return = "new-line character" in str(error)
    return (
        "a carriage return is neither quoted nor at a line's end; end lines with line feeds"
        if is_return
        else str(error)
    )


def _values(line: int, fields: list[str], header: list[str], is_damaged: bool) -> dict[str, object] | str:
    if is_damaged:
        return f"line {line} is not valid UTF-8"
    if len(fields) != len(header):
        return f"line {line} has {count_text(len(fields), 'field')}, but the header {len(header)}"
    return {name: value or None for name, value in zip(header, fields, strict=True)}
