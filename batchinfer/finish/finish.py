"""From durable results to outputs and statistics: every input row once, in input order."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer import __version__
from batchinfer.config import JobConfig
from batchinfer.controller.claims import last_claim, num_claims, result_files, winning_claim
from batchinfer.controller.step_journal import keep_lost_steps
from batchinfer.data.duck import literal, read_parquet
from batchinfer.data.expert_tables import read_expert_tables
from batchinfer.data.parquet import kept_fields, own_file, read_rows, table_writer
from batchinfer.data.schemas import PREDICTIONS, RESULTS, STATS_REQUESTS, STATS_RUN, STATS_UNITS, output_schema
from batchinfer.data.shards import refuse_changed
from batchinfer.finish.kept_columns import KeptRows
from batchinfer.progress import Progress, note
from batchinfer.records import BatchinferError, ConfigError, ExitCode, IncompleteRunError, Shard
from batchinfer.run.equal_rows import EqualRows, together
from batchinfer.run.lock import locked
from batchinfer.run.publish import publish_run
from batchinfer.rundir import RunDir, publish_json, published, read_json

SORT_MEMORY = "1GB"  # DuckDB spills to the run folder beyond this
BATCH_ROWS = 4096
NOT_COMPUTED = "not computed: the run was finished before this row was (--allow-partial)"


@dataclass(frozen=True, slots=True)
class Finished:
    """What finish wrote."""

    num_rows: int
    num_errors: int
    num_missing: int  # rows not computed, with --allow-partial
    unreadable: tuple[str, ...]  # paths of shards without outputs

    @property
    def exit_code(self) -> int:
        return ExitCode.ROW_ERRORS if self.num_errors or self.unreadable else ExitCode.OK


def finish_run(run: RunDir, job: JobConfig, *, allow_partial: bool = False) -> Finished:
    """Check that no row is missing or double, then write outputs/ and stats/, and publish them if the job says so.

    Raises:
        IncompleteRunError: rows are missing (without `allow_partial`), or a result stands twice.
        RunMismatchError: an input shard is not the file that was planned; or output.publish is another job's.
        StoreError: an object store does not answer or refuses to.
    """
    with _scratch(run, is_last=not allow_partial):
        result = _finish(run, job, allow_partial=allow_partial)
        if job.output.publish is not None:
            _publish(run, job, result)
    return result


def _publish(run: RunDir, job: JobConfig, result: Finished) -> None:
    try:
        num_objects = publish_run(run, job, asdict(result))
    except BatchinferError as error:
        raise type(error)(
            f"{error}; the results are all in {run.outputs}: run `batchinfer finish {run.root}` to publish them"
        ) from None
    note(
        f"{num_objects:,} files put into {job.output.publish}" if num_objects else f"{job.output.publish} is up to date"
    )


def _finish(run: RunDir, job: JobConfig, *, allow_partial: bool) -> Finished:
    state = read_json(run.run_json)
    shards = [Shard(**shard) for shard in state["shards"]]
    if state["state"] == "finished" and _is_written(run, shards):
        _write_run(run, job, shards, state["counts"])  # prices may have changed
        return Finished(**{**state["finished"], "unreadable": tuple(state["finished"]["unreadable"])})
    refuse_changed(shards, job.s3)
    claims = _claims(run, allow_partial)
    with _database(run) as connection:
        num_missing = _load_results(connection, run, claims)
        if num_missing and not allow_partial:
            raise IncompleteRunError(_lost_results(connection, run, num_missing))
        expected = state["counts"]["rows"]
        num_rows, num_errors = _write_outputs(
            connection, run, job, shards, pa.type_for_alias(state["id_type"]), expected
        )
        _write_stats(connection, run, shards, claims)
    keep_lost_steps(run)
    _write_run(run, job, shards, state["counts"])
    unreadable = tuple(shard.path for shard in shards if shard.problem is not None)
    result = Finished(num_rows, num_errors, num_missing, unreadable)
    finished = {**asdict(result), "unreadable": list(unreadable)}
    now = "partial" if num_missing else "finished"
    publish_json(run.run_json, {**state, "state": now, "finished": finished, **_equality(run)})
    return result


@contextmanager
def _scratch(run: RunDir, *, is_last: bool) -> Iterator[None]:
    """One finish at a time, with an empty scratch folder that is gone afterwards.

    Args:
        is_last: whether nobody can be working any more once this goes well. What dead workers left behind goes, too.
    """
    with locked(run, doing="finish this run"):
        shutil.rmtree(run.finish_scratch, ignore_errors=True)
        try:
            yield
            if is_last:
                shutil.rmtree(run.work, ignore_errors=True)
        finally:
            shutil.rmtree(run.finish_scratch, ignore_errors=True)
            with suppress(OSError):  # others have something in it
                run.work.rmdir()


def _is_written(run: RunDir, shards: list[Shard]) -> bool:
    outputs = all(run.output(shard.name).exists() for shard in shards if shard.problem is None)
    return outputs and all(run.stats_file(table).exists() for table in ("requests", "units", "run"))


def _claims(run: RunDir, allow_partial: bool) -> dict[int, Path]:
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


@contextmanager
def _database(run: RunDir) -> Iterator[duckdb.DuckDBPyConnection]:
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


def _load_results(connection: duckdb.DuckDBPyConnection, run: RunDir, claims: dict[int, Path]) -> int:
    """Make the view `delivered` (one row per computed or duplicate request, sorted); returns how many are missing."""
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
            f"{surplus} results in {run.root} stand twice and {unplanned} were never planned; please report this fault"
        )
    target = run.finish_scratch / "delivered.parquet"
    connection.execute(
        f"""
        COPY (
            SELECT *, false AS is_duplicate FROM results
            UNION ALL BY NAME
            SELECT results.* REPLACE (duplicates.shard AS shard, duplicates.row AS row, duplicates.sample AS sample),
                   true AS is_duplicate
            FROM duplicates JOIN results
              ON results.shard = of_shard AND results.row = of_row AND results.sample = of_sample
            ORDER BY shard, row, sample
        ) TO {literal(target)} (FORMAT parquet, ROW_GROUP_SIZE 16384)
        """
    )
    connection.execute(f"CREATE VIEW delivered AS SELECT * FROM {read_parquet(target)}")
    return missing


def _output_rows(run: RunDir, shards: list[Shard]) -> str:
    """SQL for the output rows of some shards with all columns of outputs and stats/requests, in no order."""
    tokens = read_parquet(*(run.tokens(shard.index) for shard in shards))
    return f"""
        SELECT wanted.shard, wanted.row, wanted.sample, wanted.id,
               coalesce(delivered.status, 'error') AS status,
               coalesce(wanted.error, delivered.error,
                        CASE WHEN delivered.status IS NULL THEN {literal(NOT_COMPUTED)} END) AS error,
               delivered.text, delivered.token_ids, coalesce(delivered.finish_reason, 'error') AS finish_reason,
               delivered.stop_reason, coalesce(delivered.prompt_tokens, 0) AS prompt_tokens,
               CASE WHEN is_duplicate THEN 0 ELSE coalesce(cached_memory_tokens, 0) END AS cached_memory_tokens,
               CASE WHEN is_duplicate THEN 0 ELSE coalesce(cached_disk_tokens, 0) END AS cached_disk_tokens,
               CASE WHEN is_duplicate THEN delivered.prompt_tokens ELSE 0 END AS cached_duplicate_tokens,
               CASE WHEN is_duplicate THEN 0 ELSE coalesce(replicated_tokens, 0) END AS replicated_tokens,
               coalesce(delivered.completion_tokens, 0) AS completion_tokens,
               CASE WHEN is_duplicate THEN 0 ELSE coalesce(delivered.completion_tokens, 0) END AS generated_tokens,
               CASE WHEN is_duplicate THEN 0 ELSE coalesce(delivered.kv_tokens_sum, 0) END AS kv_tokens_sum,
               delivered.logprobs, delivered.unit,
               CASE WHEN NOT is_duplicate THEN admitted_s END AS admitted_s,
               CASE WHEN NOT is_duplicate THEN first_token_s END AS first_token_s,
               CASE WHEN NOT is_duplicate THEN finished_s END AS finished_s
        FROM (SELECT shard, row, id, error, unnest(range(n))::INTEGER AS sample FROM {tokens}) AS wanted
        LEFT JOIN (
            SELECT * FROM delivered WHERE shard BETWEEN {shards[0].index} AND {shards[-1].index}
        ) AS delivered USING (shard, row, sample)
    """


def _write_outputs(
    connection: duckdb.DuckDBPyConnection,
    run: RunDir,
    job: JobConfig,
    shards: list[Shard],
    id_type: pa.DataType,
    expected: int,
) -> tuple[int, int]:
    """Write outputs/<name> for every readable shard; returns the number of rows and of error rows.

    Args:
        expected: output rows that the plan counted.
    """
    readable = [shard for shard in shards if shard.problem is None]
    kept = kept_fields(shards, job.output.keep_columns, job.s3)
    schema = output_schema(id_type, kept)
    num_rows = num_errors = 0
    with Progress("finish", expected, "rows") as progress:
        for shard in readable:
            reader = _output_reader(connection, run, shard, schema, kept)
            kept_rows = KeptRows(shard, kept, job.s3)
            with (
                published(run.output(shard.name), scratch=run.finish_scratch) as temporary,
                pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
            ):
                for batch in reader:
                    rows = batch["row"]
                    table = pa.table([*batch.columns, *kept_rows.take(rows)], schema=schema)
                    writer.write_table(table)
                    num_rows += len(table)
                    num_errors += sum(status == "error" for status in batch["status"].to_pylist())
                    progress.advance(len(table))
    if num_rows != expected:
        raise IncompleteRunError(f"{expected} rows were asked for, but {num_rows} written; please report this fault")
    return num_rows, num_errors


def _output_reader(
    connection: duckdb.DuckDBPyConnection, run: RunDir, shard: Shard, schema: pa.Schema, kept: list[pa.Field]
) -> Iterator[pa.RecordBatch]:
    """One shard's output rows in order, without the kept columns."""
    own = pa.schema(list(schema)[: len(schema) - len(kept)])
    reader = connection.sql(
        f"""
        SELECT {"id::BIGINT" if own.field("id").type == pa.int64() else "id"} AS id, row, sample, status, error, text,
               token_ids, finish_reason, stop_reason, prompt_tokens,
               cached_memory_tokens + cached_disk_tokens + cached_duplicate_tokens AS cached_tokens,
               completion_tokens, logprobs
        FROM ({_output_rows(run, [shard])}) ORDER BY row, sample
        """
    ).to_arrow_reader(BATCH_ROWS)
    for batch in reader:
        yield batch.cast(own)


