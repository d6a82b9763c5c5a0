"""Commands for a job on a cluster: status, cancel, retry; and `submit --to slurm`."""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchinfer.commands.goals import GoalOptions, expected_size
from batchinfer.commands.options import json_option, run_argument
from batchinfer.commands.target import Target

if TYPE_CHECKING:
    from batchinfer.config import JobConfig
    from batchinfer.run.storage import Storage
    from batchinfer.submit.size import ArraySize


@click.command()
@run_argument
@click.option("--watch", is_flag=True, help="Print again every few seconds until the run is finished.")
@json_option
def status(target: Path, watch: bool, as_json: bool) -> None:
    """Print the state and progress of RUN (a run folder or a .toml file).

    The state is planning, planned (no worker yet), running, interrupted (no worker any more), computed (finish is
    next), finished or partial. Then come tokens, units, rows, speed, time left, running commands and problems.
    """
    from batchinfer.run.open_storage import storage_of
    from batchinfer.run.planned import planned_run
    from batchinfer.status.status import StatusReader
    from batchinfer.status.text import as_document, format_status, watch_status

    if watch and as_json:
        raise click.UsageError("--json is one document; leave --watch out")
    run, config = planned_run(target, (), may_be_planning=True)
    reader = StatusReader(run, storage_of(config))
    if watch:
        watch_status(reader, click.echo)
    else:
        found = reader.read()
        click.echo(json.dumps(as_document(found), indent=1) if as_json else format_status(found))


@click.command()
@run_argument
def cancel(target: Path) -> None:
    """End all tasks of RUN (a run folder or a .toml file). Results are kept; `submit` continues later."""
    from batchinfer.run.open_storage import storage_of
    from batchinfer.run.planned import planned_run
    from batchinfer.submit.k8s import tasks as k8s
    from batchinfer.submit.ray import client as ray
    from batchinfer.submit.records import launchers_of
    from batchinfer.submit.slurm import tasks as slurm

    run, config = planned_run(target, (), "sent")
    storage = storage_of(config)
    end = {"slurm": lambda: slurm.cancel(storage), "k8s": lambda: k8s.cancel(run), "ray": lambda: ray.cancel(storage)}
    ended = [name for launcher in launchers_of(run) for name in end[launcher]()]
    storage.keep_sent()
    click.echo(f"cancelled: {' '.join(ended)}" if ended else f"nothing of {run.shown} waits or runs in a cluster")


@click.command()
@run_argument
@click.option("--array", metavar="N[%M]", help="Send this number of tasks, with the last submission's options.")
def retry(target: Path, array: str | None) -> None:
    """Compute the failed rows of RUN (a run folder or a .toml file) again; good rows keep their answers.

    Rows that the plan found bad stay error rows.
    """
    from batchinfer.controller.retry import retry_failed
    from batchinfer.run.open_storage import storage_of
    from batchinfer.run.planned import planned_run
    from batchinfer.submit.size import parse_size

    run, config = planned_run(target, (), "sent")
    storage = storage_of(config)
    size = None if array is None else parse_size(array)
    if size is not None and not size.tasks:
        raise click.UsageError("--array 0 would send nothing; leave it out to start `batchinfer work` by hand")
    found = retry_failed(storage)
    click.echo(f"{found.num_requests:,} failed requests in {found.num_units:,} units are to be computed again")
    if found.num_held:
        click.echo(f"{found.num_held:,} more units with failed requests are being worked on; retry again afterwards")
    if found.num_bad_rows:
        click.echo(f"{found.num_bad_rows:,} rows are bad in the input; a retry does not change them")
    if not found.num_open_units:
        click.echo("all units are done")
    elif size is None:
        click.echo(f"{found.num_open_units:,} units are open: `batchinfer work {run.shown}`, then `batchinfer finish`")
    else:
        said = _send_again(storage, size)
        storage.keep_sent()
        click.echo(said)


def _send_again(storage: Storage, size: ArraySize) -> str:
    """Send tasks with the options of the last submission, by its launcher; return the line to print."""
    from batchinfer.submit.k8s import tasks as k8s
    from batchinfer.submit.ray import client as ray
    from batchinfer.submit.records import last_launcher
    from batchinfer.submit.size import parse_tasks
    from batchinfer.submit.slurm import client
    from batchinfer.submit.slurm import tasks as submit

    run = storage.run
    match last_launcher(run):
        case "k8s":
            return k8s.what_to_watch(run, k8s.send_again(run, parse_tasks(str(size))))
        case "ray":
            return ray.what_to_watch(run, ray.submit(storage, ray.submissions(run)[-1].shape, parse_tasks(str(size))))
    earlier = submit.submissions(run)
    shape = earlier[-1].shape if earlier else submit.Shape()
    sent = submit.submit(run, shape, size, max_array_size=client.max_array_size())
    return submit.what_to_watch(run, sent)


