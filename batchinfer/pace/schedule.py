"""Tasks of a run by time of day, so that it takes what others leave free."""

import time
from collections.abc import Callable

from batchinfer.pace.pursue import LOOK_S, Lives, is_finished, resize_and_keep, when_slurm_answers
from batchinfer.progress import note
from batchinfer.records import ConfigError, IncompleteRunError
from batchinfer.run.storage import Storage
from batchinfer.status.status import StatusReader
from batchinfer.submit.size import ArraySize
from batchinfer.submit.slurm.follower import check_follower, take_over
from batchinfer.submit.slurm.schedule import parse_schedule, size_at
from batchinfer.submit.slurm.tasks import is_in_slurm, log_folder, num_tasks


def follow(storage: Storage, entries: list[str], minute_now: Callable[[], int], look_s: float = LOOK_S) -> None:
    """Resize a submitted run whenever the schedule says so, until it is finished. Tasks that died are sent anew.

    Args:
        minute_now: minute of the day.
        look_s: seconds between looks.

    Raises:
        ConfigError: the job has no schedule, Slurm refuses, or a file of the run folder is damaged.
        IncompleteRunError: tasks end without results, or everything has ended and the run is not finished.
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
    storage.keep_sent()
    reader, lives = StatusReader(run, storage), Lives(run)
    while not is_finished(storage):
        check_follower(run, follower)
        with when_slurm_answers():
            wanted = size_at(schedule, minute_now())
            status = reader.read()
            lives.look(wanted.tasks, status.work_done)
            if wanted != has:
                sent, away = resize_and_keep(storage, wanted, follower=follower)
                added = 0 if sent is None else sent.size.tasks
                note(f"{wanted} tasks from now on: {added} added, {len(away)} sent away")
                has = wanted
            elif wanted.tasks and status.units_waiting:
                _make_up_for_dead_tasks(storage, wanted, status.units_waiting, lives, follower)
            elif wanted.tasks and not status.units_running and not is_in_slurm(run) and not is_finished(storage):
                raise IncompleteRunError(
                    f"all that was sent for {run.shown} has ended, but the run is not finished; `batchinfer status` "
                    f"and the logs in {log_folder(run)} say why"
                )
        time.sleep(look_s)


def _make_up_for_dead_tasks(
    storage: Storage, wanted: ArraySize, units_waiting: int, lives: Lives, follower: str
) -> None:
    """Send tasks for units that nobody holds. Those that ended for want of one have left none."""
    alive = num_tasks(storage.run)
    missing = min(wanted.tasks - alive, units_waiting)
    if missing <= 0:
        return
    lives.check(missing)
    resize_and_keep(storage, ArraySize(alive + missing, wanted.at_once), follower=follower)
    lives.count(missing)
    note(f"{missing} of {wanted} tasks have ended before their time: sent anew")


def local_minute() -> int:
    """The minute of the day in this machine's time zone."""
    now = time.localtime()
    return now.tm_hour * 60 + now.tm_min
