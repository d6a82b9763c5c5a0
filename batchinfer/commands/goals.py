"""`submit --finish-by TIME`, `--max-cost DOLLARS` and `--follow RUN`: a command that stays and resizes the run."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchinfer.commands.target import Target

if TYPE_CHECKING:
    from batchinfer.config import JobConfig
    from batchinfer.pace.goal import Goal
    from batchinfer.run.store.interface import Storage
    from batchinfer.submit.size import ArraySize


GOAL_OPTIONS = ("finish_by", "max_cost", "prices")


@dataclass(frozen=True, slots=True)
class GoalOptions:
    """The requested number of tasks: given by --array, or by a deadline and a budget."""

    array: str | None
    finish_by: str | None
    max_cost: float | None
    prices: Path | None

    @property
    def is_given(self) -> bool:
        return self != GoalOptions(None, None, None, None)

    @property
    def has_goal(self) -> bool:
        return self.finish_by is not None or self.max_cost is not None

    @property
    def size(self) -> ArraySize | None:
        from batchinfer.submit.size import parse_size

        return None if self.array is None else parse_size(self.array)

    def check(self, *, has_goal: bool) -> None:
        """Refuse options that contradict each other.

        Args:
            has_goal: whether the run has a goal, by these options or by earlier ones.
        """
        size = self.size
        if size is not None and not size.tasks:
            raise click.UsageError("--array 0 would submit nothing; give 1 task or more")
        if has_goal and size is not None and size.at_once is not None:
            raise click.UsageError("--array N%M: with --finish-by or --max-cost N alone says how many may run at once")
        if self.prices is not None and not has_goal:
            raise click.UsageError("--prices is for --finish-by and --max-cost; add one of them")

    def goal(self, job: JobConfig, earlier: Goal | None = None) -> Goal:
        """Return the goal of these options; an option that is not given keeps the value of the earlier goal."""
        from batchinfer.pace.goal import Goal, check_goal, parse_deadline
        from batchinfer.report.price.price_list import PriceList, read_prices

        now_s = time.time()
        goal = earlier or Goal(None, None, None, PriceList(gpu_hour=job.pricing.gpu_hour), now_s)
        changes: dict[str, Any] = {} if self.max_cost is None else {"max_cost": self.max_cost}
        if self.finish_by is not None:
            changes |= {"finish_by_s": parse_deadline(self.finish_by, now_s), "set_s": now_s}
        if (size := self.size) is not None:
            changes["most_tasks"] = size.tasks
        if self.prices is not None:
            changes["prices"] = read_prices(self.prices)
        goal = replace(goal, **changes)
        check_goal(goal, job)
        return goal


def submit_with_goal(target: Target, options: GoalOptions, shape_options: dict[str, Any]) -> None:
    """Submit the job to Slurm with as many tasks as its goal needs, and follow the goal until the run is finished.

    A dry run prints the expected course and the first sbatch commands instead.
    """
    from batchinfer.pace.follow_goal import follow_goal
    from batchinfer.pace.goal import write_goal
    from batchinfer.run.planned import planned_run
    from batchinfer.run.store.interface import put_sent
    from batchinfer.run.store.open import storage_of
    from batchinfer.submit.slurm.launcher import SlurmLauncher
    from batchinfer.submit.slurm.tasks import record_shape

    launcher = SlurmLauncher()  # only Slurm tasks can follow a goal
    run, config = target.run_and_job
    shape = launcher.shape(run, config, shape_options)
    goal = options.goal(config)
    if target.dry_run and target.tell_finished():
        return
    if target.dry_run:
        planned_run(target.path, target.overrides)
        size = _expected_size(storage_of(config), config, goal)
        if size is not None:
            click.echo(launcher.dry_run(run, config, shape, size))
        return
    launcher.check_cluster(shape)
    target.plan()
    storage = storage_of(config)
    storage.fetch("state", "sent")
    if target.tell_finished():
        return
    record_shape(run, shape)
    write_goal(run, goal)
    put_sent(storage)
    click.echo(
        "this command runs until the run is finished. If it ends before, tasks continue unchanged, and "
        f"`batchinfer submit --follow {run.shown}` changes their number again"
    )
    follow_goal(storage, config, goal)


def follow_run(target: Path, overrides: tuple[str, ...], options: GoalOptions) -> None:
    """Resize a submitted run by its schedule or its goal until it is finished."""
    from batchinfer.pace.follow_goal import follow_goal
    from batchinfer.pace.follow_schedule import follow_schedule, local_minute
    from batchinfer.pace.goal import read_goal, write_goal
    from batchinfer.run.planned import planned_run
    from batchinfer.run.store.interface import put_sent
    from batchinfer.run.store.open import storage_of

    _, config = planned_run(target, overrides)
    storage = storage_of(config)
    storage.fetch("state", "sent")
    earlier = read_goal(storage.run)
    if earlier is None and not options.has_goal:
        if options.array is not None or options.prices is not None:
            raise click.UsageError("--array and --prices need --finish-by or --max-cost here; add one of them")
        follow_schedule(storage, config.slurm.schedule, local_minute)
        return
    options.check(has_goal=True)
    goal = options.goal(config, earlier)
    write_goal(storage.run, goal)
    put_sent(storage)
    follow_goal(storage, config, goal)


def _expected_size(storage: Storage, config: JobConfig, goal: Goal) -> ArraySize | None:
    """Print the expected course of a goal; return the number of tasks to start with, None for 0."""
    from batchinfer.pace.follow_goal import measure_seconds
    from batchinfer.pace.goal import clock, look_ahead, sentences
    from batchinfer.pace.meter import RunMeter
    from batchinfer.submit.size import ArraySize

    now_s = time.time()
    seen = RunMeter(storage, config, goal.prices, measure_seconds(goal)).measure(now_s)
    outlook = look_ahead(goal, seen, 0, now_s)
    for line in sentences(goal, seen, outlook):
        click.echo(line)
    for start_s, end_s, tasks in () if outlook.ahead is None else outlook.ahead.stretches:
        click.echo(f"  {clock(start_s)}  to  {clock(end_s)}  {tasks:>7,} at once")
    return ArraySize(outlook.tasks) if outlook.tasks else None
