"""Conversion of tables of any library to batches of rows whose columns can be written to Parquet."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from batchinfer.data.columns import plain_type
from batchinfer.data.kept_fields import can_be_copied
from batchinfer.data.wide_rows import decoded
from batchinfer.records import InputError
from batchinfer.sanitize import first_line

BATCH_ROWS = 16384  # read from a Hugging Face Dataset at a time
# errors of libraries for a column without an Arrow type
NOT_ARROW = (pa.ArrowException, ValueError, TypeError, OverflowError)


def is_column(data: Any) -> bool:
    """Return whether data is a column: an Arrow array, or a Series of pandas or polars."""
    is_array = isinstance(data, pa.Array | pa.ChunkedArray)
    # asked of the class: a frame has its columns as attributes
    return is_array or (hasattr(data, "__arrow_c_stream__") and hasattr(type(data), "dtype"))


def column_of(data: Any) -> pa.ChunkedArray:
    """Return the values of one column.

    Raises:
        pa.ArrowException, ValueError, TypeError, OverflowError: the values cannot be converted to Arrow.
    """
    return pa.chunked_array([data] if isinstance(data, pa.Array) else data)


def batches_of(data: Any) -> tuple[pa.RecordBatchReader, dict[str, str]] | None:
    """Return a reader of a table's rows, and the reason for each column left out; None if `data` is no table.

    A column of structs counts as a table.

    Raises:
        InputError: no column can be converted to Arrow.
    pa.ArrowException, ValueError, TypeError, OverflowError: the table cannot be converted for another reason.
    """
    if is_column(data):
        return pa.Table.from_struct_array(column_of(data)).to_reader(), {}
    if isinstance(data, ds.Dataset):
        return data.scanner().to_reader(), {}
    if hasattr(getattr(data, "features", None), "arrow_schema"):
        return _of_hugging_face(data), {}
    if not hasattr(data, "__arrow_c_stream__"):
        return None
    lost: dict[str, str] = {}
    try:
        reader = pa.RecordBatchReader.from_stream(data)
    except NOT_ARROW:
        lost = _columns_not_arrow(data)
        good = [name for name in data.columns if str(name) not in lost] if lost else []
        if lost and not good:
            name, reason = next(iter(lost.items()))
            raise _cannot_be_taken(name, reason) from None
        if not good:
            raise
        reader = pa.RecordBatchReader.from_stream(data[good])
    if type(data).__module__.startswith("polars"):
        # polars exports Python objects as their addresses, in binary of a fixed size, which nothing else has
        sizes = {field.name for field in reader.schema if pa.types.is_fixed_size_binary(field.type)}
        lost |= dict.fromkeys(sizes, "it holds Python objects")
    return reader, lost


_REPEATED = "data has several columns of this name"


def _cannot_be_taken(name: str, reason: str) -> InputError:
    advice = "rename all but one" if reason == _REPEATED else "convert it, for example to text"
    return InputError(f"column {name!r} of data cannot be taken: {reason}; {advice}")


def storable(reader: pa.RecordBatchReader, lost: dict[str, str], used: Collection[str]) -> pa.RecordBatchReader:
    """Return a reader of the rows with columns of types that Parquet has; other columns are left out.

    Args:
        lost: columns left out before, with reasons; more are added.
        used: the columns that the job reads.

    Raises:
        InputError: a column that the job reads is left out.
    """
    stored = [field.with_type(_stored_type(field.type)) for field in reader.schema]
    for field, read in zip(stored, reader.schema, strict=True):
        if field.name not in lost and not can_be_copied(field.name, field.type):
            lost[field.name] = f"it is {read.type}, which Parquet has not"
    for name, reason in lost.items():
        if name in used:
            raise _cannot_be_taken(name, reason)
    places = [place for place, field in enumerate(stored) if field.name not in lost]
    schema = pa.schema([stored[place].remove_metadata() for place in places])
    return pa.RecordBatchReader.from_batches(schema, _stored_batches(reader, places, schema))


def _stored_batches(reader: pa.RecordBatchReader, places: list[int], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    num_rows = 0
    for batch in reader:
        for part in decoded(batch.select(places), num_rows):
            columns = [column.cast(kind) for column, kind in zip(part.columns, schema.types, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)
        num_rows += len(batch)


def _stored_type(kind: pa.DataType) -> pa.DataType:
    plain = plain_type(kind, keeps_json=True)
    # the type that Parquet returns for a dictionary of large texts
    return pa.string() if pa.types.is_dictionary(kind) and pa.types.is_large_string(plain) else plain


def _columns_not_arrow(data: Any) -> dict[str, str]:
    """Return the columns of a data frame that cannot be converted to Arrow, with reasons."""
    lost = {}
    names = list(getattr(data, "columns", ()))
    for name in names:
        try:
            pa.RecordBatchReader.from_stream(data[[name]])
        except NOT_ARROW as error:
            is_repeated = names.count(name) > 1
            reason = (
                _REPEATED if is_repeated else f"Arrow cannot hold its {data[name].dtype} values ({reason_of(error)})"
            )
            lost[str(name)] = reason
    return lost


def reason_of(error: BaseException) -> str:
    """Return the first sentence of an error; pandas adds another one that names the column."""
    return first_line(ValueError(*error.args[:1]))


def _of_hugging_face(data: Any) -> pa.RecordBatchReader:
    """Return a reader of a Hugging Face Dataset in its order; its Arrow table may have more rows.

    Raises:
        InputError: the Dataset has a transform, whose rows would be others than those of the Arrow table.
    """
    shown = getattr(data, "format", None) or {}
    if shown.get("type") == "custom":
        raise InputError(
            "data has a transform (with_transform or set_transform), which runs only when rows are shown; give "
            "data.map(…) with the same function, or data.with_format(None) for the rows without it"
        )
    columns = shown.get("columns")
    if columns is not None and not shown.get("output_all_columns"):
        data = data.select_columns(columns)  # all but by with_format(columns=…)
    schema = data.features.arrow_schema
    tables = data.with_format("arrow").iter(BATCH_ROWS)
    batches = (batch for table in tables for batch in table.cast(schema).to_batches())
    return pa.RecordBatchReader.from_batches(schema, batches)
