"""Tasks of a run by time of day, so that it takes what others leave free."""

import re
import time
from collections.abc import Callable

from batchinfer.pace.pursue import LOOK_S, Lives, is_finished, resize_and_keep, when_slurm_answers
from batchinfer.progress import note
from batchinfer.records import ConfigError, IncompleteRunError
from batchinfer.run.storage import Storage
from batchinfer.status.status import StatusReader
from batchinfer.submit.size import ArraySize, parse_size
from batchinfer.submit.slurm.follower import check_follower, take_over
from batchinfer.submit.slurm.tasks import is_in_slurm, log_folder, num_tasks

ENTRY = re.compile(r"([01]\d|2[0-3]):([0-5]\d) (\S+)")


def parse_schedule(entries: list[str]) -> list[tuple[int, ArraySize]]:
    """Read the entries of slurm.schedule.

    Args:
        entries: `HH:MM N` or `HH:MM N%M`, in any order.

    Returns:
        (minute of the day, size from then on), sorted.

    Raises:
        ConfigError: an entry is something else, or two have the same time.
    """
    found: dict[int, ArraySize] = {}
    for entry in entries:
        match = ENTRY.fullmatch(entry)
        if match is None:
            raise ConfigError(
                f"slurm.schedule holds {entry!r}; write the time and the tasks from then on: '20:00 32%16'"
            )
        minute = int(match[1]) * 60 + int(match[2])
        if minute in found:
            raise ConfigError(f"slurm.schedule has two entries for {match[1]}:{match[2]}; leave one out")
        found[minute] = parse_size(match[3])
    return sorted(found.items())


def size_at(schedule: list[tuple[int, ArraySize]], minute: int) -> ArraySize:
    """The size at a minute of the day: that of the last entry before it; the night's last one holds past midnight."""
    earlier = [size for start, size in schedule if start <= minute]
    return earlier[-1] if earlier else schedule[-1][1]


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
