"""Statistics of an unfinished run's durable results, written to another folder for the run's report."""

from collections import defaultdict
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq

from batchinfer.config import JobConfig
from batchinfer.data.duckdb_sql import literal
from batchinfer.data.schemas.statistics import STATS_REQUESTS
from batchinfer.finish.join import HAS_ENDED, create_results, open_database, output_rows, query
from batchinfer.finish.long_answers import LongAnswers
from batchinfer.finish.statistics import write_request_stats, write_run_stats
from batchinfer.manifest import Manifest
from batchinfer.records import Shard
from batchinfer.run.equality import run_equality
from batchinfer.rundir import RunDir, read_state, shards_of_state

# of an output row, without the text, which may be large and is shown by `peek`
COLUMNS = "row, sample, id, status, NULL::VARCHAR AS text, error, finish_reason, completion_tokens"


def write_so_far(run: RunDir, job: JobConfig, files: list[Path], folder: Path) -> int:
    """Write statistics and outputs like those of a finished run, for the rows that have ended.

    The run folder is only read, because other processes may work in it. Steps that a session has not committed yet are
    missing.

    Args:
        files: the result files that count.
        folder: the folder to create, named like the run.

    Returns:
        The number of output rows that have ended.

    Raises:
        ConfigError: a file of the run is damaged, or the folder cannot be written.
    """
    state, target = read_state(run), RunDir(folder)
    target.stats.mkdir(parents=True)
    for table in (path for path in run.stats.glob("*") if path.is_dir()):
        (target.stats / table.name).symlink_to(table.absolute())
    for part in (run.requests.parent, run.tokens(0).parent):
        (target.root / part.name).symlink_to(part.absolute())
    is_planned = state["state"] != "planning"
    shards = shards_of_state(state) if is_planned else []
    num_rows = 0
    if is_planned:
        planned = (run.requests, run.duplicates, *(run.tokens(shard.index) for shard in shards if not shard.problem))
        Manifest(run.root, state.get("files")).check(*planned)
        num_rows = _write_rows(run, job, target, shards, files)
    else:
        pq.write_table(STATS_REQUESTS.schema.empty_table(), target.stats_file("requests"))
    counts = state["counts"] if is_planned else defaultdict(lambda: None)
    write_run_stats(target, job, shards, counts, asdict(run_equality(run, state, files)))
    return num_rows


def _write_rows(run: RunDir, job: JobConfig, target: RunDir, shards: list[Shard], files: list[Path]) -> int:
    """Write stats/requests.parquet and outputs/ for the rows that have ended; return the number of rows."""
    num_rows = 0
    rows = "samples" if job.input.choices is None else "choices"
    with (
        open_database(run, "report", target.finish_scratch) as connection,
        closing(LongAnswers(target.finish_scratch, keeps=False)) as answers,  # COLUMNS has no text of answers
    ):
        create_results(connection, run, files, answers)
        connection.execute(f"CREATE VIEW delivered AS {query('delivered')}")
        write_request_stats(connection, target, shards, HAS_ENDED)
        for shard in (shard for shard in shards if shard.problem is None):
            path = target.output(shard.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            ended = f"SELECT {COLUMNS} FROM ({query(rows, output_rows=output_rows(target, [shard]))}) WHERE {HAS_ENDED}"
            copied = connection.execute(f"COPY ({ended}) TO {literal(path)} (FORMAT parquet)").fetchall()
            num_rows += copied[0][0]
    return num_rows
