"""Rows of files of lines: a first pass counts them and finds the schema, later passes read them in batches."""

import io
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pyarrow as pa

from batchinfer.data.formats.delimited import csv_rows
from batchinfer.data.formats.jsonl import filled_lines, integer_lists, json_records
from batchinfer.data.formats.lines import BadRow, Bytes, HashedBytes, Record, decompressed
from batchinfer.data.formats.names import compression_of, delimiter_of
from batchinfer.data.formats.openai_batch import SCHEMA, openai_records
from batchinfer.data.formats.values import Columns, WrongValueError, converter_of, role_of
from batchinfer.data.shard_schemas import file_schema, with_schema
from batchinfer.data.wide_rows import BATCH_BYTES
from batchinfer.records import Shard
from batchinfer.sanitize import clip

_FIRST_ERROR = b"first_error"  # in the metadata of a schema: error of the first row, if all rows are bad
ROW_ERROR = "\0error"  # the last column of each batch: error sentence of a bad row, else null
AS_JSON = "\0json:"  # before a column's name: the values of each row as JSON text


def inspect(shard: Shard, source: Bytes, roles: Mapping[str, str]) -> Shard:
    """Return the shard with its rows counted, its schema found and its bytes hashed.

    Raises:
        OSError, ValueError: the file is damaged, or no file of lines.
    """
    hashed = HashedBytes(source)
    if shard.format == "openai":
        num_rows, found = sum(1 for _ in filled_lines(_content(shard, hashed))), SCHEMA
    else:
        num_rows, found = _columns_of(shard, hashed, roles)
    footer = hashed.digest()
    return with_schema(replace(shard, footer=footer, size_bytes=hashed.num_bytes, num_rows=num_rows), found)


def _columns_of(shard: Shard, hashed: HashedBytes, roles: Mapping[str, str]) -> tuple[int, pa.Schema]:
    columns = Columns(roles, is_text=shard.format == "csv")
    num_rows, has_good, first_error = 0, False, ""
    header, records = _opened(shard, hashed, next((name for name, role in roles.items() if role == "token_ids"), None))
    columns.add_names(header)
    for _, _, values in records:
        num_rows += 1
        if isinstance(values, str):
            first_error = first_error or values
        else:
            has_good = True
            columns.add_row(values)
    schema = columns.schema()
    return num_rows, schema if has_good or not num_rows else schema.with_metadata({_FIRST_ERROR: first_error})


def why_no_row(schema: pa.Schema) -> str | None:
    """Return the error of the first row if no row of the file can be read; None if one can, or there is no row."""
    reason = (schema.metadata or {}).get(_FIRST_ERROR)
    return None if reason is None else clip(reason.decode())


def batches(shard: Shard, source: Bytes, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows with some of their columns, then the column ROW_ERROR.

    Args:
        columns: names of columns; with AS_JSON before them, their values are JSON text.

    Raises:
        RunMismatchError: the file changed after it was inspected.
        OSError, ValueError: the file is damaged.
    """
    hashed = HashedBytes(source)
    schema = file_schema(shard)
    fields = [
        pa.field(name, pa.string(), metadata={"fitting": "strict_json"})
        if name.startswith(AS_JSON)
        else schema.field(name)
        for name in columns
    ]
    group: list[Record] = []
    num_bytes = 0
    integers = next((field.name for field in fields if role_of(field) == "token_ids"), None)
    for record in _opened(shard, hashed, integers)[1]:
        group.append(record)
        num_bytes += record[1]
        if len(group) >= batch_rows or num_bytes >= BATCH_BYTES:
            yield _batch(group, fields)
            group, num_bytes = [], 0
    if group:
        yield _batch(group, fields)
    if hashed.digest() != shard.footer:
        raise shard.changed()


def bad_lines(batch: pa.RecordBatch) -> dict[int, str]:
    """Return the error sentences of bad lines by their position in the batch; {} for formats without lines."""
    if ROW_ERROR not in batch.schema.names:
        return {}
    return {row: clip(sentence) for row, sentence in enumerate(batch[ROW_ERROR].to_pylist()) if sentence is not None}


def _content(shard: Shard, source: HashedBytes) -> io.BufferedReader:
    return decompressed(source, compression_of(shard.path))


def _opened(shard: Shard, source: HashedBytes, integers: str | None) -> tuple[list[str], Iterator[Record]]:
    """Return the columns that a file names before its rows, and the rows."""
    content = _content(shard, source)
    if shard.format == "csv":
        return csv_rows(content, delimiter_of(shard.path))
    return [], openai_records(content) if shard.format == "openai" else json_records(content, integers)


def _batch(records: list[Record], fields: list[pa.Field]) -> pa.RecordBatch:
    errors = [
        values if isinstance(values, str) else values.sentence if isinstance(values, BadRow) else None
        for _, _, values in records
    ]
    arrays = []
    for field in fields:
        name = field.name.removeprefix(AS_JSON)
        found = [None if isinstance(values, str) else values.get(name) for _, _, values in records]
        lists = integer_lists(found) if role_of(field) == "token_ids" else None
        if lists is not None:
            arrays.append(lists)
            continue
        fit = converter_of(field)
        for row, (line, _, _) in enumerate(records):
            if fit is not None and found[row] is not None:
                try:
                    found[row] = fit(found[row])
                except WrongValueError as error:
                    errors[row] = errors[row] or f"line {line}: {field.name} {error}"
                    found[row] = None
        arrays.append(pa.array(found, field.type))
    names = [*(field.name for field in fields), ROW_ERROR]
    return pa.RecordBatch.from_arrays([*arrays, pa.array(errors, pa.string())], names=names)
