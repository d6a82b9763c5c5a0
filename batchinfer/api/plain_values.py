"""Conversion of Python values to those of a job file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_origin

from pydantic import PydanticUserError, TypeAdapter

from batchinfer.records import ConfigError
from batchinfer.sanitize import first_line


def plain(value: Any) -> Any:
    """Convert a value to a type that TOML has: paths to texts, tuples and arrays to lists, mappings to dicts."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, type):
        return value  # classes of arrays have the methods of arrays
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return value.tolist()
    return str(value) if isinstance(value, Path) else value


def with_schema(sampling: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of [sampling] with a JSON schema in place of a class in structured_outputs.

    Raises:
        ConfigError: structured_outputs is a class, or the class has no JSON schema.
    """
    outputs = sampling.get("structured_outputs")
    if not isinstance(outputs, dict) and outputs is not None:
        name = getattr(outputs, "__name__", "…")
        raise ConfigError(f'structured_outputs is {outputs!r}, not a dict; write structured_outputs={{"json": {name}}}')
    if outputs is None:
        return sampling
    outputs = {key: value for key, value in outputs.items() if value is not None}  # as of a class with all keys
    if not isinstance(outputs.get("json", ""), str | dict):
        outputs["json"] = _schema_of(outputs["json"])
    return sampling | {"structured_outputs": outputs}


def _schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a pydantic model, dataclass, TypedDict, or other type that pydantic knows."""
    try:
        if not isinstance(kind, type) and get_origin(kind) is None:
            raise TypeError("it is no class")
        return TypeAdapter(kind).json_schema()
    except (PydanticUserError, NameError, TypeError, ValueError) as error:
        raise ConfigError(
            f"structured_outputs.json is {kind!r}, of which no JSON schema can be made: {first_line(error)}; give a "
            "pydantic model, a dataclass, or a JSON schema as dict or text"
        ) from None
