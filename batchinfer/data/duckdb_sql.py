"""File names and texts in DuckDB's SQL, and the check for column types that DuckDB does not have."""

import os
import re
from pathlib import Path

import pyarrow as pa

from batchinfer.records import ConfigError


def read_parquet(*files: Path) -> str:
    """Return SQL that reads exactly these files. DuckDB takes every path for a glob pattern, so paths are escaped."""
    return f"read_parquet([{', '.join(map(pattern, files))}], hive_partitioning = false)"


def literal(value: str | Path) -> str:
    """Return a text as an SQL literal."""
    return "'" + str(value).replace("'", "''") + "'"


def pattern(file: Path) -> str:
    """Return a path as an SQL literal of a glob pattern that matches only this path."""
    return literal("".join(f"[{char}]" if char in "*?[" else char for char in str(file)))


def refuse_unknown_types(kept: list[pa.Field]) -> None:
    """Refuse kept columns of types that DuckDB does not have, because DuckDB writes JSON lines.

    Raises:
        ConfigError: names the first such column.
    """
    import duckdb  # whose loading takes as long as planning a small job

    with duckdb.connect() as connection:
        for field in kept:
            try:
                connection.register("rows", pa.table([pa.nulls(0, field.type)], [field.name]))
            except duckdb.NotImplementedException:
                raise ConfigError(
                    f"output.keep_columns names {field.name!r}, which is {field.type}, a type that output.format = "
                    "'jsonl' cannot write; convert it"
                ) from None


def file_error(error: Exception) -> OSError | None:
    """Return the failed call to the file system behind an error of DuckDB; None for other errors and without a code."""
    code = re.search(r'"errno":"?(\d+)', str(error))
    return OSError(int(code[1]), os.strerror(int(code[1]))) if code else None
