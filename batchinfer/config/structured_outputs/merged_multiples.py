"""Search for numbers that llguidance computes wrongly: multipleOf together with bounds, and exclusive whole bounds.

llguidance merges the limits that allOf, anyOf and $ref put on one number. It computes the least common multiple in 32
bits, and uses doubles to decide whether a multiple lies between two bounds. It drops a range that it finds empty from
an anyOf or from the optional properties, without a warning. The same holds for a property or item that several schemas
limit.
"""

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from batchinfer.config.structured_outputs.schema_numbers import SchemaNumber, is_number, numbers_of
from batchinfer.config.structured_outputs.schema_tree import list_under, subschemas, target_of

_BITS_32 = 1 << 32
_MOST_WAYS = 100  # combinations of alternatives, and numbers in one of them
_MOST_VISITS = 10_000  # of sets of schemas that apply to one value

Bound = tuple[Fraction, bool]  # a number, and whether the bound is exclusive


class _Range(NamedTuple):
    """The range of numbers that several schemas allow together."""

    multiples: tuple[SchemaNumber, ...] = ()
    least: tuple[Bound, ...] = ()
    most: tuple[Bound, ...] = ()
    is_integer: bool = False
    open_wholes: tuple[SchemaNumber, ...] = ()  # bounds that are whole numbers, themselves out of the range

    def and_also(self, other: "_Range") -> "_Range":
        """Return what two ranges have in common."""
        return _Range(
            (self.multiples + other.multiples)[:_MOST_WAYS],
            (self.least + other.least)[:_MOST_WAYS],
            (self.most + other.most)[:_MOST_WAYS],
            self.is_integer or other.is_integer,
            (self.open_wholes + other.open_wholes)[:_MOST_WAYS],
        )


def misjudged_number(schema: dict[str, Any]) -> SchemaNumber | None:
    """Return a multipleOf, or a whole open bound, with which llguidance goes wrong, None if there is none.

    Args:
        schema: of `exact_json.parse`.
    """
    watched = {(id(one.schema), one.keyword): one for one in numbers_of(schema) if _is_watched(one)}
    if not watched:
        return None
    merger = _Merger(schema, watched)
    for _, part in subschemas(schema):
        merger.visit((part,))
    return merger.misjudged


def _is_watched(number: SchemaNumber) -> bool:
    return number.is_multiple or (number.keyword.startswith("exclusive") and int(number.value) == number.value)


class _Merger:
    """Follows which schemas llguidance puts together for one value, that of a property or an item included.

    misjudged: the first number found with which it goes wrong.
    """

    def __init__(self, root: dict[str, Any], watched: dict[tuple[int, str], SchemaNumber]) -> None:
        self._root, self._watched = root, watched
        self._known: dict[int, list[tuple[dict[str, Any], ...]]] = {}  # by id of a schema
        self._seen: set[frozenset[int]] = set()
        self.misjudged: SchemaNumber | None = None

    def visit(self, parts: tuple[Any, ...]) -> None:
        """Look at the schemas of one value, and at those of the values in it."""
        key = frozenset(map(id, parts))
        is_too_much = len(key) > 1 and len(self._seen) >= _MOST_VISITS
        if self.misjudged is not None or key in self._seen or is_too_much:
            return
        self._seen.add(key)
        for together in self._together([self._ways(part) for part in parts]):
            own = list({id(part): part for part in together}.values())
            self.misjudged = next(filter(None, map(_misjudged, self._ranges(own))), None)
            if self.misjudged is not None:
                return
            if len(own) > 1 or "patternProperties" in own[0]:
                for below in _below(own):
                    self.visit(below)

    def _ways(self, part: Any) -> list[tuple[dict[str, Any], ...]]:
        """Return the schemas that together say what a schema does, one tuple for each way through anyOf."""
        if not isinstance(part, dict):
            return [()]
        if id(part) not in self._known:
            self._known[id(part)] = [()]  # a schema that refers to itself adds nothing
            target = target_of(self._root, part.get("$ref"))
            needed = [*list_under(part, "allOf"), *([] if target is None else [target.value])]
            own: list[tuple[dict[str, Any], ...]] = [(part,)]
            choices = [own, *map(self._ways, needed)]
            for key in ("anyOf", "oneOf"):
                choices.append([way for other in list_under(part, key) for way in self._ways(other)])
            self._known[id(part)] = self._together(choices)
        return self._known[id(part)]

    def _together(self, choices: list[list[tuple[dict[str, Any], ...]]]) -> list[tuple[dict[str, Any], ...]]:
        found: list[tuple[dict[str, Any], ...]] = [()]
        for choice in filter(None, choices):
            found = [one + other for one in found for other in choice][:_MOST_WAYS]
        return [way for way in found if way]

    def _ranges(self, parts: list[dict[str, Any]]) -> list[_Range]:
        found = [_Range()]
        for part in parts:
            values = [part["const"]] if "const" in part else list_under(part, "enum")
            numbers = [Fraction(value) for value in values if is_number(value)][:_MOST_WAYS]
            points = [_Range(least=((number, False),), most=((number, False),)) for number in numbers]
            own = self._own(part)
            found = [one.and_also(own).and_also(point) for one in found for point in points or [_Range()]][:_MOST_WAYS]
        return found

    def _own(self, part: dict[str, Any]) -> _Range:
        bounds = {
            key: ((Fraction(part[key]), key.startswith("exclusive")),) if is_number(part.get(key)) else ()
            for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        }
        multiple = self._watched.get((id(part), "multipleOf"))
        wholes = [self._watched.get((id(part), key)) for key in ("exclusiveMinimum", "exclusiveMaximum")]
        types = [part["type"]] if isinstance(part.get("type"), str) else list_under(part, "type")
        return _Range(
            () if multiple is None else (multiple,),
            bounds["minimum"] + bounds["exclusiveMinimum"],
            bounds["maximum"] + bounds["exclusiveMaximum"],
            "integer" in types and "number" not in types,
            tuple(whole for whole in wholes if whole is not None),
        )


