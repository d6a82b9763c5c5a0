"""Following of a schedule: the number of tasks by the time of day, so that a run uses idle hours of a cluster."""

import time
from collections.abc import Callable

from batchinfer.pace.follow_goal import LOOK_S, RetryLimit, ignoring_outages, is_finished, resize_durably
from batchinfer.progress import note
from batchinfer.records import ConfigError, IncompleteRunError
from batchinfer.run.store.interface import Storage, put_sent
from batchinfer.status.status import StatusReader
from batchinfer.submit.size import ArraySize
from batchinfer.submit.slurm.follower import check_follower, take_over
from batchinfer.submit.slurm.schedule import parse_schedule, size_at
from batchinfer.submit.slurm.tasks import is_in_slurm, log_folder, num_tasks


def follow_schedule(
    storage: Storage, entries: list[str], minute_now: Callable[[], int], look_s: float = LOOK_S
) -> None:
    """Resize a submitted run by its schedule until it is finished; dead tasks are replaced.

    Args:
        minute_now: returns the minute of the day.
        look_s: seconds between checks.

    Raises:
        ConfigError: the job has no schedule, Slurm refuses, or a file of the run folder is damaged.
        IncompleteRunError: tasks end without results, or all jobs have ended and the run is not finished.
        InterruptedRunError: the run is cancelled, or another command follows it.
    """
    schedule = parse_schedule(entries)
    if not schedule:
        raise ConfigError(
            "the job has no slurm.schedule to follow; add one, for example schedule = ['08:00 4', '20:00 32'], or give "
            "--finish-by TIME"
        )
    has: ArraySize | None = None
    run = storage.run
    follower = take_over(run)
    put_sent(storage)
    reader, retries = StatusReader(run, storage), RetryLimit(run)
    while not is_finished(storage):
        check_follower(run, follower)
        with ignoring_outages():
            wanted = size_at(schedule, minute_now())
            status = reader.read()
            retries.update(wanted.tasks, status.work_done)
            if wanted != has:
                sent, away = resize_durably(storage, wanted, follower=follower)
                added = 0 if sent is None else sent.size.tasks
                note(f"{wanted} tasks from now on: {added} added, {len(away)} removed")
                has = wanted
            elif wanted.tasks and status.units_waiting:
                _replace_dead_tasks(storage, wanted, status.units_waiting, retries, follower)
            elif wanted.tasks and not status.units_running and not is_in_slurm(run) and not is_finished(storage):
                raise IncompleteRunError(
                    f"all jobs of {run.shown} have ended, but the run is not finished; see `batchinfer status` and the "
                    f"logs in {log_folder(run)}"
                )
        time.sleep(look_s)


def _replace_dead_tasks(
    storage: Storage, wanted: ArraySize, units_waiting: int, retries: RetryLimit, follower: str
) -> None:
    """Submit tasks for units that no task holds. Tasks that ended because no unit was left are not replaced."""
    alive = num_tasks(storage.run)
    missing = min(wanted.tasks - alive, units_waiting)
    if missing <= 0:
        return
    retries.check(missing)
    resize_durably(storage, ArraySize(alive + missing, wanted.at_once), follower=follower)
    retries.count(missing)
    note(f"{missing} of {wanted} tasks have ended early: replaced")


def local_minute() -> int:
    """Return the minute of the day in this machine's time zone."""
    now = time.localtime()
    return now.tm_hour * 60 + now.tm_min
