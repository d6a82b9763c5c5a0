"""Results of the counted claims, joined with the plan: what is missing, what is double, and the rows to write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import duckdb

from batchinfer.controller.claims import last_claim, result_files, winning_claim
from batchinfer.data.duckdb_sql import literal, read_parquet
from batchinfer.data.parquet import read_rows
from batchinfer.data.schemas import RESULTS
from batchinfer.records import ConfigError, IncompleteRunError, Shard
from batchinfer.rundir import RunDir

SORT_MEMORY = "1GB"  # DuckDB spills to the run folder beyond this
NOT_COMPUTED = "not computed: the run was finished before this row was (--allow-partial)"


def query(name: str, **parts: str | int) -> str:
    """The SQL of queries/<name>.sql with its {parts}: numbers, and SQL made by data.duck."""
    text = (resources.files("batchinfer.finish") / "queries" / f"{name}.sql").read_text(encoding="utf-8")
    return text.format(**parts)


@contextmanager
def open_database(run: RunDir) -> Iterator[duckdb.DuckDBPyConnection]:
    """DuckDB for sorting and joining, with its scratch files in the run folder.

    Raises:
        ConfigError: a file of the run folder is damaged, or the disk is full.
    """
    try:
        run.finish_scratch.mkdir(parents=True, exist_ok=True)
        with duckdb.connect(
            config={"memory_limit": SORT_MEMORY, "temp_directory": str(run.finish_scratch / "spill")}
        ) as connection:
            yield connection
    except (duckdb.IOException, duckdb.InvalidInputException, duckdb.OutOfMemoryException) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"cannot finish {run.root}: {reason}; free space, or use another output.dir if a file is damaged"
        ) from None


def counted_claims(run: RunDir, *, allow_partial: bool) -> dict[int, Path]:
    """The claim that counts for each unit."""
    claims, missing = {}, []
    units = [row["unit"] for row in read_rows(run.units)]
    for unit in units:
        claim = winning_claim(run, unit)
        if claim is None:
            missing.append(unit)
            claim = last_claim(run, unit) if allow_partial else None
        if claim is not None:
            claims[unit] = claim
    if missing and not allow_partial:
        raise IncompleteRunError(
            f"{len(missing)} of {len(units)} work units in {run.root} are not done; run `batchinfer work {run.root}`, "
            "or finish with --allow-partial"
        )
    return claims


def join_results(
    connection: duckdb.DuckDBPyConnection, run: RunDir, claims: dict[int, Path], *, allow_partial: bool
) -> int:
    """Make the views `results` and `delivered` (queries/delivered.sql); returns the number of missing results.

    Raises:
        IncompleteRunError: results are missing (without `allow_partial`), double, or were never planned.
    """
    files = [path for claim in claims.values() for path in result_files(claim)]
    if files:
        connection.execute(f"CREATE VIEW results AS SELECT * FROM {read_parquet(*files)}")
    else:
        connection.register("no_results", RESULTS.schema.empty_table())
        connection.execute("CREATE VIEW results AS SELECT * FROM no_results")
    connection.execute(f"CREATE VIEW planned AS SELECT shard, row, sample FROM {read_parquet(run.requests)}")
    connection.execute(f"CREATE VIEW duplicates AS SELECT * FROM {read_parquet(run.duplicates)}")
    missing = _number(connection, "SELECT count(*) FROM planned ANTI JOIN results USING (shard, row, sample)")
    surplus = _number(connection, "SELECT count(*) - count(DISTINCT (shard, row, sample)) FROM results")
    unplanned = _number(connection, "SELECT count(*) FROM results ANTI JOIN planned USING (shard, row, sample)")
    if surplus or unplanned:
        raise IncompleteRunError(
            f"{surplus} results in {run.root} are double and {unplanned} were never planned; please report this fault"
        )
    target = run.finish_scratch / "delivered.parquet"
    connection.execute(f"COPY ({query('delivered')}) TO {literal(target)} (FORMAT parquet, ROW_GROUP_SIZE 16384)")
    connection.execute(f"CREATE VIEW delivered AS SELECT * FROM {read_parquet(target)}")
    if missing and not allow_partial:
        raise IncompleteRunError(_lost_results(connection, run, missing))
    return missing


def output_rows(run: RunDir, shards: list[Shard]) -> str:
    """SQL for the output rows of neighbouring shards (queries/output_rows.sql)."""
    return query(
        "output_rows",
        tokens=read_parquet(*(run.tokens(shard.index) for shard in shards)),
        first=shards[0].index,
        last=shards[-1].index,
        not_computed=literal(NOT_COMPUTED),
    )


def _lost_results(connection: duckdb.DuckDBPyConnection, run: RunDir, num_missing: int) -> str:
    """What to do about results that are gone although their units are marked done."""
    units = connection.execute(
        f"""
        SELECT DISTINCT unit FROM {read_parquet(run.requests)} ANTI JOIN results USING (shard, row, sample)
        ORDER BY unit LIMIT 3
        """
    ).fetchall()
    marks = ", ".join(str(run.done(unit)) for (unit,) in units)
    return (
        f"{num_missing} results are gone from {run.root}, although their units are marked done; "
        f"delete {marks} (and so on) and run `batchinfer work {run.root}`"
    )


def _number(connection: duckdb.DuckDBPyConnection, sql: str) -> int:
    # fetched to the end: an unfinished result would block the connection
    return int(connection.execute(sql).fetchall()[0][0])
