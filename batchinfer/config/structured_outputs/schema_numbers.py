"""Numbers of a JSON schema, kept to the last digit or found to be inexact.

llguidance holds every number of a schema as a double, and reads some literals with an error in the last place. Here
numbers are read exactly: one that another literal brings out right is replaced by that literal.
"""

import json
import math
import sys
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from batchinfer.config.exact_json import WrittenFloat, decimal_of, dumps, shown
from batchinfer.config.structured_outputs.byte_matcher import byte_matcher
from batchinfer.config.structured_outputs.schema_tree import Place, is_annotation, subschemas

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_EXACT = 1 << 53  # integers below are doubles, and so are the integers next to them
_INT64 = 1 << 63
_MOST_COUNT = 1 << 64
# llguidance takes these bounds of integers for the largest one of 64 bits, which is what they mean
_LARGEST = (("maximum", _INT64 - 1), ("exclusiveMaximum", _INT64))
_PLAIN_DIGITS, _PLAIN_EXPONENT = 15, 22  # such a number is read as the nearest double by every program
# llguidance holds multipleOf as an integer and a power of ten, and reckons with ten times the integer in 32 bits
_MOST_COEFFICIENT = (1 << 32) // 10
_SLOW_COEFFICIENT = 1000  # without its zeros; it makes a state for each remainder
_TRIED_TOGETHER = 200
# a bound with more digits before its point, or more zeros behind it, makes patterns nested too deeply for llguidance
_MOST_DIGITS, _MOST_ZEROS = 80, 70
_COUNTS = tuple(f"{least}{what}" for what in ("Items", "Length", "Properties", "Contains") for least in ("min", "max"))


class Literal(WrittenFloat):
    """A literal that llguidance reads as `number`, although its digits may be those of another number."""

    number: Decimal


class SchemaNumber(NamedTuple):
    """A number of a schema that limits answers: a bound, a multiple, a constant or a member of an enum.

    schema: the part of the schema with the number.
    keyword: the key of this part, such as "maximum", whose value is or contains the number.
    """

    place: Place
    schema: dict[str, Any]
    keyword: str

    @property
    def value(self) -> int | Decimal:
        value: int | Decimal = self.place.value
        return value

    @property
    def is_multiple(self) -> bool:
        return self.keyword == "multipleOf"

    def __str__(self) -> str:
        return f"the number {shown(self.value)} at {self.place.path}"


def make_exact(schema: dict[str, Any]) -> tuple[bool, list[SchemaNumber]]:
    """Replace numbers by literals that llguidance reads as these numbers.

    Args:
        schema: of `exact_json.parse`; changed in place.

    Returns:
        Whether there are numbers whose literals matter, and the numbers that no literal brings out right.
    """
    careful = [number for number in numbers_of(schema) if not _is_plain(number)]
    fractions = {Decimal(number.value) for number in careful if not number.is_multiple and not _is_whole(number.value)}
    literals = _literals(sorted(fractions))
    inexact = []
    for number in careful:
        literal = _literal(number, literals)
        if literal is None:
            inexact.append(number)
        else:
            number.place.replace(literal)
    return bool(careful), inexact


def has_slow_multiples(schema: dict[str, Any]) -> bool:
    """Return whether llguidance compiles a schema slowly, because it counts up to a large multipleOf."""
    digits = ("".join(map(str, Decimal(one.value).as_tuple().digits)) for one in numbers_of(schema) if one.is_multiple)
    return any(int(text.rstrip("0") or "0") > _SLOW_COEFFICIENT for text in digits)


def refusal_of(number: SchemaNumber) -> str:
    """Return why a schema with an inexact number is refused."""
    if _is_long_bound(number):
        return f"{number} has more digits than llguidance can compile; leave it out"
    return (
        f"{number} would be another one in the answers, since llguidance holds numbers as doubles; ask for it as text"
    )


def impossible_count(schema: dict[str, Any]) -> str | None:
    """Return a sentence about the first limit on items, characters or properties that is no count, else None."""
    for path, part in subschemas(schema):
        for keyword in _COUNTS:
            value = part.get(keyword, 0)
            if isinstance(value, dict):
                continue
            is_count = is_number(value) and 0 <= value < _MOST_COUNT and _is_whole(value)
            if not is_count:
                return f"{shown(dumps(value))} at {path}/{keyword} is no whole number from 0 to {_MOST_COUNT - 1}"
    return None


def drop_large_annotations(schema: dict[str, Any]) -> bool:
    """Set annotations with numbers beyond doubles to null: llguidance would refuse the whole schema.

    Returns:
        Whether there were such annotations.
    """
    large = [
        (part, key)
        for _, part in subschemas(schema)
        for key in filter(is_annotation, part)
        if any(abs(place.value) > sys.float_info.max for place in _numbers_in(Place(part, key, "")))
    ]
    for part, key in large:
        part[key] = None
    return bool(large)


def numbers_of(schema: dict[str, Any]) -> Iterator[SchemaNumber]:
    """Yield the numbers in const, enum, multipleOf and the bounds of a schema and of all schemas in it."""
    for path, part in subschemas(schema):
        for keyword in ("const", "enum"):
            if keyword in part:
                for place in _numbers_in(Place(part, keyword, f"{path}/{keyword}")):
                    yield SchemaNumber(place, part, keyword)
        for keyword in (*BOUNDS, "multipleOf"):
            if is_number(part.get(keyword)):
                yield SchemaNumber(Place(part, keyword, f"{path}/{keyword}"), part, keyword)


