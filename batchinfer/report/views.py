"""DuckDB views of the outputs and statistics in run folders."""

import tempfile
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import duckdb

from batchinfer.checked_json import read_json
from batchinfer.data.duckdb_sql import literal, read_parquet
from batchinfer.data.parquet import check_sealed
from batchinfer.data.schemas.outputs import OUTPUTS
from batchinfer.data.schemas.statistics import DECODE_STEPS, STATS_TABLES
from batchinfer.data.schemas.table import Table
from batchinfer.manifest import Manifest
from batchinfer.records import ConfigError
from batchinfer.rundir import DELETE_STATISTICS, RunDir, read_state, replan_remedy, was_planned
from batchinfer.sanitize import first_line

TABLES = (OUTPUTS, *STATS_TABLES)
VIEWS = (*TABLES, DECODE_STEPS)
CHECKERS = 8  # outputs compared with their checksums at a time
# columns that runs of earlier versions lack; null there
LATER_COLUMNS = {
    "requests": {
        "finish_reason": "VARCHAR", "reasoning_tokens": "INTEGER", "structured_valid": "BOOLEAN",
        "mean_logprob": "DOUBLE", "choice": "INTEGER", "is_reused": "BOOLEAN",
    },
    "steps": {
        "drafted_tokens": "INTEGER", "accepted_tokens": "INTEGER", "graph": "VARCHAR", "graph_rows": "INTEGER",
        "no_graph": "VARCHAR", "attention_work": "DOUBLE", "streamed_bytes": "BIGINT", "weights_wait_s": "DOUBLE",
    },
    "run": {
        "predicted_prefill_tokens_max_over_mean": "DOUBLE", "predicted_prefill_attention_max_over_mean": "DOUBLE",
    },
}  # fmt: skip


def query_text(name: str) -> str:
    """Return the SQL of queries/<name>.sql."""
    return (resources.files("batchinfer.report") / "queries" / f"{name}.sql").read_text(encoding="utf-8")


def connect() -> duckdb.DuckDBPyConnection:
    """Open an empty in-memory database."""
    # created if a query outgrows the memory, removed when the connection closes
    spill = Path(tempfile.gettempdir()) / f"batchinfer-{uuid.uuid4().hex}"
    connection = duckdb.connect(
        config={
            "temp_directory": str(spill),
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            # a name in SQL is a view, never a Python variable
            "python_enable_replacements": False,
        }
    )
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET enable_progress_bar = false")  # it is drawn on stdout, where `--json` writes its document
    return connection


def open_views(run_folders: list[Path], *, reads_outputs: bool = True) -> duckdb.DuckDBPyConnection:
    """Open an in-memory database with the views of VIEWS.

    A table that a run does not have (no step was run, no shard could be read) is an empty table with the columns of
    data.schemas. With several run folders every view has the column `run`, the folder's name (its whole path if two
    names are the same); a kept input column of that name becomes `input_run`, or `input_run_1` if that is kept, too.

    Args:
        run_folders: finished run folders; a folder that is given twice counts once.
        reads_outputs: whether the caller reads outputs, whose bytes are compared with their checksums then; else only
            their sizes are.

    Raises:
        ConfigError: a folder is no run folder, is not finished, or holds a table that is damaged or cannot be read.
    """
    runs = [RunDir(folder) for folder in dict.fromkeys(absolute_folder(folder) for folder in run_folders)]
    if not runs:
        raise ConfigError("no run folder was given; name at least one")
    for run in runs:
        _check_finished(run)
        _check_damage(run, reads_outputs=reads_outputs)
    connection = connect()
    try:
        for table in TABLES:
            _create_view(connection, runs, table)
        _create_decode_steps(connection, with_run=len(runs) > 1)
    except BaseException:
        connection.close()
        raise
    return connection


def absolute_folder(folder: Path) -> Path:
    """Return the absolute path of a run folder, with links resolved.

    Raises:
        ConfigError: `folder` cannot be a path.
    """
    try:
        return Path(folder).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{str(folder)!r} cannot be a run folder: {first_line(error)}; give another path") from None


