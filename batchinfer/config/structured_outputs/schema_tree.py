"""The subschemas of a JSON schema, each with the path to it, and their keys: refused, without effect, or assertions."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urldefrag, urljoin

from batchinfer.config.spelling import did_you_mean

_OF_ONE = (
    "items", "additionalItems", "additionalProperties", "contains", "not", "propertyNames", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_OF_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OF_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
DEFINITIONS = ("$defs", "definitions")
ROOTS = ("#", "#/")  # references to the whole schema
_BASE = "json-schema:///"  # where llguidance has a schema that does not say its own address


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


def subschemas(schema: dict[str, Any], *, definitions: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, schema) of the schema itself and of each one in it, targets of references included; each once.

    Args:
        definitions: whether schemas in definitions count to which no reference leads.
    """
    waiting = [Place({"": schema}, "", "#")]
    seen: set[int] = set()
    while waiting:
        place = waiting.pop()
        value = place.value
        if not isinstance(value, dict) or id(value) in seen:
            continue
        seen.add(id(value))
        yield place.path, value
        named = value if definitions else {key: value[key] for key in value if key not in DEFINITIONS}
        waiting += reversed(children(named, place.path))
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


def list_under(part: dict[str, Any], key: str) -> list[Any]:
    """Return the list of a key of one schema; empty if it has none."""
    value = part.get(key)
    return value if isinstance(value, list) else []


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


def write_references_as_paths(root: dict[str, Any]) -> bool:
    """Replace the references that name the schema's own address, or an anchor, by the paths of their targets.

    llguidance follows more references than `target_of`, to parts that no check has seen.

    Args:
        root: changed in place.

    Returns:
        Whether a reference was replaced.

    Raises:
        ValueError: a reference that an answer may need names another document, or no place in this one.
    """
    anchors, nested = _anchors(root), _nested(root)
    is_changed = False
    waiting, seen = [Place({"": root}, "", "#")], set()
    while waiting:
        place = waiting.pop()
        part = place.value
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        # nothing but references leads into definitions
        waiting += reversed(children({key: part[key] for key in part if key not in DEFINITIONS}, place.path))
        reference = part.get("$ref")
        if not isinstance(reference, str):
            continue
        path = _as_path(root, reference, anchors)
        target = target_of(root, path)
        if path is not None and target is None and id(part) not in nested:
            raise ValueError(f"the reference {reference!r} at {place.path} leads to nothing in the schema")
        if target is None or id(part) in nested:
            raise ValueError(
                f"the reference {reference!r} at {place.path} is not followed; write it as #/… from the schema's root"
                + (", without an $id below the root" if id(part) in nested else "")
            )
        waiting.append(target)
        if path != reference:
            part["$ref"], is_changed = path, True
    return is_changed


def _as_path(root: dict[str, Any], reference: str, anchors: dict[str, str]) -> str | None:
    """Return a reference as "#" or "#/…"; None if it names another document or an unknown anchor."""
    address, _, fragment = reference.partition("#")
    if address:
        own = root.get("$id")
        base = urldefrag(urljoin(_BASE, own if isinstance(own, str) else "")).url
        if urljoin(base, address) != base:
            return None
    return f"#{fragment}" if not fragment or fragment.startswith("/") else anchors.get(fragment)


def _anchors(root: dict[str, Any]) -> dict[str, str]:
    """Return the path to each schema with an $anchor, or with an $id that is one, as before draft 2019-09."""
    found: dict[str, str] = {}
    waiting = [(root, "#")]
    while waiting:
        part, path = waiting.pop()
        own = part.get("$id")
        for name in (part.get("$anchor"), own[1:] if isinstance(own, str) and own.startswith("#") else None):
            if isinstance(name, str):
                found.setdefault(name, path)
        for place in children(part, ""):
            if isinstance(place.value, dict):
                keys = [key for key, value in part.items() if value is place.holder]
                waiting.append((place.value, "/".join([path, *map(_escaped, (*keys[:1], place.key))])))
    return found


def _escaped(key: str | int) -> str:
    return quote(str(key).replace("~", "~0").replace("/", "~1"))


def _nested(root: dict[str, Any]) -> set[int]:
    """Return the ids of the schemas in parts with an $id of their own, which are documents within the document."""
    found: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        value, is_nested = waiting.pop()
        if isinstance(value, dict):
            own = value.get("$id")
            is_nested = is_nested or (value is not root and isinstance(own, str) and not own.startswith("#"))
            if is_nested:
                found.add(id(value))
        if isinstance(value, dict | list):
            waiting += [(below, is_nested) for below in (value.values() if isinstance(value, dict) else value)]
    return found


SWITCHES = "x-guidance"  # llguidance's key for how it compiles a schema
# keywords that say what a value must be; llguidance refuses the ones that it does not know by name
ASSERTIONS = (
    "$ref", "$recursiveRef", "$dynamicRef", "type", "const", "enum", "allOf", "anyOf", "oneOf", "not", "if", "then",
    "else", "properties", "patternProperties", "additionalProperties", "propertyNames", "required", "minProperties",
    "maxProperties", "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties", "items",
    "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains", "minItems",
    "maxItems", "uniqueItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
    "maxLength", "pattern", "format",
)  # fmt: skip
# and keys that say nothing of a value, some of OpenAPI's and of common generators of schemas among them
_KEYWORDS = frozenset((
    *ASSERTIONS,
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment", "$defs",
    "definitions", "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
    "contentMediaType", "contentEncoding", "contentSchema", "discriminator", "externalDocs", "xml", "propertyOrdering",
    "enumNames", "enumDescriptions", "markdownDescription",
))  # fmt: skip


def is_annotation(key: str) -> bool:
    """Return whether a key restricts no value and contains no schemas."""
    return key.startswith("x-") or (key in _KEYWORDS and key not in (*ASSERTIONS, *DEFINITIONS))


def switched_at(schema: dict[str, Any]) -> str | None:
    """Return the path of a key that would change how llguidance compiles the schema, None if there is none."""
    return next((f"{path}/{SWITCHES}" for path, part in subschemas(schema) if SWITCHES in part), None)


def keyword_warnings(schema: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each key in a schema that has no effect and looks as if it was to have one."""
    parts = dict(subschemas(schema))
    # a schema may keep the targets of its references wherever it likes
    targets = {str(part["$ref"]).split("/")[1] for part in parts.values() if str(part.get("$ref")).startswith("#/")}
    for path, part in parts.items():
        for key, value in part.items():
            if key == "nullable":
                if value is True:
                    yield (
                        f"nullable at {path} has no effect, since it is OpenAPI's and not JSON Schema's; to allow "
                        'null, add "null" to the type'
                    )
            elif not (key in _KEYWORDS or key.startswith("x-") or (path == "#" and key in targets)):
                instead = did_you_mean(key, ASSERTIONS)
                yield f"{key!r} at {path} is no keyword of JSON Schema and has no effect{instead and f'; {instead}'}"
