"""A schema with numbers beyond doubles, written as a grammar of their texts.

Only the way from the root to such numbers is written here, as rules of Lark; all other parts stay JSON schemas:

    {"properties": {"id": {"const": 9007199254740993}, "n": S}, …}    r0: "{" r0_0
                                                                      r0_0: "\\"id\\"" ":" r1 r0_1
                                                                      r1: "9007199254740993"
                                                                      r2: %json S
"""

import math
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from batchinfer.config.exact_json import dumps
from batchinfer.config.structured_outputs.schema_numbers import BOUNDS, Literal, SchemaNumber, is_number, is_too_long
from batchinfer.config.structured_outputs.schema_tree import ASSERTIONS, DEFINITIONS, children, subschemas, target_of

_MOST_DIGITS = 100  # of an integer that is written without an exponent
_OTHER_NAME = r'/"[^"\\\x00-\x1F\x7F]*"/'


class CannotBeWrittenError(Exception):
    """A schema has parts for which there are no rules here."""


def lark_of(schema: dict[str, Any], inexact: list[SchemaNumber], blanks: str) -> str:
    """Return the grammar of a schema in Lark.

    Args:
        schema: as `make_exact` leaves it.
        inexact: the numbers that have to be written as texts.
        blanks: pattern of what may come between two parts of JSON.

    Raises:
        CannotBeWrittenError: it is more than is written here.
    """
    rules = _Rules(schema, inexact, blanks)
    start = rules.name_of(schema)
    head = ['%llguidance {"ignore_once": true}', f"%ignore /{blanks}/", f"start: {start}"]
    return "\n".join([*head, *rules.lines()])


