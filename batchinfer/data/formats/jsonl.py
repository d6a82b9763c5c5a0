"""Reader of JSON lines: each line that is not blank is one row; a line that is no object is a bad row.

Lists of token ids are most of a file's bytes. In their column, a list of integers stays JSON (msgspec.Raw) until
`integer_lists` parses the lists of many rows at once.
"""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from batchinfer.config.exact_json import exact_float
from batchinfer.data.formats.lines import Record, numbered_lines, too_long
from batchinfer.data.formats.values import INT64, MOST_NAMES, in_words
from batchinfer.sanitize import error_text

_DECODER = msgspec.json.Decoder()
_EXACT_DECODER = msgspec.json.Decoder(float_hook=exact_float)
_SCHEMA_KEYS = (b"structured_outputs", b"json_schema", b"guided_json")
_LONG_NUMBER = re.compile(rb"[0-9][0-9.]{15}|[eE][+-]?[0-9]{3}")  # perhaps more digits than a float keeps
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_SPACE = b" \t\r\n"
_ODD = re.compile(r'["\\\x00-\x1f]')  # characters in names of columns to which msgspec cannot rename fields
_INTEGERS = b"0123456789-," + _SPACE  # JSON of these bytes alone consists of integers


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
    rows = None if integers is None else _Rows(integers)
    for number, line in filled_lines(content):
        if line is None:
            yield number, 0, too_long(number)
            continue
        text = line.strip(_SPACE)
        is_exact = any(key in text for key in _SCHEMA_KEYS) and _LONG_NUMBER.search(text) is not None
        values = None if rows is None or is_exact else rows.decode(text)
        if values is None:
            found = _object(number, text, _EXACT_DECODER if is_exact else _DECODER)
            if rows is not None and not isinstance(found, str):
                rows.learn(found)
            yield number, len(line), found
        else:
            yield number, len(line), values


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


class _Rows:
    """Fast decoder of objects whose columns occurred in earlier objects.

    Args:
        integers: see `json_records`.
    """

    def __init__(self, integers: str) -> None:
        self._names: dict[str, None] = {} if _ODD.search(integers) else {integers: None}
        self._key = msgspec.json.encode(integers)
        self._decoder: msgspec.json.Decoder[Any] | None = None

    def decode(self, text: bytes) -> dict[str, Any] | None:
        """Return the object's values; None if the object has other columns, or is not valid JSON."""
        if self._decoder is None:
            return None
        try:
            values = msgspec.structs.astuple(self._decoder.decode(text))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if values[0] is msgspec.UNSET or not self._is_only_list(bytes(values[0]), text):
            return None
        return {name: value for name, value in zip(self._names, values, strict=True) if value is not msgspec.UNSET}

    def _is_only_list(self, value: bytes, text: bytes) -> bool:
        """Return whether `value` is a list of integers, and the key occurs once in the line: msgspec keeps the last."""
        if value.translate(None, _INTEGERS) != b"[]":
            return False
        start = text.find(b"[", text.find(self._key))
        end = start + len(value)
        rest = text[:start] + text[end:]
        return text[start:end] == value and rest.count(self._key) == 1 and b"\\u" not in rest

    def learn(self, names: Iterable[str]) -> None:
        """Add columns to those of the decoder, up to MOST_NAMES; names with odd characters are left out."""
        new = [name for name in names if name not in self._names and not _ODD.search(name)]
        if self._names and (new or self._decoder is None) and len(self._names) + len(new) <= MOST_NAMES:
            self._names |= dict.fromkeys(new)
            self._decoder = _decoder_of(list(self._names))


def _decoder_of(names: list[str]) -> msgspec.json.Decoder[Any]:
    """Return a decoder of objects with no other names than these; the value of the first name stays JSON."""
    fields = {f"field_{place}": name for place, name in enumerate(names)}
    types = [(field, Any if place else msgspec.Raw, msgspec.UNSET) for place, field in enumerate(fields)]
    return msgspec.json.Decoder(msgspec.defstruct("Row", types, rename=fields, forbid_unknown_fields=True))


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
