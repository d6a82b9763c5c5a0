"""Output rows as JSON lines: the same columns, rows and order as in the Parquet file beside them."""

import re
from collections.abc import Iterable, Iterator

import duckdb
import pyarrow as pa

from batchinfer.data.columns import is_text, python_values
from batchinfer.data.duckdb_sql import literal

SLICE_BYTES = 1 << 19  # that are lines at a time: log-probabilities are ten times as long in these
# what DuckDB writes although JSON has it not, and texts, in which it may stand
_NO_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|-?(?:NaN|Infinity)')


class Lines:
    """What the files of lines beside a shard's Parquet file hold; by itself nothing, where there are none."""

    def of(self, rows: pa.Table) -> Iterable[tuple[int, bytes]]:
        """(which file, whole lines) that the shard's next rows give."""
        return ()

    def rest(self) -> Iterable[tuple[int, bytes]]:
        """The same once there are no more rows."""
        return ()


class JsonLines(Lines):
    """Turns rows into lines, every type as DuckDB writes it, times in UTC.

    NaN and infinities, which JSON has not, are null; bytes of a text that are no UTF-8 are U+FFFD, and a list or struct
    with such a text is null.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection.cursor()  # rows may still come from the other
        self._connection.execute("SET TimeZone = 'UTC'")

    def of(self, rows: pa.Table) -> Iterator[tuple[int, bytes]]:
        slice_rows = max(1, SLICE_BYTES * len(rows) // max(1, rows.nbytes))
        for first in range(0, len(rows), slice_rows):
            for line in self._texts(rows.slice(first, slice_rows)):
                yield 0, _strict(line).encode() + b"\n"

    def _texts(self, rows: pa.Table) -> Iterator[str]:
        # names of columns may be anything, and differ in case alone
        columns = {f"c{place}": _sound(column) for place, column in enumerate(rows.columns)}
        self._connection.register("rows", pa.table(columns))
        pairs = ", ".join(f"{literal(name)}, c{place}" for place, name in enumerate(rows.schema.names))
        for (line,) in self._connection.execute(f"SELECT json_object({pairs})::VARCHAR FROM rows").fetchall():
            yield line


def _sound(column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    """The column without bytes that are no UTF-8, of which DuckDB makes an empty line."""
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
