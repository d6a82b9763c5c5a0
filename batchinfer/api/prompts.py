"""Conversion of prompts in memory (lists, columns, tables) to a Parquet shard."""

from __future__ import annotations

import filecmp
import json
import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.api.tables import NOT_ARROW, batches_of, column_of, is_column, storable
from batchinfer.data.columns import is_json, is_text, plain_type
from batchinfer.ownership import group_id, make_folder
from batchinfer.records import ConfigError, InputError, RunMismatchError
from batchinfer.sanitize import first_line
from batchinfer.whole_files import cannot_write, published

KINDS = ("user", "prompt", "messages", "token_ids")  # keys of [input]
INDEX = re.compile(r"__index_level_\d+__")  # pandas' name for an index without a name
USE = "give a list of texts, of lists of messages or of lists of token ids, or a table"
BATCH_ROWS = 16384  # rows of a list in a row group


def reader_of(
    data: Any, named: Mapping[str, str], others: set[str], kept: Any = None
) -> tuple[pa.RecordBatchReader, dict[str, str]]:
    """Return a reader of the rows, and the columns of prompts by kind (one of KINDS).

    Columns that the job does not read are left out if they cannot be written to Parquet.

    Args:
        named: the columns of prompts by kind, as named by the caller; if empty, the column is searched.
        others: columns with another use, which are not searched.
        kept: columns that are copied to the outputs, which are chosen only if no other column fits.

    Raises:
        InputError: data has no prompts, or rows of several kinds; or a column that the job reads cannot be written.
        ConfigError: no column fits, several fit, or the named column does not exist.
    """
    kept = kept if isinstance(kept, list) else []
    try:
        if isinstance(data, list | tuple):
            return _of_list(data, named)
        if is_column(data) and not pa.types.is_struct((column := column_of(data)).type):
            return _of_column(column, named)
        found = batches_of(data)
    except NOT_ARROW as error:
        raise InputError(f"data cannot be read as Arrow columns: {first_line(error)}; {USE}") from None
    if found is None:
        raise InputError(f"data is a {type(data).__name__}, which holds no prompts; {USE}")
    reader, lost = found
    if lost and not named:  # a column left out may be that of the prompts
        name, reason = next(iter(lost.items()))
        raise InputError(
            f"column {name!r} of data cannot be taken: {reason}; convert it, or name the column of prompts (prompt=, "
            "messages= or token_ids=)"
        )
    columns = dict(named) or _found(reader.schema, others, kept)
    template = named.get("template", "")
    used = {*others, *kept, *columns.values(), *(name for name in [*reader.schema.names, *lost] if name in template)}
    return storable(reader, lost, used), columns


def write_shard(reader: pa.RecordBatchReader, target: Path, run_json: Path, shared_group: str | None) -> None:
    """Write the rows to a file that a job reads.

    Args:
        run_json: run.json of the job; if it exists, the rows must be those in the present target.

    Raises:
        RunMismatchError: the run folder belongs to other rows.
        ConfigError: the folder cannot be written.
        InputError: the rows cannot be read or written.
    """
    try:
        target.parent.parent.mkdir(parents=True, exist_ok=True)
        make_folder(target.parent, group_id(shared_group, "output.shared_group"))
    except OSError as error:
        raise cannot_write(target, error) from None
    try:
        with published(target) as temporary:
            with pq.ParquetWriter(temporary, reader.schema, compression="zstd") as writer:
                for batch in reader:
                    writer.write_batch(batch)
            if run_json.exists() and target.exists() and not filecmp.cmp(temporary, target, shallow=False):
                raise RunMismatchError(
                    f"the run folder {run_json.parent} was made for other rows than these; choose another output.dir, "
                    "give the same rows, or delete that folder"
                )
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise InputError(f"data cannot be written as Parquet: {first_line(error)}; {USE}") from None


def _of_list(rows: Sequence[Any], named: Mapping[str, str]) -> tuple[pa.RecordBatchReader, dict[str, str]]:
    """Return a reader of rows of one kind as a column, with row numbers as ids; and the columns by kind."""
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in rows]  # arrays of numpy's, tensors
    kinds = {_kind(row, place) for place, row in enumerate(rows)} - {""}
    if len(kinds) > 1:
        raise InputError(f"data holds rows of several kinds ({' and '.join(sorted(kinds))}); give rows of one kind")
    kind = kinds.pop() if kinds else next(iter(named), "prompt")
    columns = _columns_of(kind, named)
    values: Sequence[Any] = rows
    if kind == "messages":
        values = [None if row is None else json.dumps(row, ensure_ascii=False) for row in rows]
    column = pa.array(values, pa.list_(pa.int64())) if kind == "token_ids" else _texts(values)
    return _numbered(column, columns)


