"""Typed access to the keys of a foreign JSON file; model/config.py reads config.json through it.

Every getter either returns a value of the stated kind or raises ModelError with one sentence that names the file,
the key, the value found and what is supported. JSON null counts as a missing key.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.records import ModelError
from batchinfer.sanitize import error_text

# No dimension of a real model comes near this; larger values are typing errors that would overflow later.
_MAX_SIZE = 2**31 - 1
_MAX_SHOWN = 120
GGUF = "GGUF files are not read: take the model's own folder, or convert the file (docs/models.md, GGUF files)"


def read_json_object(path: Path, *, are_names_unique: bool = False) -> dict[str, Any]:
    """Return the JSON object in `path`; NaN and Infinity, which JSON does not have, are refused.

    Args:
        are_names_unique: refuse an object with two values of one name, of which the last would count.

    Raises:
        ModelError: no such file, unreadable, not JSON, or not an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = f"; {GGUF}." if any(path.parent.glob("*.gguf")) else "."
        raise ModelError(f"{path} does not exist; a model folder holds config.json and *.safetensors{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    try:
        pairs_hook = _refuse_two_values if are_names_unique else None
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=pairs_hook)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error_text(error)}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {show(value)}, but a JSON object is needed.")
    return value


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a finite number."""

    above: float = -math.inf
    at_least: float = -math.inf
    at_most: float = math.inf

    def hold(self, value: float) -> bool:
        try:
            return math.isfinite(value) and value > self.above and self.at_least <= value <= self.at_most
        except OverflowError:  # a whole number that is no float
            return False

    def __str__(self) -> str:
        parts = [
            f"above {self.above:g}" if self.above > -math.inf and self.above >= self.at_least else "",
            f"at least {self.at_least:g}" if self.at_least > -math.inf and self.at_least > self.above else "",
            f"at most {self.at_most:g}" if self.at_most < math.inf else "",
        ]
        return " ".join(["a finite number", *filter(None, parts)])


class ConfigReader:
    """One JSON object of a file; `prefix` is its path from the top of the file, for messages.

    It remembers which keys were asked for.
    """

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = ""):
        self.path = path
        self.prefix = prefix
        self._values = values
        self._asked: set[str] = set()

    def has(self, key: str) -> bool:
        """Return whether the key is there with a value other than null."""
        return self._value(key) is not None

    def pass_over(self, *keys: str) -> None:
        """Mark these keys as read, as their values do not matter here."""
        self._asked.update(keys)

    def unread(self) -> dict[str, Any]:
        """Return the keys with a value other than null that no getter has read."""
        return {key: value for key, value in self._values.items() if key not in self._asked and value is not None}

    def name(self, key: str) -> str:
        """Return the key's full name, with the path from the top of the file."""
        return f"{self.prefix}.{key}" if self.prefix else key

    def unsupported(self, key: str, value: object, supported: str) -> ModelError:
        """Return the error for a value that cannot be used."""
        return ModelError(f"{self.path}: {self.name(key)} is {show(value)}, but supported is {supported}.")

    def size(
        self,
        *keys: str,
        default: int | None = None,
        null: int | None = None,
        minimum: int = 1,
        maximum: int = _MAX_SIZE,
    ) -> int:
        """Return a whole number under any of several names, which must agree; an explicit null means `null`."""
        if null is not None and not any(self.has(key) for key in keys) and any(key in self._values for key in keys):
            return null
        key, value = self._first(keys)
        if value is None:
            if default is None:
                raise self._missing(keys[0], f"a whole number of at least {minimum}")
            return default
        return self._whole(key, value, minimum, maximum)

    def numbers(self, key: str, *, whole: bool = False) -> list[Any]:
        """Return a list of numbers, or of whole ones; empty when the key is missing."""
        value, kinds = self._value(key), (int,) if whole else (int, float)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(item) in kinds for item in value):
            raise self.unsupported(key, value, "a list of whole numbers" if whole else "a list of numbers")
        return value

    def number(self, key: str, default: float | None = None, **bounds: float) -> float:
        """Return a finite number within bounds (see `Bounds`); without a default it is needed."""
        value = self.optional_number(key, **bounds)
        if value is not None:
            return value
        if default is None:
            raise self._missing(key, str(Bounds(**bounds)))
        return default

    def optional_number(self, key: str, **bounds: float) -> float | None:
        """Return a finite number within bounds, or None when the key is missing or null."""
        value, allowed = self._value(key), Bounds(**bounds)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not allowed.hold(value):
            raise self.unsupported(key, value, str(allowed))
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false; 0 and 1 are refused, and null of a flag that is on by default: elsewhere it is off."""
        value = self._value(key)
        if value is None and not (default and key in self._values):
            return default
        if not isinstance(value, bool):
            raise self.unsupported(key, value, "true or false")
        return value

    def text(self, *keys: str, default: str) -> str:
        """Return a string under any of several names, which must agree."""
        key, value = self._first(keys)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.unsupported(key, value, "a string")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of strings; empty when the key is missing."""
        value = self._value(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.unsupported(key, value, "a list of strings")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return one token id or a list of them, each inside the vocabulary; empty when the key is missing."""
        value = self._value(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        return tuple(dict.fromkeys(self._whole(key, item, 0, vocab_size - 1) for item in items))

    def section(self, key: str, *, inherits: tuple[str, ...] = ()) -> ConfigReader | None:
        """Return a nested object, None when the key is missing, null or an empty object.

        Args:
            inherits: keys that have the value of this object where they are not in the nested one.
        """
        value = self._value(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.unsupported(key, value, "a JSON object")
        inherited = {name: self._values[name] for name in inherits if self.has(name)}
        return ConfigReader(self.path, inherited | value, self.name(key))

    def expect(self, key: str, *expected: object, supported: str, needed: bool = False) -> None:
        """Raise unless the key, where it is given (or always, when `needed`), has one of these JSON values."""
        value = self._value(key)
        if value is None:
            if needed:
                raise self._missing(key, supported)
            return
        if not any(value == one and _json_kind(value) == _json_kind(one) for one in expected):
            raise self.unsupported(key, value, supported)

    def _value(self, key: str) -> Any:
        self._asked.add(key)
        return self._values.get(key)

    def _first(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        """Return the first name that has a value; another name with another value is a contradiction."""
        found = [(key, self._values[key]) for key in keys if self.has(key)]
        if not found:
            return keys[0], None
        for key, value in found[1:]:
            if value != found[0][1]:
                raise self.unsupported(key, value, f"the same as {self.name(found[0][0])} = {show(found[0][1])}")
        return found[0]

    def _missing(self, key: str, supported: str) -> ModelError:
        return ModelError(f"{self.path}: {self.name(key)} is missing or null, but needed is {supported}.")

    def _whole(self, key: str, value: object, minimum: int, maximum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.unsupported(key, value, f"a whole number from {minimum} to {maximum}")
        return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_two_values(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if found.setdefault(name, value) != value:
            raise ValueError(f"{name} is there twice, as {found[name]!r} and as {value!r}")
    return found


def _json_kind(value: object) -> object:
    """Return the kind of a JSON value, which differs for true and 1 although Python compares them as equal."""
    if isinstance(value, list):
        return [_json_kind(item) for item in value]
    return type(value)


def show(value: object) -> str:
    """Return a value as JSON, cut if it is long."""
    try:
        text = json.dumps(value, default=str)
    except ValueError:  # a whole number of thousands of digits
        text = "a very large value"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
