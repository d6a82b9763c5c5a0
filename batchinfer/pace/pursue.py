"""Has as many tasks run as a goal asks for, until the run is finished or its money is spent."""

import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf

from batchinfer.config import JobConfig
from batchinfer.pace.goal import Goal, Outlook, look_ahead, sentences
from batchinfer.pace.meter import MEASURE_S, MEASURE_SHARE, Measured, RunMeter
from batchinfer.progress import note
from batchinfer.records import IncompleteRunError, InterruptedRunError
from batchinfer.run.storage import Storage
from batchinfer.rundir import RunDir, read_state
from batchinfer.submit.size import ArraySize
from batchinfer.submit.slurm.client import AwayError, Task
from batchinfer.submit.slurm.follower import check_follower, take_over
from batchinfer.submit.slurm.tasks import Submission, is_in_slurm, log_folder, num_tasks, resize

LOOK_S = 15.0
LEAVE_S = 120.0  # in which a task that was sent away commits and ends
AHEAD = 2  # a task is sent when the money lasts twice as long as it takes to notice and to leave
FRUITLESS_LIVES = 3  # sent for each task that is wanted, without a new result: something else is wrong


def pursue(
    storage: Storage, job: JobConfig, goal: Goal, *, now_s: Callable[[], float] = time.time, look_s: float = LOOK_S
) -> None:
    """Look at the run again and again, and send or send away tasks. Those that died are sent anew.

    Raises:
        ConfigError: Slurm refuses, or a file of the run folder is damaged. (While Slurm does not answer tasks stay.)
        StoreError: the object store that has it does not answer.
        IncompleteRunError: tasks end without results, or everything has ended and the run is not finished.
        InterruptedRunError: the money is spent, the run is cancelled, or another command follows it.
    """
    run = storage.run
    meter = RunMeter(storage, job, goal.prices, measure_seconds(goal))
    reserve_s = look_s + LEAVE_S + job.cluster.commit_seconds
    follower = take_over(run)
    storage.keep_sent()
    sender = _Sender(storage, goal, follower)
    told: tuple[bool, ...] = ()
    while not is_finished(storage):
        check_follower(run, follower)
        with when_slurm_answers():
            has, now = num_tasks(run), now_s()
            seen = meter.look(now)
            if not seen.units_open:
                sender.have_finished()
            else:
                affordable = _affordable_tasks(goal, seen, now, reserve_s)
                if affordable < (has or AHEAD):
                    _pause(storage, goal, seen, look_s, follower)
                outlook = look_ahead(goal, seen, has, now)
                outlook = replace(outlook, tasks=int(min(outlook.tasks, max(has, affordable / AHEAD))))
                outlook = sender.calm(outlook, has, seen, now)
                news = _kinds(outlook)
                if outlook.tasks != has or news != told:
                    for line in sentences(goal, seen, outlook):
                        note(line)
                    told = news
                sender.set_tasks(outlook.tasks, has, seen, now)
        time.sleep(look_s)


@contextmanager
def when_slurm_answers() -> Iterator[None]:
    """One look at the tasks; while Slurm does not answer they stay as they are, until the next look."""
    try:
        yield
    except AwayError as error:
        note(f"warning: {error}; tasks stay as they are until it answers")


def measure_seconds(goal: Goal) -> float:
    """How long a speed has to be measured to count."""
    if goal.finish_by_s is None:
        return MEASURE_S
    return min(MEASURE_S, MEASURE_SHARE * (goal.finish_by_s - goal.set_s))


def is_finished(storage: Storage) -> bool:
    """Whether the outputs are there, of all rows; what others have sent meanwhile is known, too."""
    storage.fetch("state", "sent")
    return read_state(storage.run)["state"] == "finished"


def resize_and_keep(
    storage: Storage, size: ArraySize, busy: Container[str] = (), *, follower: str
) -> tuple[Submission | None, list[Task]]:
    """Set how many tasks wait or run, as `resize`; records of it are durable, also of the part before a refusal."""
    storage.fetch("sent")  # that another node has cancelled the run, or follows it
    try:
        return resize(storage.run, size, busy, follower)
    finally:
        storage.keep_sent()