def _write_stats(
    connection: duckdb.DuckDBPyConnection, run: RunDir, shards: list[Shard], claims: dict[int, Path]
) -> None:
    """Write stats/{requests,units}.parquet; steps, experts and nodes were written while working."""
    readable = [shard for shard in shards if shard.problem is None]
    names = ", ".join(STATS_REQUESTS.schema.names)
    with published(run.stats_file("requests"), scratch=run.finish_scratch) as temporary:
        connection.execute(
            f"COPY (SELECT {names} FROM ({_output_rows(run, readable)}) ORDER BY shard, row, sample) "
            f"TO {literal(temporary)} (FORMAT parquet)"
        )
    claim_rows = [
        {"unit": unit, "claim": claim.name, "num_claims": num_claims(run, unit)} for unit, claim in claims.items()
    ]
    claim_schema = pa.schema([STATS_UNITS.schema.field(name) for name in ("unit", "claim", "num_claims")])
    connection.register("claims", pa.Table.from_pylist(claim_rows, schema=claim_schema))
    rows = connection.sql(
        f"""
        SELECT unit, any_value(planned.num_requests) AS num_requests, any_value(planned.prompt_tokens) AS prompt_tokens,
               any_value(planned.new_tokens) AS new_tokens,
               coalesce(sum(results.prompt_tokens - cached_memory_tokens - cached_disk_tokens), 0) AS computed_tokens,
               coalesce(sum(completion_tokens), 0) AS completion_tokens,
               coalesce(any_value(num_claims), 0) AS num_claims, any_value(claim) AS claim,
               min(admitted_s) AS started_s, max(finished_s) AS finished_s
        FROM {read_parquet(run.units)} AS planned LEFT JOIN claims USING (unit) LEFT JOIN results USING (unit)
        GROUP BY unit ORDER BY unit
        """
    ).to_arrow_table()
    with table_writer(run.stats_file("units"), STATS_UNITS.schema) as writer:
        writer.write_table(rows.select(STATS_UNITS.schema.names).cast(STATS_UNITS.schema))