def _below(parts: list[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield the schemas of each value in a value of all these schemas: of a property by name or pattern, of an item."""
    named = [part["properties"] if isinstance(part.get("properties"), dict) else {} for part in parts]
    patterns = [part["patternProperties"] if isinstance(part.get("patternProperties"), dict) else {} for part in parts]
    for name in dict.fromkeys(itertools.chain(*named)):
        found = []
        for part, own, others in zip(parts, named, patterns, strict=True):
            fitting = [others[pattern] for pattern in others if _may_match(pattern, name)]
            fitting += [own[name]] if name in own else []
            found += fitting or [part.get("additionalProperties")]
        yield tuple(found)
    for pattern in dict.fromkeys(itertools.chain(*patterns)):
        yield tuple(
            others.get(pattern, part.get("additionalProperties")) for part, others in zip(parts, patterns, strict=True)
        )
    yield tuple(part.get("additionalProperties") for part in parts)
    firsts = [list_under(part, "prefixItems") or list_under(part, "items") for part in parts]
    for place in range(max(map(len, firsts)) + 1):
        yield tuple(
            first[place] if place < len(first) else part.get("items") for part, first in zip(parts, firsts, strict=True)
        )


def _may_match(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a property's name; True if RE2, which takes linear time, cannot tell."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        return bool(pc.match_substring_regex(pa.array([name]), pattern)[0].as_py())
    except pa.ArrowException:
        return True


def _misjudged(merged: _Range) -> SchemaNumber | None:
    if merged.multiples and _is_misjudged(merged):
        return merged.multiples[-1]
    if merged.open_wholes and not merged.is_integer:
        admitted = _admitted_bound(merged)
        return next((one for one in merged.open_wholes if one.value == admitted), None)
    return None


def _admitted_bound(merged: _Range) -> Fraction | None:
    """Return a whole number that llguidance takes although it is excluded, None if there is none.

    The patterns of the numbers between a whole number and the next one, farther from 0, begin with it alone.
    """
    if not (merged.least and merged.most):
        return None
    (low, low_is_open), (high, high_is_open) = _limits(merged)
    if low_is_open and 0 <= low == int(low) < high < low + 1:
        return low
    return high if high_is_open and 0 >= high == int(high) > low > high - 1 else None


def _limits(merged: _Range) -> tuple[Bound, Bound]:
    """Return the closest bounds of a range that has bounds on both sides."""
    return max(merged.least), min(merged.most, key=lambda bound: (bound[0], not bound[1]))


def _is_misjudged(merged: _Range) -> bool:
    """Return whether llguidance is wrong about a range being empty, or computes with numbers too large for it."""
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
    if not merged.is_integer and (
        _loses_a_multiple(merged, coefficient, exponent) or _lacks_zeros(merged, coefficient, exponent)
    ):
        return True
    if not (merged.least and merged.most):
        return False
    lowest, highest = _limits(merged)
    # multiples come without a fraction, or with all places of the step
    if lowest[0] == highest[0] and _places(lowest[0]) not in (0, exponent):
        return True
    step = Fraction(coefficient, 10**exponent)
    is_empty = _is_empty(lowest, highest, Fraction(step.numerator) if merged.is_integer else step)
    try:
        return _is_empty_to_library(lowest, highest, coefficient / 10.0**exponent, merged.is_integer) != is_empty
    except OverflowError:  # no double
        return True


def _loses_a_multiple(merged: _Range, coefficient: int, exponent: int) -> bool:
    """Return whether a multiple's digits begin a bound's digits: llguidance would then ask for more digits."""
    step = Fraction(coefficient, 10**exponent)
    for bound, _ in (*merged.least, *merged.most):
        cut = Fraction(int(bound * 10**exponent), 10**exponent)
        is_inside = all(cut >= low for low, _ in merged.least) and all(cut <= high for high, _ in merged.most)
        if cut != bound and is_inside and (cut / step).denominator == 1:
            return True
    return False


_MOST_SHORT = 9  # multiples of coefficients up to here may be written without zeros
_FAR = Fraction(1 << 64)


def _lacks_zeros(merged: _Range, coefficient: int, exponent: int) -> bool:
    """Return whether llguidance asks for trailing zeros, as in 0.50, that its pattern of the range rejects.

    The pattern rejects trailing zeros after the digits of a bound, after numbers that begin with the digits of an open
    bound, and after numbers between -1 and 0.
    """
    if not (merged.least or merged.most) or coefficient <= _MOST_SHORT or exponent < 2:
        return False
    least, most = merged.least or ((-_FAR, True),), merged.most or ((_FAR, True),)
    low, high = _limits(merged._replace(least=least, most=most))
    short = Fraction(math.lcm(coefficient, 10), 10**exponent)  # its multiples have fewer places than the step

    def has_short(start: Fraction, end: Fraction) -> bool:
        """Return whether a multiple of `short` in the range lies between two numbers."""
        first = math.floor(max(start, low[0]) / short) * short
        found = (first + step * short for step in range(3))  # one may be `start`, another an open bound
        return any(
            start < one < end and (low[0] < one or low == (one, False)) and (one < high[0] or high == (one, False))
            for one in found
        )

    for (bound, is_open), sign in ((high, 1), (low, -1)):
        if not is_open and bound * sign > 0 and bound.denominator > 1 and (bound / short).denominator == 1:
            return True
    return (
        has_short(Fraction(-1), Fraction(0))
        or (low[1] and low[0] >= 0 and has_short(low[0], low[0] + Fraction(1, 10 ** _places(low[0]))))
        or (high[1] and high[0] <= 0 and has_short(high[0] - Fraction(1, 10 ** _places(high[0])), high[0]))
    )


def _places(number: Fraction) -> int:
    """Return the number of decimal places of a number."""
    return next(places for places in itertools.count() if (number * 10**places).denominator == 1)


def _is_empty(lowest: Bound, highest: Bound, step: Fraction) -> bool:
    first = math.ceil(lowest[0] / step) * step
    first += step if lowest[1] and first == lowest[0] else 0
    return first > highest[0] or (highest[1] and first == highest[0])


def _is_empty_to_library(lowest: Bound, highest: Bound, step: float, is_integer: bool) -> bool:
    """Return whether llguidance's own arithmetic, with doubles, finds the range empty."""
    if is_integer and _is_empty(lowest, highest, Fraction(1)):
        return True
    if lowest[0] > highest[0] or (lowest[0] == highest[0] and (lowest[1] or highest[1])):
        return True
    first, last = (math.ceil(float(lowest[0]) / step) * step, math.floor(float(highest[0]) / step) * step)
    first += step if lowest[1] and first == float(lowest[0]) else 0
    last -= step if highest[1] and last == float(highest[0]) else 0
    return math.ceil(first) > math.floor(last) if is_integer else first > last
