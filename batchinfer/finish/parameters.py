"""Parameter types that a tool declares, and conversion of values that a model wrote without types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.config.structured_outputs.schema_tree import list_under
from batchinfer.finish.json_text import BLANKS, NO_JSON, json_value, quoted

# the values that a schema allows, by their type; None: any value of the type
Allowed = dict[str, list[Any] | None]

_TYPES: dict[str, Allowed] = {
    **{name: {name: None} for name in ("string", "integer", "boolean", "object", "array", "null")},
    "number": {"number": None, "integer": None},
}


class Parameters:
    """A tool's `parameters`, a JSON schema; only types, enums and combinations of schemas are used.

    Args:
        schema: the schema; any other value declares nothing.
    """

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._allowed: dict[int, Allowed | None] = {}  # by id of the schema

    def declares(self, name: str) -> bool:
        """Return whether the tool has a parameter of this name."""
        return bool(self._schemas_of(name))

    def json_of(self, name: str, text: str) -> str | None:
        """Return a parameter's text as JSON: a string of exactly this text, or the unchanged text of a literal.

        A text that may be a string becomes one, with two exceptions: `null` if null is allowed, and an allowed literal
        if the text is in no enum of strings. If no type is declared, a text that is JSON becomes a literal.

        Returns:
            None if the text fits no declared type.
        """
        literal = text.strip(BLANKS)
        value = json_value(literal)
        kind = None if value is NO_JSON else _type_of(value)
        try:
            allowed = _either([self._allowed_by(schema) for schema in self._schemas_of(name)])
        except RecursionError:  # a schema nested a thousand deep declares nothing
            allowed = None
        if allowed is None:
            return quoted(text) if kind is None else literal
        is_text = _holds(allowed, "string", text)
        is_literal = kind not in (None, "string") and _holds(allowed, kind, value)
        if is_literal and (not is_text or text == "null"):
            return literal
        if is_text or "string" in allowed:
            return quoted(text)
        return literal if kind in allowed else None

    def _schemas_of(self, name: str) -> list[Any]:
        try:
            return list(self._found(self._schema, name, set()))
        except RecursionError:
            return []

    def _found(self, schema: Any, name: str, seen: set[int]) -> Iterator[Any]:
        """Yield the schemas of one parameter in a schema of all parameters, following references and combinations."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        seen.add(id(schema))
        own, others = schema.get("properties"), schema.get("additionalProperties")
        declared = [own[name]] if isinstance(own, dict) and name in own else []
        declared += [part for pattern, part in _members(schema, "patternProperties") if _fits(pattern, name)]
        yield from declared or ([others] if isinstance(others, dict) and others else [])
        for part in [
            self._target(schema),
            *list_under(schema, "allOf"),
            *list_under(schema, "anyOf"),
            *list_under(schema, "oneOf"),
            *(schema.get(key) for key in ("then", "else")),
            *(part for _, part in _members(schema, "dependentSchemas")),
        ]:
            yield from self._found(part, name, seen)

    def _allowed_by(self, schema: Any) -> Allowed | None:
        """Return the values that a schema allows; None: the schema names no type."""
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._allowed:
            self._allowed[id(schema)] = None  # for a schema that refers to itself
            self._allowed[id(schema)] = self._computed(schema)
        return self._allowed[id(schema)]

    def _computed(self, schema: dict[str, Any]) -> Allowed | None:
        found = [self._allowed_by(part) for part in [self._target(schema), *list_under(schema, "allOf")]]
        for key in ("anyOf", "oneOf"):
            found.append(_either([self._allowed_by(part) for part in list_under(schema, key)]))
        names = schema.get("type")
        named = [_TYPES.get(name.lower()) if isinstance(name, str) else None for name in _listed(names)]
        found.append(_either(named))
        if isinstance(schema.get("enum"), list):
            found.append(_only(schema["enum"]))
        if "const" in schema:
            found.append(_only([schema["const"]]))
        return _all(found)

    def _target(self, schema: dict[str, Any]) -> Any:
        """Return the schema that `$ref` points to in the parameters; None if there is none."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found = self._schema
        for part in unquote(reference[1:]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and re.fullmatch("[0-9]{1,9}", key) and int(key) < len(found):
                found = found[int(key)]
            else:
                found = found.get(key) if isinstance(found, dict) else None
        return found


def _members(schema: dict[str, Any], key: str) -> list[tuple[str, Any]]:
    found = schema.get(key)
    return list(found.items()) if isinstance(found, dict) else []


def _fits(pattern: str, name: str) -> bool:
    try:  # by a library whose time is linear in the name
        return bool(pc.match_substring_regex(pa.array([name]), pattern)[0].as_py())
    except (pa.ArrowException, UnicodeError):
        return False


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _only(values: list[Any]) -> Allowed:
    """Return the allowance of these values only."""
    found: dict[str, list[Any] | None] = {}
    for value in values:
        found[_type_of(value)] = [*(found.get(_type_of(value)) or []), value]
    return found


def _either(choices: list[Allowed | None]) -> Allowed | None:
    """Return the values that any of the choices allows; None if every value is allowed."""
    if not choices or None in choices:
        return None
    found: Allowed = {}
    for allowed in choices:
        for kind, values in (allowed or {}).items():
            had = found.get(kind, [])
            found[kind] = None if had is None or values is None else [*had, *(v for v in values if v not in had)]
    return found


def _all(parts: list[Allowed | None]) -> Allowed | None:
    """Return the values that all parts allow."""
    found: Allowed | None = None
    for allowed in parts:
        if found is None or allowed is None:
            found = allowed if found is None else found
            continue
        found = {kind: _common(found[kind], allowed[kind]) for kind in found.keys() & allowed.keys()}
    return found


def _common(first: list[Any] | None, second: list[Any] | None) -> list[Any] | None:
    if first is None or second is None:
        return second if first is None else first
    return [value for value in first if value in second]


def _holds(allowed: Allowed, kind: str | None, value: Any) -> bool:
    if kind is None or kind not in allowed:
        return False
    values = allowed[kind]
    return values is None or value in values


def _type_of(value: Any) -> str:
    """Return the type of a JSON value; a number without a fraction is an integer, as in JSON Schema."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
