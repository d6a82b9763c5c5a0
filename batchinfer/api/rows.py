"""Further forms of data: rows as dicts, columns as dicts, one text, one chat, and datasets with splits."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.api.settings import KINDS
from batchinfer.api.tables import BATCH_ROWS, NOT_ARROW, column_of, is_column, reason_of
from batchinfer.data.formats.names import is_data_file
from batchinfer.records import InputError


def usual_form(data: Any) -> Any:
    """Convert data to a list of prompts, a dict of lists as columns, or a table.

        one text or chat → a list of it      rows as dicts → columns      splits → the only split      sequence → list

    Raises:
        InputError: data is a message or a row alone, names a file, has several splits, or has columns that do not fit
            together.
    """
    if is_lazy_list(data):
        data = list(data)
    if isinstance(data, str):
        _refuse_file_name(data)
    if isinstance(data, str) or is_chat(data):
        return [data]
    if isinstance(data, list | tuple) and any(isinstance(row, Mapping) for row in data):
        return _columns_of_rows(data)
    if isinstance(data, Mapping):
        return _of_mapping(data)
    is_arrow = hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__")
    return data.tolist() if hasattr(data, "tolist") and not is_arrow else data


def _refuse_file_name(text: str) -> None:
    """Raise InputError if a text alone is the name of a data file: it would be answered as a question."""
    if "\n" not in text and is_data_file(os.path.basename(text)) and os.path.isfile(text):
        raise InputError(
            f"data is {text!r}, the name of a file; give its rows, such as pandas.read_csv({text!r}), or a job with "
            f"input.files to batchinfer.run; for an answer to this text itself, give [{text!r}]"
        )


def is_lazy_list(data: Any) -> bool:
    """Return whether data is a sequence of another class than Python's own, such as a column of a Dataset."""
    return isinstance(data, Sequence) and not isinstance(data, str | bytes | bytearray | memoryview | list | tuple)


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of messages, not of rows."""
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_message, value))


def batches_of_columns(
    columns: Mapping[str, list[Any]], read: Collection[str]
) -> tuple[tuple[pa.RecordBatchReader, dict[str, str]], set[str]]:
    """Convert columns of Python values to Arrow batches.

    Chats become JSON text, which keeps every message as it is. Without a column `id`, ids are row numbers.

    Args:
        read: columns with another use than prompts; their dicts become JSON text, too.

    Returns:
        (what `batches_of` returns, the names of the columns that hold chats).
    """
    columns = {name: list(map(as_list, values)) for name, values in columns.items()}
    chats = {name for name, values in columns.items() if any(values) and all(map(is_chat, filter(None, values)))}
    numbers = list(range(len(next(iter(columns.values())))))
    arrays, lost = {}, {}
    for name, values in {"id": numbers, **columns}.items():
        try:
            is_json = name in chats or (name in read and any(isinstance(_first_of(value), Mapping) for value in values))
            arrays[name] = _array(list(map(json_text, values)) if is_json else values)
        except NOT_ARROW as error:
            lost[name] = f"Arrow cannot hold its values ({reason_of(error)})"
    return (pa.table(arrays).to_reader(BATCH_ROWS), lost), chats


def text_array(values: Sequence[str | None]) -> pa.Array:
    """Return the texts as a column; a text with a lone surrogate becomes invalid UTF-8, so that its row is bad."""
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        raw = [None if value is None else value.encode("utf-8", "surrogatepass") for value in values]
        return pc.cast(pa.array(raw, pa.binary()), options=pc.CastOptions(pa.string(), allow_invalid_utf8=True))


def as_list(value: Any) -> Any:
    """Convert an array of numpy, or a tensor, to a list; other values stay."""
    return value.tolist() if hasattr(value, "tolist") else value


def _array(values: list[Any]) -> pa.Array:
    if all(value is None or isinstance(value, str) for value in values):
        return text_array(values)
    return pa.array(values)


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and "role" in value
        and bool(value.keys() & {"content", "tool_calls"})
        and not value.keys() & set(KINDS)
    )


def _first_of(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) and value else value


def json_text(value: Any) -> str | None:
    """Convert a value to JSON text, with lists for arrays at any depth (pandas reads lists of lists so); text stays."""
    is_text = value is None or isinstance(value, str)
    return value if is_text else json.dumps(value, ensure_ascii=False, default=_of_numpy)


def _of_numpy(value: Any) -> Any:
    if not hasattr(value, "tolist"):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return value.tolist()


def _columns_of_rows(rows: Sequence[Any]) -> dict[str, list[Any]]:
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping) and row is not None:
            raise InputError(
                f"row {place} of data is a {type(row).__name__}, but other rows are dicts; give rows of one kind"
            )
    names = dict.fromkeys(name for row in rows if row is not None for name in row)
    return _with_names({name: [None if row is None else row.get(name) for row in rows] for name in names})


def _of_mapping(data: Mapping[Any, Any]) -> Any:
    if data and all(hasattr(part, "features") and not is_lazy_list(part) for part in data.values()):  # Hugging Face's
        first, *others = data
        if not others:
            return data[first]
        names = " and ".join(map(repr, data))
        raise InputError(f"data has the splits {names}; give one of them, for example data[{first!r}]")
    if _is_message(data):
        raise InputError("data is one message; give the list of messages of a chat: [data]")
    columns = {}
    for name, values in data.items():
        if not _is_list(values) or is_chat(values):
            raise InputError(
                f"{name!r} of data is a {type(values).__name__}, not a column of values; give one row as [data]"
            )
        columns[name] = _listed(values)
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name!r}: {length:,}" for name, length in lengths.items())
        raise InputError(f"the columns of data have different numbers of values ({shown}); give one value per row")
    return _with_names(columns)


def _is_list(values: Any) -> bool:
    is_array = hasattr(type(values), "dtype") and not isinstance(values, str | bytes)  # numpy has texts with a dtype
    return isinstance(values, list | tuple) or is_array or is_column(values) or is_lazy_list(values)


def _listed(values: Any) -> list[Any]:
    if is_column(values):
        with suppress(*NOT_ARROW):  # such a column is left out later
            return list(column_of(values).to_pylist())  # pandas' own conversion has NaN for null
    return list(as_list(values))


def _with_names(columns: dict[Any, list[Any]]) -> dict[str, list[Any]]:
    for name in columns:
        if not isinstance(name, str):
            raise InputError(f"data has a column {name!r}; give the columns names that are texts")
    if not columns:
        raise InputError('data has no columns; give rows with a prompt: [{"prompt": …}]')
    return columns
