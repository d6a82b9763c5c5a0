"""The status of a run, read from its folder alone: on a login node, while other nodes work on it."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.checked_json import read_json
from batchinfer.data.parquet import read_rows
from batchinfer.manifest import Manifest
from batchinfer.progress import duration
from batchinfer.records import DamagedFileError
from batchinfer.run.heartbeat import SessionStatus, signs_of_life
from batchinfer.run.store.interface import Part, Storage
from batchinfer.run.store.watch import HOLDER, LEASE_S, is_over
from batchinfer.run.units.claims import done_mark, last_claim, lease_of, result_files
from batchinfer.run.units.planned_tokens import planned_tokens
from batchinfer.run.units.result_files import is_reused
from batchinfer.rundir import CLAIM, RunDir, read_state
from batchinfer.status.result_counts import (
    ResultFile,
    left_s,
    read_result_file,
    requests_per_s,
    step_tokens_per_s,
    token_counts,
    tokens_per_s,
)
from batchinfer.submit.launcher import count_live_tasks
from batchinfer.whole_files import file_system_s


@dataclass(frozen=True, slots=True)
class Holder:
    """The worker that holds a unit."""

    unit: int
    node: str
    process: str  # name of the process on that node
    task: str | None  # name in the cluster
    restarts: int  # of the task
    held_s: float  # since the claim
    silent_s: float  # since the last renewal of the lease
    requests: int
    requests_done: int  # durable


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a run; `status --json` prints these names."""

    run: str
    state: str  # of the run folder: 'planning', 'planned', 'finished' or 'partial'
    # 'planning'; 'planned': no unit was claimed yet; 'running': a worker holds a unit; 'interrupted': units are left,
    # but no worker holds one; 'computed': all units are done, `finish` is next; 'finished'; 'partial'
    activity: str
    workers: int = 0  # processes that hold units
    units: int = 0
    units_done: int = 0
    units_running: int = 0
    units_waiting: int = 0
    units_failed: int = 0  # units with failed requests
    rows: int = 0  # output rows
    rows_bad: int = 0  # rows that the plan found to be bad
    requests: int = 0  # to compute
    requests_done: int = 0  # durable, failed ones included
    requests_failed: int = 0
    work: int = 0  # prompt tokens to compute and tokens that may be generated, by the plan
    work_done: float = 0.0  # of `work`, by the share of durable requests in each unit
    # Totals: actual tokens of durable requests, and expected tokens of the others; without a forecast of answer lengths
    # the expected output is the limit. Done: tokens of durable requests, and further tokens of live sessions.
    prompt_tokens: int = 0
    prompt_tokens_done: int = 0
    output_tokens: int = 0
    output_tokens_done: int = 0
    tokens_per_s: float | None = None  # recent speed of the model; None while no worker is alive
    requests_per_s: float | None = None
    left_s: float | None = None  # by the plan and the measured speed; None: not known
    launcher: str | None = None  # 'Slurm', 'Kubernetes' or 'Ray'
    tasks_running: int | None = None  # None if the cluster cannot be asked, or nothing was submitted
    tasks_waiting: int | None = None
    running: list[Holder] = field(default_factory=list)
    sessions: list[SessionStatus] = field(default_factory=list)  # live commands with their progress
    problems: list[str] = field(default_factory=list)


STATUS_PARTS: tuple[Part, ...] = ("state", "plan", "results", "claims", "stats", "signs", "sent")


