"""Following of a goal: the number of tasks is adjusted until the run is finished or its budget is spent."""

import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf

from batchinfer.config import JobConfig
from batchinfer.pace.goal import Goal, Outlook, look_ahead, sentences
from batchinfer.pace.meter import MEASURE_S, MEASURE_SHARE, Measurement, RunMeter
from batchinfer.progress import note
from batchinfer.records import IncompleteRunError, InterruptedRunError
from batchinfer.run.store.interface import Storage, put_sent
from batchinfer.rundir import RunDir, read_state
from batchinfer.sanitize import count_text
from batchinfer.submit.size import ArraySize
from batchinfer.submit.slurm.client import SlurmUnavailableError, Task
from batchinfer.submit.slurm.follower import check_follower, take_over
from batchinfer.submit.slurm.tasks import Submission, is_in_slurm, log_folder, num_tasks, resize

LOOK_S = 15.0
LEAVE_S = 120.0  # time for a removed task to commit and end
AHEAD = 2  # a task is added if the budget lasts this many times as long as noticing and removing it takes
FRUITLESS_LIVES = 3  # most submissions per wanted task without a new result


def follow_goal(
    storage: Storage, job: JobConfig, goal: Goal, *, now_s: Callable[[], float] = time.time, look_s: float = LOOK_S
) -> None:
    """Measure the run every `look_s` seconds, and add or remove tasks; dead tasks are replaced.

    Raises:
        ConfigError: Slurm refuses, or a file of the run folder is damaged. (Tasks stay while Slurm does not answer.)
        StoreError: the object store with the run does not answer.
        IncompleteRunError: tasks end without results, or all jobs have ended and the run is not finished.
        InterruptedRunError: the budget is spent, the run is cancelled, or another command follows it.
    """
    run = storage.run
    meter = RunMeter(storage, job, goal.prices, measure_seconds(goal))
    reserve_s = look_s + LEAVE_S + job.cluster.commit_seconds
    follower = take_over(run)
    put_sent(storage)
    resizer = _Resizer(storage, goal, follower)
    reported: tuple[bool, ...] = ()
    while not is_finished(storage):
        check_follower(run, follower)
        with ignoring_outages():
            has, now = num_tasks(run), now_s()
            seen = meter.measure(now)
            if not seen.units_open:
                resizer.ensure_finish_job()
            else:
                affordable = _affordable_tasks(goal, seen, now, reserve_s)
                if affordable < (has or AHEAD):
                    _pause(storage, goal, seen, look_s, follower)
                outlook = look_ahead(goal, seen, has, now)
                outlook = replace(outlook, tasks=int(min(outlook.tasks, max(has, affordable / AHEAD))))
                outlook = resizer.delay_reduction(outlook, has, seen, now)
                news = _news(outlook)
                if outlook.tasks != has or news != reported:
                    for line in sentences(goal, seen, outlook):
                        note(line)
                    reported = news
                resizer.set_tasks(outlook.tasks, has, seen, now)
        time.sleep(look_s)


@contextmanager
def ignoring_outages() -> Iterator[None]:
    """Turn SlurmUnavailableError inside the block into a warning; tasks stay unchanged until the next check."""
    try:
        yield
    except SlurmUnavailableError as error:
        note(f"warning: {error}; tasks stay as they are until it answers")


def measure_seconds(goal: Goal) -> float:
    """Return the task-seconds after which a measured speed is used."""
    if goal.finish_by_s is None:
        return MEASURE_S
    return min(MEASURE_S, MEASURE_SHARE * (goal.finish_by_s - goal.set_s))


def is_finished(storage: Storage) -> bool:
    """Fetch state and submissions of the run; return whether all outputs are written."""
    storage.fetch("state", "sent")
    return read_state(storage.run)["state"] == "finished"


def resize_durably(
    storage: Storage, size: ArraySize, busy: Container[str] = (), *, follower: str
) -> tuple[Submission | None, list[Task]]:
    """Call `resize`, and make its records durable, also those of a part that succeeded before an error."""
    storage.fetch("sent")  # another node may have cancelled the run, or follow it
    try:
        return resize(storage.run, size, busy, follower)
    finally:
        put_sent(storage)


