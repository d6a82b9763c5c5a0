"""DuckDB over run folders: the views, and other people's SQL on them, read only."""

import json
import tempfile
import uuid
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import duckdb

from batchinfer.checked_json import read_json
from batchinfer.data.duckdb_sql import literal, pattern, read_parquet
from batchinfer.data.parquet import check_sealed
from batchinfer.data.schemas import DECODE_STEPS, OUTPUTS, STATS_TABLES, Table
from batchinfer.manifest import Manifest
from batchinfer.records import ConfigError
from batchinfer.report.query_limits import SQL_S, Deadline, query_bytes, too_much_memory
from batchinfer.rundir import DELETE_STATISTICS, RunDir, plan_again

TABLES = (OUTPUTS, *STATS_TABLES)
VIEWS = (*TABLES, DECODE_STEPS)
FETCH_ROWS = 1000
# columns that runs of earlier versions do not have; they are null then
LATER_COLUMNS = {
    "requests": {
        "finish_reason": "VARCHAR", "reasoning_tokens": "INTEGER", "structured_valid": "BOOLEAN",
        "mean_logprob": "DOUBLE", "choice": "INTEGER",
    },
    "steps": {
        "drafted_tokens": "INTEGER", "accepted_tokens": "INTEGER", "graph": "VARCHAR", "graph_rows": "INTEGER",
        "no_graph": "VARCHAR",
    },
}  # fmt: skip

# Plan operators that change something; a SELECT can hide them (in a WITH, or behind a function that runs more SQL).
_CHANGING_OPERATORS = ("COPY", "INSERT", "UPDATE", "DELETE", "MERGE", "EXECUTE", "ENABLE", "DISABLE")


def query_text(name: str) -> str:
    """The SQL of queries/<name>.sql."""
    return (resources.files("batchinfer.report") / "queries" / f"{name}.sql").read_text(encoding="utf-8")


def connect() -> duckdb.DuckDBPyConnection:
    """An empty database in memory."""
    # created only when a query outgrows the memory, removed when the connection closes
    spill = Path(tempfile.gettempdir()) / f"batchinfer-{uuid.uuid4().hex}"
    connection = duckdb.connect(
        config={
            "temp_directory": str(spill),
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            # names in SQL mean views, never variables of this program
            "python_enable_replacements": False,
        }
    )
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def open_views(run_folders: list[Path]) -> duckdb.DuckDBPyConnection:
    """An in-memory database with the views of VIEWS.

    A table that a run does not have (no step was run, no shard could be read) is an empty table with the columns of
    data.schemas. With several run folders every view has the column `run`, the folder's name (its whole path where two
    names are the same); a kept input column of that name becomes `input_run`.

    Args:
        run_folders: finished run folders; one that is given twice counts once.

    Raises:
        ConfigError: a folder is no run folder, is not finished, or holds a table that is damaged or cannot be read.
    """
    runs = [RunDir(folder) for folder in dict.fromkeys(_absolute(folder) for folder in run_folders)]
    if not runs:
        raise ConfigError("no run folder was given; name at least one")
    for run in runs:
        _check_finished(run)
        _check_damage(run)
    connection = connect()
    try:
        for table in TABLES:
            _create_view(connection, runs, table)
        _create_decode_steps(connection, with_run=len(runs) > 1)
    except BaseException:
        connection.close()
        raise
    return connection


def run_query(
    run_folders: list[Path], sql: str, *, seconds: float = SQL_S
) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Run one SELECT on the views; it can read the runs' own tables and nothing else, and change nothing.

    Rows are computed as they are taken, so a result may be larger than the memory. Times with a time zone come as text
    (in UTC).

    Args:
        seconds: until the last row is taken.

    Returns:
        The column names (they may repeat) and the rows.

    Raises:
        ConfigError: a run folder is wrong (see open_views), or the SQL is not one SELECT, does not run, takes too long
            or too much memory, or reaches for files, network, extensions or settings. Taking rows can raise it too.
    """
    connection = open_views(run_folders)
    files = [file for folder in run_folders for file in _run_files(RunDir(_absolute(folder)))]
    return answer(connection, files, sql, seconds=seconds, views=[table.name for table in VIEWS])


def answer(
    connection: duckdb.DuckDBPyConnection, files: list[Path], sql: str, *, seconds: float, views: list[str]
) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """What `run_query` says, on these views of a connection, which is closed after it.

    Args:
        files: what the views read.

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


# ---- views


def _absolute(folder: Path) -> Path:
    try:
        return Path(folder).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{str(folder)!r} cannot be a run folder: {_first_line(error)}; give another path") from None


def _check_finished(run: RunDir) -> None:
    if not run.run_json.is_file():
        raise ConfigError(f"{run.root} is not a run folder (it has no {run.run_json.name}); give the job's output.dir")
    if not _table_files(run, "run"):
        raise ConfigError(
            f"the run in {run.root} is not finished; `batchinfer run {run.root}` goes on with it, "
            f"`batchinfer peek {run.root} --sql QUERY` asks the answers so far"
        )


