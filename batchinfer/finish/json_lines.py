"""Output rows as JSON lines, with the columns, rows and order of the Parquet file next to them."""

import re
from collections.abc import Iterable, Iterator

import duckdb
import pyarrow as pa

from batchinfer.data.columns import is_text, python_values
from batchinfer.data.duckdb_sql import literal

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
    or struct with such a text becomes null.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection.cursor()  # rows may still be read from the other connection
        self._connection.execute("SET TimeZone = 'UTC'")

    def encode(self, rows: pa.Table) -> Iterator[tuple[int, bytes]]:
        slice_rows = max(1, SLICE_BYTES * len(rows) // max(1, rows.nbytes))
        for first in range(0, len(rows), slice_rows):
            for line in self._texts(rows.slice(first, slice_rows)):
                yield 0, _strict(line).encode() + b"\n"

    def _texts(self, rows: pa.Table) -> Iterator[str]:
        # column names may be anything, and may differ in case only
        columns = {f"c{place}": _sound(column) for place, column in enumerate(rows.columns)}
        self._connection.register("rows", pa.table(columns))
        pairs = ", ".join(f"{literal(name)}, c{place}" for place, name in enumerate(rows.schema.names))
        for (line,) in self._connection.execute(f"SELECT json_object({pairs})::VARCHAR FROM rows").fetchall():
            yield line


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


def _strict(line: str) -> str:
    if "NaN" not in line and "Infinity" not in line:
        return line
    return _NO_NUMBER.sub(lambda found: found[0] if found[0][0] == '"' else "null", line)
