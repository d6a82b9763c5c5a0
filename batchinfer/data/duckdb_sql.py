"""File names as DuckDB's SQL wants them, and what it cannot hold."""

from pathlib import Path

import pyarrow as pa

from batchinfer.records import ConfigError


def read_parquet(*files: Path) -> str:
    """SQL that reads exactly these files: DuckDB takes every path for a glob pattern, so theirs are escaped."""
    return f"read_parquet([{', '.join(map(pattern, files))}], hive_partitioning = false)"


def literal(value: str | Path) -> str:
    """A text as an SQL literal."""
    return "'" + str(value).replace("'", "''") + "'"


def pattern(file: Path) -> str:
    """A path as a glob pattern that matches only itself."""
    return literal("".join(f"[{char}]" if char in "*?[" else char for char in str(file)))


def refuse_strange(kept: list[pa.Field]) -> None:
    """Refuse kept columns of types that DuckDB, which writes lines, does not know.

    Raises:
        ConfigError: names the first of them.
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