def _write_run(run: RunDir, job: JobConfig, shards: list[Shard], counts: dict[str, Any]) -> None:
    """Write stats/run.parquet, the last file of a run: the report takes it for the sign that the run is finished."""
    row = {
        "run": run.root.name,
        "version": __version__,
        "model": job.model.path,
        "dtype": job.model.dtype,
        "finished_s": time.time(),
        "num_shards": len(shards),
        "unreadable_shards": sum(shard.problem is not None for shard in shards),
        "input_rows": counts["input_rows"],
        "rows": counts["rows"],
        "distinct_tokens": counts["distinct_tokens"],
        "replicated_tokens": _replicated_tokens(run),
        "predicted_computed_tokens": counts["computed_tokens"],
        **{f"predicted_{name}": counts[name] for name, _, _ in PREDICTIONS},
        **_expert_prediction(run),
        **_equality(run),
        **job.pricing.model_dump(),
    }
    with table_writer(run.stats_file("run"), STATS_RUN.schema) as writer:
        writer.write_table(pa.Table.from_pylist([row], schema=STATS_RUN.schema))


def _equality(run: RunDir) -> dict[str, Any]:
    """Whether rows have the same bits however they were batched, by all sessions that had ranks, and where they ran."""
    sessions = [read_rows(path)[0] for path in sorted((run.stats / "nodes").glob("*.parquet"))]
    names = [field.name for field in fields(EqualRows)]
    # a session of an earlier version may have computed and says nothing of it
    said = [
        EqualRows(**{name: session.get(name) for name in names})
        for session in sessions
        if session.get("processor") is not None or session["first_prefill_s"] is not None
    ]
    return asdict(together(said))