def _of_column(column: pa.ChunkedArray, named: Mapping[str, str]) -> tuple[pa.RecordBatchReader, dict[str, str]]:
    """Return a reader of an array or a Series as a column, with row numbers as ids; and the columns by kind."""
    kind = _kind_of(column.type) or (next(iter(named), "prompt") if pa.types.is_null(column.type) else "")
    if not kind:
        raise InputError(f"data is a column of {column.type}, which holds no prompts; {USE}")
    reader, columns = _numbered(column, _columns_of(kind, named))
    return storable(reader, {}, reader.schema.names), columns


def _columns_of(kind: str, named: Mapping[str, str]) -> dict[str, str]:
    """Return the name of the prompts' column by kind, for data that is a single column of this kind.

    Raises:
        ConfigError: the caller names a column of another kind.
    """
    columns = dict(named) or {kind: kind}
    # texts may be user's messages or chats as JSON, too, and a template has them as its {{ prompt }}
    if kind not in columns and not (kind == "prompt" and columns.keys() & {"user", "messages", "template"}):
        (asked, name), *_ = columns.items()
        raise ConfigError(f"{asked} is {name!r}, but data is a list of {kind}; leave {asked} out")
    return columns


def _numbered(
    column: pa.Array | pa.ChunkedArray, columns: dict[str, str]
) -> tuple[pa.RecordBatchReader, dict[str, str]]:
    name = "prompt" if "template" in columns else next(iter(columns.values()))
    table = pa.table({"id": range(len(column)), name: column})
    return table.to_reader(BATCH_ROWS), columns


def _texts(values: Sequence[str | None]) -> pa.Array:
    """Return the texts as a column; a text with a lone surrogate becomes invalid UTF-8, so that its row is bad."""
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        raw = [None if value is None else value.encode("utf-8", "surrogatepass") for value in values]
        return pc.cast(pa.array(raw, pa.binary()), options=pc.CastOptions(pa.string(), allow_invalid_utf8=True))


def _kind(row: Any, place: int) -> str:
    """Return the kind (one of KINDS) of a row of a list, "" for null or an empty list."""
    if row is None or (isinstance(row, list | tuple) and not row):
        return ""
    if isinstance(row, str):
        return "prompt"
    if isinstance(row, list | tuple):
        if all(isinstance(item, Mapping) for item in row):
            return "messages"
        if all(isinstance(item, Integral) for item in row):
            return "token_ids"
    raise InputError(f"row {place} of data is a {type(row).__name__} that is no prompt; {USE}")


def _found(schema: pa.Schema, others: set[str], kept: list[str]) -> dict[str, str]:
    """Return the only column whose type can be prompts, by its kind."""
    asked = [field for field in schema if field.name not in others and not INDEX.fullmatch(field.name)]
    fits = [(kind, field.name) for field in asked if (kind := _kind_of(field.type))]
    if len(fits) > 1:
        fits = [fit for fit in fits if fit[1] not in kept] or fits
    if len(fits) == 1:
        return dict(fits)
    if not fits:
        raise ConfigError(
            f"no column of data holds texts, messages or token ids (it has {', '.join(schema.names) or 'none'}); "
            "name one with user=, prompt=, messages= or token_ids="
        )
    names = ", ".join(f"{kind}={name!r}" for kind, name in fits)
    raise ConfigError(f"several columns of data could hold the prompts; name one: {names}")


def _kind_of(column_type: pa.DataType) -> str:
    """Return the kind of prompts (one of KINDS) in a column of this type; "" for none, and for JSON."""
    held = plain_type(column_type)
    if is_json(column_type):
        return ""
    if is_text(held):
        return "prompt"
    item = plain_type(held.value_type) if hasattr(held, "value_type") else None
    if item is not None and pa.types.is_integer(item):
        return "token_ids"
    if item is not None and pa.types.is_struct(item) and {"role", "content"} <= {field.name for field in item}:
        return "messages"
    return ""
