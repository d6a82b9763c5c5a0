"""Values that a row may give as JSON text or as Arrow structs, in one Python form."""

import json
from typing import Any

from batchinfer.sanitize import error_text


class RowError(ValueError):
    """A row makes no prompt; the message is its error."""


def json_value(column: str, text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        RowError: the text is not valid JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{column} is not valid JSON: {error_text(error)}") from None


def tool_list(column: str, value: Any) -> list[dict[str, Any]] | None:
    """Return a row's tools as a list; None if the row has none.

    Args:
        value: a list of objects, one object, or JSON text of either.

    Raises:
        RowError: the value is something else.
    """
    tools = json_value(column, value) if isinstance(value, str) else without_nulls(value)
    if tools is None:
        return None
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"{column} is not a list of tools, each an object")
    return tools


def without_nulls(value: Any) -> Any:
    """Return the value without null fields: in Parquet all structs of a column have the same fields."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
