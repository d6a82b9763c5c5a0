"""Results of the counted claims, joined with the plan: missing and double results, and the rows to write."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import duckdb

from batchinfer.data.duckdb_sql import file_error, literal, read_parquet
from batchinfer.data.schemas.internal import RESULTS
from batchinfer.finish.long_answers import LongAnswers, all_rows
from batchinfer.host_info import free_memory_bytes
from batchinfer.records import ConfigError, IncompleteRunError, Shard
from batchinfer.rundir import RunDir, replan_remedy
from batchinfer.sanitize import count_text, first_line

SORT_BYTES = 1 << 30  # DuckDB's memory before it spills to the run folder, at least
MOST_SORT_BYTES = 8 << 30  # ... and at most; between them a quarter of the free memory
NOT_COMPUTED = "not computed: the run was finished before this row was (--allow-partial)"
HAS_ENDED = f"error IS DISTINCT FROM {literal(NOT_COMPUTED)}"  # SQL, of an output row


def query(name: str, **parts: str | int) -> str:
    """Return the SQL of queries/<name>.sql with its {parts} filled in: numbers, and SQL of data/duckdb_sql.py."""
    text = (resources.files("batchinfer.finish") / "queries" / f"{name}.sql").read_text(encoding="utf-8")
    return text.format(**parts)


@contextmanager
def open_database(
    run: RunDir, command: str = "finish", scratch: Path | None = None
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a DuckDB connection for sorting and joining, with scratch files in the run folder.

    Args:
        command: name of the command for messages.
        scratch: another folder for scratch files.

    Raises:
        ConfigError: a file of the run folder is damaged, the disk is full, or rows are too wide for the memory.
    """
    limit = sort_limit(max(SORT_BYTES, min(free_memory_bytes() // 4, MOST_SORT_BYTES)))
    scratch = scratch or run.finish_scratch
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        with duckdb.connect(config={"memory_limit": limit, "temp_directory": str(scratch / "spill")}) as connection:
            yield connection
    except duckdb.Error as error:
        # a full disk that stops spilling raises the same exception
        if isinstance(error, duckdb.OutOfMemoryException) and "temp_directory" not in str(error):
            raise ConfigError(
                f"cannot {command} {run.shown}: its rows are too wide to be sorted in {limit}; repeat "
                f"`batchinfer {command} {run.shown}` where more memory is free: it takes a quarter of that"
            ) from None
        reason = first_line(file_error(error) or error)
        raise ConfigError(
            f"cannot {command} {run.shown}: {reason}; free space, or use another output.dir if a file is damaged"
        ) from None


def sort_limit(num_bytes: int) -> str:
    """Format a memory limit for DuckDB and for messages."""
    return f"{num_bytes >> 20} MiB"


def join_results(
    connection: duckdb.DuckDBPyConnection,
    run: RunDir,
    files: list[Path],
    answers: LongAnswers | None = None,
    *,
    allow_partial: bool,
    as_planned: bool = False,
) -> int:
    """Create the views `results` and `delivered` (queries/delivered.sql); return the number of missing results.

    Args:
        files: the result files that count.
        answers: keeps long answers out of the views; None: they stay in the views.
        as_planned: see `create_results`.

    Raises:
        IncompleteRunError: results are missing (without `allow_partial`), double, or were never planned.
    """
    create_results(connection, run, files, answers, as_planned=as_planned)
    connection.execute(f"CREATE VIEW planned AS SELECT shard, row, sample FROM {read_parquet(run.requests)}")
    missing = _number(connection, "SELECT count(*) FROM planned ANTI JOIN results USING (shard, row, sample)")
    surplus = _number(connection, "SELECT count(*) - count(DISTINCT (shard, row, sample)) FROM results")
    unplanned = _number(connection, "SELECT count(*) FROM results ANTI JOIN planned USING (shard, row, sample)")
    if surplus or unplanned:
        raise IncompleteRunError(
            f"{count_text(surplus, 'result')} in {run.shown} {'is' if surplus == 1 else 'are'} double and {unplanned} "
            f"{'is' if unplanned == 1 else 'are'} of another plan; "
            f"{replan_remedy(run.root)}"
        )
    target = run.finish_scratch / "delivered.parquet"
    connection.execute(f"COPY ({query('delivered')}) TO {literal(target)} (FORMAT parquet, ROW_GROUP_SIZE 16384)")
    connection.execute(f"CREATE VIEW delivered AS SELECT * FROM {read_parquet(target)}")
    if missing and not allow_partial:
        raise IncompleteRunError(
            f"{count_text(missing, 'result')} {'is' if missing == 1 else 'are'} not in {run.shown}, although the "
            f"units are marked done; {replan_remedy(run.root)}"
        )
    return missing


def create_results(
    connection: duckdb.DuckDBPyConnection,
    run: RunDir,
    files: list[Path],
    answers: LongAnswers | None = None,
    *,
    as_planned: bool = False,
) -> None:
    """Create the views `results` (of result files) and `duplicates` (of the plan), which queries/delivered.sql joins.

    Args:
        answers: see `join_results`.
        as_planned: whether outputs have the plan's counts of shared tokens, as if no answer had been reused; else
            those of the results.
    """
    if not files:
        connection.register("no_results", RESULTS.schema.empty_table())
        rows = all_rows("no_results")
    elif answers is None:
        rows = all_rows(read_parquet(*files))
    else:
        rows = answers.set_apart(connection, files)
    planned = f"SELECT shard, row, sample, cached_tokens AS planned_tokens FROM {read_parquet(run.requests)}"
    if as_planned:
        connection.execute(f"CREATE VIEW results AS SELECT * FROM ({rows}) JOIN ({planned}) USING (shard, row, sample)")
    else:
        connection.execute(f"CREATE VIEW results AS SELECT *, cached_memory_tokens AS planned_tokens FROM ({rows})")
    connection.execute(f"CREATE VIEW duplicates AS SELECT * FROM {read_parquet(run.duplicates)}")


def output_rows(run: RunDir, shards: list[Shard]) -> str:
    """Return SQL for the output rows of consecutive shards (queries/output_rows.sql)."""
    return query(
        "output_rows",
        tokens=read_parquet(*(run.tokens(shard.index) for shard in shards)),
        first=shards[0].index,
        last=shards[-1].index,
        not_computed=literal(NOT_COMPUTED),
    )


def _number(connection: duckdb.DuckDBPyConnection, sql: str) -> int:
    # read to the end: an unfinished result would block the connection
    return int(connection.execute(sql).fetchall()[0][0])