def _check_finished(run: RunDir) -> None:
    if not run.run_json.is_file():
        if was_planned(run):
            read_state(run)  # raises the error of a run.json that was deleted
        raise ConfigError(f"{run.root} is not a run folder (it has no {run.run_json.name}); give the job's output.dir")
    if not _table_files(run, "run") and run.stats_file("run") not in _manifest(run):
        raise ConfigError(
            f"the run in {run.root} is not finished; `batchinfer run {run.root}` goes on with it, "
            f"`batchinfer peek {run.root} --sql QUERY` asks the answers so far"
        )


def _check_damage(run: RunDir, *, reads_outputs: bool) -> None:
    """Check outputs and statistics against the checksums in run.json, and session tables against their seals."""
    manifest = _manifest(run)
    manifest.check(*(file for file in manifest if file.is_relative_to(run.stats)))
    for file in sorted(run.stats.glob("*/*.parquet")):
        check_sealed(file, shown=file.resolve(), remedy=DELETE_STATISTICS)  # in a folder so far these are linked
    outputs = _named_outputs(run, manifest)
    for file in outputs:
        manifest.open(file).close()  # compares the size
    if reads_outputs:
        with ThreadPoolExecutor(CHECKERS) as pool:
            list(pool.map(manifest.check, outputs))


def _manifest(run: RunDir) -> Manifest:
    return Manifest(run.root, read_json(run.run_json, remedy=replan_remedy(run.root)).get("files"))


def _table_files(run: RunDir, name: str) -> list[Path]:
    """Return the Parquet files of one view, sorted."""
    if name == OUTPUTS.name:
        return _output_files(run)
    return _parquet_files([run.stats_file(name), *(run.stats / name).glob("*")])


def _output_files(run: RunDir) -> list[Path]:
    """Return the outputs that run.json names, whether they exist or not; those of a run so far are not named there."""
    manifest = _manifest(run)
    return _named_outputs(run, manifest) if any(manifest) else _parquet_files(run.outputs.rglob("*"))


def _named_outputs(run: RunDir, manifest: Manifest) -> list[Path]:
    return sorted(file for file in manifest if file.is_relative_to(run.outputs) and _is_parquet(file))


def _parquet_files(files: Iterable[Path]) -> list[Path]:
    return sorted(file for file in files if _is_parquet(file) and file.is_file())


def _is_parquet(file: Path) -> bool:
    return file.suffix.lower() == ".parquet"


def run_files(run: RunDir) -> list[Path]:
    """Return all files that the views of a run read."""
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
        raise ConfigError(f"cannot read the table {table.name} of {where}: {first_line(error)}") from None


def _with_later_columns(connection: duckdb.DuckDBPyConnection, source: str, table: Table) -> str:
    if table.name not in LATER_COLUMNS:
        return source
    present = {column for column, *_ in connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()}
    later = [(kind, name) for name, kind in LATER_COLUMNS[table.name].items() if name not in present]
    return f"(SELECT *{''.join(f', NULL::{kind} AS {name}' for kind, name in later)} FROM {source})"


def _create_decode_steps(connection: duckdb.DuckDBPyConnection, *, with_run: bool) -> None:
    """Create decode_steps, the only view that is made of other views."""
    sql = query_text(DECODE_STEPS.name)
    try:
        connection.execute(
            f"CREATE VIEW {DECODE_STEPS.name} AS {sql.replace('/* run, */', 'run,') if with_run else sql}"
        )
    except duckdb.Error as error:
        raise ConfigError(f"cannot read the tables steps and nodes of these runs: {first_line(error)}") from None


def _select(connection: duckdb.DuckDBPyConnection, source: str, run_name: str | None, table: Table) -> str:
    """Return SQL for the rows of one run, with `run_name` in the column `run` unless it is None."""
    if run_name is None:
        return f"SELECT * FROM {source}"
    if "run" in table.schema.names:
        return f"SELECT * REPLACE ({literal(run_name)} AS run) FROM {source}"
    described = connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()
    kept_run = next((column for column, *_ in described if column.lower() == "run"), None)
    free, taken = "input_run", {column.lower() for column, *_ in described}
    while free in taken:
        free += "_1"
    renamed = f' RENAME ("{kept_run}" AS {free})' if kept_run else ""
    return f"SELECT {literal(run_name)} AS run, *{renamed} FROM {source}"


def _run_names(runs: list[RunDir]) -> list[str | None]:
    names = [run.root.name for run in runs]
    return [name if names.count(name) == 1 else str(run.root) for run, name in zip(runs, names, strict=True)]
