"""Output rows as JSON lines, with the columns, rows and order of the Parquet file next to them."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import duckdb
import pyarrow as pa

from batchinfer.data.columns import is_text, python_values
from batchinfer.data.duckdb_sql import literal
from batchinfer.records import ConfigError
from batchinfer.sanitize import first_line

SLICE_BYTES = 1 << 19  # of rows that become lines at a time; as lines, log-probabilities are ten times as long
# numbers that DuckDB writes but JSON does not have; and strings, which may contain the same words
_NO_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|-?(?:NaN|Infinity)')


class Lines:
    """Base class of the extra line files written next to a shard's Parquet file; writes nothing."""

    def encode(self, rows: pa.Table) -> Iterable[tuple[int, bytes]]:
        """Yield (file number, whole lines) for the shard's next rows."""
        return ()

    def flush(self) -> Iterable[tuple[int, bytes]]:
        """Yield (file number, whole lines) that are left after the shard's last rows."""
        return ()


class JsonLines(Lines):
    """One file of JSON lines; DuckDB formats the values, times are in UTC.

    NaN and infinities, which JSON does not have, become null. Bytes of a text that are no UTF-8 become U+FFFD; a list
    or struct with such a text becomes null. Of a key that a map has twice, the last value counts. Durations have
    microseconds, and the ends of the ranges of times and dates are infinity and -infinity.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection.cursor()  # rows may still be read from the other connection
        self._connection.execute("SET TimeZone = 'UTC'")

    def encode(self, rows: pa.Table) -> Iterator[tuple[int, bytes]]:
        slice_rows = max(1, SLICE_BYTES * len(rows) // max(1, rows.nbytes))
        for first in range(0, len(rows), slice_rows):
            for line in self._texts(rows.slice(first, slice_rows)):
                yield 0, _strict(line).encode() + b"\n"

    def _texts(self, rows: pa.Table) -> list[str]:
        """Return the line of each row.

        Raises:
            ConfigError: DuckDB cannot write a value.
        """
        try:
            try:
                return self._written(rows)
            except duckdb.InvalidInputException as error:
                if "duplicate key" not in str(error):
                    raise
                return self._written(_with_single_keys(rows))
        except (duckdb.InvalidInputException, duckdb.DataError) as error:
            raise ConfigError(
                f"a row cannot be written as a line of JSON: {first_line(error)}; leave its column out of "
                'output.keep_columns, or set output.format = "parquet"'
            ) from None

    def _written(self, rows: pa.Table) -> list[str]:
        # column names may be anything, and may differ in case only
        columns = {f"c{place}": _sound(column) for place, column in enumerate(rows.columns)}
        self._connection.register("rows", pa.table(columns))
        pairs = ", ".join(f"{literal(name)}, c{place}" for place, name in enumerate(rows.schema.names))
        found = self._connection.execute(f"SELECT json_object({pairs})::VARCHAR FROM rows").fetchall()
        return [line for (line,) in found]


def _sound(column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    """Return the column with invalid UTF-8 replaced; DuckDB would make an empty line of it."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        values = [
            (value.object.decode(errors="replace") if is_text(column.type) else None)
            if isinstance(value, UnicodeDecodeError)
            else value
            for value in python_values(column)
        ]
        return pa.array(values, column.type)
    return column


def _with_single_keys(rows: pa.Table) -> pa.Table:
    """Return the rows with the last value of each key of a map, which DuckDB wants to have once."""
    columns = []
    for column in rows.columns:
        if _has_maps(column.type):
            values = [_with_last_values(value, column.type) for value in python_values(column)]
            columns.append(pa.array(values, column.type))
        else:
            columns.append(column)
    return pa.table(columns, schema=rows.schema)


def _has_maps(kind: pa.DataType) -> bool:
    return pa.types.is_map(kind) or any(_has_maps(kind.field(place).type) for place in range(kind.num_fields))


def _with_last_values(value: Any, kind: pa.DataType) -> Any:
    if isinstance(value, list) and pa.types.is_map(kind):
        pairs = {repr(key): (key, _with_last_values(item, kind.item_type)) for key, item in value}
        return list(pairs.values())
    if isinstance(value, list):
        return [_with_last_values(item, kind.value_type) for item in value]
    if isinstance(value, dict):
        return {name: _with_last_values(item, kind.field(name).type) for name, item in value.items()}
    return None if isinstance(value, UnicodeDecodeError) else value


def _strict(line: str) -> str:
    if "NaN" not in line and "Infinity" not in line:
        return line
    return _NO_NUMBER.sub(lambda found: found[0] if found[0][0] == '"' else "null", line)
