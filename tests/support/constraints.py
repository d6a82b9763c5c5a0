"""Constraints on answers: 40 schemas and patterns, and independent judges of the answers."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pyarrow as pa

DATE = r"^[12][0-9]{3}-(0[1-9]|1[0-2])-([0-2][0-9]|3[01])$"
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9}, "next": {"$ref": "#/$defs/node"}},
    "required": ["v"],
    "additionalProperties": False,
}


def record(**properties: Any) -> dict[str, Any]:
    """An object with these and no other members."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def list_of(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


INTEGER = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMAS: list[dict[str, Any]] = [
    record(a=INTEGER),
    record(a=INTEGER, b={"enum": ["x", "yé", 3, None]}),
    record(ok={"type": "boolean"}, why={"type": "string", "maxLength": 12}),
    record(date={"type": "string", "pattern": DATE}),
    record(who=record(age=INTEGER, kind={"const": "person"})),
    record(tags=list_of({"enum": ["a", "b", "c"]}, 1, 3)),
    record(grid=list_of(list_of(INTEGER, 2, 2), 2, 2)),
    record(price={"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.5}),
    record(**{"ключ": {"enum": ["да", "нет"]}}),
    record(**{"emoji": {"enum": ["😀", "👩‍👩‍👧", "é"]}}),
    record(quote={"const": 'she said "no\\yes"\n'}),
    record(either={"anyOf": [{"type": "null"}, record(x=INTEGER)]}),
    record(either={"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 2}]}),
    record(point={"$ref": "#/$defs/point"}) | {"$defs": {"point": record(x=INTEGER, y=INTEGER)}},
    record(chain={"$ref": "#/$defs/node"}) | {"$defs": {"node": NODE}},
    record(a={"allOf": [{"type": "integer"}, {"minimum": 10, "maximum": 12}]}),
    record(id={"type": "string", "format": "uuid"}),
    record(mail={"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,5}\\.org$"}),
    record(code={"type": "string", "minLength": 3, "maxLength": 3}),
    record(deep=record(deep=record(deep=record(deep={"const": True})))),
    {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "additionalProperties": False},
    {"type": "array", "prefixItems": [INTEGER, {"type": "boolean"}], "items": False, "minItems": 2},
    list_of({"type": "string", "pattern": "^[ab]{1,3}$"}, 0, 4),
    list_of(record(k={"enum": ["u", "v"]}), 1, 2),
    {"type": "integer", "minimum": -20, "maximum": 20},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["red", "green", "blue", 0, 1.5, None, True]},
    {"type": "string", "pattern": "^(\\+49|0)[0-9]{5,7}$"},
    {"type": "string", "maxLength": 20},
]
PATTERNS = [
    r"[0-9]{3}-[0-9]{4}",
    r"(yes|no)(, (yes|no)){0,2}",
    r"[A-Z][a-z]{2,8} (is|was) [a-z]{3,6}\.",
    r"[0-9]{1,2}:[0-9]{2}",
    r"(a|é|ü|漢){2,6}",
    r"0x[0-9a-f]{4}",
]
CHOICES = [["yes", "no"], ["positive", "negative", "neutral"], ["A", "B", "C", "D"], ["是", "否", "naïve"]]
CONSTRAINTS: list[tuple[str, Any]] = [
    *(("json", schema) for schema in SCHEMAS),
    *(("regex", pattern) for pattern in PATTERNS),
    *(("choice", choice) for choice in CHOICES),
]
TYPE = pa.struct([("json", pa.string()), ("regex", pa.string()), ("choice", pa.list_(pa.string()))])


def as_field(number: int) -> dict[str, Any]:
    """The value of a row's `structured_outputs` field, of type TYPE."""
    kind, content = CONSTRAINTS[number % len(CONSTRAINTS)]
    return {kind: json.dumps(content, ensure_ascii=False) if kind == "json" else content}


def judge(number: int, text: str) -> None:
    """Fail, with some exception, unless a text is what its row has asked for."""
    kind, content = CONSTRAINTS[number % len(CONSTRAINTS)]
    if kind == "json":
        checker = jsonschema.Draft202012Validator(content, format_checker=jsonschema.FormatChecker())
        checker.validate(json.loads(text))
    elif kind == "regex":
        assert re.fullmatch(content, text), f"{text!r} is not {content}"
    else:
        assert text in content, f"{text!r} is none of {content}"
