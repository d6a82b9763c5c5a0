"""`submit --to k8s`, and changes of the number of tasks in Kubernetes."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

import click

from batchinfer.commands.goals import GoalOptions
from batchinfer.commands.target import Target, tasks_of

if TYPE_CHECKING:
    from batchinfer.run.storage import Storage


def submit_to_k8s(target: Target, asked: GoalOptions, options: dict[str, Any]) -> None:
    """Send the job's tasks to Kubernetes, or print their manifests."""
    from batchinfer.run.open_storage import storage_of
    from batchinfer.submit.k8s.kubectl import Kubectl
    from batchinfer.submit.k8s.manifests import as_yaml
    from batchinfer.submit.k8s.shape import Shape, check_shape
    from batchinfer.submit.k8s.tasks import manifests, submit, what_to_watch

    if options["image"] is None:
        raise click.UsageError("--to k8s needs --image NAME, a container image with batchinfer in it: docs/clusters.md")
    tasks, shape = tasks_of(asked.array, "k8s"), Shape(**options)
    run, job = target.run_and_job
    check_shape(job, shape)
    if target.dry_run:
        target.print_expected(tasks, shape.nodes_per_group)
        click.echo(as_yaml(manifests(run, job.output.dir, shape, tasks)[1]), nl=False)
        return
    Kubectl(shape.context, shape.namespace).check()  # fail before planning if there is no cluster
    target.plan()
    storage = storage_of(job)
    storage.fetch("state", "sent")
    sent = submit(run, job.output.dir, shape, tasks)
    storage.keep_sent()
    click.echo(what_to_watch(run, sent))


def resize_on_k8s(storage: Storage, size: str, busy: Container[str]) -> list[str]:
    """Change the number of tasks; return lines that report the change."""
    from batchinfer.submit.k8s.tasks import resize
    from batchinfer.submit.size import parse_tasks

    added, away = resize(storage.run, parse_tasks(size), busy)
    lines = [f"{added} tasks added"] if added else []
    return lines + ([f"sent away, with what they have finished committed: {' '.join(away)}"] if away else [])
