"""JSONL: each line that is not blank is one row, an object; whatever else it is, is said of the row."""

import io
from collections.abc import Iterator
from typing import Any

import msgspec

from batchinfer.data.formats.lines import Record, numbered_lines, too_long
from batchinfer.data.formats.values import in_words

_DECODER = msgspec.json.Decoder()
_SPACE = b" \t\r\n"


def filled_lines(content: io.BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    """The lines that are not blank, as `numbered_lines` has them."""
    for number, line in numbered_lines(content):
        if line is None or line.strip(_SPACE):
            yield number, line


def json_records(content: io.BufferedReader) -> Iterator[Record]:
    """The objects in a file of JSON lines."""
    for number, line in filled_lines(content):
        if line is None:
            yield number, 0, too_long(number)
        else:
            yield number, len(line), _object(number, line.strip(_SPACE))


def _object(number: int, text: bytes) -> dict[str, Any] | str:
    try:
        value = _DECODER.decode(text)
    except UnicodeDecodeError:
        return f"line {number} is not valid UTF-8"
    except (msgspec.DecodeError, RecursionError) as error:
        return f"line {number} is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}"
    return value if isinstance(value, dict) else f"line {number} is {in_words(value)}, not an object"
