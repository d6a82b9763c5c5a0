"""Output rows as JSON lines: the same columns, rows and order as in the Parquet file beside them."""

import json
from collections.abc import Iterable

import duckdb
import msgspec
import pyarrow as pa

from batchinfer.data.duckdb_sql import literal


class Lines:
    """What the files of lines beside a shard's Parquet file hold; by itself nothing, where there are none."""

    def of(self, rows: pa.Table) -> Iterable[tuple[int, bytes]]:
        """(which file, whole lines) that the shard's next rows give."""
        return ()

    def rest(self) -> Iterable[tuple[int, bytes]]:
        """The same once there are no more rows."""
        return ()


class JsonLines(Lines):
    """Turns rows into lines, every type as DuckDB writes it; NaN and infinities, which JSON has not, are null."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection.cursor()  # rows may still come from the other

    def of(self, rows: pa.Table) -> Iterable[tuple[int, bytes]]:
        # names of columns may be anything, and differ in case alone
        self._connection.register("rows", rows.rename_columns([f"c{place}" for place in range(rows.num_columns)]))
        pairs = ", ".join(f"{literal(name)}, c{place}" for place, name in enumerate(rows.schema.names))
        lines = self._connection.execute(f"SELECT json_object({pairs})::VARCHAR FROM rows").fetchall()
        return ((0, _strict(line) + b"\n") for (line,) in lines)


def _strict(line: str) -> bytes:
    if "NaN" in line or "Infinity" in line:  # perhaps within a text
        return msgspec.json.encode(json.loads(line))
    return line.encode()
