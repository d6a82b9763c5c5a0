"""Results of the ranks on disk: result files of claimed units, steps, counts of the KV store."""

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from msgspec.structs import astuple

from batchinfer.controller.units import result_table
from batchinfer.data.parquet import table_writer
from batchinfer.data.schemas.statistics import STATS_KV, STATS_STEPS
from batchinfer.protocol.messages import StepRecord
from batchinfer.records import Completion, RequestKey
from batchinfer.run.session import Session
from batchinfer.run.units.claims import Claim, UnitClaims
from batchinfer.run.units.result_files import result_keys, write_results
from batchinfer.run.units.step_journal import StepJournal
from batchinfer.rundir import RunDir


class Results:
    """Open units of this process and their finished requests."""

    def __init__(self, run: RunDir, session: Session, claims: UnitClaims) -> None:
        self._run, self._session, self._claims = run, session, claims
        self._open: dict[int, Claim] = {}
        self._missing: dict[int, int] = {}  # by unit: number of requests without a completion
        self._finished: dict[int, list[Completion]] = {}  # by unit: completions not yet on disk
        self._num_parts: dict[int, int] = {}
        self._written: list[tuple[Claim, Path]] = []  # result files that the store does not have yet
        self._steps: list[tuple[int, int, StepRecord]] = []  # rank, number, record
        self._journal = StepJournal(run, session.name)
        self._num_step_files = 0
        self._num_steps_of_rank: dict[int, int] = {}
        self._store_counts: dict[tuple[int, int], dict[str, float]] = {}  # by start and rank
        self._num_starts = 0
        self.last_commit_s = time.monotonic()

    def open_unit(self, claim: Claim, keys: set[RequestKey]) -> set[RequestKey]:
        """Open a claimed unit, and return its requests that no earlier claim has finished."""
        done = {key for path in claim.inherited for key in result_keys(path)}
        missing = keys - done
        self._open[claim.unit] = claim
        self._missing[claim.unit] = len(missing)
        self._num_parts[claim.unit] = 0
        if not missing:
            self.commit()
        return missing

    @property
    def open_units(self) -> set[int]:
        return set(self._open)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def add(self, completions: list[Completion]) -> bool:
        """Add finished requests; return whether they complete a unit, which should be committed."""
        for completion in completions:
            self._finished.setdefault(completion.unit, []).append(completion)
            self._missing[completion.unit] -= 1
        return any(self._missing[completion.unit] == 0 for completion in completions)

    def add_steps(self, rank: int, records: list[StepRecord]) -> None:
        """Add steps. Step numbers continue after a restart and are equal on all ranks of a group."""
        first = self._num_steps_of_rank.get(rank, 0)
        self._num_steps_of_rank[rank] = first + len(records)
        steps = [(rank, step, record) for step, record in enumerate(records, first)]
        self._steps += steps
        self._journal.add(steps)

    def set_store_counts(self, rank: int, counts: dict[str, float]) -> None:
        """Record the counts of a rank's KV store since the rank's start."""
        self._store_counts[self._num_starts, rank] = counts

    def ranks_ended(self) -> None:
        """Close the counts of this start, since restarted ranks count from zero."""
        self._num_starts += 1
        most_steps = max(self._num_steps_of_rank.values(), default=0)
        self._num_steps_of_rank = dict.fromkeys(self._num_steps_of_rank, most_steps)

    def check_run(self) -> None:
        """Check that the run folder still holds this run; see Session.check_run."""
        self._session.check_run()

    def commit(self) -> None:
        """Write finished requests to disk, then mark complete units done; continue where an error interrupted.

        Raises:
            ConfigError: a file cannot be written, or the run is gone.
        """
        self.check_run()
        self._send_written()
        for unit in list(self._finished):
            path = write_results(self._open[unit].folder, self._num_parts[unit], result_table(self._finished[unit]))
            self._written.append((self._open[unit], path))
            self._num_parts[unit] += 1
            del self._finished[unit]
            self._send_written()
        self._write_steps()
        self._write_store_counts()
        for unit in [unit for unit, missing in self._missing.items() if missing == 0]:
            self._claims.complete(self._open[unit])
            del self._open[unit], self._missing[unit]
        self._session.record("running")
        self.last_commit_s = time.monotonic()

    def _send_written(self) -> None:
        while self._written:
            self._claims.add(*self._written[0])
            del self._written[0]

    def _write_steps(self) -> None:
        if not self._steps:
            return
        target = self._run.session_stats("steps", self._session.name, self._num_step_files)
        ranks, numbers, records = zip(*self._steps, strict=True)
        names = StepRecord.__struct_fields__
        columns: dict[str, Any] = dict(zip(names, zip(*map(astuple, records), strict=True), strict=True))
        columns |= {"session": [self._session.name] * len(records), "rank": ranks, "step": numbers}
        with table_writer(target, STATS_STEPS.schema) as writer:
            writer.write_table(pa.table(columns, schema=STATS_STEPS.schema))
        self._steps.clear()
        self._journal.clear()
        self._num_step_files += 1

    def _write_store_counts(self) -> None:
        if not self._store_counts:
            return
        rows = [
            {"session": self._session.name, "rank": rank, "start": start, **counts}
            for (start, rank), counts in self._store_counts.items()
        ]
        with table_writer(self._run.session_stats("kv", self._session.name), STATS_KV.schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows, schema=STATS_KV.schema))
