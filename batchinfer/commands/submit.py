"""A planned job on a cluster: `submit` for Slurm, Kubernetes and Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from batchinfer.commands import k8s, ray, slurm
from batchinfer.commands.goals import GOAL_OPTIONS, Asked
from batchinfer.commands.options import job_options, pass_stop, tracer_of
from batchinfer.commands.target import Target
from batchinfer.stop import StopSignal

# Options that only some launchers know.
ONLY_OF = {
    **dict.fromkeys((*GOAL_OPTIONS, "partition", "account", "qos", "time", "sbatch_args"), ("slurm",)),
    **dict.fromkeys(("template", "finish_template"), ("slurm", "k8s")),
    **dict.fromkeys(("image", "memory", "namespace", "context", "queue", "volumes", "secret"), ("k8s",)),
    "cpus": ("k8s", "ray"),
    "address": ("ray",),
}
SPELT = {"sbatch_args": "--sbatch-arg", "volumes": "--pvc"}  # options that are not called as their parameters are


def _slurm_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option(
            "--finish-by",
            metavar="TIME",
            help="Slurm, instead of --array: as many tasks as end the run by then, local time unless TIME names a "
            "zone, for example '2026-11-23 06:00'; raised and lowered while it runs, so this command stays. --array N "
            "is then the most at once.",
        ),
        click.option(
            "--max-cost",
            metavar="DOLLARS",
            type=click.FloatRange(min=0, min_open=True),
            help="Slurm: commit and pause, with exit code 75, before all tasks of the run have cost more.",
        ),
        click.option(
            "--prices",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="Slurm: a price list (.toml) for --finish-by and --max-cost instead of pricing.gpu_hour; its "
            "cheap_hours come first.",
        ),
        click.option("--partition", metavar="NAME", help="Slurm."),
        click.option("--account", metavar="NAME", help="Slurm."),
        click.option("--qos", metavar="NAME", help="Slurm."),
        click.option("--time", metavar="LIMIT", help="Slurm: of a task; it goes back into the queue before that."),
        click.option(
            "--sbatch-arg",
            "sbatch_args",
            metavar="OPTION",
            multiple=True,
            help="Slurm: one more option of sbatch for the tasks, such as --sbatch-arg=--exclusive. May be repeated.",
        ),
    ):
        command = option(command)
    return command


def _other_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--image", metavar="NAME", help="Kubernetes: the container's, with batchinfer in it."),
        click.option("--namespace", metavar="NAME", help="Kubernetes; default: the context's."),
        click.option("--context", metavar="NAME", help="Kubernetes: of kubectl; default: its current one."),
        click.option("--queue", metavar="NAME", help="Kubernetes: Kueue's LocalQueue."),
        click.option(
            "--pvc",
            "volumes",
            metavar="CLAIM:PATH",
            multiple=True,
            help="Kubernetes: mounts a PersistentVolumeClaim at PATH in each pod. May be repeated.",
        ),
        click.option("--secret", metavar="NAME", help="Kubernetes: its keys become variables (credentials for s3://)."),
        click.option("--memory", metavar="QUANTITY", help="Kubernetes: of each node of a task, for example 64Gi."),
        click.option("--cpus", metavar="NUMBER", help="Kubernetes, Ray: of each node of a task."),
        click.option("--address", metavar="URL", help="Ray: the cluster's dashboard, for example http://head:8265."),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("target", metavar="[JOB]", required=False, type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(["slurm", "k8s", "ray"]), default="slurm", show_default=True)
@click.option("--array", metavar="N[%M]", help="Tasks, and in Slurm how many of them may run at once (default: all).")
@click.option("--nodes-per-group", metavar="K", type=click.IntRange(1), default=1, show_default=True, help="Per task.")
@click.option("--gpus-per-node", metavar="G", type=click.IntRange(1))
@_slurm_options
@_other_options
@click.option(
    "--template", type=click.Path(path_type=Path), help="Own file instead of jobs/array.sbatch or jobs/k8s/tasks.yaml."
)
@click.option("--finish-template", type=click.Path(path_type=Path), help="The same for the job that finishes.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print what would be sent (sbatch commands, manifests), and the tasks, hours and cost that a plan expects; "
    "plan and send nothing.",
)
@click.option(
    "--resize",
    nargs=2,
    metavar="RUN N[%M]",
    help="Have N tasks of a submitted RUN from now on: add some, or have some commit and leave.",
)
@click.option(
    "--follow",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Slurm: resize a submitted RUN by its slurm.schedule, or by --finish-by and --max-cost as they were or are "
    "given, until it is finished.",
)
@job_options
@pass_stop
def submit(
    stop: StopSignal,
    target: Path | None,
    to: str,
    array: str | None,
    dry_run: bool,
    resize: tuple[str, str] | None,
    follow: Path | None,
    overrides: tuple[str, ...],
    strict: bool,
    trace: bool,
    **shape: Any,
) -> None:
    """Plan JOB (a .toml file or a run folder) here, then have a cluster compute it: Slurm, Kubernetes or Ray.

    N tasks claim work units until none is left; each task is a group of K nodes that computes as one. What comes behind
    them writes the outputs. Tasks may end, be added or be taken away at any time.
    """
    _refuse_others(to, shape)
    asked = Asked(array, *(shape.pop(name) for name in GOAL_OPTIONS))
    if resize is not None or follow is not None:
        if target is not None or dry_run or (resize is not None and (follow is not None or asked.says_anything)):
            raise click.UsageError("--resize and --follow stand alone: tasks that are added are like the earlier ones")
        if resize is not None:
            _resize(Path(resize[0]), resize[1])
        if follow is not None:
            slurm.follow_run(follow, overrides, asked)
        return
    if target is None or (array is None and not asked.has_goal):
        raise click.UsageError(
            "submit needs a JOB and --array N[%M] or --finish-by TIME, or one of --resize and --follow"
        )
    asked.check(has_goal=asked.has_goal)
    for name in ("template", "finish_template"):
        shape[name] = None if shape[name] is None else str(shape[name].absolute())
    options = {name: value for name, value in shape.items() if to in ONLY_OF.get(name, (to,))}
    job = Target(target, overrides, stop, tracer_of(trace), strict=strict, dry_run=dry_run)
    {"slurm": slurm.submit_to_slurm, "k8s": k8s.submit_to_k8s, "ray": ray.submit_to_ray}[to](job, asked, options)


def _refuse_others(to: str, shape: dict[str, Any]) -> None:
    """Options of other launchers than the one that is meant."""
    for name, value in shape.items():
        if value not in (None, ()) and to not in ONLY_OF.get(name, (to,)):
            option = SPELT.get(name, f"--{name.replace('_', '-')}")
            raise click.UsageError(
                f"{option} is for --to {' and --to '.join(ONLY_OF[name])}; leave it out for --to {to}"
            )


def _resize(target: Path, size: str) -> None:
    from batchinfer.run.open_storage import storage_of
    from batchinfer.run.planned import planned_run
    from batchinfer.slurm.status import StatusReader
    from batchinfer.submit.records import last_launcher

    run, config = planned_run(target, ())
    storage = storage_of(config)
    busy = {holder.task for holder in StatusReader(run, storage).read().running if holder.task is not None}
    change = {"k8s": k8s.resize_on_k8s, "ray": ray.resize_on_ray}.get(last_launcher(run) or "", slurm.resize_on_slurm)
    lines = change(storage, size, busy) or [f"{run.shown} has that many tasks already"]
    storage.keep_sent()
    for line in lines:
        click.echo(line)
