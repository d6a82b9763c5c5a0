"""Reading of JSON that models wrote, without formatting it again: values keep their exact texts."""

import json

import msgspec

BLANKS = " \t\n\r"  # around a JSON value
NO_JSON = object()


def json_value(text: str) -> object:
    """Return the value of a JSON text, NO_JSON if the text is not valid by the standard.

    The standard has no NaN; numbers beyond a double and lone surrogates are refused, too.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return NO_JSON


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object."""
    return isinstance(json_value(text), dict)


def members(text: str) -> dict[str, str]:
    """Return the members of an object by name, each with the exact text of its value.

    Args:
        text: a valid JSON object.
    """
    found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return {name: bytes(value).decode() for name, value in found.items()}


def elements(text: str) -> list[str]:
    """Return the texts of a list's elements.

    Args:
        text: a valid JSON list.
    """
    return [bytes(value).decode() for value in msgspec.json.decode(text, type=list[msgspec.Raw])]


def object_of(values: dict[str, str]) -> str:
    """Return the JSON text of an object whose values have these JSON texts."""
    return "{" + ", ".join(f"{quoted(name)}: {value}" for name, value in values.items()) + "}"


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)
