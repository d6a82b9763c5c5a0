"""Reader of JSON lines: each line that is not blank is one row; a line that is no object is a bad row.

Lists of token ids are most of a file's bytes. In their column, a list of integers is cut out of the line before the
line is decoded, and stays JSON (msgspec.Raw) until `integer_lists` parses the lists of many rows at once.
"""

import io
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from batchinfer.config.exact_json import exact_float
from batchinfer.data.formats.lines import Record, numbered_lines, too_long
from batchinfer.data.formats.values import INT64, in_words
from batchinfer.sanitize import error_text

_DECODER = msgspec.json.Decoder()
_EXACT_DECODER = msgspec.json.Decoder(float_hook=exact_float)
_SCHEMA_KEYS = (b"structured_outputs", b"json_schema", b"guided_json")
_LONG_NUMBER = re.compile(rb"[0-9][0-9.]{15}|[eE][+-]?[0-9]{3}")  # perhaps more digits than a float keeps
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_SPACE = b" \t\r\n"
_INTEGERS = b"0123456789-," + _SPACE  # JSON of these bytes alone consists of integers
_CUT_TEXT = "batchinfer:list"  # stands for the list that is cut out of a line
_CUT = msgspec.json.encode(_CUT_TEXT)


def filled_lines(content: io.BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines that are not blank (see `numbered_lines`)."""
    for number, line in numbered_lines(content):
        if line is None or line.strip(_SPACE):
            yield number, line


def json_records(content: io.BufferedReader, integers: str | None = None) -> Iterator[Record]:
    """Yield the objects in a file of JSON lines.

    Args:
        integers: name of the column whose lists of integers stay JSON (msgspec.Raw).
    """
    for number, line in filled_lines(content):
        if line is None:
            yield number, 0, too_long(number)
            continue
        text = line.strip(_SPACE)
        is_exact = any(key in text for key in _SCHEMA_KEYS) and _LONG_NUMBER.search(text) is not None
        values = None if integers is None or is_exact else _with_list_as_json(text, integers)
        yield number, len(line), values or _object(number, text, _EXACT_DECODER if is_exact else _DECODER)


def _with_list_as_json(text: bytes, name: str) -> dict[str, Any] | None:
    """Return an object whose column `name` is a list of integers, kept as JSON; None for other lines."""
    start = text.find(b"[", text.find(msgspec.json.encode(name)))
    end = text.find(b"]", start) + 1
    before, items, after = text[:start], text[start:end], text[end:]
    if items.translate(None, _INTEGERS) != b"[]" or _CUT in before or _CUT in after:
        return None
    try:
        value = msgspec.json.decode(items, type=msgspec.Raw)
        values = _DECODER.decode(before + _CUT + after)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    # else the list was that of another column or in a nested object, or the column occurs again with another value
    is_column = isinstance(values, dict) and values.get(name) == _CUT_TEXT
    return {**values, name: value} if is_column else None


def integer_lists(values: Sequence[object]) -> pa.Array | None:
    """Return lists of integers from `json_records`, and nulls, as list<int64>; None if there is any other value."""
    if not all(value is None or isinstance(value, msgspec.Raw) for value in values):
        return None
    texts = [bytes(value)[1:-1].strip(_SPACE) if isinstance(value, msgspec.Raw) else b"" for value in values]
    items = np.fromstring(b",".join(filter(None, texts)), dtype=np.int64, sep=",")
    if items.size and not INT64[0] < items.min() <= items.max() < INT64[-1]:
        return None  # NumPy clips integers of more than 64 bits
    offsets = [0, *accumulate(text.count(b",") + 1 if text else 0 for text in texts)]
    is_null = pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(items), mask=is_null)


def _object(number: int, text: bytes, decoder: msgspec.json.Decoder[Any]) -> dict[str, Any] | str:
    try:
        value = decoder.decode(text)
    except UnicodeDecodeError:
        return f"line {number} is not valid UTF-8"
    except (msgspec.DecodeError, RecursionError) as error:
        reason = error_text(error).removeprefix("JSON is malformed: ")
        if "truncated" in reason and _HALF_PAIR.search(text):
            reason = "unexpected end of escaped utf-16 surrogate pair"
        return f"line {number} is not valid JSON: {reason}"
    return value if isinstance(value, dict) else f"line {number} is {in_words(value)}, not an object"
