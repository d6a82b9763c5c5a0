"""Error sentences for the problems that pydantic finds in a TOML file."""

import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from batchinfer.config.sampling import KINDS
from batchinfer.config.spelling import did_you_mean
from batchinfer.sanitize import clip


def sentences(error: ValidationError, schema: type[BaseModel], path: Path) -> list[str]:
    """Return a sentence per key with a problem in the file at `path`, in the order of the schema."""
    first: dict[tuple[Any, ...], ErrorDetails] = {}
    for problem in error.errors(include_url=False):
        # a value that has none of several types has a problem for each type
        key = problem["loc"] if problem["type"] == "extra_forbidden" else problem["loc"][:2]
        known = first.setdefault(key, problem)
        if known["type"] == "literal_error" and problem["type"] == "bool_type":
            known["msg"] += ", true or false"
    return [clip(f"{path}: {_sentence(problem, schema)}") for problem in first.values()]


def _sentence(problem: ErrorDetails, schema: type[BaseModel]) -> str:
    # a key with a line break in it must not break the message
    names = [str(name) if str(name).isprintable() else repr(name) for name in problem["loc"]]
    # after a key come positions in lists, keys of tables, and pydantic's names of types
    deeper = [f"[{name}]" if name.isdigit() else f".{name}" for name in names[2:] if name.isdigit() or name in KINDS]
    where = ".".join(names[:2]) + "".join(deeper)
    kind, value = problem["type"], problem.get("input")
    has_parts = any(_keys(schema, name) for name in schema.model_fields)
    what = "part" if has_parts and len(names) == 1 else "key"
    if kind == "extra_forbidden":
        return f"{where if len(names) < 3 else f'{where}.{names[-1]}'} is not a known {what}; {_instead(names, schema)}"
    if kind == "missing":
        needed = " and ".join(_keys(schema, names[0], required=True)) if len(names) == 1 else ""
        return f"the {what} {where} is missing; add it{f' as [{where}] with {needed}' if needed else ''}"
    message = problem["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        # a check of a whole part begins its message with the key, one of several parts with part and key
        return f"{where}{('', '.', ' ')[min(len(names), 2)]}{message}"
    if kind in ("too_short", "string_too_short"):
        return f"{where} is empty; write at least one {'item' if kind == 'too_short' else 'character'}"
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    hint = ""
    if kind == "literal_error" and isinstance(value, str):
        hint = did_you_mean(value, re.findall("'([^']*)'", problem["ctx"]["expected"]))
    elif kind == "list_type" and isinstance(value, str):
        hint = f"write [{json.dumps(value, ensure_ascii=False)}]"
    elif kind in ("int_type", "float_type") and isinstance(value, str):
        hint = "write it without quotes" if re.fullmatch(r"-?\d+(\.\d+)?", value) else ""
    message = message.replace("Input should", "it should")
    return f"{where} is {shown}, but {message}{f'; {hint}' if hint else ''}"


def _instead(names: list[str], schema: type[BaseModel]) -> str:
    """Return the remedy for an unknown key."""
    if len(names) > 2:
        return did_you_mean(names[-1], KINDS, f"use one of {', '.join(KINDS)}")
    known = list(schema.model_fields) if len(names) == 1 else _keys(schema, names[0])
    homes = [part for part in schema.model_fields if names[-1] in _keys(schema, part)]
    if homes and names[-1] not in known:
        return f"it belongs into [{homes[0]}]"
    return did_you_mean(names[-1], known, "remove it" + (f" or use one of {', '.join(known)}" if known else ""))


def _keys(schema: type[BaseModel], part: str, *, required: bool = False) -> list[str]:
    """Return the keys of a part, or only the required ones."""
    annotation = schema.model_fields[part].annotation if part in schema.model_fields else None
    fields = getattr(annotation, "model_fields", {})
    return [name for name, field in fields.items() if field.is_required() or not required]
