"""Output rows of a job that still runs, as soon as their results are durable."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import duckdb
import pyarrow as pa

from batchinfer.config import JobConfig
from batchinfer.data.inputs import with_schemas
from batchinfer.data.parquet import check_columns
from batchinfer.finish.join import HAS_ENDED, SORT_BYTES, create_results, query, sort_limit
from batchinfer.finish.long_answers import LongAnswers
from batchinfer.finish.outputs import OutputRows
from batchinfer.manifest import Manifest
from batchinfer.run.fingerprint import planned_tokenizer
from batchinfer.run.units.result_files import damage
from batchinfer.rundir import RunDir, read_state, shards_of_state

LOOK_S = 0.5  # least time between two reads of the folder
MOST_SHARE = 0.1  # largest share of the time that reading may take


class EarlyRows:
    """A reader of new output rows in a run folder in which another process works.

    A job with choices gives no early rows: a row needs the results of all its choices.
    """

    def __init__(self, run: RunDir, job: JobConfig) -> None:
        self._run, self._job = run, job
        self._seen: set[Path] = set()
        self._is_plan_checked = False
        self._next_look_s = 0.0

    def new(self) -> Iterator[tuple[int, pa.Table]]:
        """Yield (shard, rows as in outputs/) for new results. A row may come twice; bad rows do.

        Raises:
            DamagedFileError: a file of the plan is damaged.
        """
        if time.monotonic() < self._next_look_s or self._job.input.choices is not None:
            return
        started_s = time.monotonic()
        yield from self._rows(self._new_files())
        ended_s = time.monotonic()
        self._next_look_s = ended_s + max(LOOK_S, (ended_s - started_s) / MOST_SHARE)

    def _new_files(self) -> list[Path]:
        files = sorted(set(self._run.unit_folders.glob("*/*/part-*.parquet")) - self._seen)
        self._seen.update(files)
        return [path for path in files if damage(path) is None]  # the rows of a damaged file are computed again

    def _rows(self, files: list[Path]) -> Iterator[tuple[int, pa.Table]]:
        if not files:
            return
        state = read_state(self._run)
        shards = [shard for shard in with_schemas(shards_of_state(state), self._job.s3) if shard.problem is None]
        if not self._is_plan_checked:
            manifest = Manifest(self._run.root, state.get("files"))
            manifest.check(self._run.requests, self._run.duplicates)
            for shard in shards:
                check_columns(self._run.tokens(shard.index), manifest, ["id", "shard", "row", "n", "choices", "error"])
            self._is_plan_checked = True
        with (
            tempfile.TemporaryDirectory(prefix="batchinfer-") as spill,
            duckdb.connect(config={"memory_limit": sort_limit(SORT_BYTES), "temp_directory": spill}) as connection,
            closing(LongAnswers(Path(spill))) as answers,
        ):
            create_results(connection, self._run, files, answers)
            connection.execute(f"CREATE TABLE delivered AS {query('delivered')}")
            tokenizer = partial(planned_tokenizer, self._job, state["fingerprint"], self._run.root)
            rows = OutputRows(connection, self._run, self._job, shards, state, answers, tokenizer)
            for shard, tables in rows.by_shard(connection, shards, HAS_ENDED):
                for table in tables:
                    yield shard.index, table