def _check_damage(run: RunDir) -> None:
    """Compare statistics with what run.json vouches for, and those of sessions with what they say themselves."""
    manifest = Manifest(run.root, read_json(run.run_json, remedy=plan_again(run.root)).get("files"))
    manifest.check(*(file for file in manifest if file.is_relative_to(run.stats)))
    for file in sorted(run.stats.glob("*/*.parquet")):
        check_sealed(file, remedy=DELETE_STATISTICS)


def _table_files(run: RunDir, name: str) -> list[Path]:
    """The Parquet files of one view, in a fixed order."""
    if name == OUTPUTS.name:
        files = list(run.outputs.rglob("*"))
    else:
        files = [run.stats_file(name), *(run.stats / name).glob("*")]
    return sorted(file for file in files if file.suffix.lower() == ".parquet" and file.is_file())


def _run_files(run: RunDir) -> list[Path]:
    return [file for table in TABLES for file in _table_files(run, table.name)]


def _create_view(connection: duckdb.DuckDBPyConnection, runs: list[RunDir], table: Table) -> None:
    names = _run_names(runs) if len(runs) > 1 else [None]
    selects = []
    try:
        for run, name in zip(runs, names, strict=True):
            files = _table_files(run, table.name)
            if files:
                source = _with_later_columns(connection, read_parquet(*files), table)
                selects.append(_select(connection, source, name, table))
        if selects:
            connection.execute(f"CREATE VIEW {table.name} AS {' UNION ALL BY NAME '.join(selects)}")
        else:
            connection.register("no_rows", table.schema.empty_table())
            select = _select(connection, "no_rows", None if len(runs) == 1 else "", table)
            connection.execute(f"CREATE TABLE {table.name} AS {select}")
            connection.unregister("no_rows")
    except (duckdb.Error, UnicodeEncodeError) as error:
        where = runs[0].root if len(runs) == 1 else "these runs together"
        raise ConfigError(f"cannot read the table {table.name} of {where}: {_first_line(error)}") from None


def _with_later_columns(connection: duckdb.DuckDBPyConnection, source: str, table: Table) -> str:
    if table.name not in LATER_COLUMNS:
        return source
    present = {column for column, *_ in connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()}
    later = [(kind, name) for name, kind in LATER_COLUMNS[table.name].items() if name not in present]
    return f"(SELECT *{''.join(f', NULL::{kind} AS {name}' for kind, name in later)} FROM {source})"


def _create_decode_steps(connection: duckdb.DuckDBPyConnection, *, with_run: bool) -> None:
    """The one view that is made of others."""
    sql = query_text(DECODE_STEPS.name)
    try:
        connection.execute(
            f"CREATE VIEW {DECODE_STEPS.name} AS {sql.replace('/* run, */', 'run,') if with_run else sql}"
        )
    except duckdb.Error as error:
        raise ConfigError(f"cannot read the tables steps and nodes of these runs: {_first_line(error)}") from None


def _select(connection: duckdb.DuckDBPyConnection, source: str, run_name: str | None, table: Table) -> str:
    """The rows of one run; with its name in the column `run` unless that is None."""
    if run_name is None:
        return f"SELECT * FROM {source}"
    if "run" in table.schema.names:
        return f"SELECT * REPLACE ({literal(run_name)} AS run) FROM {source}"
    described = connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()
    kept_run = next((column for column, *_ in described if column.lower() == "run"), None)
    renamed = f' RENAME ("{kept_run}" AS input_run)' if kept_run else ""
    return f"SELECT {literal(run_name)} AS run, *{renamed} FROM {source}"


def _run_names(runs: list[RunDir]) -> list[str | None]:
    names = [run.root.name for run in runs]
    return [name if names.count(name) == 1 else str(run.root) for run, name in zip(runs, names, strict=True)]


# ---- other people's SQL


def _lock(connection: duckdb.DuckDBPyConnection, files: list[Path]) -> None:
    """From here on DuckDB opens only `files` and keeps its settings."""
    # the patterns too, because DuckDB looks at the path as written before it resolves the pattern
    allowed = dict.fromkeys(form(file) for file in files for form in (literal, pattern))
    connection.execute(f"SET allowed_paths = [{', '.join(allowed)}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _check_reads_only(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Refuse what is not one SELECT, and a SELECT whose plan holds an operator that changes something.

    The lock above cannot do this alone: a file that may be read may also be overwritten.
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
    """Start the query and name its columns."""
    described = connection.execute(sql).description or []
    columns = [str(column[0]) for column in described]
    # DuckDB needs an extra package to hand times with a zone to Python; as text it does not
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
        return ConfigError(f"--sql may read {_named(views)} and no other file: {_first_line(error)}")
    if not isinstance(error, duckdb.CatalogException | duckdb.BinderException):
        return ConfigError(f"the SQL does not run: {_first_line(error)}")
    # what is not there, and what was probably meant; then comes the SQL
    told = "; ".join(str(error).strip().partition("\n\n")[0].splitlines())
    if "Table with name" in told:
        told += f"; --sql reads {_named(views)}"
    return ConfigError(f"the SQL does not run: {told}")


def _named(views: list[str]) -> str:
    return f"the views {', '.join(views)}" if len(views) > 1 else f"the view {views[0]}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