class StatusReader:
    """Repeated reading of a run's status; final files are read once.

    Attributes:
        counted: the result files that counted in the last status.
        damaged: the damaged files that it found, with their reasons.

    With `checks_results` result files are compared with their digests, and so read whole.
    """

    def __init__(self, run: RunDir, storage: Storage | None = None, *, checks_results: bool = False) -> None:
        self._run, self._storage, self._checks_results = run, storage, checks_results
        self.counted: list[Path] = []
        self.damaged: dict[Path, str] = {}
        self._units: list[dict[str, Any]] = []  # read once the plan is complete
        self._files: dict[Path, ResultFile] = {}
        self._done: dict[int, list[Path]] = {}  # unit -> its files

    def read(self) -> Status:
        """Read the run's status now.

        Raises:
            ConfigError: a file of the run folder is missing or damaged.
        """
        if self._storage is not None:
            self._storage.fetch(*STATUS_PARTS)
        state = read_state(self._run)
        sessions = [session for session in signs_of_life(self._run).values() if session.may_live]
        if state["state"] == "planning":
            return Status(run=self._run.shown, state="planning", activity="planning", sessions=sessions)
        if not self._units:
            self._units = read_rows(self._run.units, Manifest(self._run.root, state.get("files")))
        now_s = file_system_s(self._run.root)
        self.damaged, self.counted = {}, []
        holders, silent = list[Holder](), list[Holder]()
        finished: list[list[ResultFile]] = []
        was_begun = False
        for row in self._units:
            unit = row["unit"]
            files = self._done_files(unit)
            if files is None:
                claim = last_claim(self._run, unit)
                files = [] if claim is None else result_files(claim)
                is_offered = bool(files) and all(map(is_reused, files))  # by the plan
                was_begun = was_begun or (claim is not None and not is_offered)
                holder = None if claim is None else self._holder(row, claim, files, now_s)
                if holder is not None:
                    (silent if holder.silent_s > LEASE_S else holders).append(holder)
            finished.append(self._count(files))
        return self._status(state, finished, holders, silent, sessions, now_s, was_begun=was_begun)

    def _status(
        self,
        state: dict[str, Any],
        finished: list[list[ResultFile]],
        holders: list[Holder],
        silent: list[Holder],
        sessions: list[SessionStatus],
        now_s: float,
        *,
        was_begun: bool,
    ) -> Status:
        files_now = [file for files in finished for file in files]
        done, failed = sum(file.rows for file in files_now), sum(file.failed for file in files_now)
        total = sum(row["num_requests"] for row in self._units)
        rate = requests_per_s(files_now, now_s) if holders else None
        tasks, trouble = count_live_tasks(self._run)
        counts = state["counts"]
        workers = [session for session in sessions if session.command in ("work", "run")]
        speed = tokens_per_s(workers) or step_tokens_per_s(self._run, now_s, self.damaged) if holders else None
        is_running = bool(holders or workers) and len(self._done) < len(self._units)
        return Status(
            run=self._run.shown,
            state=state["state"],
            activity="running" if is_running else _idle(state["state"], was_begun, len(self._done), len(self._units)),
            workers=len({(holder.node, holder.process) for holder in holders}) or len(workers) * is_running,
            units=len(self._units),
            units_done=len(self._done),
            units_running=len(holders),
            units_waiting=len(self._units) - len(self._done) - len(holders),
            units_failed=sum(any(file.failed for file in files) for files in finished),
            rows=counts["rows"],
            rows_bad=counts["bad_rows"],
            requests=total,
            requests_done=done,
            requests_failed=failed,
            work=sum(map(_work, self._units)),
            work_done=sum(map(_work_done, self._units, finished)),
            **_token_counts(self._units, counts, finished, workers),
            tokens_per_s=speed,
            requests_per_s=rate,
            left_s=left_s(workers) or ((total - done) / rate if rate else None),
            launcher=None if tasks is None else tasks.launcher,
            tasks_running=None if tasks is None else tasks.running,
            tasks_waiting=None if tasks is None else tasks.waiting,
            running=holders,
            sessions=sessions,
            problems=_problems(state, silent, files_now, _failed_sessions(self._run), self._run)
            + [f"{path} is damaged: {reason}" for path, reason in self.damaged.items()]
            + trouble,
        )

    def newest_file(self) -> Path | None:
        """Return the newest result file that counted in the last status, None if there is none.

        Of files with equal dates, which object stores give in whole seconds, it is one of the last unit.
        """
        with_rows = (path for path in self.counted if self._files[path].rows)  # a retry may leave a file without rows
        return max(with_rows, key=lambda path: (self._files[path].written_s, path), default=None)

    def _done_files(self, unit: int) -> list[Path] | None:
        if unit in self._done and self._run.done(unit).exists():  # a retry opens units again
            return self._done[unit]
        self._done.pop(unit, None)
        try:
            mark = done_mark(self._run, unit)
        except DamagedFileError as error:
            self.damaged[error.path] = error.reason
            mark = None
        if mark is not None:
            self._done[unit] = list(mark.files)
        return self._done.get(unit)

    def _holder(self, row: dict[str, Any], claim: Path, files: list[Path], now_s: float) -> Holder | None:
        path = lease_of(claim)
        if path is None:  # the unit was released
            return None
        try:
            lease = read_json(path, *HOLDER)
        except DamagedFileError as error:
            if path.exists():  # else the worker has just ended
                self.damaged[path] = error.reason
            return None
        if is_over(lease):
            return None
        return Holder(
            unit=row["unit"],
            node=lease.get("node", lease["host"]),
            process=str(lease["process"]),
            task=lease.get("task"),
            restarts=lease.get("restarts", 0),
            held_s=max(0.0, now_s - (claim / CLAIM).stat().st_mtime),
            silent_s=max(0.0, now_s - path.stat().st_mtime),
            requests=row["num_requests"],
            requests_done=sum(self._file(file).rows for file in files),
        )

    def _count(self, files: list[Path]) -> list[ResultFile]:
        found = [self._file(path) for path in files]
        self.counted += (path for path in files if path not in self.damaged)
        return found

    def _file(self, path: Path) -> ResultFile:
        if path not in self._files:
            try:
                self._files[path] = read_result_file(path, is_checked=self._checks_results)
            except DamagedFileError as error:
                self.damaged[path] = error.reason
                return ResultFile(0, 0, 0.0)
        return self._files[path]


