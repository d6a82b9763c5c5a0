"""The `batchinfer` command. Each command imports its own function, so that `report` starts without torch."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchinfer.records import BatchinferError, ExitCode, InterruptedRunError
from batchinfer.stop import StopSignal

if TYPE_CHECKING:
    from batchinfer.config import JobConfig
    from batchinfer.engine.rank_group import RankGroup
    from batchinfer.finish import Finished
    from batchinfer.rundir import RunDir
    from batchinfer.session import Session
    from batchinfer.slurm import ArraySize
    from batchinfer.submission import Shape
    from batchinfer.trace import Tracer

EXIT_CODES = """
\b
Exit codes:
  0   done (finish and run: all rows ok)
  1   internal failure
  2   bad job, input or usage
  3   finished, some rows are error rows
  75  interrupted; the same command goes on where it stopped
"""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, epilog=EXIT_CODES)
@click.version_option(package_name="batchinfer")
def cli() -> None:
    """Offline batch inference for DeepSeek-V3/R1-style models: Parquet prompts in, Parquet outputs and statistics out.

    \b
    Start here:
      batchinfer run JOB.toml                  plan, compute, write outputs, print the report
      batchinfer report RUN --sql "SELECT …"   ask the outputs and statistics anything
      batchinfer submit JOB.toml --array 8     the same on a Slurm cluster; then: status, cancel, retry
      batchinfer schema                        every key of a job file
      batchinfer doctor                        what this machine can run
    """


def _job_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--trace", is_flag=True, help="Write trace.json (open it in ui.perfetto.dev) to the run folder."),
        click.option("--strict", is_flag=True, help="Stop with exit code 2 at the first bad row or unreadable shard."),
        click.option(
            "--set",
            "overrides",
            metavar="A.B=VALUE",
            multiple=True,
            help="Override a key of the job file with a TOML value; a bare word is a string. May be repeated.",
        ),
    ):
        command = option(command)
    return command


def _earlier_run_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option(
            "--expert-loads",
            metavar="RUN",
            type=click.Path(path_type=Path),
            help="Place the experts by the tokens that this earlier run counted, not by those of the first unit.",
        ),
        click.option(
            "--learn-from",
            metavar="RUN",
            type=click.Path(path_type=Path),
            help="Take answer lengths, speed and expert loads from this finished run: the ranks' work is spread by "
            "them, and the plan says how long the job will take and what it will cost.",
        ),
    ):
        command = option(command)
    return command


@cli.command(epilog=EXIT_CODES)
@click.argument("job", type=click.Path(path_type=Path))
@_earlier_run_options
@_job_options
@click.pass_obj
def plan(
    stop: StopSignal,
    job: Path,
    overrides: tuple[str, ...],
    strict: bool,
    trace: bool,
    learn_from: Path | None,
    expert_loads: Path | None,
) -> None:
    """Check and tokenise every row of JOB (a .toml file), order the requests, print what the plan predicts.

    No model is loaded. Bad rows are reported here, before any accelerator is used.
    """
    from batchinfer.config import load_job

    with _alone("plan", stop) as session:
        config = load_job(job, overrides)
        _plan(config, session, _tracer(trace), strict=strict, learn_from=learn_from, expert_loads=expert_loads)


@cli.command(epilog=EXIT_CODES)
@click.argument("target", metavar="JOB", type=click.Path(path_type=Path))
@_job_options
@click.pass_obj
def work(stop: StopSignal, target: Path, overrides: tuple[str, ...], strict: bool, trace: bool) -> None:
    """Compute the units of a planned JOB (a .toml file or a run folder) until none is left.

    Several `work` commands may run at once, also on other machines that see the same run folder. After an interrupt,
    run it again: finished requests are kept.
    """
    from batchinfer.planned import planned_run
    from batchinfer.rundir import refuse_bad_rows
    from batchinfer.session import Session
    from batchinfer.whereabouts import node_name, slurm_restarts, slurm_task

    with Session("work", stop) as session:
        run, config = planned_run(target, overrides)
        if strict:
            refuse_bad_rows(run)
        session.attach(run)
        if slurm_task() is not None:
            click.echo(f"Slurm task {slurm_task()} on {node_name()}, restart {slurm_restarts()}", err=True)
        _work(run, config, session, stop, _tracer(trace))


@cli.command(epilog=EXIT_CODES)
@click.argument("target", metavar="JOB", type=click.Path(path_type=Path))
@click.option(
    "--allow-partial", is_flag=True, help="Write error rows for what is not computed yet, instead of refusing."
)
@_job_options
@click.pass_obj
def finish(
    stop: StopSignal, target: Path, overrides: tuple[str, ...], strict: bool, trace: bool, allow_partial: bool
) -> None:
    """Check that no row is missing or double, then write outputs/ and stats/ of JOB (a .toml file or a run folder)."""
    from batchinfer.planned import planned_run
    from batchinfer.rundir import refuse_bad_rows

    with _alone("finish", stop) as session:
        run, config = planned_run(target, overrides)
        if strict:
            refuse_bad_rows(run)
        session.attach(run)
        code = _finish(run, config, allow_partial=allow_partial)
    sys.exit(code)


@cli.command(epilog=EXIT_CODES)
@click.argument("job", type=click.Path(path_type=Path))
@_earlier_run_options
@_job_options
@click.pass_obj
def run(
    stop: StopSignal,
    job: Path,
    overrides: tuple[str, ...],
    strict: bool,
    trace: bool,
    learn_from: Path | None,
    expert_loads: Path | None,
) -> None:
    """Plan, compute and finish JOB (a .toml file) on this machine, then print the report.

    Interrupted? Run the same command again: it goes on where it stopped and ends with the same outputs.
    """
    from batchinfer.config import load_job
    from batchinfer.engine.nodes import refuse_several_processes
    from batchinfer.engine.rank_group import ranks_ahead

    refuse_several_processes("run")
    config = load_job(job, overrides)
    know_experts = learn_from is not None or expert_loads is not None
    with ranks_ahead(config, stop, know_experts=know_experts) as ranks, _alone("run", stop) as session:
        tracer = _tracer(trace)
        run_dir = _plan(config, session, tracer, strict=strict, learn_from=learn_from, expert_loads=expert_loads)
        _work(run_dir, config, session, stop, tracer, ranks)
        code = _finish(run_dir, config, allow_partial=False)
    _print_report([run_dir.root], as_json=False)
    sys.exit(code)


@cli.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option(
    "--sql", metavar="QUERY", help="Run one SELECT on the views (see `batchinfer schema --stats`); @FILE reads it."
)
def report(runs: tuple[Path, ...], as_json: bool, sql: str | None) -> None:
    """What one or several finished RUN folders did: tokens, cache hits, speed, cost and margin.

    \b
    The views for --sql: outputs, requests, units, steps, experts, nodes, kv, run. For example:
      batchinfer report runs/demo --sql "SELECT status, count(*) FROM outputs GROUP BY status"
    """
    if sql is None:
        _print_report(list(runs), as_json=as_json)
    else:
        _print_query(list(runs), sql, as_json=as_json)


def _number_option(name: str, text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(name, type=float, metavar="NUMBER", help=text)


@cli.command()
@click.option("--run", "run_folder", metavar="RUN", type=click.Path(path_type=Path), help="Start from this run.")
@click.option("--prices", "price_file", metavar="FILE", type=click.Path(path_type=Path), help="A price list (.toml).")
@_number_option("--hit-tokens", "Input tokens served from a cache.")
@_number_option("--miss-tokens", "Input tokens computed.")
@_number_option("--output-tokens", "Output tokens.")
@_number_option("--nodes", "Mean nodes held.")
@_number_option("--gpus-per-node", "Accelerators of a node.")
@_number_option("--hours", "How long they are held.")
@_number_option("--gpu-hour", "$ per accelerator-hour.")
@_number_option("--price-hit", "$ per million hit tokens.")
@_number_option("--price-miss", "$ per million miss tokens.")
@_number_option("--price-output", "$ per million output tokens.")
@click.option("--batch", is_flag=True, help="With the list's batch discount.")
@click.option("--start", metavar="HH:MM", help="Begin at this time (UTC): the list's off-peak hours count.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def price(
    run_folder: Path | None,
    price_file: Path | None,
    gpu_hour: float | None,
    price_hit: float | None,
    price_miss: float | None,
    price_output: float | None,
    batch: bool,
    start: str | None,
    as_json: bool,
    **changes: float | None,
) -> None:
    """Cost, revenue and margins from numbers or from a run; options replace single numbers of a RUN.

    \b
    The published day of DeepSeek-V3/R1 at R1's list prices:
      batchinfer price --prices jobs/prices/deepseek-r1.toml --hit-tokens 342e9 --miss-tokens 266e9 \\
          --output-tokens 168e9 --nodes 226.75 --gpus-per-node 8 --hours 24
    """
    from batchinfer.report import what_if
    from batchinfer.report.price_list import PriceList, minute_of_day, read_prices

    amounts, prices = what_if.Amounts(), PriceList()
    if run_folder is not None:
        amounts, prices = what_if.amounts_of_run(run_folder)
    if price_file is not None:
        prices = read_prices(price_file)
    prices = prices.with_prices(gpu_hour=gpu_hour, input_hit=price_hit, input_miss=price_miss, output=price_output)
    start_minute = None if start is None else minute_of_day(start, "--start")
    figures = what_if.price(what_if.with_changes(amounts, **changes), prices, is_batch=batch, start_minute=start_minute)
    click.echo(json.dumps(figures, indent=1) if as_json else what_if.format_price(figures, prices))


@cli.command()
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def simulate(spec: Path, as_json: bool) -> None:
    """The cluster on paper: what the job of SPEC (a .toml file) would take on GPUs that are not here.

    Tokens/s per node, what limits each stage, nodes over time, cost and margin, the cheapest EP sizes and batch, and
    nodes to finish by a time. An example with comments: jobs/simulate_day.toml.
    """
    from batchinfer.sim.answer import answer
    from batchinfer.sim.spec import load_spec
    from batchinfer.sim.table import format_answer

    figures = answer(load_spec(spec))
    click.echo(json.dumps(figures, indent=1) if as_json else format_answer(figures))


@cli.command()
@click.argument("target", metavar="[JOB]", required=False, type=click.Path(path_type=Path))
@click.option("--array", metavar="N[%M]", help="Tasks, and how many of them may run at once (default: all).")
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
@click.option("--dry-run", is_flag=True, help="Print the sbatch commands; plan and send nothing.")
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
    help="Resize a submitted RUN by its slurm.schedule, until it is finished.",
)
@_job_options
@click.pass_obj
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
    from batchinfer.slurm import parse_size
    from batchinfer.submission import Shape

    if resize is not None or follow is not None:
        if target is not None or array is not None or dry_run or (resize is not None and follow is not None):
            raise click.UsageError("--resize and --follow stand alone: tasks that are added are like the earlier ones")
        if resize is not None:
            _resize(Path(resize[0]), resize[1])
        if follow is not None:
            _follow(follow, overrides)
        return
    if target is None or array is None:
        raise click.UsageError("submit needs a JOB and --array N[%M], or one of --resize and --follow")
    shape["template"] = None if template is None else str(template.absolute())
    shape["finish_template"] = None if finish_template is None else str(finish_template.absolute())
    size = parse_size(array)
    if not size.tasks:
        raise click.UsageError("--array 0 would send nothing; give 1 task or more")
    _submit(target, overrides, size, Shape(**shape), stop, _tracer(trace), strict=strict, dry_run=dry_run)


@cli.command()
@click.argument("target", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--watch", is_flag=True, help="Again every few seconds, until the run is finished.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def status(target: Path, watch: bool, as_json: bool) -> None:
    """How far RUN (a run folder or a .toml file) is: units, rows, speed, time left, who works on what, problems."""
    from batchinfer.planned import planned_run
    from batchinfer.status import StatusReader
    from batchinfer.status_text import as_document, format_status, watch_status

    if watch and as_json:
        raise click.UsageError("--json is one document; leave --watch out")
    reader = StatusReader(planned_run(target, ())[0])
    if watch:
        watch_status(reader, click.echo)
    else:
        found = reader.read()
        click.echo(json.dumps(as_document(found), indent=1) if as_json else format_status(found))


@cli.command()
@click.argument("target", metavar="RUN", type=click.Path(path_type=Path))
def cancel(target: Path) -> None:
    """End all Slurm tasks of RUN (a run folder or a .toml file). What is finished stays; `submit` goes on later."""
    from batchinfer.planned import planned_run
    from batchinfer.submission import cancel as cancel_run

    run, _ = planned_run(target, ())
    ended = cancel_run(run)
    click.echo(f"cancelled: {' '.join(ended)}" if ended else f"nothing of {run.root} waits or runs in Slurm")


@cli.command()
@click.argument("target", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--array", metavar="N[%M]", help="Send so many Slurm tasks for it, like those of the last submission.")
def retry(target: Path, array: str | None) -> None:
    """Give failed rows of RUN (a run folder or a .toml file) another try; good rows keep their answers.

    Rows that the plan found to be bad stay error rows.
    """
    from batchinfer.planned import planned_run
    from batchinfer.retry import retry_failed
    from batchinfer.slurm import max_array_size, parse_size
    from batchinfer.submission import Shape, submissions, what_to_watch
    from batchinfer.submission import submit as submit_run

    run, _ = planned_run(target, ())
    size = None if array is None else parse_size(array)
    if size is not None and not size.tasks:
        raise click.UsageError("--array 0 would send nothing; leave it out to start `batchinfer work` by hand")
    found = retry_failed(run)
    click.echo(f"{found.num_requests:,} failed requests in {found.num_units:,} units are to be computed again")
    if found.num_held:
        click.echo(f"{found.num_held:,} more units with failed requests are being worked on; retry again afterwards")
    if found.num_bad_rows:
        click.echo(f"{found.num_bad_rows:,} rows are bad in the input; no try helps them")
    if not found.num_open_units:
        click.echo("all units are done")
    elif size is None:
        click.echo(f"{found.num_open_units:,} units are open: `batchinfer work {run.root}`, then `batchinfer finish`")
    else:
        earlier = submissions(run)
        shape = earlier[-1].shape if earlier else Shape()
        click.echo(what_to_watch(run, submit_run(run, shape, size, max_array_size=max_array_size())))


@cli.command()
@click.option("--stats", is_flag=True, help="The tables of a run folder and their columns instead.")
@click.option("--json", "as_json", is_flag=True, help="The job file's JSON Schema.")
def schema(stats: bool, as_json: bool) -> None:
    """Print every part and key of a job file with type, default and meaning."""
    from batchinfer.schema import job_json_schema, job_schema_text, stats_schema_text

    if as_json and not stats:
        click.echo(json.dumps(job_json_schema(), indent=1))
    else:
        click.echo(stats_schema_text() if stats else job_schema_text())


@cli.command()
@click.option(
    "--bench",
    is_flag=True,
    help="Also measure this machine: products, memory, and one rank with all threads against one per core.",
)
def doctor(bench: bool) -> None:
    """Say what this machine can run, which kernels are chosen and why others are not."""
    from batchinfer.doctor import examine

    click.echo(examine(bench=bench))


@cli.group()
def kv() -> None:
    """Look after the KV store on disk: STORE is its folder, or a JOB.toml whose [kv] dir names it."""


_store_argument = click.argument("target", metavar="STORE", type=click.Path(path_type=Path))
_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


@kv.command("stat")
@_store_argument
@_json_option
def kv_stat(target: Path, as_json: bool) -> None:
    """What a store holds, by model, and what runs read from it and wrote to it."""
    from batchinfer.kv.upkeep import describe_store, format_description, open_store

    found = describe_store(open_store(target))
    click.echo(json.dumps(found, indent=1) if as_json else format_description(found))


@kv.command("verify")
@_store_argument
@_json_option
def kv_verify(target: Path, as_json: bool) -> None:
    """Read every block and check its checksum. Damaged files go to quarantine; exit code 3 when there were any."""
    from batchinfer.kv.upkeep import open_store, verify_store

    found = verify_store(open_store(target))
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        for damaged in found["damaged"]:
            click.echo(f"{damaged['file']}: {damaged['reason']}")
        click.echo(f"{found['files']:,} files checked, {len(found['damaged'])} of them damaged")
    sys.exit(ExitCode.ROW_ERRORS if found["damaged"] else ExitCode.OK)


@kv.command("gc")
@_store_argument
@click.option("--max-bytes", metavar="SIZE", help="Evict until all files are below this, for example 500GB or 2TiB.")
@_json_option
def kv_gc(target: Path, max_bytes: str | None, as_json: bool) -> None:
    """Delete what killed runs left behind and, with --max-bytes, the blocks least worth having. Live runs may go on."""
    from batchinfer.kv.upkeep import open_store, parse_bytes, shrink_store

    found = shrink_store(open_store(target), None if max_bytes is None else parse_bytes(max_bytes))
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        click.echo(
            f"{found['evicted_files']:,} files with {found['evicted_bytes']:,} bytes evicted; "
            f"the store has {found['bytes_after']:,} bytes now"
        )


@kv.command("path")
@_store_argument
@click.argument("block", required=False)
def kv_path(target: Path, block: str | None) -> None:
    """Print the folder of a store, or the file that holds BLOCK (its name in hex, 12 digits of it or more)."""
    from batchinfer.kv.upkeep import find_block, open_store

    store = open_store(target)
    click.echo(str(store.root if block is None else find_block(store, block)))


def _alone(command: str, stop: StopSignal) -> Session:
    """The session of a command that must not run in several processes at once."""
    from batchinfer.engine.nodes import refuse_several_processes
    from batchinfer.session import Session

    refuse_several_processes(command)
    return Session(command, stop)


def _tracer(enabled: bool) -> Tracer:
    from batchinfer.trace import Tracer

    return Tracer(enabled=enabled)


def _plan(
    config: JobConfig,
    session: Session,
    tracer: Tracer,
    *,
    strict: bool,
    learn_from: Path | None,
    expert_loads: Path | None,
) -> RunDir:
    from batchinfer.plan.planner import plan_job
    from batchinfer.plan.summary import format_summary, read_summary

    with tracer.span("plan", "controller"):
        run_dir = plan_job(config, session, strict=strict, learn_from=learn_from, expert_loads=expert_loads)
    tracer.write(run_dir.trace)
    click.echo(format_summary(read_summary(run_dir), config.cluster.num_ranks), err=session.command == "run")
    return run_dir


def _submit(
    target: Path,
    overrides: tuple[str, ...],
    size: ArraySize,
    shape: Shape,
    stop: StopSignal,
    tracer: Tracer,
    *,
    strict: bool,
    dry_run: bool,
) -> None:
    import shlex

    from batchinfer.config import load_job
    from batchinfer.planned import planned_run
    from batchinfer.rundir import RunDir, refuse_bad_rows
    from batchinfer.schedule import parse_schedule
    from batchinfer.slurm import max_array_size
    from batchinfer.submission import check_shape, dry_run_commands, submit, what_to_watch

    if target.is_dir():
        run_dir, config = planned_run(target, overrides)
        if strict:
            refuse_bad_rows(run_dir)
    else:
        config = load_job(target, overrides)
        run_dir = RunDir(Path(config.output.dir))
    check_shape(config, shape)
    parse_schedule(config.slurm.schedule)
    if dry_run:
        click.echo("\n".join(shlex.join(command) for command in dry_run_commands(run_dir, shape, size)))
        return
    limit = max_array_size()  # without Slurm there is no need to plan
    if not target.is_dir():
        with _alone("plan", stop) as session:
            _plan(config, session, tracer, strict=strict, learn_from=None, expert_loads=None)
    click.echo(what_to_watch(run_dir, submit(run_dir, shape, size, max_array_size=limit)))


def _follow(target: Path, overrides: tuple[str, ...]) -> None:
    from batchinfer.planned import planned_run
    from batchinfer.schedule import follow, local_minute

    run_dir, config = planned_run(target, overrides)
    follow(run_dir, config.slurm.schedule, local_minute)


def _resize(target: Path, size: str) -> None:
    from batchinfer.planned import planned_run
    from batchinfer.slurm import parse_size
    from batchinfer.submission import resize, what_to_watch

    run_dir, _ = planned_run(target, ())
    sent, drained = resize(run_dir, parse_size(size))
    if sent is not None:
        click.echo(what_to_watch(run_dir, sent))
    if drained:
        click.echo(f"sent away, with what they have finished committed: {' '.join(task.name for task in drained)}")
    if sent is None and not drained:
        click.echo(f"{run_dir.root} has so many tasks already")


def _work(
    run_dir: RunDir,
    config: JobConfig,
    session: Session,
    stop: StopSignal,
    tracer: Tracer,
    ranks: RankGroup | None = None,
) -> None:
    from batchinfer.engine.controller import work_on

    try:
        work_on(run_dir, config, session, stop, tracer, ranks)
    finally:
        tracer.write(run_dir.trace)


def _finish(run_dir: RunDir, config: JobConfig, *, allow_partial: bool) -> int:
    from batchinfer.finish import finish_run

    result = finish_run(run_dir, config, allow_partial=allow_partial)
    click.echo(_finished_text(run_dir, result), err=True)
    return result.exit_code


def _finished_text(run_dir: RunDir, result: Finished) -> str:
    lines = [f"{result.num_rows:,} rows in {run_dir.outputs}, {result.num_errors:,} of them error rows"]
    if result.num_missing:
        lines.append(f"partial: {result.num_missing:,} requests were not computed")
    lines += [f"no outputs for {path}: it could not be read" for path in result.unreadable]
    return "\n".join(lines)


def _print_report(runs: list[Path], *, as_json: bool) -> None:
    from batchinfer.report.metrics import metrics_and_details, report_metrics
    from batchinfer.report.table import format_report

    if as_json:
        documents = [report_metrics(folder) for folder in runs]
        click.echo(json.dumps(documents[0] if len(documents) == 1 else documents, indent=1))
        return
    panels = [format_report(*metrics_and_details(folder)) for folder in runs]
    click.echo("\n".join(panels), nl=False)


def _print_query(runs: list[Path], sql: str, *, as_json: bool) -> None:
    from batchinfer.report.rows import format_rows, json_records
    from batchinfer.report.views import run_query

    if sql.startswith("@"):
        try:
            sql = Path(sql[1:]).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise click.UsageError(f"cannot read the SQL file {sql[1:]}: {error}") from None
    columns, rows = run_query(runs, sql)
    if as_json:
        click.echo(json.dumps(list(json_records(columns, rows)), indent=1, ensure_ascii=False))
    else:
        click.echo(format_rows(columns, rows), nl=False)


def main() -> None:
    """Entry point: errors become one sentence on stderr and the exit code that the contract names."""
    # Waiting threads may spin for a moment only: by default they spin for so long that another process on the same
    # cores makes steps 40 times slower. Read once, when torch loads its thread library, which happens later.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        # installed first: a signal during the imports below counts too
        cli.main(standalone_mode=False, obj=StopSignal())
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.BAD_JOB)
    except BatchinferError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except InterruptedRunError as stopped:
        click.echo(str(stopped), err=True)
        sys.exit(stopped.exit_code)
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(ExitCode.INTERNAL)
    except Exception:
        traceback.print_exc()
        click.echo("error: batchinfer failed; the lines above say where. What was finished is kept.", err=True)
        sys.exit(ExitCode.INTERNAL)
