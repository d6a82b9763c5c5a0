"""`submit --to ray`."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

import click

from batchinfer.commands.goals import Asked
from batchinfer.commands.target import Target, tasks_of

if TYPE_CHECKING:
    from batchinfer.rundir import RunDir


def submit_to_ray(target: Target, asked: Asked, options: dict[str, Any]) -> None:
    """Send the job's tasks to a Ray cluster, or print what they would be."""
    from batchinfer.submit.ray.client import connect, dry_run_text, submit, what_to_watch
    from batchinfer.submit.ray.shape import Shape, check_shape

    tasks, shape = tasks_of(asked.array, "ray"), Shape(**options)
    run, job = target.run_and_job
    check_shape(job, shape)
    if target.dry_run:
        target.tell_expected(tasks, shape.nodes_per_group)
        click.echo(dry_run_text(run, shape, tasks))
        return
    connect(shape)  # without a cluster there is no need to plan
    target.plan()
    click.echo(what_to_watch(run, submit(run, shape, tasks)))


def resize_on_ray(run: RunDir, size: str, busy: Container[str]) -> list[str]:
    """Change the number of tasks; what came of it, for a person. The driver knows by itself which tasks to take."""
    from batchinfer.submit.ray.client import resize
    from batchinfer.submit.size import parse_tasks

    tasks = parse_tasks(size)
    before = resize(run, tasks)
    if tasks == before:
        return []
    return [f"{tasks - before} tasks are added" if tasks > before else f"{before - tasks} tasks commit and leave"]