def _token_counts(
    units: list[dict[str, Any]], counts: dict[str, Any], finished: list[list[ResultFile]], workers: list[SessionStatus]
) -> dict[str, int]:
    rows_U = np.array([sum(file.rows for file in files) for files in finished], dtype=np.float64)
    share_left_U = 1 - rows_U / np.array([max(unit["num_requests"], 1) for unit in units])
    files = [(file.prompt_tokens, file.output_tokens) for of_unit in finished for file in of_unit]
    durable = np.array(files, dtype=np.float64).reshape(-1, 2).sum(axis=0)
    return token_counts(planned_tokens(units, counts), share_left_U, durable, workers)


def _work(unit: dict[str, Any]) -> int:
    """Return the planned work of a unit in tokens."""
    return int(unit["new_tokens"] + unit["max_output_tokens"])


def _work_done(unit: dict[str, Any], files: list[ResultFile]) -> float:
    return _work(unit) * sum(file.rows for file in files) / float(unit["num_requests"])


def _failed_sessions(run: RunDir) -> int:
    paths = (run.stats / "nodes").glob("*.parquet")
    return sum(row["state"] == "failed" and row["command"] == "work" for path in paths for row in read_rows(path))


def _idle(state: str, was_begun: bool, num_done: int, num_units: int) -> str:
    """Return the run's activity while no worker holds a unit, see Status."""
    if state in ("finished", "partial"):
        return state
    if num_done == num_units:
        return "computed"
    return "interrupted" if was_begun or num_done else "planned"


def _problems(
    state: dict[str, Any], silent: list[Holder], files: list[ResultFile], failed_sessions: int, run: RunDir
) -> list[str]:
    problems = [f"{shard['path']}: {shard['problem']}" for shard in state["shards"] if shard["problem"] is not None]
    problems += [
        f"unit {holder.unit}: {holder.node} has been silent for {duration(holder.silent_s)}; another worker may take it"
        for holder in silent
    ]
    if failed_sessions:
        problems.append(f"{failed_sessions} `work` commands failed; see their logs")
    errors = Counter[str]()
    for file in files:
        errors.update(dict(file.errors))
    problems += [f"{count} x {error}" for error, count in errors.most_common(3)]
    if errors:
        problems.append(f"`batchinfer retry {run.shown}` retries failed requests")
    return problems
