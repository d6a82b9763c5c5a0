"""Read-only execution of a user's SQL on the views of run folders."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb

from batchinfer.data.duckdb_sql import literal, pattern
from batchinfer.data.schemas.outputs import OUTPUTS
from batchinfer.records import ConfigError
from batchinfer.report.query_limits import SQL_S, Deadline, query_bytes, too_much_memory
from batchinfer.report.views import VIEWS, absolute_folder, open_views, run_files
from batchinfer.rundir import RunDir
from batchinfer.sanitize import first_line

FETCH_ROWS = 1000

# Plan operators that change something; a SELECT can hide them (in a WITH, or behind a function that runs more SQL).
_CHANGING_OPERATORS = ("COPY", "INSERT", "UPDATE", "DELETE", "MERGE", "EXECUTE", "ENABLE", "DISABLE")


def run_query(
    run_folders: list[Path], sql: str, *, seconds: float = SQL_S
) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Run one SELECT on the views, which can read the runs' own tables only and change nothing.

    Rows are computed while the caller iterates, so a result may be larger than the memory. Times with a time zone are
    returned as text (in UTC).

    Args:
        seconds: time limit until the last row is read.

    Returns:
        The column names (they may repeat) and the rows.

    Raises:
        ConfigError: a run folder is wrong (see open_views), or the SQL is not one SELECT, does not run, takes too long
            or too much memory, or accesses files, network, extensions or settings. Reading rows can raise it, too.
    """
    connection = open_views(run_folders, reads_outputs=OUTPUTS.name in sql.lower())
    files = [file for folder in run_folders for file in run_files(RunDir(absolute_folder(folder)))]
    return answer(connection, files, sql, seconds=seconds, views=[table.name for table in VIEWS])


def answer(
    connection: duckdb.DuckDBPyConnection, files: list[Path], sql: str, *, seconds: float, views: list[str]
) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Run one SELECT as `run_query` does on views of an open connection, and close the connection after the last row.

    Args:
        files: the files that the views read.

    Raises:
        ConfigError: as `run_query`.
    """
    deadline = Deadline(connection, seconds)
    try:
        sql.encode()
        connection.execute(f"SET memory_limit = '{query_bytes() >> 20} MiB'")
        _lock(connection, files)
        deadline.call(lambda: _check_reads_only(connection, sql))
        columns = deadline.call(lambda: _execute(connection, sql))
    except BaseException as error:
        if not deadline.is_stuck:
            connection.close()
        if isinstance(error, UnicodeEncodeError):
            raise ConfigError("the SQL is not valid Unicode; write it in UTF-8") from None
        if isinstance(error, duckdb.Error):
            raise _sql_error(error, views) from None
        raise
    return columns, _rows(connection, deadline, views)


def _rows(connection: duckdb.DuckDBPyConnection, deadline: Deadline, views: list[str]) -> Iterator[tuple[Any, ...]]:
    try:
        while rows := deadline.call(lambda: connection.fetchmany(FETCH_ROWS)):
            yield from rows
    except duckdb.Error as error:
        raise _sql_error(error, views) from None
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"a value of the result has no form in Python ({error}); cast its column to VARCHAR"
        ) from None
    finally:
        if not deadline.is_stuck:
            connection.close()


def _lock(connection: duckdb.DuckDBPyConnection, files: list[Path]) -> None:
    """Restrict DuckDB to opening `files` only, and lock its settings."""
    # as patterns, too: DuckDB checks the path as written before it resolves the pattern
    allowed = dict.fromkeys(form(file) for file in files for form in (literal, pattern))
    connection.execute(f"SET allowed_paths = [{', '.join(allowed)}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _check_reads_only(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Refuse SQL other than one SELECT, and a SELECT whose plan has an operator that changes something.

    `_lock` does not prevent changes: DuckDB may overwrite a file that it may read.
    """
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise ConfigError(f"--sql takes one SELECT, but got {len(statements)} statements")
    kind = statements[0].type
    if kind != duckdb.StatementType.SELECT:
        name = str(kind).rpartition(".")[2].replace("MULTI", "a PIVOT without IN (...)")
        raise ConfigError(f"--sql only reads: it takes one SELECT (or DESCRIBE, SHOW, SUMMARIZE), but got {name}")
    explained = connection.execute(f"EXPLAIN (FORMAT JSON) {sql}").fetchall()
    for operator in _operators(json.loads(explained[0][1])):
        if any(word in operator for word in _CHANGING_OPERATORS):
            raise ConfigError(f"--sql only reads, but this SQL contains {operator}; take it out")


def _operators(plan: list[dict[str, Any]]) -> Iterator[str]:
    for node in plan:
        yield str(node["name"]).upper()
        yield from _operators(node["children"])


def _execute(connection: duckdb.DuckDBPyConnection, sql: str) -> list[str]:
    """Start the query and return its column names."""
    described = connection.execute(sql).description or []
    columns = [str(column[0]) for column in described]
    # DuckDB needs an extra package to convert times with a zone to Python values, but not to text
    types = [str(column[1]).upper() for column in described]
    zoned = ["WITH TIME ZONE" in name or "TIMESTAMPTZ" in name for name in types]
    if any(zoned):
        connection.execute(f"CREATE TEMP VIEW zoned_result AS {sql}")
        picked = ", ".join(f"CAST(c{i} AS VARCHAR)" if text else f"c{i}" for i, text in enumerate(zoned))
        aliases = ", ".join(f"c{i}" for i in range(len(columns)))
        connection.execute(f"SELECT {picked} FROM zoned_result AS result({aliases})")
    return columns


def _sql_error(error: duckdb.Error, views: list[str]) -> ConfigError:
    if isinstance(error, duckdb.OutOfMemoryException):
        return too_much_memory(query_bytes())
    if isinstance(error, duckdb.PermissionException):
        return ConfigError(f"--sql may read {_named(views)} and no other file: {first_line(error)}")
    if not isinstance(error, duckdb.CatalogException | duckdb.BinderException):
        return ConfigError(f"the SQL does not run: {first_line(error)}")
    # the missing name and DuckDB's suggestion; the SQL after them is cut
    found = "; ".join(str(error).strip().partition("\n\n")[0].splitlines())
    if "Table with name" in found:
        found += f"; --sql reads {_named(views)}"
    return ConfigError(f"the SQL does not run: {found}")


def _named(views: list[str]) -> str:
    return f"the views {', '.join(views)}" if len(views) > 1 else f"the view {views[0]}"
