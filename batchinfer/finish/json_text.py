"""JSON of models, read without being written again: values are copied as the texts that they are."""

import json

import msgspec

BLANKS = " \t\n\r"  # around a JSON value
NO_JSON = object()


def json_value(text: str) -> object:
    """Return the value of a JSON text, NO_JSON if the standard does not allow the text.

    It has no NaN, no number beyond a double, and no half surrogate pair, which no text can hold.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return NO_JSON


def is_object(text: str) -> bool:
    """Return whether a text is JSON of an object."""
    return isinstance(json_value(text), dict)


def members(text: str) -> dict[str, str]:
    """Return the members of an object: by name, the value's text as it is written.

    Args:
        text: valid JSON of an object.
    """
    found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return {name: bytes(value).decode() for name, value in found.items()}


def elements(text: str) -> list[str]:
    """Return the texts of a list's elements.

    Args:
        text: valid JSON of a list.
    """
    return [bytes(value).decode() for value in msgspec.json.decode(text, type=list[msgspec.Raw])]


def object_of(values: dict[str, str]) -> str:
    """Return JSON text of an object whose members have these texts as values."""
    return "{" + ", ".join(f"{quoted(name)}: {value}" for name, value in values.items()) + "}"


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)