def submit_to_slurm(target: Target, asked: GoalOptions, options: dict[str, Any]) -> None:
    """Send the job's tasks to Slurm, or print the sbatch commands."""
    import shlex
    from dataclasses import replace

    from batchinfer.pace.goal import write_goal
    from batchinfer.pace.pursue import pursue
    from batchinfer.pace.schedule import parse_schedule
    from batchinfer.run.open_storage import storage_of
    from batchinfer.run.planned import planned_run
    from batchinfer.submit.slurm.client import max_array_size
    from batchinfer.submit.slurm.tasks import (
        Shape,
        check_shape,
        dry_run_commands,
        remember_shape,
        submit,
        what_to_watch,
    )

    shape = Shape(**options)
    run, config = target.run_and_job
    check_shape(config, shape)
    if run.uri is not None:
        shape = replace(shape, sbatch_args=(*_endpoint(config), *shape.sbatch_args))
    parse_schedule(config.slurm.schedule)
    size, goal = asked.size, asked.goal(config) if asked.has_goal else None
    if target.dry_run:
        if goal is not None:
            planned_run(target.path, target.overrides)
            size = expected_size(storage_of(config), config, goal)
        elif size is not None:
            target.print_expected(size.tasks, shape.nodes_per_group)
        if size is not None:
            click.echo("\n".join(shlex.join(command) for command in dry_run_commands(run, shape, size)))
        return
    limit = max_array_size()  # fails before planning if there is no Slurm
    target.plan()
    storage = storage_of(config)
    storage.fetch("state", "sent")
    if goal is None:
        assert size is not None
        sent = submit(run, shape, size, max_array_size=limit)
        storage.keep_sent()
        click.echo(what_to_watch(run, sent))
        return
    remember_shape(run, shape)
    write_goal(run, goal)
    storage.keep_sent()
    click.echo(
        "this command stays until the run is finished. If it ends before, tasks continue, and "
        f"`batchinfer submit --follow {run.shown}` adapts their number again"
    )
    pursue(storage, config, goal)


def _endpoint(config: JobConfig) -> tuple[str, ...]:
    """Return sbatch's option for the S3 endpoint, because tasks find the job file by its URI alone."""
    return () if config.s3.endpoint is None else (f"--export=ALL,AWS_ENDPOINT_URL_S3={config.s3.endpoint}",)


def follow_run(target: Path, overrides: tuple[str, ...], asked: GoalOptions) -> None:
    """Resize a submitted run by its schedule or its goal until it is finished."""
    from batchinfer.pace.goal import read_goal, write_goal
    from batchinfer.pace.pursue import pursue
    from batchinfer.pace.schedule import follow, local_minute
    from batchinfer.run.open_storage import storage_of
    from batchinfer.run.planned import planned_run

    _, config = planned_run(target, overrides)
    storage = storage_of(config)
    storage.fetch("state", "sent")
    earlier = read_goal(storage.run)
    if earlier is None and not asked.has_goal:
        if asked.array is not None or asked.prices is not None:
            raise click.UsageError("--array and --prices go with --finish-by or --max-cost here; add one of them")
        follow(storage, config.slurm.schedule, local_minute)
        return
    asked.check(has_goal=True)
    goal = asked.goal(config, earlier)
    write_goal(storage.run, goal)
    storage.keep_sent()
    pursue(storage, config, goal)


def resize_on_slurm(storage: Storage, size: str, busy: Container[str]) -> list[str]:
    """Change the number of tasks; return lines that report the change."""
    from batchinfer.submit.size import parse_size
    from batchinfer.submit.slurm.tasks import resize, what_to_watch

    wanted = parse_size(size)
    sent, drained = resize(storage.run, wanted, busy)
    lines = [] if sent is None else [what_to_watch(storage.run, sent)]
    if drained:
        names = " ".join(task.name for task in drained)
        lines.append(f"sent away, with what they have finished committed: {names}")
    if wanted.at_once is not None:
        lines.append(f"at most {wanted.at_once} tasks run at once from now on")
    return lines