class _Rules:
    def __init__(self, root: dict[str, Any], inexact: list[SchemaNumber], blanks: str) -> None:
        self._root, self._blanks = root, blanks
        self._bodies: dict[str, str] = {}
        self._names: dict[int, str] = {}  # by id of a schema
        self._written = self._closure({id(number.schema) for number in inexact})

    def lines(self) -> Iterator[str]:
        for name, body in self._bodies.items():
            yield f"{name}: {body}"

    def name_of(self, schema: Any) -> str:
        """Return the name of the rule for a schema; its body is made now, unless that has begun already."""
        if id(schema) not in self._names:
            name = self._names[id(schema)] = f"r{len(self._names)}"
            self._bodies[name] = ""  # rules come in the order of their names
            self._bodies[name] = self._body(schema, name)
        return self._names[id(schema)]

    def _closure(self, written: set[int]) -> set[int]:
        """Add the schemas that lead to schemas that have to be written."""
        parts = list(subschemas(self._root))
        while True:
            more = {
                id(part)
                for path, part in parts
                if id(part) not in written and any(id(value) in written for value in self._below(path, part))
            }
            if not more:
                return written
            written |= more

    def _below(self, path: str, part: dict[str, Any]) -> Iterator[Any]:
        named = {key: value for key, value in part.items() if key not in DEFINITIONS}
        yield from (place.value for place in children(named, path))
        target = target_of(self._root, part.get("$ref"))
        if target is not None:
            yield target.value

    def _body(self, schema: Any, name: str) -> str:
        if id(schema) not in self._written:
            return f"%json {self._as_json(schema)}"
        keys = {key for key in schema if key in ASSERTIONS}
        kind = schema.get("type")
        if keys <= {"const", "enum", "type"}:
            return self._values(schema)
        if kind == "integer" and keys <= {*BOUNDS, "type", "format"}:  # formats are of texts
            return f"/{_range_of(schema)}/"
        if kind == "object" and keys <= {"type", "properties", "required", "additionalProperties"}:
            return self._object(schema, name)
        if kind == "array" and keys <= {"type", "items", "minItems", "maxItems"}:
            return self._array(schema)
        if keys == {"$ref"} and (target := target_of(self._root, schema["$ref"])) is not None:
            return self.name_of(target.value)
        if keys == {"anyOf"} or (keys == {"allOf"} and len(schema["allOf"]) == 1):
            return " | ".join(map(self.name_of, schema.get("anyOf") or schema["allOf"]))
        raise CannotBeWrittenError

    def _as_json(self, schema: Any) -> str:
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise CannotBeWrittenError
        definitions: dict[str, Any] = {key: {} for key in DEFINITIONS if isinstance(self._root.get(key), dict)}
        for _, part in subschemas(schema | {key: self._root[key] for key in definitions}, definitions=False):
            if "$ref" not in part:
                continue
            _, key, name, *_ = [*str(part["$ref"]).split("/"), "", ""]
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            if key not in definitions or name not in self._root[key]:
                raise CannotBeWrittenError
            definitions[key][name] = self._root[key][name]
        return dumps(schema | definitions | {"x-guidance": {"whitespace_pattern": self._blanks}})

    def _values(self, schema: dict[str, Any]) -> str:
        values = schema.get("enum", [schema.get("const")])
        if {"const", "enum"} <= schema.keys() or not isinstance(values, list):
            raise CannotBeWrittenError
        types = schema.get("type", list(_IS_OF_TYPE))
        types = [types] if isinstance(types, str) else types
        if not (isinstance(types, list) and all(kind in _IS_OF_TYPE for kind in types)):
            raise CannotBeWrittenError
        right = [value for value in values if any(_IS_OF_TYPE[kind](value) for kind in types)]
        if not right:
            raise CannotBeWrittenError
        return " | ".join(map(_value, right))

    def _object(self, schema: dict[str, Any], name: str) -> str:
        """Return the rule of an object: its properties in order, if not required optional, then other members."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if not (isinstance(properties, dict) and isinstance(required, list) and set(required) <= properties.keys()):
            raise CannotBeWrittenError
        other = "" if others is False else f'{self._other_name(properties, name)} ":" {self.name_of(others)}'
        rest, alone = '""', '""'  # members from here on, behind another one and as the first ones
        if other:
            rest, alone = f'("," {other})*', f'({other} ("," {other})*)?'
        for number, key in reversed(list(enumerate(properties))):
            member = f'{_literal(key)} ":" {self.name_of(properties[key])}'
            behind = self._add(f"{name}-behind-{number}", rest)
            if key in required:
                rest, alone = f'"," {member} {behind}', f"{member} {behind}"
            else:
                rest = f'("," {member})? {behind}'
                alone = f"{member} {behind} | {self._add(f'{name}-first-{number}', alone)}"
        return f'"{{" ({alone}) "}}"'

    def _other_name(self, properties: dict[str, Any], name: str) -> str:
        taken = " | ".join(map(_literal, properties))
        terminal = f"NAME-{name[1:]}"
        return self._add(terminal, f"{_OTHER_NAME} & ~({taken})" if taken else _OTHER_NAME)

    def _array(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not (isinstance(least, int) and isinstance(most, int | None)) or (most is not None and most < max(least, 1)):
            raise CannotBeWrittenError
        item = self.name_of(schema.get("items", True))
        times = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = item if most == 1 else f'{item} ("," {item}){times}'
        return f'"[" ({items}){"" if least else "?"} "]"'

    def _add(self, name: str, body: str) -> str:
        self._bodies[name] = body
        return name


def _range_of(schema: dict[str, Any]) -> str:
    """Return the pattern of the integers within the bounds of a schema."""
    bounds = {key: schema[key] for key in BOUNDS if key in schema}
    if not all(map(is_number, bounds.values())):
        raise CannotBeWrittenError
    exact = {key: Fraction(_number(value)) for key, value in bounds.items()}
    least = [math.ceil(exact[key]) for key in ("minimum",) if key in exact]
    least += [math.floor(exact[key]) + 1 for key in ("exclusiveMinimum",) if key in exact]
    most = [math.floor(exact[key]) for key in ("maximum",) if key in exact]
    most += [math.ceil(exact[key]) - 1 for key in ("exclusiveMaximum",) if key in exact]
    lowest, highest = max(least, default=None), min(most, default=None)
    if any(is_too_long(Decimal(bound)) for bound in (*least, *most)):
        raise CannotBeWrittenError
    if lowest is not None and highest is not None and lowest > highest:
        raise CannotBeWrittenError
    return integer_range(lowest, highest)


def _value(value: Any) -> str:
    """Return the rule of one constant."""
    if isinstance(value, dict):
        members = (f'{_literal(key)} ":" {_value(item)}' for key, item in value.items())
        return f'"{{" {_separated(members)} "}}"'
    if isinstance(value, list):
        return f'"[" {_separated(map(_value, value))} "]"'
    return _quoted(dumps(_number(value) if is_number(value) else value))


def _number(value: int | Decimal | Literal) -> int | Decimal:
    """Return the number that a schema asks for."""
    value = value.number if isinstance(value, Literal) else value
    is_short = isinstance(value, Decimal) and abs(value.adjusted()) < _MOST_DIGITS
    return int(value) if is_short and int(value) == value else value


def _separated(items: Iterable[str]) -> str:
    return ' "," '.join(items)


def _literal(name: str) -> str:
    return _quoted(dumps(name))


def _quoted(text: str) -> str:
    """Return a text as a string of Lark."""
    return dumps(text).replace("\x7f", "\\u007f")


_IS_OF_TYPE: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "number": is_number,
    "integer": lambda value: is_number(value) and Fraction(_number(value)).denominator == 1,
}


def integer_range(lowest: int | None, highest: int | None) -> str:
    """Return a regex of the integers from `lowest` to `highest`, both included, as JSON writes them.

    Args:
        lowest: None: there is no bound.
        highest: None, or at least `lowest`.
    """
    parts = []
    if lowest is None or lowest < 0:
        parts += [f"-(?:{part})" for part in _natural(max(1, -highest) if highest is not None else 1, _minus(lowest))]
    if highest is None or highest >= 0:
        parts += _natural(max(0, lowest or 0), highest)
    return "|".join(parts)


def _minus(number: int | None) -> int | None:
    return None if number is None else -number


def _natural(lowest: int, highest: int | None) -> list[str]:
    """Return patterns that together are the integers from a number of at least 0 on."""
    if lowest == 0:
        return ["0", *(_natural(1, highest) if highest != 0 else ())]
    first = len(str(lowest))
    last = first if highest is None else len(str(highest))
    parts = []
    for num_digits in range(first, last + 1):
        least, most = 10 ** (num_digits - 1), 10**num_digits - 1
        parts.append(_between(str(max(lowest, least)), str(most if highest is None else min(highest, most))))
    return parts if highest is not None else [*parts, f"[1-9][0-9]{{{first},}}"]


def _between(low: str, high: str) -> str:
    """Return the pattern of the texts of digits between two that are equally long."""
    if low == high:
        return low
    rest = len(low) - 1
    if low[0] == high[0]:
        return low[0] + f"(?:{_between(low[1:], high[1:])})"
    first, last = int(low[0]), int(high[0])
    parts = []
    if low[1:].strip("0"):
        parts.append(f"{first}(?:{_between(low[1:], '9' * rest)})")
        first += 1
    if high[1:].strip("9"):
        parts.append(f"{last}(?:{_between('0' * rest, high[1:])})")
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return "|".join(parts)
