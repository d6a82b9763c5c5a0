"""The job or run that `submit` sends to a launcher."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchinfer.commands.jobs import plan_here
from batchinfer.commands.options import alone
from batchinfer.stop import StopSignal

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

    @cached_property
    def run_and_job(self) -> tuple[RunDir, JobConfig]:
        """The run folder and its job; a run folder given by the user must have a plan."""
        from batchinfer.config import load_job
        from batchinfer.run.open_storage import storage_of
        from batchinfer.run.planned import planned_run
        from batchinfer.rundir import check_no_bad_rows

        if self.is_run:
            run, job = planned_run(self.path, self.overrides)
            if self.strict:
                check_no_bad_rows(run)
            return run, job
        job = load_job(self.path, self.overrides)
        return storage_of(job).run, job

    @property
    def is_run(self) -> bool:
        """Whether the user gave a run folder, not a job file."""
        from batchinfer.run.storage import uri_of

        return self.path.is_dir() or uri_of(self.path) is not None

    def plan(self) -> None:
        """Make or continue the plan of a job file; a run folder has its plan already."""
        _, job = self.run_and_job
        if not self.is_run:
            with alone("plan", self.stop) as session:
                plan_here(job, session, self.tracer, strict=self.strict, learn_from=None, expert_loads=None)

    def print_expected(self, tasks: int, nodes: int) -> None:
        """Print the plan's expectation on stderr; stdout is for the submission itself."""
        from batchinfer.submit.outlook import expected_lines

        for line in expected_lines(*self.run_and_job, tasks, nodes):
            click.echo(line, err=True)
