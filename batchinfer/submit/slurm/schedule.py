"""The entries of a job's slurm.schedule: a number of tasks by the time of day."""

import re

from batchinfer.records import ConfigError
from batchinfer.submit.size import ArraySize, parse_size

ENTRY = re.compile(r"([01]\d|2[0-3]):([0-5]\d) (\S+)")


def parse_schedule(entries: list[str]) -> list[tuple[int, ArraySize]]:
    """Parse the entries of slurm.schedule.

    Args:
        entries: `HH:MM N` or `HH:MM N%M`, in any order.

    Returns:
        (minute of the day, size from then on), sorted.

    Raises:
        ConfigError: an entry has another form, or two have the same time.
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
    """Return the size at a minute of the day, by the last entry before; a day's last entry holds past midnight."""
    earlier = [size for start, size in schedule if start <= minute]
    return earlier[-1] if earlier else schedule[-1][1]
