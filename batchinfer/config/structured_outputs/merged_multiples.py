"""multipleOf together with bounds and with other multipleOf, where llguidance's arithmetic would go wrong.

llguidance merges all that allOf, anyOf and $ref say of one number, reckons with the smallest common multiple in 32
bits, and decides with doubles whether there is a multiple between two bounds. It leaves a range that it takes for empty
out of an anyOf or of the optional properties without a word.
"""

import itertools
import math
from fractions import Fraction
from typing import Any, NamedTuple

from batchinfer.config.structured_outputs.schema_numbers import SchemaNumber, is_number, numbers_of
from batchinfer.config.structured_outputs.schema_tree import subschemas, target_of

_BITS_32 = 1 << 32
_MOST_WAYS = 100  # in which alternatives are put together, and numbers in one of them

Bound = tuple[Fraction, bool]  # a number, and whether it is itself out of the range


class _Range(NamedTuple):
    """The numbers that some schemas together allow."""

    multiples: tuple[SchemaNumber, ...] = ()
    least: tuple[Bound, ...] = ()
    most: tuple[Bound, ...] = ()
    is_integer: bool = False

    def and_also(self, other: "_Range") -> "_Range":
        """Return what two ranges have in common."""
        return _Range(
            (self.multiples + other.multiples)[:_MOST_WAYS],
            (self.least + other.least)[:_MOST_WAYS],
            (self.most + other.most)[:_MOST_WAYS],
            self.is_integer or other.is_integer,
        )


def misjudged_multiple(schema: dict[str, Any]) -> SchemaNumber | None:
    """Return a multipleOf with which llguidance goes wrong, None if there is none.

    Args:
        schema: of `exact_json.parse`.
    """
    multiples = {id(number.schema): number for number in numbers_of(schema) if number.is_multiple}
    if not multiples:
        return None
    merger = _Merger(schema, multiples)
    for _, part in subschemas(schema):
        for merged in merger.ways(part):
            if merged.multiples and _is_misjudged(merged):
                return merged.multiples[-1]
    return None


class _Merger:
    def __init__(self, root: dict[str, Any], multiples: dict[int, SchemaNumber]) -> None:
        self._root, self._multiples = root, multiples
        self._known: dict[int, list[_Range]] = {}  # by id of a schema

    def ways(self, part: Any) -> list[_Range]:
        """Return the ranges that a schema and the schemas for the same value allow, one for each way through anyOf."""
        if not isinstance(part, dict):
            return [_Range()]
        if id(part) not in self._known:
            self._known[id(part)] = [_Range()]  # a schema that refers to itself adds nothing
            self._known[id(part)] = self._found(part)
        return self._known[id(part)]

    def _found(self, part: dict[str, Any]) -> list[_Range]:
        target = target_of(self._root, part.get("$ref"))
        together = [*_list(part, "allOf"), *([] if target is None else [target.value])]
        choices = [[self._own(part)], *(self.ways(other) for other in together)]
        for key in ("anyOf", "oneOf"):
            choices.append([way for other in _list(part, key) for way in self.ways(other)])
        values = [part["const"]] if "const" in part else _list(part, "enum")
        numbers = [Fraction(value) for value in values if is_number(value)]
        choices.append([_Range(least=((number, False),), most=((number, False),)) for number in numbers])
        found = [_Range()]
        for choice in filter(None, choices):
            found = [one.and_also(other) for one in found for other in choice][:_MOST_WAYS]
        return found

    def _own(self, part: dict[str, Any]) -> _Range:
        bounds = {
            key: ((Fraction(part[key]), key.startswith("exclusive")),) if is_number(part.get(key)) else ()
            for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        }
        multiple = self._multiples.get(id(part))
        types = [part["type"]] if isinstance(part.get("type"), str) else _list(part, "type")
        return _Range(
            () if multiple is None else (multiple,),
            bounds["minimum"] + bounds["exclusiveMinimum"],
            bounds["maximum"] + bounds["exclusiveMaximum"],
            "integer" in types and "number" not in types,
        )


def _is_misjudged(merged: _Range) -> bool:
    """Whether llguidance takes a range for empty that is not, or the other way round, or reckons beyond 32 bits."""
    coefficient, exponent = 0, 0  # the common multiple is coefficient / 10**exponent
    for number in merged.multiples:
        multiple = abs(Fraction(number.value))
        places = _places(multiple)
        if not multiple:
            return False
        whole = int(multiple * 10**places)
        if coefficient:
            one, other = coefficient * 10 ** max(places - exponent, 0), whole * 10 ** max(exponent - places, 0)
            if one * other >= _BITS_32:
                return True
            whole, places = math.lcm(one, other), max(places, exponent)
        coefficient, exponent = whole, places
    if 10 * coefficient >= _BITS_32:
        return True
    if not (merged.least and merged.most):
        return False
    lowest, highest = max(merged.least), min(merged.most, key=lambda bound: (bound[0], not bound[1]))
    # multiples come without a fraction, or with all places of the step
    if lowest[0] == highest[0] and _places(lowest[0]) not in (0, exponent):
        return True
    step = Fraction(coefficient, 10**exponent)
    return _is_empty_to_library(lowest, highest, coefficient / 10.0**exponent, merged.is_integer) != _is_empty(
        lowest, highest, Fraction(step.numerator) if merged.is_integer else step
    )


def _places(number: Fraction) -> int:
    """Return how many places a decimal number has behind its point."""
    return next(places for places in itertools.count() if (number * 10**places).denominator == 1)


def _is_empty(lowest: Bound, highest: Bound, step: Fraction) -> bool:
    first = math.ceil(lowest[0] / step) * step
    first += step if lowest[1] and first == lowest[0] else 0
    return first > highest[0] or (highest[1] and first == highest[0])


def _is_empty_to_library(lowest: Bound, highest: Bound, step: float, is_integer: bool) -> bool:
    """Do llguidance's arithmetic."""
    if is_integer and _is_empty(lowest, highest, Fraction(1)):
        return True
    if lowest[0] > highest[0] or (lowest[0] == highest[0] and (lowest[1] or highest[1])):
        return True
    first, last = (math.ceil(float(lowest[0]) / step) * step, math.floor(float(highest[0]) / step) * step)
    first += step if lowest[1] and first == float(lowest[0]) else 0
    last -= step if highest[1] and last == float(highest[0]) else 0
    return math.ceil(first) > math.floor(last) if is_integer else first > last


def _list(part: dict[str, Any], key: str) -> list[Any]:
    value = part.get(key)
    return value if isinstance(value, list) else []
