"""The subschemas of a JSON schema, each with the path to it."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

_OF_ONE = (
    "items", "additionalItems", "additionalProperties", "contains", "not", "propertyNames", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_OF_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OF_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
ROOTS = ("#", "#/")  # references to the whole schema


class Place(NamedTuple):
    """A value in a schema: the dict or list that holds it, its key there, and its path from the root."""

    holder: Any
    key: Any
    path: str

    @property
    def value(self) -> Any:
        return self.holder[self.key]

    def replace(self, value: Any) -> None:
        self.holder[self.key] = value


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, schema) of the schema itself and of each one in it, targets of references included; each once."""
    waiting = [Place({"": schema}, "", "#")]
    seen: set[int] = set()
    while waiting:
        place = waiting.pop()
        value = place.value
        if not isinstance(value, dict) or id(value) in seen:
            continue
        seen.add(id(value))
        yield place.path, value
        waiting += reversed(children(value, place.path))
        target = target_of(schema, value.get("$ref"))
        if target is not None:
            waiting.append(target)


def children(schema: dict[str, Any], path: str) -> list[Place]:
    """Return the places of the schemas right below one, in their order."""
    found = []
    for key, value in schema.items():
        below = f"{path}/{key}"
        if key in _OF_MAPS and isinstance(value, dict):
            found += [Place(value, name, f"{below}/{name}") for name in value]
        elif key in _OF_LISTS and isinstance(value, list):
            found += [Place(value, number, f"{below}/{number}") for number in range(len(value))]
        elif key in _OF_ONE:
            found.append(Place(schema, key, below))
    return found


def target_of(root: dict[str, Any], reference: Any) -> Place | None:
    """Return the place that a reference within the document names by its path; None if there is none."""
    if not isinstance(reference, str):
        return None
    if reference in ROOTS:
        return Place({"": root}, "", "#")
    if not reference.startswith("#/"):
        return None
    place = Place({"": root}, "", "#")
    for name in unquote(reference[2:]).split("/"):
        part = name.replace("~1", "/").replace("~0", "~")
        holder = place.value
        key: Any = int(part) if isinstance(holder, list) and re.fullmatch("[0-9]{1,9}", part) else part
        try:
            holder[key]
        except (KeyError, IndexError, TypeError):
            return None
        place = Place(holder, key, f"{place.path}/{part}")
    return place
