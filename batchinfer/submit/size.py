"""The number of tasks: its text form N or N%M, and the tasks that are pending and running."""

import re
from dataclasses import dataclass, field

from batchinfer.records import ConfigError

MOST_TASKS = 1_000_000


@dataclass(frozen=True, slots=True)
class ArraySize:
    """A number of tasks, and how many of them may run at once (None: all)."""

    tasks: int
    at_once: int | None = None

    def __str__(self) -> str:
        return str(self.tasks) if self.at_once is None else f"{self.tasks}%{self.at_once}"


def parse_size(text: str) -> ArraySize:
    """Parse N or N%M.

    Raises:
        ConfigError: `text` is something else, or a number is out of range.
    """
    found = re.fullmatch(r"(\d{1,9})(?:%(\d{1,9}))?", text)
    if found is None:
        raise ConfigError(f"{text!r} is not a number of tasks; write N, or N%M for at most M of them at once")
    tasks, at_once = int(found[1]), None if found[2] is None else int(found[2])
    if tasks > MOST_TASKS or at_once == 0:
        raise ConfigError(f"{text!r}: N may be at most {MOST_TASKS:,} tasks, and M must be at least 1")
    return ArraySize(tasks, at_once)


def parse_size_without_limit(text: str) -> ArraySize:
    """Parse N. Where tasks end only when no unit is left, N%M would be the same as M.

    Raises:
        ConfigError: `text` is something else, or N is out of range.
    """
    size = parse_size(text)
    if size.at_once is not None:
        raise ConfigError(f"{text!r}: {size.at_once} at once is the same as {size.at_once} tasks here; write that")
    return size


@dataclass(frozen=True, slots=True)
class LiveTasks:
    """A run's pending and running tasks, as the cluster reports them."""

    launcher: str  # 'Slurm', 'Kubernetes' or 'Ray'
    running: int
    waiting: int
    problems: list[str] = field(default_factory=list)
