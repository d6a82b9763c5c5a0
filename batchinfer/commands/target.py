"""The job or run that `submit` sends to a launcher."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchinfer.commands.jobs import plan_here
from batchinfer.commands.options import EarlierRuns, alone
from batchinfer.sanitize import count_text
from batchinfer.stop_signals import StopSignal

if TYPE_CHECKING:
    from batchinfer.config import JobConfig
    from batchinfer.run.trace import Tracer
    from batchinfer.rundir import RunDir


@dataclass(frozen=True)
class Target:
    """A job file or a run folder to submit, with the options for its plan."""

    path: Path
    overrides: tuple[str, ...]
    stop: StopSignal
    tracer: Tracer = field(repr=False)
    strict: bool
    dry_run: bool
    earlier_runs: EarlierRuns

    @cached_property
    def run_and_job(self) -> tuple[RunDir, JobConfig]:
        """The run folder and its job; a run folder given by the user must have a plan."""
        from batchinfer.config import load_job
        from batchinfer.run.fingerprint import check_same, settings_fingerprint
        from batchinfer.run.planned import planned_run
        from batchinfer.run.store.open import storage_of
        from batchinfer.rundir import check_no_bad_rows, read_state, was_planned

        if self.is_run:
            run, job = planned_run(self.path, self.overrides)
            if self.strict:
                check_no_bad_rows(run)
            return run, job
        job = load_job(self.path, self.overrides)
        run = storage_of(job).run
        if self.dry_run and was_planned(run):  # a plan of this job would refuse or replace the other job
            check_same(read_state(run)["fingerprint"], settings_fingerprint(job), run.shown)
        return run, job

    @property
    def is_run(self) -> bool:
        """Whether the user gave a run folder, not a job file."""
        from batchinfer.run.store.interface import uri_of

        return self.path.is_dir() or uri_of(self.path) is not None

    def plan(self) -> None:
        """Make or continue the plan of a job file; a run folder has its plan already."""
        _, job = self.run_and_job
        if not self.is_run:
            with alone("plan", self.stop) as session:
                plan_here(job, session, self.tracer, strict=self.strict, earlier_runs=self.earlier_runs)

    def tell_finished(self) -> bool:
        """Return whether the run is finished, and say so: tasks would find nothing to compute."""
        from batchinfer.rundir import read_state

        run, _ = self.run_and_job
        if not run.run_json.exists() or read_state(run)["state"] != "finished":
            return False
        finish = f"`batchinfer finish {shlex.quote(run.shown)}` writes its outputs again, in another format for example"
        click.echo(f"{run.shown} is finished, so that nothing is submitted; {finish}", err=self.dry_run)
        return True

    def print_expected(self, tasks: int, nodes: int) -> None:
        """Print the plan's expectation on stderr; stdout is for the submission itself."""
        for line in _expected_lines(*self.run_and_job, tasks, nodes):
            click.echo(line, err=True)


def _expected_lines(run: RunDir, job: JobConfig, tasks: int, nodes: int) -> list[str]:
    """Return lines with tasks, hours and cost by the run's plan, or with the reason why they are not known.

    Args:
        nodes: number of nodes of a task.
    """
    from batchinfer.progress import duration
    from batchinfer.rundir import read_state

    kind = f"{count_text(tasks, 'task')} of {count_text(nodes, 'node')}"
    if not run.run_json.exists() or (state := read_state(run))["state"] == "planning":
        return [f"{kind}; hours and cost are known when there is a plan: `batchinfer plan` first"]
    num_units, work_s = state["counts"]["units"], state["counts"]["work_s"]
    warning = [] if tasks <= num_units else ["warning: more tasks than units; some tasks will have no work"]
    if work_s is None:
        later = "; cluster.gpu counts when a plan is made, and this one was made without" if job.cluster.gpu else ""
        unknown = f"hours and cost are not known: plan with --learn-from and a finished run, or name cluster.gpu{later}"
        return [f"{kind} for {count_text(num_units, 'unit')}; {unknown}", *warning]
    hours, num_ranks, price = work_s / 3600, job.cluster.num_ranks, job.pricing.gpu_hour
    at_once = max(1, min(tasks, num_units))
    cost = "" if price is None else f", {hours * num_ranks * price:,.2f} $"
    figures = (
        f"{hours:,.2f} task-hours by the plan, {duration(work_s / at_once)} with all tasks working",
        f"{hours * num_ranks:,.2f} accelerator-hours{cost} in all",
    )
    return [f"{kind} for {count_text(num_units, 'unit')}: {', '.join(figures)}", *warning]
