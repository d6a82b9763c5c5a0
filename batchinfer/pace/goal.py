"""Deadline and budget of a submitted run (`slurm/goal.json`), and the number of tasks that they require."""

import time
from dataclasses import asdict, dataclass
from datetime import datetime

from batchinfer.balance.pace import Preview, Stretch, Terms, preview, tasks_now
from batchinfer.checked_json import publish_json, read_json
from batchinfer.config import JobConfig
from batchinfer.pace.meter import Measurement
from batchinfer.progress import duration
from batchinfer.records import ConfigError
from batchinfer.report.price.price_list import CheapHours, PriceList
from batchinfer.rundir import RunDir
from batchinfer.sanitize import count_text

MOST_DAYS = 366
SLACK_S = 1.0  # an end that is less late counts as in time


@dataclass(frozen=True, slots=True)
class Goal:
    """A deadline, a budget or both."""

    finish_by_s: float | None  # Unix time
    max_cost: float | None  # $ for the whole run
    most_tasks: int | None  # at once; None: as many as units are left
    prices: PriceList  # of accelerators
    set_s: float  # Unix time


@dataclass(frozen=True, slots=True)
class Outlook:
    """The number of tasks from now on, and the expected course of the run."""

    tasks: int
    ahead: Preview | None  # None: the speed of a task is not known
    late_s: float = 0.0
    is_too_dear: bool = False


def parse_deadline(text: str, now_s: float) -> float:
    """Parse a date and time to Unix time; the time is local unless it names a zone.

    Raises:
        ConfigError: `text` is no date and time, is in the past, or more than MOST_DAYS away.
    """
    try:
        found = datetime.fromisoformat(text).astimezone()  # no zone: this machine's
    except (ValueError, OverflowError):
        raise ConfigError(
            f"--finish-by is {text!r}; write date and time, for example '2026-11-23 06:00' (local) or "
            "'2026-11-23T06:00+01:00'"
        ) from None
    if found.timestamp() <= now_s:
        raise ConfigError(f"--finish-by is {text!r}, which is in the past: now it is {clock(now_s)}; name a later time")
    if found.timestamp() > now_s + MOST_DAYS * 86_400:
        raise ConfigError(f"--finish-by is {text!r}, more than {MOST_DAYS} days away; name an earlier time")
    return found.timestamp()


def check_goal(goal: Goal, job: JobConfig) -> None:
    """Check that a goal can be followed.

    Raises:
        ConfigError: the job has a schedule, too; a budget has no price; there is neither a time nor a number of tasks.
    """
    if job.slurm.schedule:
        raise ConfigError("--finish-by and --max-cost contradict the job's slurm.schedule; leave one of them out")
    if goal.max_cost is not None and goal.prices.gpu_hour is None:
        raise ConfigError("--max-cost needs the price of accelerators; set pricing.gpu_hour or give --prices FILE")
    if goal.finish_by_s is None and goal.most_tasks is None:
        raise ConfigError("--max-cost alone does not say how many tasks; add --array N or --finish-by TIME")


def write_goal(run: RunDir, goal: Goal) -> None:
    """Record the goal for a later `--follow`."""
    values = {name: getattr(goal, name) for name in ("finish_by_s", "max_cost", "most_tasks", "set_s")}
    hours = [asdict(window) for window in goal.prices.cheap_hours]
    publish_json(run.goal, {**values, "gpu_hour": goal.prices.gpu_hour, "cheap_hours": hours})


def read_goal(run: RunDir) -> Goal | None:
    """Return the recorded goal, None if there is none.

    Raises:
        DamagedFileError: the record is damaged.
    """
    if not run.goal.exists():
        return None
    record = read_json(run.goal, "finish_by_s", "max_cost", "most_tasks", "gpu_hour", "cheap_hours", "set_s")
    hours = tuple(CheapHours(**window) for window in record.pop("cheap_hours"))
    prices = PriceList(gpu_hour=record.pop("gpu_hour"), cheap_hours=hours)
    return Goal(**record, prices=prices)


def look_ahead(goal: Goal, seen: Measurement, has: int, now_s: float) -> Outlook:
    """Compute the number of tasks that the goal requires now, and the expected course.

    Args:
        has: number of pending and running tasks.
    """
    most = min(seen.units_open, goal.most_tasks or seen.units_open)
    if not most:
        return Outlook(0, Preview((), now_s, 0.0))
    work_s, finish_by_s = seen.work_s, goal.finish_by_s
    if work_s is None:  # some tasks have to run to measure the speed
        return Outlook(most if finish_by_s is None else min(max(has, 1), most), None)
    if finish_by_s is None or finish_by_s <= now_s:
        tasks, until_s = most, now_s + seen.startup_s + work_s / most
        cost = sum(most * part.length_s / 3600 * part.price for part in _stretches(goal, seen, now_s, until_s))
        ahead = Preview(((now_s, until_s, most),), until_s, cost)
    else:
        stretches, terms = _stretches(goal, seen, now_s, finish_by_s), Terms(most, seen.startup_s, seen.unit_s)
        tasks, ahead = tasks_now(work_s, stretches, terms, has), preview(work_s, stretches, terms, has)
    late_s = 0.0 if finish_by_s is None else ahead.end_s - finish_by_s
    is_too_dear = goal.max_cost is not None and seen.spent + ahead.cost > goal.max_cost
    return Outlook(tasks, ahead, late_s if late_s > SLACK_S else 0.0, is_too_dear)


def sentences(goal: Goal, seen: Measurement, outlook: Outlook) -> list[str]:
    """Return the outlook as lines for a person: tasks, end and cost, and warnings if the goal cannot be met."""
    tasks, ahead = outlook.tasks, outlook.ahead
    if ahead is None:
        return [
            f"{count_text(tasks, 'task')} from now on: the speed of a task is not known yet, so these tasks measure it"
        ]
    left = "" if seen.work_s is None else f"{seen.work_s / 3600:,.2f} task-hours are left, "
    cost = "" if goal.prices.gpu_hour is None else f" and costs {seen.spent + ahead.cost:,.2f} $ in all"
    lines = [f"{count_text(tasks, 'task')} from now on: {left}it ends at {clock(ahead.end_s)}{cost}"]
    if outlook.late_s:
        lines.append(
            f"warning: it cannot end by {clock(goal.finish_by_s or 0.0)} with at most {count_text(tasks, 'task')}; "
            f"at this speed it is {duration(outlook.late_s)} late"
        )
    if outlook.is_too_dear:
        lines.append(
            f"warning: at this speed it costs {seen.spent + ahead.cost:,.2f} $ in all, more than --max-cost "
            f"{goal.max_cost:,.2f}; it pauses before that"
        )
    return lines


def clock(time_s: float) -> str:
    """Format a Unix time as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def _stretches(goal: Goal, seen: Measurement, start_s: float, end_s: float) -> list[Stretch]:
    """Return the stretches of equal price between two times, each with the cost of a task per hour."""
    parts = goal.prices.gpu_hours_between(start_s, end_s)
    return [Stretch(first, last, price * seen.num_ranks) for first, last, price in parts]
