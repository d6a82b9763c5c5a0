"""A job on a Slurm cluster: submit, status, cancel, retry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchinfer.commands.goals import GOAL_OPTIONS, Asked, expected_size
from batchinfer.commands.jobs import plan_here
from batchinfer.commands.options import alone, job_options, pass_stop, tracer_of
from batchinfer.stop import StopSignal

if TYPE_CHECKING:
    from batchinfer.run.trace import Tracer
    from batchinfer.slurm.submit import Shape


@click.command()
@click.argument("target", metavar="[JOB]", required=False, type=click.Path(path_type=Path))
@click.option("--array", metavar="N[%M]", help="Tasks, and how many of them may run at once (default: all).")
@click.option(
    "--finish-by",
    metavar="TIME",
    help="Instead of --array: as many tasks as end the run by then, local time unless TIME names a zone, for example "
    "'2026-11-23 06:00'; raised and lowered while it runs, so this command stays. --array N is then the most at once.",
)
@click.option(
    "--max-cost",
    metavar="DOLLARS",
    type=click.FloatRange(min=0, min_open=True),
    help="Commit and pause, with exit code 75, before all tasks of the run have cost more.",
)
@click.option(
    "--prices",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A price list (.toml) for --finish-by and --max-cost instead of pricing.gpu_hour; its cheap_hours come first.",
)
@click.option("--nodes-per-group", metavar="K", type=click.IntRange(1), default=1, show_default=True, help="Per task.")
@click.option("--gpus-per-node", metavar="G", type=click.IntRange(1))
@click.option("--partition", metavar="NAME")
@click.option("--account", metavar="NAME")
@click.option("--qos", metavar="NAME")
@click.option("--time", metavar="LIMIT", help="Of a task; it goes back into the queue before that.")
@click.option(
    "--sbatch-arg",
    "sbatch_args",
    metavar="OPTION",
    multiple=True,
    help="One more option of sbatch for the tasks, for example --sbatch-arg=--exclusive. May be repeated.",
)
@click.option("--template", type=click.Path(path_type=Path), help="Own batch script instead of jobs/array.sbatch.")
@click.option("--finish-template", type=click.Path(path_type=Path), help="The same for jobs/finish.sbatch.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the sbatch commands, and the hours and cost that a plan expects of --finish-by; plan and send nothing.",
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
    help="Resize a submitted RUN by its slurm.schedule, or by --finish-by and --max-cost as they were or are given, "
    "until it is finished.",
)
@job_options
@pass_stop
def submit(
    stop: StopSignal,
    target: Path | None,
    array: str | None,
    dry_run: bool,
    resize: tuple[str, str] | None,
    follow: Path | None,
    overrides: tuple[str, ...],
    strict: bool,
    trace: bool,
    template: Path | None,
    finish_template: Path | None,
    **shape: Any,
) -> None:
    """Plan JOB (a .toml file or a run folder) here, then have a Slurm cluster compute it.

    An array of N tasks claims work units until none is left; each task is a group of K nodes that computes as one. A
    job behind it writes the outputs. Tasks may end, be added or be taken away at any time.
    """
    from batchinfer.slurm.submit import Shape

    asked = Asked(array, *(shape.pop(name) for name in GOAL_OPTIONS))
    if resize is not None or follow is not None:
        if target is not None or dry_run or (resize is not None and (follow is not None or asked.says_anything)):
            raise click.UsageError("--resize and --follow stand alone: tasks that are added are like the earlier ones")
        if resize is not None:
            _resize(Path(resize[0]), resize[1])
        if follow is not None:
            _follow(follow, overrides, asked)
        return
    if target is None or (array is None and not asked.has_goal):
        raise click.UsageError(
            "submit needs a JOB and --array N[%M] or --finish-by TIME, or one of --resize and --follow"
        )
    asked.check(has_goal=asked.has_goal)
    shape["template"] = None if template is None else str(template.absolute())
    shape["finish_template"] = None if finish_template is None else str(finish_template.absolute())
    _submit(target, overrides, asked, Shape(**shape), stop, tracer_of(trace), strict=strict, dry_run=dry_run)


@click.command()
@click.argument("target", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--watch", is_flag=True, help="Again every few seconds, until the run is finished.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def status(target: Path, watch: bool, as_json: bool) -> None:
    """What goes on in RUN (a run folder or a .toml file) and how far it is.

    It is planning, planned (nobody works yet), running, interrupted (nobody works any more), computed (finish is
    next), finished or partial; then come tokens, units, rows, speed, time left, what each command does, and problems.
    """
    from batchinfer.run.open_storage import storage_of
    from batchinfer.run.planned import planned_run
    from batchinfer.slurm.status import StatusReader
    from batchinfer.slurm.status_text import as_document, format_status, watch_status

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
@click.argument("target", metavar="RUN", type=click.Path(path_type=Path))
def cancel(target: Path) -> None:
    """End all Slurm tasks of RUN (a run folder or a .toml file). What is finished stays; `submit` goes on later."""
    from batchinfer.run.planned import planned_run
    from batchinfer.slurm.submit import cancel as cancel_run

    run, _ = planned_run(target, ())
    ended = cancel_run(run)
    click.echo(f"cancelled: {' '.join(ended)}" if ended else f"nothing of {run.root} waits or runs in Slurm")


@click.command()
@click.argument("target", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--array", metavar="N[%M]", help="Slurm tasks to send for it, like those of the last submission.")
def retry(target: Path, array: str | None) -> None:
    """Give failed rows of RUN (a run folder or a .toml file) another try; good rows keep their answers.

    Rows that the plan found to be bad stay error rows.
    """
    from batchinfer.controller.retry import retry_failed
    from batchinfer.run.open_storage import storage_of
    from batchinfer.run.planned import planned_run
    from batchinfer.slurm.client import max_array_size, parse_size
    from batchinfer.slurm.submit import Shape, submissions, what_to_watch
    from batchinfer.slurm.submit import submit as submit_run

    run, config = planned_run(target, ())
    size = None if array is None else parse_size(array)
    if size is not None and not size.tasks:
        raise click.UsageError("--array 0 would send nothing; leave it out to start `batchinfer work` by hand")
    found = retry_failed(storage_of(config))
    click.echo(f"{found.num_requests:,} failed requests in {found.num_units:,} units are to be computed again")
    if found.num_held:
        click.echo(f"{found.num_held:,} more units with failed requests are being worked on; retry again afterwards")
    if found.num_bad_rows:
        click.echo(f"{found.num_bad_rows:,} rows are bad in the input; no try helps them")
    if not found.num_open_units:
        click.echo("all units are done")
    elif size is None:
        click.echo(f"{found.num_open_units:,} units are open: `batchinfer work {run.shown}`, then `batchinfer finish`")
    else:
        earlier = submissions(run)
        shape = earlier[-1].shape if earlier else Shape()
        click.echo(what_to_watch(run, submit_run(run, shape, size, max_array_size=max_array_size())))


def _submit(
    target: Path,
    overrides: tuple[str, ...],
    asked: Asked,
    shape: Shape,
    stop: StopSignal,
    tracer: Tracer,
    *,
    strict: bool,
    dry_run: bool,
) -> None:
    import shlex

    from batchinfer.config import load_job
    from batchinfer.run.open_storage import storage_of
    from batchinfer.run.planned import planned_run
    from batchinfer.rundir import refuse_bad_rows
    from batchinfer.slurm.client import max_array_size
    from batchinfer.slurm.goal import write_goal
    from batchinfer.slurm.pursue import pursue
    from batchinfer.slurm.schedule import parse_schedule
    from batchinfer.slurm.submit import check_shape, dry_run_commands, remember_shape, submit, what_to_watch

    if target.is_dir():
        run_dir, config = planned_run(target, overrides)
        if strict:
            refuse_bad_rows(run_dir)
    else:
        config = load_job(target, overrides)
        run_dir = storage_of(config).run
    check_shape(config, shape)
    parse_schedule(config.slurm.schedule)
    size, goal = asked.size, asked.goal(config) if asked.has_goal else None
    if dry_run:
        if goal is not None:
            size = expected_size(planned_run(target, overrides)[0], config, goal)
        if size is not None:
            click.echo("\n".join(shlex.join(command) for command in dry_run_commands(run_dir, shape, size)))
        return
    limit = max_array_size()  # without Slurm there is no need to plan
    if not target.is_dir():
        with alone("plan", stop) as session:
            plan_here(config, session, tracer, strict=strict, learn_from=None, expert_loads=None)
    if goal is None:
        assert size is not None
        click.echo(what_to_watch(run_dir, submit(run_dir, shape, size, max_array_size=limit)))
        return
    remember_shape(run_dir, shape)
    write_goal(run_dir, goal)
    click.echo(
        "this command stays until the run is finished. If it ends before, tasks go on as they are, and "
        f"`batchinfer submit --follow {run_dir.root}` changes their number again"
    )
    pursue(run_dir, config, goal)


def _follow(target: Path, overrides: tuple[str, ...], asked: Asked) -> None:
    from batchinfer.run.planned import planned_run
    from batchinfer.slurm.goal import read_goal, write_goal
    from batchinfer.slurm.pursue import pursue
    from batchinfer.slurm.schedule import follow, local_minute

    run_dir, config = planned_run(target, overrides)
    earlier = read_goal(run_dir)
    if earlier is None and not asked.has_goal:
        if asked.array is not None or asked.prices is not None:
            raise click.UsageError("--array and --prices go with --finish-by or --max-cost here; add one of them")
        follow(run_dir, config.slurm.schedule, local_minute)
        return
    asked.check(has_goal=True)
    goal = asked.goal(config, earlier)
    write_goal(run_dir, goal)
    pursue(run_dir, config, goal)


def _resize(target: Path, size: str) -> None:
    from batchinfer.run.planned import planned_run
    from batchinfer.slurm.client import parse_size
    from batchinfer.slurm.status import StatusReader
    from batchinfer.slurm.submit import resize, what_to_watch

    run_dir, _ = planned_run(target, ())
    wanted = parse_size(size)
    busy = {holder.task for holder in StatusReader(run_dir).read().running if holder.task is not None}
    sent, drained = resize(run_dir, wanted, busy)
    if sent is not None:
        click.echo(what_to_watch(run_dir, sent))
    if drained:
        click.echo(f"sent away, with what they have finished committed: {' '.join(task.name for task in drained)}")
    if sent is None and not drained:
        click.echo(f"{run_dir.root} has that many tasks already")
