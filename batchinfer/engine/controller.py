"""Claims units, feeds the rank, commits what is finished. Called by `batchinfer work` and `batchinfer run`."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from batchinfer.config import JobConfig, load_job
from batchinfer.data.parquet import read_rows, table_writer
from batchinfer.data.schemas import RESULTS, STATS_EXPERTS, STATS_STEPS
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.engine.claims import Claim, Claims
from batchinfer.engine.units import kv_tokens, read_unit, result_keys, result_table
from batchinfer.fingerprint import check_same, model_fingerprint, settings_fingerprint
from batchinfer.progress import Progress, note
from batchinfer.records import (
    Completion,
    ConfigError,
    InterruptedRunError,
    Request,
)
from batchinfer.rundir import RunDir, read_json
from batchinfer.session import Session
from batchinfer.stop import StopSignal
from batchinfer.trace import Tracer

WAIT_S = 1.0  # between looks at units that others hold

if TYPE_CHECKING:
    from batchinfer.engine.worker import RankWorker, StepRecord


def work_on(run: RunDir, job: JobConfig, session: Session, stop: StopSignal, tracer: Tracer) -> None:
    """Compute all units of a planned run that nobody else holds.

    Raises:
        InterruptedRunError: a signal came; everything finished is committed.
        ModelError, RunMismatchError: the model folder cannot be loaded, or changed since the plan.
    """
    open_units = [row for row in read_rows(run.units) if not run.done(row["unit"]).exists()]
    if not open_units:
        return
    tokenizer = load_tokenizer(Path(job.model.path))
    _check_model(run, job, tokenizer.digest)
    from batchinfer.engine.worker import load_worker  # here, so that nothing imports torch before there is work

    session.num_ranks, session.device = 1, "cpu"
    most_tokens, largest_tokens = kv_tokens(run, open_units)
    worker = load_worker(job, tokenizer, most_tokens=most_tokens, largest_tokens=largest_tokens, tracer=tracer)
    total = sum(row["num_requests"] for row in open_units)
    with Claims(run) as claims, Progress("work", total, "requests") as progress:
        controller = Controller(run, job, session, stop, worker, claims, open_units, progress, tracer)
        stop.graceful = True
        try:
            _run_until_all_done(controller, worker, stop)
        finally:
            stop.graceful = False
            controller.commit()
    if stop.requested:
        raise InterruptedRunError(
            f"stopped; {progress.count:,} of {total:,} requests are done and kept; run the same command to go on"
        )


def _run_until_all_done(controller: Controller, worker: RankWorker, stop: StopSignal) -> None:
    """Work on every unit that can be had; wait for those that others hold, and take over what they give up."""
    told = False
    while not stop.requested:
        worker.run(controller)
        num_held = controller.num_not_done()
        if num_held == 0 or stop.requested:
            return
        if not told:
            note(f"{num_held} units are held by other workers; waiting for them")
            told = True
        time.sleep(WAIT_S)


class Controller:
    """The feed of one worker: units in, completions out, durable within `commit_seconds`."""

    def __init__(
        self,
        run: RunDir,
        job: JobConfig,
        session: Session,
        stop: StopSignal,
        worker: RankWorker,
        claims: Claims,
        units: list[dict[str, Any]],
        progress: Progress,
        tracer: Tracer,
    ) -> None:
        self._run, self._job, self._session, self._stop = run, job, session, stop
        self._worker, self._claims, self._progress, self._tracer = worker, claims, progress, tracer
        self._default = job.sampling.to_sampling()
        self._units = units
        self._open: dict[int, Claim] = {}
        self._claimed: set[int] = set()
        self._missing: dict[int, int] = {}  # unit -> requests without a completion
        self._finished: dict[int, list[Completion]] = {}  # unit -> completions not yet on disk
        self._num_parts: dict[int, int] = {}
        self._steps: list[StepRecord] = []
        self._num_step_files = 0
        self._last_commit = time.monotonic()
        self._recent_tokens = 0
        self._recent_since = time.monotonic()
        self._speed = ""

    def next_requests(self) -> list[Request]:
        """The requests of the next unit that can be claimed; empty when there is none now."""
        for place, row in enumerate(self._units):
            claim = None if row["unit"] in self._open else self._claims.try_claim(row["unit"])
            if claim is not None:
                # start looking behind this unit next time
                self._units = self._units[place + 1 :] + self._units[: place + 1]
                requests = self._open_unit(claim, row)
                if requests:
                    return requests
        return []

    def num_not_done(self) -> int:
        """Units that nobody has completed; those that others completed meanwhile count as progress."""
        done = [row for row in self._units if self._run.done(row["unit"]).exists()]
        self._units = [row for row in self._units if not self._run.done(row["unit"]).exists()]
        elsewhere = [row["num_requests"] for row in done if row["unit"] not in self._claimed]
        self._progress.advance(sum(elsewhere))
        return len(self._units)

    def take(self, completions: list[Completion], record: StepRecord) -> None:
        if self._session.first_prefill_s is None:
            self._session.first_prefill_s = record.start_s
            self._session.record("running")
        self._steps.append(record)
        for completion in completions:
            self._finished.setdefault(completion.unit, []).append(completion)
            self._missing[completion.unit] -= 1
        self._show(completions, record)
        unit_is_complete = any(self._missing[completion.unit] == 0 for completion in completions)
        if unit_is_complete or time.monotonic() - self._last_commit >= self._job.cluster.commit_seconds:
            self.commit()

    def stop_requested(self) -> bool:
        return self._stop.requested

    def commit(self) -> None:
        """Make everything finished durable, then mark complete units done."""
        with self._tracer.span("commit", "controller"):
            for unit, completions in self._finished.items():
                part = self._open[unit].folder / f"part-{self._num_parts[unit]:05d}.parquet"
                with table_writer(part, RESULTS.schema) as writer:
                    writer.write_table(result_table(completions))
                self._num_parts[unit] += 1
            self._finished.clear()
            self._write_steps()
            self._write_experts()
            for unit in [unit for unit, missing in self._missing.items() if missing == 0]:
                self._claims.complete(self._open.pop(unit))
                del self._missing[unit]
            self._session.record("running")
        self._last_commit = time.monotonic()

    def _open_unit(self, claim: Claim, row: dict[str, Any]) -> list[Request]:
        """The requests of a claimed unit that no earlier claim has finished."""
        done = {key for path in claim.inherited for key in result_keys(path)}
        requests = [request for request in read_unit(self._run, row, self._default) if request.key not in done]
        self._progress.advance(row["num_requests"] - len(requests))
        self._open[claim.unit] = claim
        self._claimed.add(claim.unit)
        self._missing[claim.unit] = len(requests)
        self._num_parts[claim.unit] = 0
        if not requests:
            self.commit()
        return requests

    def _show(self, completions: list[Completion], record: StepRecord) -> None:
        self._recent_tokens += record.new_tokens
        seconds = time.monotonic() - self._recent_since
        if seconds >= 1.0:
            self._speed = f"{self._recent_tokens / seconds:,.0f} tokens/s"
            self._recent_tokens, self._recent_since = 0, time.monotonic()
        self._progress.advance(len(completions), self._speed)

    def _write_steps(self) -> None:
        if not self._steps:
            return
        rows = [{"session": self._session.name, "rank": 0, **asdict(record)} for record in self._steps]
        target = self._run.session_stats("steps", self._session.name, self._num_step_files)
        with table_writer(target, STATS_STEPS.schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows, schema=STATS_STEPS.schema))
        self._steps.clear()
        self._num_step_files += 1

    def _write_experts(self) -> None:
        parts = []
        for phase, tokens in self._worker.expert_tokens.items():
            layers, experts = np.indices(tokens.shape)
            columns = {
                "session": pa.array([self._session.name] * tokens.size, pa.string()),
                "rank": np.zeros(tokens.size, dtype=np.int32),
                "phase": pa.array([phase] * tokens.size, pa.string()),
                "layer": self._worker.moe_layers[layers].reshape(-1).astype(np.int32),
                "expert": experts.reshape(-1).astype(np.int32),
                "tokens": tokens.reshape(-1),
            }
            parts.append(pa.table(columns, schema=STATS_EXPERTS.schema))
        with table_writer(self._run.session_stats("experts", self._session.name), STATS_EXPERTS.schema) as writer:
            writer.write_table(pa.concat_tables(parts))


def planned_run(target: Path, overrides: tuple[str, ...]) -> tuple[RunDir, JobConfig]:
    """The run folder and job behind a job file or a run folder.

    Raises:
        ConfigError: there is no such file or folder, or the job has no plan yet.
        RunMismatchError: the job's settings are not those of the plan.
    """
    if target.is_dir():
        run = RunDir(target.absolute())
        if not run.run_json.exists() or not run.job.exists():
            raise ConfigError(f"{target} is not a run folder of batchinfer; give a job file or a job's output.dir")
        # the folder itself counts, not the output.dir written in it: it may have been moved
        job = load_job(run.job, overrides)
    else:
        job = load_job(target, overrides)
        run = RunDir(Path(job.output.dir))
    if not run.run_json.exists() or read_json(run.run_json)["state"] == "planning":
        raise ConfigError(f"{run.root} has no complete plan yet; run `batchinfer plan {target}` first")
    check_same(read_json(run.run_json)["fingerprint"], settings_fingerprint(job), run.root)
    return run, job


def _check_model(run: RunDir, job: JobConfig, tokenizer_digest: str) -> None:
    """Refuse to compute with another model than the plan was made for."""
    recorded = read_json(run.run_json)["fingerprint"]
    check_same(recorded, model_fingerprint(job, tokenizer_digest), run.root)
