"""How far a run is, from its folder alone: on a login node, while others work on it."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.checked_json import read_json
from batchinfer.controller.claims import done_mark, last_claim, result_files
from batchinfer.controller.lease_watch import LEASE_S, is_over
from batchinfer.controller.planned_tokens import planned_tokens
from batchinfer.data.parquet import own_file, read_rows, sealed_table
from batchinfer.manifest import Manifest
from batchinfer.progress import duration
from batchinfer.records import ConfigError, DamagedFileError
from batchinfer.run.heartbeat import Sign, signs_of_life
from batchinfer.run.storage import Part, Storage
from batchinfer.rundir import RunDir, read_state
from batchinfer.slurm import client, submit
from batchinfer.slurm.token_counts import left_s, token_counts, tokens_per_s
from batchinfer.submit.k8s import tasks as k8s
from batchinfer.submit.live import LiveTasks
from batchinfer.submit.ray import client as ray
from batchinfer.submit.records import last_launcher
from batchinfer.whole_files import file_system_s

WINDOW_S = 300.0  # speeds are those of the last minutes
MOST_ERRORS = 100  # different ones that are remembered of a file: three of all are told
# why tasks wait when nothing is wrong
USUAL_REASONS = {"None", "Resources", "Priority", "JobArrayTaskLimit", "BeginTime", "Dependency"}


@dataclass(frozen=True, slots=True)
class Holder:
    """Who works on a unit."""

    unit: int
    node: str
    process: str  # its name on that node
    task: str | None  # of a cluster
    restarts: int  # of that task
    held_s: float  # since it was claimed
    silent_s: float  # since the lease was renewed
    requests: int
    requests_done: int  # durable


@dataclass(frozen=True, slots=True)
class Status:
    """How far a run is; `status --json` prints these names."""

    run: str
    state: str  # of the run folder: 'planning', 'planned', 'finished' or 'partial'
    # 'planning'; 'planned': nobody has begun to work; 'running': somebody holds a unit; 'interrupted': units are left
    # and nobody holds one any more; 'computed': all units are done, `finish` is next; 'finished'; 'partial'
    activity: str
    workers: int = 0  # processes that hold units
    units: int = 0
    units_done: int = 0
    units_running: int = 0
    units_waiting: int = 0
    units_failed: int = 0  # units with failed requests
    rows: int = 0  # output rows
    rows_bad: int = 0  # of these, error rows since the plan
    requests: int = 0  # to compute
    requests_done: int = 0  # durable, the failed ones too
    requests_failed: int = 0
    work: int = 0  # prompt tokens to compute and tokens that may be generated, by the plan
    work_done: float = 0.0  # of it, by the share of each unit's requests that is durable
    # Planned: of requests that are done what they took, of the others what the plan expects; output tokens are
    # expected at their limits where nobody knows how long answers are. Done are the tokens of requests that are
    # durable, and what live sessions have computed beyond these.
    prompt_tokens: int = 0
    prompt_tokens_done: int = 0
    output_tokens: int = 0
    output_tokens_done: int = 0
    tokens_per_s: float | None = None  # run through the model, lately; None while nobody works
    requests_per_s: float | None = None
    left_s: float | None = None  # by the plan and what is measured; None: not known
    launcher: str | None = None  # 'Slurm', 'Kubernetes' or 'Ray', where the tasks below are
    tasks_running: int | None = None  # None where it cannot be asked, or nothing was submitted
    tasks_waiting: int | None = None
    running: list[Holder] = field(default_factory=list)
    sessions: list[Sign] = field(default_factory=list)  # commands that are alive, and what each of them is doing
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _File:
    """A file of results, which never changes."""

    rows: int
    failed: int
    written_s: float
    prompt_tokens: int = 0  # computed for its rows
    output_tokens: int = 0
    errors: tuple[tuple[str, int], ...] = ()  # sentences, and how many rows have each


STATUS_PARTS: tuple[Part, ...] = ("state", "plan", "results", "claims", "stats", "signs", "sent")


class StatusReader:
    """Reads a run's status again and again; what cannot change any more is read once.

    Attributes:
        counted: the result files that counted when it was last read.
    """

    def __init__(self, run: RunDir, storage: Storage | None = None) -> None:
        self._run, self._storage = run, storage
        self.counted: list[Path] = []
        self._units: list[dict[str, Any]] = []  # read when the plan is complete
        self._files: dict[Path, _File] = {}
        self._damaged: dict[Path, str] = {}  # and why
        self._done: dict[int, list[Path]] = {}  # unit -> its files

    def read(self) -> Status:
        """The status now.

        Raises:
            ConfigError: a file of the run folder is missing or damaged.
        """
        if self._storage is not None:
            self._storage.fetch(*STATUS_PARTS)
        state = read_state(self._run)
        sessions = [sign for sign in signs_of_life(self._run).values() if sign.may_live]
        if state["state"] == "planning":
            return Status(run=self._run.shown, state="planning", activity="planning", sessions=sessions)
        if not self._units:
            self._units = read_rows(self._run.units, Manifest(self._run.root, state.get("files")))
        now_s = file_system_s(self._run.root)
        self._damaged, self.counted = {}, []
        holders, silent = list[Holder](), list[Holder]()
        finished: list[list[_File]] = []
        was_begun = False
        for row in self._units:
            unit = row["unit"]
            files = self._done_files(unit)
            if files is None:
                claim = last_claim(self._run, unit)
                was_begun = was_begun or claim is not None
                files = [] if claim is None else result_files(claim)
                holder = None if claim is None else self._holder(row, claim, files, now_s)
                if holder is not None:
                    (silent if holder.silent_s > LEASE_S else holders).append(holder)
            finished.append(self._count(files))
        return self._status(state, finished, holders, silent, sessions, now_s, was_begun=was_begun)

    def _status(
        self,
        state: dict[str, Any],
        finished: list[list[_File]],
        holders: list[Holder],
        silent: list[Holder],
        sessions: list[Sign],
        now_s: float,
        *,
        was_begun: bool,
    ) -> Status:
        files_now = [file for files in finished for file in files]
        done, failed = sum(file.rows for file in files_now), sum(file.failed for file in files_now)
        total = sum(row["num_requests"] for row in self._units)
        rate = _rate(files_now, now_s) if holders else None
        tasks, trouble = _live_tasks(self._run)
        counts = state["counts"]
        workers = [sign for sign in sessions if sign.command in ("work", "run")]
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
            tokens_per_s=tokens_per_s(workers) or _tokens_per_s(self._run, now_s, self._damaged) if holders else None,
            requests_per_s=rate,
            left_s=left_s(workers) or ((total - done) / rate if rate else None),
            launcher=None if tasks is None else tasks.launcher,
            tasks_running=None if tasks is None else tasks.running,
            tasks_waiting=None if tasks is None else tasks.waiting,
            running=holders,
            sessions=sessions,
            problems=_problems(state, silent, files_now, _failed_sessions(self._run), self._run)
            + [f"{path} is damaged: {reason}" for path, reason in self._damaged.items()]
            + trouble,
        )

    def newest_file(self) -> Path | None:
        """Of the results that counted when it was last read, those that became durable last; None: there are none."""
        with_rows = (path for path in self.counted if self._files[path].rows)  # a retry may leave a file without
        return max(with_rows, key=lambda path: self._files[path].written_s, default=None)

    def _done_files(self, unit: int) -> list[Path] | None:
        if unit in self._done and self._run.done(unit).exists():  # a retry opens units again
            return self._done[unit]
        self._done.pop(unit, None)
        try:
            mark = done_mark(self._run, unit)
        except DamagedFileError as error:
            self._damaged[error.path] = error.reason
            mark = None
        if mark is not None:
            self._done[unit] = list(mark.files)
        return self._done.get(unit)

    def _holder(self, row: dict[str, Any], claim: Path, files: list[Path], now_s: float) -> Holder | None:
        path = claim / "lease.json"
        try:
            lease = read_json(path, "released", "host")
        except DamagedFileError as error:
            self._damaged[path] = error.reason
            return None
        if is_over(lease):
            return None
        return Holder(
            unit=row["unit"],
            node=lease.get("node", lease["host"]),
            process=str(lease["process"]),
            task=lease.get("task"),
            restarts=lease.get("restarts", 0),
            held_s=max(0.0, now_s - (claim / "claim.json").stat().st_mtime),
            silent_s=max(0.0, now_s - path.stat().st_mtime),
            requests=row["num_requests"],
            requests_done=sum(self._file(file).rows for file in files),
        )

    def _count(self, files: list[Path]) -> list[_File]:
        found = [self._file(path) for path in files]
        self.counted += (path for path in files if path not in self._damaged)
        return found

    def _file(self, path: Path) -> _File:
        if path not in self._files:
            try:
                self._files[path] = _read_file(path)
            except DamagedFileError as error:
                self._damaged[path] = error.reason
                return _File(0, 0, 0.0)
        return self._files[path]


def _live_tasks(run: RunDir) -> tuple[LiveTasks | None, list[str]]:
    """The run's tasks where it was sent last, and what is wrong with them."""
    try:
        match last_launcher(run):
            case "slurm":
                tasks = _slurm_tasks(run)
            case "k8s":
                tasks = k8s.look(run)
            case "ray":
                tasks = ray.look(run)
            case _:
                tasks = None
    except ConfigError as error:
        return None, [str(error)]
    return tasks, [] if tasks is None else tasks.problems