def _expert_prediction(run: RunDir) -> dict[str, float | None]:
    """How even the experts' work is to be by the placement that the plan, or the engine after a unit, has made."""
    tables = read_expert_tables(run).values()
    tokens = sum(float(group.load_of_slot.sum()) for group in tables)
    if not tokens:
        return {"predicted_expert_max_over_mean": None, "predicted_expert_bound": None}
    weighted = [(float(group.load_of_slot.sum()) / tokens, group) for group in tables]
    return {
        "predicted_expert_max_over_mean": sum(weight * group.max_over_mean for weight, group in weighted),
        "predicted_expert_bound": sum(weight * group.bound_over_mean for weight, group in weighted),
    }


def _replicated_tokens(run: RunDir) -> int:
    """Prompt tokens that delivered ok rows computed again on purpose; stats/requests has 0 for duplicates."""
    path, total = run.stats_file("requests"), 0
    with own_file(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=["status", "replicated_tokens"]):
            delivered = pc.equal(batch["status"], "ok")
            total += pc.sum(batch["replicated_tokens"].filter(delivered)).as_py() or 0
    return total


def _number(connection: duckdb.DuckDBPyConnection, sql: str) -> int:
    # fetched to the end: an unfinished result would block the connection
    return int(connection.execute(sql).fetchall()[0][0])
