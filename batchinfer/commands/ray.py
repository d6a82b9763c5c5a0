"""`submit --to ray`, and changes of the number of tasks in Ray."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

import click

from batchinfer.commands.goals import GoalOptions
from batchinfer.commands.target import Target, tasks_of

if TYPE_CHECKING:
    from batchinfer.run.storage import Storage


def submit_to_ray(target: Target, asked: GoalOptions, options: dict[str, Any]) -> None:
    """Send the job's tasks to a Ray cluster, or print their description."""
    from dataclasses import replace

    from batchinfer.data.stores import s3_endpoint
    from batchinfer.run.open_storage import storage_of
    from batchinfer.submit.ray.client import connect, dry_run_text, submit, what_to_watch
    from batchinfer.submit.ray.shape import Shape, check_shape

    tasks, shape = tasks_of(asked.array, "ray"), Shape(**options)
    run, job = target.run_and_job
    check_shape(job, shape)
    if run.uri is not None:  # nodes find the job file by the URI alone, so they need the endpoint
        shape = replace(shape, endpoint=s3_endpoint(job.s3))
    if target.dry_run:
        target.print_expected(tasks, shape.nodes_per_group)
        click.echo(dry_run_text(run, shape, tasks))
        return
    connect(shape)  # fail before planning if there is no cluster
    target.plan()
    storage = storage_of(job)
    storage.fetch("state", "sent")
    click.echo(what_to_watch(run, submit(storage, shape, tasks)))


def resize_on_ray(storage: Storage, size: str, busy: Container[str]) -> list[str]:
    """Change the number of tasks; return lines that report the change. Ray's driver chooses the tasks to end."""
    from batchinfer.submit.ray.client import resize
    from batchinfer.submit.size import parse_tasks

    tasks = parse_tasks(size)
    before = resize(storage, tasks)
    if tasks == before:
        return []
    return [f"{tasks - before} tasks are added" if tasks > before else f"{before - tasks} tasks commit and leave"]