def _slurm_tasks(run: RunDir) -> LiveTasks | None:
    """None where Slurm's commands are missing."""
    if not client.is_here():
        return None
    tasks = submit.live_tasks(run)
    waiting = Counter(task.reason for task in tasks if task.is_pending)
    unusual = {reason: count for reason, count in waiting.items() if reason not in USUAL_REASONS}
    num_waiting = sum(waiting.values())
    problems = [f"{count} Slurm tasks wait: {reason}" for reason, count in unusual.items()]
    return LiveTasks("Slurm", len(tasks) - num_waiting, num_waiting, problems)


def _tokens_per_s(run: RunDir, now_s: float, damaged: dict[Path, str]) -> float | None:
    """Each session by its own clock, over the last minutes it has told of; notes damaged files."""
    spans: dict[str, list[tuple[float, float, int]]] = {}
    for path in (run.stats / "steps").glob("*.parquet"):
        try:
            with own_file(path):
                if now_s - path.stat().st_mtime > WINDOW_S:
                    continue
                columns = ["session", "start_s", "duration_s", "new_tokens"]
                table = pq.read_table(sealed_table(path), columns=columns).to_pydict()
        except DamagedFileError as error:
            if path.exists():  # a commit has not just taken it away
                damaged[path] = error.reason
            continue
        for session, start, seconds, tokens in zip(*table.values(), strict=True):
            spans.setdefault(session, []).append((start, start + seconds, tokens))
    if not spans:
        return None
    rates = []
    for steps in spans.values():
        end = max(step[1] for step in steps)
        recent = [step for step in steps if step[1] > end - WINDOW_S]
        rates.append(sum(step[2] for step in recent) / max(end - min(step[0] for step in recent), 1e-3))
    return sum(rates)