class Lives:
    """Notices when tasks are sent again and again, and no result comes."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._sent = self._most = 0  # since the last result, and most tasks wanted at once
        self._work_done = 0.0

    def look(self, wanted: int, work_done: float) -> None:
        """So many tasks are wanted now, and so much work is durable."""
        if work_done > self._work_done:
            self._sent, self._work_done = 0, work_done
        self._most = max(self._most, wanted)

    def check(self, added: int) -> None:
        """Before so many are sent.

        Raises:
            IncompleteRunError: too many were sent in vain.
        """
        if added > 0 and self._sent + added > FRUITLESS_LIVES * self._most:
            raise IncompleteRunError(
                f"{self._sent:,} tasks of {self._run.shown} were sent since its last result, and end without "
                f"another; the logs in {log_folder(self._run)} say why"
            )

    def count(self, added: int) -> None:
        """So many were sent."""
        self._sent += max(0, added)


class _Sender:
    """Sends tasks of one run, and notices when that leads nowhere."""

    def __init__(self, storage: Storage, goal: Goal, follower: str) -> None:
        self._storage, self._run, self._goal, self._follower = storage, storage.run, goal, follower
        self._changed_s = -inf  # when the number of tasks was changed last, and the price then
        self._price = 0.0
        self._lives = Lives(storage.run)
        self._has_sent_finish = False

    def calm(self, outlook: Outlook, has: int, seen: Measured, now_s: float) -> Outlook:
        """Keep tasks until a change can be seen: results come in lots, and speeds waver with them."""
        is_new = now_s < self._changed_s + seen.unit_s + seen.flight_s and self._price_at(now_s) == self._price
        return replace(outlook, tasks=has) if outlook.tasks < has <= seen.units_open and is_new else outlook

    def set_tasks(self, wanted: int, has: int, seen: Measured, now_s: float) -> None:
        """Have this number of tasks.

        Raises:
            IncompleteRunError: tasks were sent again and again, and no result came.
        """
        self._lives.look(wanted, seen.work_done)
        if wanted == has:
            return
        self._lives.check(wanted - has)
        resize_and_keep(self._storage, ArraySize(wanted), seen.busy, follower=self._follower)
        self._lives.count(wanted - has)
        self._changed_s, self._price = now_s, self._price_at(now_s)

    def _price_at(self, now_s: float) -> float:
        return self._goal.prices.gpu_cost(now_s, now_s + 1)

    def have_finished(self) -> None:
        """All units are done: the job that finishes is there, or comes with one more task.

        Raises:
            IncompleteRunError: it was there and has failed.
        """
        if is_in_slurm(self._run) or is_finished(self._storage):
            return
        if self._has_sent_finish:
            raise IncompleteRunError(
                f"all that was sent for {self._run.shown} has ended, but the run is not finished; "
                f"`batchinfer finish {self._run.shown}` and the logs in {log_folder(self._run)} say why"
            )
        resize_and_keep(self._storage, ArraySize(1), follower=self._follower)
        self._has_sent_finish = True


def _kinds(outlook: Outlook) -> tuple[bool, ...]:
    """What would be news to a person."""
    return outlook.ahead is None, outlook.late_s > 0, outlook.is_too_dear


def _affordable_tasks(goal: Goal, seen: Measured, now_s: float, seconds: float) -> float:
    """Tasks that what is left of the money pays for, for so long."""
    if goal.max_cost is None:
        return inf
    price = seen.num_ranks * goal.prices.gpu_cost(now_s, now_s + seconds)
    return (goal.max_cost - seen.spent) / price if price else inf


def _pause(storage: Storage, goal: Goal, seen: Measured, look_s: float, follower: str) -> None:
    """Send all tasks away and wait for them.

    Raises:
        InterruptedRunError: always.
    """
    resize_and_keep(storage, ArraySize(0), follower=follower)
    while is_in_slurm(storage.run):
        time.sleep(look_s)
    raise InterruptedRunError(
        f"paused at {seen.spent:,.2f} $, before more than --max-cost {goal.max_cost:,.2f} is spent; "
        f"`batchinfer submit --follow {storage.run.shown} --max-cost MORE` goes on"
    )
