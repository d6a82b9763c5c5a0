"""Schemas that no finite value satisfies."""

from typing import Any

from batchinfer.config.structured_outputs.schema_tree import children, subschemas, target_of


def exclude_endless(schema: dict[str, Any]) -> bool | None:
    """Replace the schemas that only endless values would satisfy by false, as far as values can do without them.

    A schema is endless if it needs itself: by references alone, or by a required property or item. llguidance would
    let an answer begin with such a value, and the answer could never end.

    Args:
        schema: changed in place.

    Returns:
        Whether something was replaced; None if the whole schema is endless.
    """
    parts = [part for _, part in subschemas(schema)]
    if not any("$ref" in part for part in parts):
        return False
    ends: set[int] = set()  # ids of schemas that a finite value satisfies
    while new := {id(part) for part in parts if id(part) not in ends and _ends(schema, part, ends)}:
        ends |= new
    if id(schema) not in ends:
        return None
    endless = []
    for path, part in subschemas(schema):
        named = [part.get(key) for key in ("$defs", "definitions")]  # by themselves they ask for nothing
        for place in children(part, path):
            if isinstance(place.value, dict) and id(place.value) not in ends:
                endless += [] if any(place.holder is holder for holder in named) else [place]
    for place in endless:
        place.replace(False)
    return bool(endless)


def _ends(root: dict[str, Any], part: dict[str, Any], ends: set[int]) -> bool:
    """Whether a finite value may satisfy a schema, given the schemas of which that is known."""

    def may_end(value: Any) -> bool:
        return id(value) in ends if isinstance(value, dict) else value is not False

    target = target_of(root, part.get("$ref"))
    if target is not None and not may_end(target.value):
        return False
    if not all(map(may_end, _list(part, "allOf"))):
        return False
    if any(_list(part, name) and not any(map(may_end, _list(part, name))) for name in ("anyOf", "oneOf")):
        return False
    types = [part["type"]] if isinstance(part.get("type"), str) else _list(part, "type")
    if not types or any(kind not in ("array", "object") for kind in types):
        return True
    properties, required = part.get("properties"), _list(part, "required")
    properties = properties if isinstance(properties, dict) else {}
    if "object" in types and all(may_end(properties.get(name)) for name in required if isinstance(name, str)):
        return True
    least = part.get("minItems", 0)
    first, rest = _list(part, "prefixItems"), part.get("items")
    needs_rest = isinstance(least, int) and least > len(first)
    needed = [*first[: least if isinstance(least, int) else 0], *([rest] if needs_rest else [])]
    return "array" in types and all(may_end(item) for item in needed if not isinstance(item, list))


def _list(part: dict[str, Any], key: str) -> list[Any]:
    value = part.get(key)
    return value if isinstance(value, list) else []
