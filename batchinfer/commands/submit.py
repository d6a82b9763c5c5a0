"""`submit`: a job on a cluster of Slurm, Kubernetes or Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from batchinfer.commands.goals import GOAL_OPTIONS, GoalOptions, follow_run, submit_with_goal
from batchinfer.commands.options import EarlierRuns, earlier_run_options, job_options, pass_stop, tracer_of
from batchinfer.commands.target import Target
from batchinfer.rundir import LAUNCHERS
from batchinfer.stop_signals import StopSignal

# Options of some launchers only.
ONLY_OF = {
    **dict.fromkeys((*GOAL_OPTIONS, "partition", "account", "qos", "time", "sbatch_args"), ("slurm",)),
    **dict.fromkeys(("template", "finish_template"), ("slurm", "k8s")),
    **dict.fromkeys(("image", "memory", "namespace", "context", "queue", "volumes", "secret"), ("k8s",)),
    "cpus": ("k8s", "ray"),
    "address": ("ray",),
}
# Options without which a launcher cannot submit, and how to give them.
REQUIRED = {"k8s": {"image": "NAME, a container image with batchinfer in it: docs/clusters.md"}}
SPELT = {"sbatch_args": "--sbatch-arg", "volumes": "--pvc"}  # options whose names differ from their parameters


def _slurm_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option(
            "--finish-by",
            metavar="TIME",
            help="Slurm, instead of --array: as many tasks as finish the run by TIME, which is local unless it names a "
            "zone, for example '2026-11-23 06:00'. This command keeps running and adjusts the number of tasks. --array "
            "N limits it.",
        ),
        click.option(
            "--max-cost",
            metavar="DOLLARS",
            type=click.FloatRange(min=0, min_open=True),
            help="Slurm: commit and pause, with exit code 75, before all tasks of the run cost more.",
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
        click.option("--time", metavar="LIMIT", help="Slurm: of a task, which goes back into the queue before that."),
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
        click.option("--image", metavar="NAME", help="Kubernetes: container image with batchinfer."),
        click.option("--namespace", metavar="NAME", help="Kubernetes; default: the context's."),
        click.option("--context", metavar="NAME", help="Kubernetes: kubectl's; default: its current one."),
        click.option("--queue", metavar="NAME", help="Kubernetes: Kueue's LocalQueue."),
        click.option(
            "--pvc",
            "volumes",
            metavar="CLAIM:PATH",
            multiple=True,
            help="Kubernetes: mount a PersistentVolumeClaim at PATH in each pod. May be repeated.",
        ),
        click.option("--secret", metavar="NAME", help="Kubernetes: its keys become variables (credentials for s3://)."),
        click.option("--memory", metavar="QUANTITY", help="Kubernetes: for each node of a task, for example 64Gi."),
        click.option("--cpus", metavar="NUMBER", help="Kubernetes, Ray: for each node of a task."),
        click.option("--address", metavar="URL", help="Ray: the cluster's dashboard, for example http://head:8265."),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("target", metavar="[JOB]", required=False, type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(LAUNCHERS), default="slurm", show_default=True)
@click.option("--array", metavar="N[%M]", help="Tasks, and in Slurm how many of them may run at once (default: all).")
@click.option("--nodes-per-group", metavar="K", type=click.IntRange(1), default=1, show_default=True, help="Per task.")
@click.option("--gpus-per-node", metavar="G", type=click.IntRange(1))
@_slurm_options
@_other_options
@click.option(
    "--template", type=click.Path(path_type=Path), help="File instead of jobs/array.sbatch or jobs/k8s/tasks.yaml."
)
@click.option("--finish-template", type=click.Path(path_type=Path), help="The same for the job that finishes the run.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the sbatch commands or manifests, and the expected tasks, hours and cost by a plan; plan and submit "
    "nothing.",
)
@click.option(
    "--resize",
    nargs=2,
    metavar="RUN N[%M]",
    help="Change the number of tasks of a submitted RUN to N: add tasks, or have tasks commit and end.",
)
@click.option(
    "--follow",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Slurm: resize a submitted RUN by its slurm.schedule, or by its latest --finish-by and --max-cost, "
    "until it is finished.",
)
@earlier_run_options
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
    earlier_runs: EarlierRuns,
    **shape: Any,
) -> None:
    """Plan JOB here, compute it on Slurm, Kubernetes or Ray.

    JOB is a .toml file or a run folder. N tasks claim work units until none is left; each task is a group of K nodes
    that compute together. A dependent job writes the outputs. Tasks may end, be added or be removed at any time.
    """
    _refuse_others(to, shape)
    goals = GoalOptions(array, *(shape.pop(name) for name in GOAL_OPTIONS))
    if resize is not None or follow is not None:
        if target is not None or dry_run or (resize is not None and (follow is not None or goals.is_given)):
            raise click.UsageError("--resize and --follow take no other options: added tasks are like the earlier ones")
        if resize is not None:
            _resize(Path(resize[0]), resize[1])
        if follow is not None:
            follow_run(follow, overrides, goals)
        return
    if target is None or (array is None and not goals.has_goal):
        raise click.UsageError(
            "submit needs a JOB and --array N[%M] or --finish-by TIME, or one of --resize and --follow"
        )
    goals.check(has_goal=goals.has_goal)
    for name in ("template", "finish_template"):
        shape[name] = None if shape[name] is None else str(shape[name].absolute())
    options = {name: value for name, value in shape.items() if to in ONLY_OF.get(name, (to,))}
    job = Target(target, overrides, stop, tracer_of(trace), strict=strict, dry_run=dry_run, earlier_runs=earlier_runs)
    if job.is_run and any(earlier_runs):
        raise click.UsageError("--learn-from, --expert-loads and --reuse count when a plan is made; a run has its plan")
    if array is None or goals.has_goal:
        submit_with_goal(job, goals, options)
    else:
        _submit(job, to, array, options)


def _submit(target: Target, to: str, array: str, options: dict[str, Any]) -> None:
    """Submit a fixed number of tasks, or print the submission if this is a dry run."""
    from batchinfer.run.store.interface import put_sent
    from batchinfer.run.store.open import storage_of
    from batchinfer.submit.launcher import launcher_named

    for name, usage in REQUIRED.get(to, {}).items():
        if options[name] is None:
            raise click.UsageError(f"--to {to} needs --{name} {usage}")
    launcher = launcher_named(to)
    size = launcher.parse_size(array)
    run, job = target.run_and_job
    shape = launcher.shape(run, job, options)
    if target.dry_run and target.tell_finished():
        return
    if target.dry_run:
        target.print_expected(size.tasks, shape.nodes_per_group)
        click.echo(launcher.dry_run(run, job, shape, size))
        return
    launcher.check_cluster(shape)
    target.plan()
    storage = storage_of(job)
    storage.fetch("state", "sent")
    if target.tell_finished():
        return
    text = launcher.submit(storage, job, shape, size)
    put_sent(storage)
    click.echo(text)


def _refuse_others(to: str, shape: dict[str, Any]) -> None:
    """Refuse options of other launchers than `to`."""
    for name, value in shape.items():
        if value not in (None, ()) and to not in ONLY_OF.get(name, (to,)):
            option = SPELT.get(name, f"--{name.replace('_', '-')}")
            raise click.UsageError(
                f"{option} is for --to {' and --to '.join(ONLY_OF[name])}; leave it out for --to {to}"
            )


def _resize(target: Path, size: str) -> None:
    from batchinfer.run.planned import planned_run
    from batchinfer.run.store.interface import put_sent
    from batchinfer.run.store.open import storage_of
    from batchinfer.status.status import StatusReader
    from batchinfer.submit.launcher import DEFAULT_LAUNCHER, last_launcher, launcher_named

    run, config = planned_run(target, ())
    storage = storage_of(config)
    busy = {holder.task for holder in StatusReader(run, storage).read().running if holder.task is not None}
    launcher = last_launcher(run) or launcher_named(DEFAULT_LAUNCHER)
    lines = launcher.resize(storage, launcher.parse_size(size), busy) or [f"{run.shown} has that many tasks already"]
    put_sent(storage)
    for line in lines:
        click.echo(line)