class RetryLimit:
    """A limit on replacing tasks while no result becomes durable."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._sent = self._most = 0  # tasks submitted since the last result; most tasks wanted at once
        self._work_done = 0.0

    def update(self, wanted: int, work_done: float) -> None:
        """Note the number of wanted tasks and the durable work; new results reset the count."""
        if work_done > self._work_done:
            self._sent, self._work_done = 0, work_done
        self._most = max(self._most, wanted)

    def check(self, added: int) -> None:
        """Check the limit before `added` tasks are submitted.

        Raises:
            IncompleteRunError: too many tasks were submitted since the last result.
        """
        if added > 0 and self._sent + added > FRUITLESS_LIVES * self._most:
            raise IncompleteRunError(
                f"{count_text(self._sent, 'task')} of {self._run.shown} {'was' if self._sent == 1 else 'were'} "
                "submitted since its last result, and ended without "
                f"another; see the logs in {log_folder(self._run)}"
            )

    def count(self, added: int) -> None:
        """Count `added` tasks that were submitted."""
        self._sent += max(0, added)


class _Resizer:
    """Changes the number of one run's tasks, within the limit on fruitless retries."""

    def __init__(self, storage: Storage, goal: Goal, follower: str) -> None:
        self._storage, self._run, self._goal, self._follower = storage, storage.run, goal, follower
        self._changed_s = -inf  # time of the last change of the number of tasks, and the price then
        self._price = 0.0
        self._retries = RetryLimit(storage.run)
        self._has_sent_finish = False

    def delay_reduction(self, outlook: Outlook, has: int, seen: Measurement, now_s: float) -> Outlook:
        """Keep the number of tasks until the last change shows in results, which become durable in batches."""
        is_new = now_s < self._changed_s + seen.unit_s + seen.flight_s and self._price_at(now_s) == self._price
        return replace(outlook, tasks=has) if outlook.tasks < has <= seen.units_open and is_new else outlook

    def set_tasks(self, wanted: int, has: int, seen: Measurement, now_s: float) -> None:
        """Set the number of tasks.

        Raises:
            IncompleteRunError: tasks were submitted again and again without a result.
        """
        self._retries.update(wanted, seen.work_done)
        if wanted == has:
            return
        self._retries.check(wanted - has)
        resize_durably(self._storage, ArraySize(wanted), seen.busy, follower=self._follower)
        self._retries.count(wanted - has)
        self._changed_s, self._price = now_s, self._price_at(now_s)

    def _price_at(self, now_s: float) -> float:
        return self._goal.prices.gpu_cost(now_s, now_s + 1)

    def ensure_finish_job(self) -> None:
        """Submit a finishing job (with one more task) if all units are done and there is none.

        Raises:
            IncompleteRunError: the finishing job ended, but the run is not finished.
        """
        if is_in_slurm(self._run) or is_finished(self._storage):
            return
        if self._has_sent_finish:
            raise IncompleteRunError(
                f"all jobs of {self._run.shown} have ended, but the run is not finished; run `batchinfer finish "
                f"{self._run.shown}` or see the logs in {log_folder(self._run)} for the reason"
            )
        resize_durably(self._storage, ArraySize(1), follower=self._follower)
        self._has_sent_finish = True


def _news(outlook: Outlook) -> tuple[bool, ...]:
    """Return the states of an outlook whose change is reported."""
    return outlook.ahead is None, outlook.late_s > 0, outlook.is_too_dear


def _affordable_tasks(goal: Goal, seen: Measurement, now_s: float, seconds: float) -> float:
    """Return the number of tasks that the rest of the budget pays for `seconds`."""
    if goal.max_cost is None:
        return inf
    price = seen.num_ranks * goal.prices.gpu_cost(now_s, now_s + seconds)
    return (goal.max_cost - seen.spent) / price if price else inf


def _pause(storage: Storage, goal: Goal, seen: Measurement, look_s: float, follower: str) -> None:
    """Remove all tasks and wait for their ends.

    Raises:
        InterruptedRunError: always.
    """
    resize_durably(storage, ArraySize(0), follower=follower)
    while is_in_slurm(storage.run):
        time.sleep(look_s)
    raise InterruptedRunError(
        f"paused at {seen.spent:,.2f} $, before more than --max-cost {goal.max_cost:,.2f} is spent; "
        f"`batchinfer submit --follow {storage.run.shown} --max-cost MORE` goes on"
    )
