"""Keys of a JSON schema: switches of llguidance are refused, keys that mean nothing are warned of."""

from collections.abc import Iterator
from typing import Any

from batchinfer.config.spelling import did_you_mean
from batchinfer.config.structured_outputs.schema_tree import subschemas

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
