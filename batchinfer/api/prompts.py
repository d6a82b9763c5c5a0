"""Conversion of prompts in memory (lists, columns, tables) to a Parquet shard."""

from __future__ import annotations

import filecmp
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.api.rows import as_list, batches_of_columns, json_text, text_array, usual_form
from batchinfer.api.tables import BATCH_ROWS, NOT_ARROW, batches_of, column_of, is_column, storable
from batchinfer.data.columns import column_type, is_json, is_text, is_token_list, plain_type, python_values
from batchinfer.data.plain_arrays import plain_array
from batchinfer.ownership import group_id, make_folder
from batchinfer.plan.first_job import CHATS_AS_JSON, LOOK_ROWS, USUAL_NAMES, chat_keys, usual_columns
from batchinfer.records import ConfigError, InputError, RunMismatchError
from batchinfer.sanitize import clip, first_line
from batchinfer.whole_files import cannot_write, published

MASK = "attention_mask"
PYTHON_ERROR = ". Detail: Python exception"  # after the text of an error that a caller's own reader has raised
INDEX = re.compile(r"__index_level_\d+__")  # pandas' name for an index without a name
USE = "give a list of texts, of lists of messages, of lists of token ids or of rows as dicts, or a table"
_log = logging.getLogger("batchinfer")


def reader_of(
    data: Any, named: Mapping[str, str], others: set[str], kept: Any = None, system: str = ""
) -> tuple[pa.RecordBatchReader, dict[str, str]]:
    """Return a reader of the rows, and the columns of prompts by kind (one of KINDS).

    Columns that the job does not read are left out if they cannot be written to Parquet.

    Args:
        named: the columns of prompts by kind, as named by the caller; if empty, the column is searched.
        others: columns with another use, which are not searched.
        kept: columns that are copied to the outputs, which are chosen only if no other column fits.
        system: input.system, a template that may name columns.

    Raises:
        InputError: data has no prompts, or rows of several kinds; or a column that the job reads cannot be written.
        ConfigError: no column fits, several fit, or the named column does not exist.
    """
    kept = kept if isinstance(kept, list) else []
    found: tuple[pa.RecordBatchReader, dict[str, str]] | None
    chats, is_empty = set[str](), False
    try:
        data = usual_form(data)
        if isinstance(data, list | tuple):
            return _of_list(data, named)
        if is_column(data) and not pa.types.is_struct((column := column_of(data)).type):
            return _of_column(column, named)
        if isinstance(data, Mapping):
            found, chats = batches_of_columns(data, others)
        elif (found := batches_of(data)) is not None:
            reader, is_empty = _without_empty_batches(found[0])
            found = reader, found[1]
    except NOT_ARROW as error:
        _raise_callers(error)
        raise InputError(f"data cannot be read as Arrow columns: {first_line(error)}; {USE}") from None
    if found is None:
        is_iterable = isinstance(data, Iterator | Collection) and not isinstance(data, bytes | bytearray)
        use = "give list(data)" if is_iterable or hasattr(data, "features") else USE  # features: an IterableDataset
        use = "give data.collect()" if hasattr(data, "collect") else use
        raise InputError(f"data is a {type(data).__name__}, which holds no prompts; {use}")
    reader, lost = found
    if lost and not named:  # a column left out may be that of the prompts
        name, reason = next(iter(lost.items()))
        raise InputError(
            f"column {name!r} of data cannot be taken: {reason}; convert it, or name the column of prompts (prompt=, "
            "messages= or token_ids=)"
        )
    names = [*reader.schema.names, *lost]
    others = others | {name for name in names if "{" in system and name in system}
    schema = _untyped(reader.schema) if is_empty else reader.schema
    columns = dict(named) or _found(schema, others, kept, chats, is_empty=is_empty)
    if is_empty:
        both = zip(reader.schema, schema, strict=True)
        fields = [untyped if field.name in {*others, *columns.values()} else field for field, untyped in both]
        reader = pa.RecordBatchReader.from_batches(pa.schema(fields), ())
    if "token_ids" in columns:
        reader = _without_padding(reader, columns["token_ids"])
    used = {*others, *kept, *columns.values(), *(name for name in names if name in named.get("template", ""))}
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
                for batch in _batches(reader):
                    writer.write_batch(batch)
            if run_json.exists() and target.exists() and not filecmp.cmp(temporary, target, shallow=False):
                raise RunMismatchError(
                    f"the run folder {run_json.parent} was made for other rows than these; choose another output.dir, "
                    "give the same rows, or delete that folder"
                )
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise InputError(f"data cannot be written as Parquet: {first_line(error)}; {USE}") from None


