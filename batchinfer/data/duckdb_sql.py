"""File names as DuckDB's SQL wants them."""

from pathlib import Path


def read_parquet(*files: Path) -> str:
    """SQL that reads exactly these files: DuckDB takes every path for a glob pattern, so theirs are escaped."""
    return f"read_parquet([{', '.join(map(pattern, files))}], hive_partitioning = false)"


def literal(value: str | Path) -> str:
    """A text as an SQL literal."""
    return "'" + str(value).replace("'", "''") + "'"


def pattern(file: Path) -> str:
    """A path as a glob pattern that matches only itself."""
    return literal("".join(f"[{char}]" if char in "*?[" else char for char in str(file)))
