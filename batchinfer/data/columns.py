"""The column types that input may have, and their values in a common form."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# the rows of a prompt column once they are encoded
ENCODED = pa.schema(
    [
        ("token_ids", pa.list_(pa.uint32())),  # empty for a bad row
        ("error", pa.string()),  # why the row is bad; null: it is good
        ("control_tokens", pa.bool_()),  # whether its text holds control tokens
    ]
)
_LISTS = pa.ListType | pa.LargeListType | pa.FixedSizeListType


def plain_type(kind: pa.DataType, *, keeps_json: bool = False) -> pa.DataType:
    """Return the type that batches have for `kind`: its values in place, at any depth of lists, structs and maps.

        dictionary<V>, run_end_encoded<V> → V      string_view → string      list_view<V> → list<V>      JSON → its text

    Other extension types stay, unless what they store changes: then they become that.

    Args:
        keeps_json: JSON stays JSON. Inside of other types it always does.
    """
    if isinstance(kind, pa.BaseExtensionType):
        stored = plain_type(kind.storage_type, keeps_json=True)
        if is_json(kind):
            return pa.json_(stored) if keeps_json else stored
        return kind if stored == kind.storage_type else stored
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type, keeps_json=True)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(part) for part in kind])
    if pa.types.is_map(kind):
        key, item = _plain_field(kind.key_field), _plain_field(kind.item_field)
        is_plain = (key, item) == (kind.key_field, kind.item_field)
        return kind if is_plain else pa.map_(key, item, kind.keys_sorted)
    return _plain_list(kind)


def column_type(schema: pa.Schema, name: str) -> pa.DataType | None:
    """Return the type of a column as batches have it (see `plain_type`); None if it is missing or ambiguous."""
    index = schema.get_field_index(name)
    return None if index < 0 else plain_type(schema.field(index).type)


def _plain_list(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_fixed_size_list(kind) and kind.list_size:
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    # Parquet does not take lists of no items at all that say so in their type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_list_view(kind):
        return pa.list_(_plain_field(kind.value_field))
    if pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind):
        return pa.large_list(_plain_field(kind.value_field))
    return kind


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(plain_type(field.type, keeps_json=True))


def part_without_dataset(kind: pa.DataType) -> pa.DataType | None:
    """Return the first part of a type that Hugging Face's datasets cannot read; None if it can read the whole type."""
    is_small_decimal = pa.types.is_decimal32(kind) or pa.types.is_decimal64(kind)
    is_extension = isinstance(kind, pa.BaseExtensionType) and not is_json(kind)
    if pa.types.is_map(kind) or is_small_decimal or is_extension:
        return kind
    parts = [part.type for part in kind] if pa.types.is_struct(kind) else []
    parts += [kind.value_type] if isinstance(kind, _LISTS) else []
    return next((found for found in map(part_without_dataset, parts) if found is not None), None)


def is_json(kind: pa.DataType) -> bool:
    """Return whether a type is Arrow's extension type for JSON text, as read from JSON columns of Parquet files."""
    return isinstance(kind, pa.JsonType)


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is text (dictionaries and views of text are not)."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_id_type(kind: pa.DataType) -> bool:
    """Return whether a column of this type can hold ids: text, integers, or nulls alone."""
    return is_text(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind)


def _is_list(kind: pa.DataType) -> bool:
    return isinstance(kind, _LISTS)


def is_token_list(kind: pa.DataType) -> bool:
    """Return whether a type is lists of token ids."""
    return _is_list(kind) and (pa.types.is_integer(kind.value_type) or pa.types.is_null(kind.value_type))


def _is_struct_list(kind: pa.DataType) -> bool:
    return _is_list(kind) and pa.types.is_struct(kind.value_type)


def _parts(kind: pa.DataType) -> dict[str, pa.DataType]:
    return {part.name: plain_type(part.type) for part in kind.value_type} if _is_struct_list(kind) else {}


def _is_messages(kind: pa.DataType) -> bool:
    role, content = (_parts(kind).get(name, pa.bool_()) for name in ("role", "content"))
    of_content = is_text(content) or pa.types.is_null(content) or _is_struct_list(content)
    return is_text(kind) or ((is_text(role) or pa.types.is_null(role)) and of_content)


def _is_sharegpt(kind: pa.DataType) -> bool:
    found = [_parts(kind).get(name, pa.bool_()) for name in ("from", "value")]
    return is_text(kind) or all(is_text(part) or pa.types.is_null(part) for part in found)


def _is_choices(kind: pa.DataType) -> bool:
    return _is_list(kind) and (
        is_text(item := plain_type(kind.value_type)) or pa.types.is_null(item) or is_token_list(item)
    )


def _is_tools(kind: pa.DataType) -> bool:
    return is_text(kind) or pa.types.is_struct(kind) or _is_struct_list(kind)


def _is_object(kind: pa.DataType) -> bool:
    return is_text(kind) or pa.types.is_struct(kind)


ColumnType = tuple[Callable[[pa.DataType], bool], str]

# what each kind of column for prompts must be, as a check and in words
PROMPT_TYPES: dict[str, ColumnType] = {
    "user": (is_text, "text"),
    "prompt": (is_text, "text"),
    "messages": (
        _is_messages,
        "a list of structs with the fields role (text) and content (text, or a list of parts), or JSON text",
    ),
    "sharegpt": (_is_sharegpt, "a list of structs with the text fields from and value, or JSON text"),
    "token_ids": (is_token_list, "a list of integers"),
    "choices": (_is_choices, "a list of texts, or of lists of integers"),
    "tools": (_is_tools, "a list of structs, or JSON text"),
    "chat_template_kwargs": (_is_object, "a struct, or JSON text"),
    "sampling": (_is_object, "a struct, or JSON text"),
    "template": (lambda kind: True, "anything"),
}


def without_dictionary(column: pa.Array) -> pa.Array:
    """Return the column with each value in place of its index into a dictionary."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def token_lists(column: pa.Array) -> pa.Array:
    """Return a column of lists of integers (large and fixed-size lists too) as pa.list_ of the same integers."""
    kind = pa.null() if pa.types.is_null(column.type) else column.type.value_type
    return column.cast(pa.list_(pa.int64() if pa.types.is_null(kind) else kind))


def list_lengths(lists: pa.Array) -> np.ndarray:
    """Return [N] int64, the number of items of each list; 0 for null."""
    return pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def python_values(column: pa.Array) -> list[Any]:
    """Return the column as Python values; a text that is not UTF-8 is replaced by its UnicodeDecodeError."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        values: list[Any] = []
        for value in column:
            try:
                values.append(value.as_py())
            except UnicodeDecodeError as error:
                values.append(error)
        return values