def _token_counts(
    units: list[dict[str, Any]], counts: dict[str, Any], finished: list[list[_File]], workers: list[Sign]
) -> dict[str, int]:
    rows_U = np.array([sum(file.rows for file in files) for files in finished], dtype=np.float64)
    share_left_U = 1 - rows_U / np.array([max(unit["num_requests"], 1) for unit in units])
    files = [(file.prompt_tokens, file.output_tokens) for of_unit in finished for file in of_unit]
    durable = np.array(files, dtype=np.float64).reshape(-1, 2).sum(axis=0)
    return token_counts(planned_tokens(units, counts), share_left_U, durable, workers)


def _work(unit: dict[str, Any]) -> int:
    """Of a unit, as it was cut."""
    return int(unit["new_tokens"] + unit["max_output_tokens"])


def _work_done(unit: dict[str, Any], files: list[_File]) -> float:
    return _work(unit) * sum(file.rows for file in files) / float(unit["num_requests"])


def _failed_sessions(run: RunDir) -> int:
    paths = (run.stats / "nodes").glob("*.parquet")
    return sum(row["state"] == "failed" and row["command"] == "work" for path in paths for row in read_rows(path))


def _idle(state: str, was_begun: bool, num_done: int, num_units: int) -> str:
    """What goes on while nobody holds a unit: see Status."""
    if state in ("finished", "partial"):
        return state
    if num_done == num_units:
        return "computed"
    return "interrupted" if was_begun or num_done else "planned"


def _read_file(path: Path) -> _File:
    failed: list[str] = []
    with own_file(path):
        metadata = pq.read_metadata(path)
        if any(_may_hold_errors(metadata.row_group(group)) for group in range(metadata.num_row_groups)):
            table = pq.read_table(path, columns=["status", "error"]).to_pydict()
            failed = [error for status, error in zip(*table.values(), strict=True) if status == "error"]
        counts = pq.read_table(path, columns=["computed_tokens", "completion_tokens"])
    prompt_tokens, output_tokens = (pc.sum(column).as_py() or 0 for column in counts.columns)
    errors = tuple(Counter(failed).most_common(MOST_ERRORS))
    return _File(metadata.num_rows, len(failed), path.stat().st_mtime, prompt_tokens, output_tokens, errors)


def _may_hold_errors(group: pq.RowGroupMetaData) -> bool:
    """Whether a row group may hold anything but 'ok', by its footer."""
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema == "status":
            known = column.statistics
            return known is None or not known.has_min_max or (known.min, known.max) != ("ok", "ok")
    return True


def _rate(files: list[_File], now_s: float) -> float | None:
    """Requests per second that became durable in the last minutes."""
    recent = [file for file in files if now_s - file.written_s <= WINDOW_S]
    if not recent:
        return None
    earlier = [file.written_s for file in files if now_s - file.written_s > WINDOW_S]
    since = WINDOW_S if earlier else now_s - min(file.written_s for file in recent)
    return sum(file.rows for file in recent) / max(since, 1.0)


def _problems(
    state: dict[str, Any], silent: list[Holder], files: list[_File], failed_sessions: int, run: RunDir
) -> list[str]:
    problems = [f"{shard['path']}: {shard['problem']}" for shard in state["shards"] if shard["problem"] is not None]
    problems += [
        f"unit {holder.unit}: {holder.node} has been silent for {duration(holder.silent_s)}; others may take it"
        for holder in silent
    ]
    if failed_sessions:
        problems.append(f"{failed_sessions} `work` commands failed; what they said is in their logs")
    errors = Counter[str]()
    for file in files:
        errors.update(dict(file.errors))
    problems += [f"{count} x {error}" for error, count in errors.most_common(3)]
    if errors:
        problems.append(f"`batchinfer retry {run.shown}` gives failed requests another try")
    return problems
