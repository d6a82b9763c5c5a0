"""Reading and writing of TOML."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from batchinfer.config.exact_json import exact_float
from batchinfer.records import ConfigError
from batchinfer.sanitize import first_line, fit

MAX_LINE = 80  # characters of a line in a message


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the table of a TOML file.

    Args:
        what: the kind of file, for messages.

    Raises:
        ConfigError: the file does not exist, or is not TOML.
    """
    text = ""
    try:
        text = path.read_bytes().decode("utf-8")
        return tomllib.loads(text, parse_float=exact_float)
    except FileNotFoundError:
        raise ConfigError(f"there is no {what} at {path}; give the path of a .toml file") from None
    except (OSError, ValueError) as error:
        # ValueError: not UTF-8, not TOML, or a path with a NUL in it
        raise ConfigError(f"cannot read the {what} {path}: {_reason(error, text)}") from None
    except RecursionError:
        raise ConfigError(f"cannot read the {what} {path}: its values are nested too deeply") from None


def _reason(error: Exception, text: str) -> str:
    """Return why a text is not TOML: the line, its content, and the remedy for a text without quotes."""
    place = re.search(r" \(at line (\d+), column \d+\)", str(error))
    if place is None:
        return first_line(error)
    number = int(place[1])
    line = fit(text.split("\n")[number - 1].strip(), MAX_LINE)
    said = f"line {number} is {line!r}: {first_line(error).replace(place[0], '').lower()}"
    bare = re.fullmatch(r"([\w.]+) *= *(\[? *)([^\s\"'\[{\d+.-][^\"',\]]*)(.*)", line)
    if bare is None or bare[3].startswith(("true", "false")):
        return said
    key, bracket, value, rest = bare.groups()
    value, mark, _ = value.partition("#")
    return f"{said}; texts need quotes: {key} = {bracket}{toml_value(value.strip())}{'' if mark else rest}"


def dump_parts(parts: dict[str, dict[str, Any]]) -> str:
    """Return the parts of a job as TOML; values that contain null, which TOML does not have, are JSON texts."""
    lines = []
    for part, values in parts.items():
        lines.append(f"[{part}]")
        for key, value in values.items():
            text = json.dumps(value, ensure_ascii=False) if _has_null(value) else value
            lines.append(f"{key} = {toml_value(text)}")
        lines.append("")
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    """Return a value in the notation of TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # a JSON string is a TOML basic string but for DEL, which TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _has_null(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(_has_null, items))
