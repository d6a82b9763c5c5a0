"""Slurm as a launcher."""

import shlex
from collections import Counter
from collections.abc import Container
from dataclasses import replace
from typing import Any

from batchinfer.config import JobConfig
from batchinfer.run.store.interface import Storage
from batchinfer.rundir import RunDir
from batchinfer.sanitize import count_text
from batchinfer.submit.size import ArraySize, LiveTasks, parse_size
from batchinfer.submit.slurm import client, tasks
from batchinfer.submit.slurm.schedule import parse_schedule
from batchinfer.submit.slurm.tasks import Shape

# reasons of pending tasks that are no problem
USUAL_REASONS = {"None", "Resources", "Priority", "JobArrayTaskLimit", "BeginTime", "Dependency"}


class SlurmLauncher:
    """Job arrays, submitted with sbatch."""

    def parse_size(self, text: str) -> ArraySize:
        return parse_size(text)

    def shape(self, run: RunDir, job: JobConfig, options: dict[str, Any]) -> Shape:
        shape = Shape(**options)
        tasks.check_shape(job, shape)
        parse_schedule(job.slurm.schedule)
        if run.uri is None or job.s3.endpoint is None:
            return shape
        # tasks have only the run's URI, and find their job file behind it
        endpoint = f"--export=ALL,AWS_ENDPOINT_URL_S3={job.s3.endpoint}"
        return replace(shape, sbatch_args=(endpoint, *shape.sbatch_args))

    def dry_run(self, run: RunDir, job: JobConfig, shape: Shape, size: ArraySize) -> str:
        return "\n".join(shlex.join(command) for command in tasks.dry_run_commands(run, shape, size))

    def check_cluster(self, shape: Shape) -> None:
        client.max_array_size()

    def submit(self, storage: Storage, job: JobConfig, shape: Shape, size: ArraySize) -> str:
        return tasks.submission_text(storage.run, tasks.submit(storage.run, shape, size))

    def submit_again(self, storage: Storage, size: ArraySize) -> str:
        earlier = tasks.submissions(storage.run)
        shape = earlier[-1].shape if earlier else Shape()
        return tasks.submission_text(storage.run, tasks.submit(storage.run, shape, size))

    def resize(self, storage: Storage, size: ArraySize, busy: Container[str]) -> list[str]:
        sent, drained = tasks.resize(storage.run, size, busy)
        lines = [] if sent is None else [tasks.submission_text(storage.run, sent)]
        if drained:
            names = " ".join(task.name for task in drained)
            lines.append(f"removed, after committing finished requests: {names}")
        if size.at_once is not None:
            run = "runs" if size.at_once == 1 else "run"
            lines.append(f"at most {count_text(size.at_once, 'task')} {run} at once from now on")
        return lines

    def cancel(self, storage: Storage) -> list[str]:
        return tasks.cancel(storage)

    def live_tasks(self, run: RunDir) -> LiveTasks | None:
        if not client.is_installed():
            return None
        live = tasks.live_tasks(run)
        waiting = Counter(task.reason for task in live if task.is_pending)
        problems = [
            f"{count_text(count, 'Slurm task')} {'waits' if count == 1 else 'wait'}: {reason}"
            for reason, count in waiting.items()
            if reason not in USUAL_REASONS
        ]
        return LiveTasks("Slurm", len(live) - waiting.total(), waiting.total(), problems)