def _batches(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Yield the batches; the error of a caller's own reader is one of reading, whatever its class is."""
    try:
        yield from reader
    except (pa.ArrowException, OSError) as error:
        _raise_callers(error)
        raise


def _raise_callers(error: BaseException) -> None:
    """Raise InputError if the caller's own reader has raised the error."""
    text, of_caller, trace = str(error).partition(PYTHON_ERROR)
    if of_caller:
        lines = text.removeprefix("Unknown error: ").strip().splitlines() or trace.strip().splitlines()[-1:]
        raise InputError(f"data cannot be read: {clip(''.join(lines[:1])).rstrip('.')}") from error


def _of_list(rows: Sequence[Any], named: Mapping[str, str]) -> tuple[pa.RecordBatchReader, dict[str, str]]:
    """Return a reader of rows of one kind as a column, with row numbers as ids; and the columns by kind."""
    rows = list(map(as_list, rows))
    kinds = {_kind(row, place) for place, row in enumerate(rows)} - {""}
    if len(kinds) > 1:
        raise InputError(f"data holds rows of several kinds ({' and '.join(sorted(kinds))}); give rows of one kind")
    # nulls may be of any kind, empty lists are chats or token ids
    unknown = next(iter(named), "prompt")
    if unknown not in ("messages", "token_ids") and any(row is not None for row in rows):
        unknown = "token_ids"
    kind = kinds.pop() if kinds else unknown
    columns = _columns_of(kind, named)
    values: Sequence[Any] = rows
    if kind == "messages":
        values = list(map(json_text, rows))
    column = pa.array(values, pa.list_(pa.int64())) if kind == "token_ids" else text_array(values)
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


def are_json_chats(reader: pa.RecordBatchReader, name: str) -> tuple[pa.RecordBatchReader, bool]:
    """Return a reader of the same rows, and whether texts of a column with a usual name for chats are chats as JSON."""
    batches = _batches(reader)
    if name.lower() not in USUAL_NAMES["messages"] or (first := next(batches, None)) is None:
        return reader, False
    texts = python_values(first.column(name).slice(0, LOOK_ROWS))
    return pa.RecordBatchReader.from_batches(reader.schema, chain([first], batches)), chat_keys(texts) == CHATS_AS_JSON


def _without_empty_batches(reader: pa.RecordBatchReader) -> tuple[pa.RecordBatchReader, bool]:
    """Return a reader of the same rows, and whether there are none: the length of a DuckDB query is another query."""
    batches = (batch for batch in _batches(reader) if len(batch))
    first = next(batches, None)
    rest = batches if first is None else chain([first], batches)
    return pa.RecordBatchReader.from_batches(reader.schema, rest), first is None


def _without_padding(reader: pa.RecordBatchReader, ids: str) -> pa.RecordBatchReader:
    """Return a reader of the same rows, which raises InputError at padding: a zero in `attention_mask` of transformers.

    Args:
        ids: the column of token ids.
    """
    if not is_token_list(column_type(reader.schema, MASK) or pa.null()):
        return reader

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in reader:
            if pc.min(plain_array(batch[MASK]).flatten()).as_py() == 0:
                raise InputError(
                    f"column {MASK!r} of data has zeros, so the token ids in {ids!r} are padded, and padding would be "
                    f"part of the prompts; tokenise without padding, or leave {MASK!r} out if the ids are not padded"
                )
            yield batch

    return pa.RecordBatchReader.from_batches(reader.schema, batches())


def _untyped(schema: pa.Schema) -> pa.Schema:
    """Return the schema with the type null for float64, the type of pandas' columns without values."""
    return pa.schema([field.with_type(pa.null()) if field.type == pa.float64() else field for field in schema])


def _found(
    schema: pa.Schema, others: set[str], kept: list[str], chats: set[str], *, is_empty: bool = False
) -> dict[str, str]:
    """Return the column of prompts by its kind: the only one whose type fits, or the first with a usual name.

    Args:
        chats: columns with chats as JSON text.
        is_empty: there are no rows, so that columns of nulls fit if no other column does.
    """
    asked = [field for field in schema if field.name not in others and not INDEX.fullmatch(field.name)]
    kinds = {field.name: "messages" if field.name in chats else _kind_of(field.type) for field in asked}
    fits = {name: kind for name, kind in kinds.items() if kind}
    if is_empty and not fits:
        fits = {field.name: "prompt" for field in asked if pa.types.is_null(field.type)}
    if len(fits) > 1:
        fits = {name: kind for name, kind in fits.items() if name not in kept} or fits
    if not fits:
        raise ConfigError(
            f"no column of data holds texts, messages or token ids (it has {', '.join(schema.names) or 'none'}); "
            "name one with user=, prompt=, messages= or token_ids="
        )
    likely = {name: "messages" if name.lower() in USUAL_NAMES["messages"] else kind for name, kind in fits.items()}
    name = (usual_columns(likely) or list(fits))[0]
    kind = fits[name]
    if len(fits) == 1 or name.lower() in USUAL_NAMES[likely[name]] or list(likely.values()).count("messages") == 1:
        _log.info("the prompts are column %r (%s)", name, kind)
        return {kind: name}
    names = ", ".join(f"{kind}={name!r}" for name, kind in fits.items())
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
