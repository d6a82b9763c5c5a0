"""The number of tasks that ends a job by its deadline at the least cost: one rule, applied repeatedly during the job.

    tasks │        ┌──────┐         the cheapest hours are filled first, up to the most tasks allowed;
          │        │ cheap│         the dearest hours that are needed are filled evenly
          │────────┘      └──────
          └─────────────────────┴─ deadline

Work is counted in seconds that one task would need for it, so the rule knows tasks only by their measured speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

MARGIN = 0.05  # of the remaining time stays free: for commits, for finishing the run, for a falling speed
LAST_UNIT = 0.75  # of a unit's time stays free, too: the last units end half a unit late on average, or were restarted
_NUM_STEPS = 500  # of a preview
_ROUNDING = 1e-9


class Stretch(NamedTuple):
    """A period in which a task has one price."""

    start_s: float
    end_s: float
    price: float  # $ per task and hour

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Terms:
    """Limits and times that all tasks share."""

    most: int  # at once
    startup_s: float = 0.0  # from a task's start to its first work
    unit_s: float = (
        0.0  # of one task for a unit of work, which cannot be divided: the last units end up to this far apart
    )


@dataclass(frozen=True, slots=True)
class Preview:
    """The rule's future if tasks run as expected and none dies."""

    stretches: tuple[tuple[float, float, int], ...]  # (from, to, tasks)
    end_s: float
    cost: float  # $


def spread(work_s: float, stretches: Sequence[Stretch], terms: Terms, running: int = 0) -> tuple[float, ...]:
    """Place work in the cheapest stretches, evenly over those of one price.

    A task that runs over a whole stretch works for all of it except its start-up; running tasks start no more. Without
    start-up no other assignment costs less.

    Args:
        work_s: seconds that one task would need.
        stretches: from now to the deadline, one after the other.
        running: tasks that run now.

    Returns:
        Tasks in each stretch, as fractions; work that finds no room is in no stretch.
    """
    tasks, left_s = [0.0] * len(stretches), work_s
    for price in sorted({stretch.price for stretch in stretches}):
        if left_s <= _ROUNDING:
            break
        same = [index for index, stretch in enumerate(stretches) if stretch.price == price]
        usable_s = sum(max(0.0, stretches[index].length_s - terms.startup_s) for index in same)
        # running tasks save the start-up in the first stretch
        ahead_s = min(terms.startup_s, stretches[0].length_s) if same[0] == 0 else 0.0
        number = left_s / (usable_s + ahead_s) if usable_s + ahead_s else inf
        if number > running:
            number = (left_s - ahead_s * running) / usable_s if usable_s else inf
        number = min(number, float(terms.most))
        for index in same:
            tasks[index] = number
        left_s -= number * usable_s + min(number, running) * ahead_s
    return tuple(tasks)


def tasks_now(work_s: float, stretches: Sequence[Stretch], terms: Terms, has: int = 0) -> int:
    """Return the number of tasks from now on.

    The number is raised when the current tasks would be late, then so far that MARGIN of the time stays free. It is
    lowered when fewer tasks would leave that free as well. Between these it stays, so that tasks are not sent and taken
    away for every change of the speed.

    Args:
        stretches: as in `spread`; empty: the deadline is over, and only the most tasks help.
        has: tasks that run now.
    """
    if work_s <= 0:
        return 0
    if not stretches:
        return terms.most
    length_s = stretches[-1].end_s - stretches[0].start_s
    least, safe = (
        _number_now(work_s, _without_end(stretches, free_s), terms, has)
        for free_s in (LAST_UNIT * terms.unit_s, LAST_UNIT * terms.unit_s + MARGIN * length_s)
    )
    target = min(ceil(safe - _ROUNDING), terms.most)
    return target if has < least or has - target >= max(1.0, MARGIN * has) else has


def preview(work_s: float, stretches: Sequence[Stretch], terms: Terms, has: int = 0) -> Preview:
    """Follow the rule to the end of the work; after the deadline the last price counts."""
    now = start_s = stretches[0].start_s
    last = stretches[-1]
    step_s = max(1.0, (last.end_s - start_s) / _NUM_STEPS)
    found: list[tuple[float, float, int]] = []
    cost = 0.0
    while work_s > 0:
        ahead = after(stretches, now)
        tasks = tasks_now(work_s, ahead, terms, has)
        price = ahead[0].price if ahead else last.price
        lost_s = terms.startup_s * max(0, tasks - has)  # at their start
        end = min(now + step_s, ahead[0].end_s) if ahead else inf
        does_s = tasks * (end - now) - lost_s
        if does_s >= work_s:  # exactly the rest, despite rounding of times
            end, does_s = now + (work_s + lost_s) / tasks, work_s
        work_s -= does_s
        cost += tasks * (end - now) / 3600 * price
        if found and found[-1][2] == tasks:
            found[-1] = (found[-1][0], end, tasks)
        else:
            found.append((now, end, tasks))
        now, has = end, tasks
    return Preview(tuple(found), now, cost)


def after(stretches: Sequence[Stretch], now_s: float) -> list[Stretch]:
    """Return the parts of the stretches from now on."""
    return [stretch._replace(start_s=max(stretch.start_s, now_s)) for stretch in stretches if stretch.end_s > now_s]


def _number_now(work_s: float, stretches: Sequence[Stretch], terms: Terms, has: int) -> float:
    """Return the tasks in the first stretch."""
    return spread(work_s, stretches, terms, has)[0] if stretches else float(terms.most)


def _without_end(stretches: Sequence[Stretch], free_s: float) -> list[Stretch]:
    """Cut the last `free_s` seconds off the stretches."""
    until_s = stretches[-1].end_s - free_s
    return [stretch._replace(end_s=min(stretch.end_s, until_s)) for stretch in stretches if stretch.start_s < until_s]
