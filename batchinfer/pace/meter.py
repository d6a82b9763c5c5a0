"""Speed and cost of a run's tasks, measured from its folder: durable results and the sessions of `work`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.config import JobConfig
from batchinfer.data.parquet import own_file, read_rows
from batchinfer.report.price.price_list import PriceList
from batchinfer.run.store.interface import Storage
from batchinfer.rundir import read_state
from batchinfer.status.status import Status, StatusReader

# A measured speed is used after this many task-seconds, or after this share of the time until the deadline
MEASURE_S, MEASURE_SHARE = 600.0, 0.05
FLIGHTS = 4  # ... but not before this multiple of the time that a request takes
LEAST_S = 1.0  # least time left while a unit is not done
WINDOW_S = 3600.0  # older measurements are dropped if the newer ones suffice


@dataclass(frozen=True, slots=True)
class Measurement:
    """The progress, speed and cost of a run at one time."""

    work_s: float | None  # task-seconds for the remaining work; None: the speed is not known
    unit_s: float  # task-seconds per unit
    flight_s: float  # mean time of a request
    startup_s: float  # mean time from a task's start to its first step; 0 before the first one
    spent: float  # $ for all tasks until now
    units_open: int
    num_ranks: int  # accelerators per task
    work_done: float = 0.0  # in tokens, as the plan counts work
    busy: frozenset[str] = frozenset()  # names of Slurm tasks that hold units


class RunMeter:
    """Repeated measurement of a run.

    A task's speed is the work that became durable, divided by the seconds from each session's first step to its last
    heartbeat. Requests in progress are not durable yet: for each task half the time of a request is subtracted, or the
    task's whole time if that is shorter than one request. Until the measurement is long enough, the plan's forecast
    fills the missing seconds.

    Args:
        measure_s: task-seconds after which a measured speed is used alone, see MEASURE_S.
    """

    def __init__(self, storage: Storage, job: JobConfig, prices: PriceList, measure_s: float) -> None:
        self._run, self._prices, self._measure_s = storage.run, prices, measure_s
        self._num_ranks = job.cluster.num_ranks
        self._status = StatusReader(storage.run, storage)
        self._ended: dict[Path, dict[str, Any]] = {}  # ended sessions, which change no more
        self._looks: list[tuple[float, float, float]] = []  # (time, task-seconds, work done), rising

    def measure(self, now_s: float) -> Measurement:
        """Measure the run's progress, speed and cost now.

        Raises:
            ConfigError: a file of the run folder is missing or damaged.
            StoreError: the object store with the run does not answer.
        """
        status = self._status.read()
        sessions = self._sessions()
        begun = [row for row in sessions if row["first_prefill_s"] is not None]
        task_s = sum(row["end_s"] - row["first_prefill_s"] for row in begun)
        flight_s = _flight_s(self._status.newest_file())
        flying_s = _flying_s(begun, status.workers, flight_s)
        speed = self._speed(status, task_s - flying_s, max(self._measure_s, FLIGHTS * flight_s), now_s)
        startups = [row["first_prefill_s"] - row["start_s"] for row in begun]
        return Measurement(
            work_s=None if speed is None else _left_s(status, speed, flying_s),
            unit_s=status.work / speed / status.units if speed else 0.0,
            flight_s=flight_s,
            startup_s=sum(startups) / len(startups) if startups else 0.0,
            spent=self._spent(sessions, status.tasks_running or 0, now_s),
            units_open=status.units - status.units_done,
            num_ranks=self._num_ranks,
            work_done=status.work_done,
            busy=frozenset(holder.task for holder in status.running if holder.task is not None),
        )

    def _speed(self, status: Status, task_s: float, needed_s: float, now_s: float) -> float | None:
        """Return the work per task-second; None if nothing is done, or measured time and forecast do not suffice."""
        looks = self._looks
        if not looks or status.work_done < looks[-1][2]:  # a retry opened units again
            looks[:] = [(now_s, 0.0, 0.0)]
        looks.append((now_s, task_s, status.work_done))
        # old measurements stay while the newer ones are too short: a run may have paused
        while len(looks) > 2 and now_s - looks[1][0] >= WINDOW_S and task_s - looks[1][1] >= needed_s:
            looks.pop(0)
        measured_s, done = task_s - looks[0][1], status.work_done - looks[0][2]
        missing_s = max(0.0, needed_s - measured_s)
        forecast_s = read_state(self._run)["counts"]["work_s"]
        if forecast_s:
            done, measured_s = done + missing_s * status.work / forecast_s, measured_s + missing_s
        elif missing_s:
            return None
        return done / measured_s if done else None

    def _sessions(self) -> list[dict[str, Any]]:
        """Return the sessions of `work`: one per life of a task and node."""
        rows = []
        for path in sorted((self._run.stats / "nodes").glob("*.parquet")):
            row = self._ended.get(path) or read_rows(path)[0]
            if row["state"] != "running":
                self._ended[path] = row
            if row["command"] == "work":
                rows.append(row)
        return rows

    def _spent(self, sessions: list[dict[str, Any]], num_running: int, now_s: float) -> float:
        """Return the $ spent until now.

        A killed session stays 'running' in its file, so only as many of the latest ones as tasks run count on.
        """
        running = [row for row in sessions if row["state"] == "running"]
        running.sort(key=lambda row: -row["end_s"])
        accelerators, alive = 0, set()
        for row in running:
            if accelerators < num_running * self._num_ranks:
                accelerators += row["num_ranks"]
                alive.add(row["session"])
        return sum(
            row["num_ranks"]
            * self._prices.gpu_cost(
                row["start_s"], max(now_s, row["end_s"]) if row["session"] in alive else row["end_s"]
            )
            for row in sessions
        )


def _left_s(status: Status, speed: float, flying_s: float) -> float:
    """Return the task-seconds of the remaining work; at least LEAST_S before all units are done."""
    left_s = (status.work - status.work_done) / speed - flying_s
    return max(left_s, LEAST_S) if status.units_done < status.units else 0.0


def _flying_s(begun: list[dict[str, Any]], num_working: int, flight_s: float) -> float:
    """Return the task-seconds spent on requests in progress."""
    running = sorted((row for row in begun if row["state"] == "running"), key=lambda row: -row["end_s"])[:num_working]
    ages_s = [row["end_s"] - row["first_prefill_s"] for row in running]
    return sum(age_s if age_s < flight_s else flight_s / 2 for age_s in ages_s)


def _flight_s(results: Path | None) -> float:
    """Return the mean seconds from admission to the last token in a result file; 0 without a file."""
    if results is None:
        return 0.0
    with own_file(results):
        table = pq.read_table(results, columns=["admitted_s", "finished_s"])
    return float(pc.mean(pc.subtract(table["finished_s"], table["admitted_s"])).as_py())