def _numbers_in(place: Place) -> Iterator[Place]:
    value = place.value
    if is_number(value):
        yield place
    elif isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _numbers_in(Place(value, key, f"{place.path}/{key}"))


def is_number(value: object) -> bool:
    """Return whether a value of a schema is a number; booleans are none."""
    return isinstance(value, int | Decimal | Literal) and not isinstance(value, bool)


def _is_whole(value: int | Decimal) -> bool:
    return int(value) == value


def _is_plain(number: SchemaNumber) -> bool:
    """Return whether llguidance reads the number exactly as it is written."""
    value = number.value
    if number.is_multiple:
        return _is_plain_literal(value) and _is_kept_as_multiple(value)
    if _is_whole(value) and not -_EXACT < value < _EXACT:
        return False
    return not _is_long_bound(number) and (isinstance(value, int) or _is_plain_literal(value))


def _is_long_bound(number: SchemaNumber) -> bool:
    return number.keyword in BOUNDS and is_too_long(Decimal(number.value))


def is_too_long(bound: Decimal) -> bool:
    """Return whether a bound has too many digits or zeros for llguidance to compile its pattern."""
    return bool(bound) and not -_MOST_ZEROS <= bound.adjusted() < _MOST_DIGITS


def _is_plain_literal(value: int | Decimal) -> bool:
    _, digits, exponent = Decimal(value).as_tuple()
    return len(digits) <= _PLAIN_DIGITS and abs(int(exponent)) <= _PLAIN_EXPONENT


def _is_kept_as_multiple(value: int | Decimal) -> bool:
    """Return whether llguidance converts a multipleOf exactly, from a double to an integer and a power of ten."""
    coefficient: float = abs(float(value))
    exponent = 0
    while coefficient % 1:
        coefficient, exponent = coefficient * 10, exponent + 1
    return coefficient < _MOST_COEFFICIENT and Fraction(int(coefficient), 10**exponent) == abs(Fraction(value))


def _literal(number: SchemaNumber, literals: dict[Decimal, str]) -> Literal | int | None:
    """Return a spelling that llguidance reads as exactly this number, None if there is none."""
    value = number.value
    if number.is_multiple:
        return None
    if _is_whole(value):
        return int(value) if _is_kept_integer(int(value), number) else None
    if Decimal(value) not in literals or _is_long_bound(number):
        return None
    literal = Literal(literals[Decimal(value)])
    literal.number = Decimal(value)
    return literal


def _is_kept_integer(value: int, number: SchemaNumber) -> bool:
    """Return whether llguidance keeps an integer exactly."""
    if abs(value) < _EXACT:
        return True
    is_of_integers = number.schema.get("type") == "integer"
    if is_of_integers and (number.keyword, value) in _LARGEST:
        return True
    # llguidance moves an exclusive bound by 1, as a double
    if abs(value) >= _INT64 or number.keyword.startswith("exclusive") or int(float(value)) != value:
        return False
    if number.keyword not in BOUNDS or is_of_integers:
        return True
    return Decimal(repr(float(value))) == value  # bounds of other numbers are compared digit by digit


# ---- literals


def _literals(values: list[Decimal]) -> dict[Decimal, str]:
    """Return literals that llguidance reads as exactly these numbers; numbers without such a literal are left out."""
    found: dict[Decimal, str] = {}
    candidates = {value: _candidates(value) for value in values}
    while candidates:
        tried = [(value, literal) for value, rest in candidates.items() if (literal := next(rest, None)) is not None]
        for first in range(0, len(tried), _TRIED_TOGETHER):
            batch = tried[first : first + _TRIED_TOGETHER]
            for (value, literal), read in zip(batch, _read_by_library([literal for _, literal in batch]), strict=True):
                if read == value:
                    found[value] = literal
        candidates = {value: candidates[value] for value, _ in tried if value not in found}
    return found


def _read_by_library(literals: list[str]) -> list[Decimal]:
    """Return the numbers that answers have for these literals, which a schema asks for as constants."""
    grammar = grammar_json(f'{{"const": [{", ".join(literals)}]', '{"whitespace_flexible": false}')
    answer = byte_matcher(grammar).compute_ff_bytes()
    read: list[Decimal] = json.loads(answer, parse_float=decimal_of, parse_int=decimal_of)
    return read


def _candidates(value: Decimal) -> Iterator[str]:
    """Yield literals of the double nearest to a number.

    Some readers make a double of all digits of a literal, then multiply by a power of ten, which rounds twice. Of
    other literals for the same double, with more or fewer digits, that arithmetic often gives the double itself.
    """
    yield str(value)
    wanted = abs(float(value))
    if not 0 < wanted < math.inf:
        return
    first = abs(value).adjusted()
    for num_digits in range(19, 5, -1):
        exponent = first - num_digits + 1
        digits = float(round(Fraction(wanted) / Fraction(10) ** exponent))
        for near in (digits, math.nextafter(digits, 0), math.nextafter(digits, math.inf)):
            power = float(f"1e{abs(exponent)}") if abs(exponent) <= 308 else math.nan
            if (near * power if exponent > 0 else near / power) == wanted:
                yield f"{'-' if value < 0 else ''}{int(near)}e{exponent}"


def grammar_json(schema_start: str, options: str) -> str:
    """Return the grammar of a schema as llguidance's JSON, its numbers as they are written.

    Args:
        schema_start: the schema as JSON without its closing brace; it has a key at least.
        options: how llguidance compiles the schema, as JSON.
    """
    return f'{{"grammars": [{{"json_schema": {schema_start}, "x-guidance": {options}}}}}]}}'
