"""Commands for a job on this machine: plan, work, finish, run (all three), and verify."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from batchinfer.commands.options import (
    EXIT_CODES,
    EarlierRuns,
    Process,
    alone,
    earlier_run_options,
    job_options,
    json_option,
    pass_stop,
    run_argument,
    tracer_of,
    verbosity_options,
)
from batchinfer.commands.reports import print_end, print_report
from batchinfer.records import ExitCode, RunBusyError
from batchinfer.sanitize import count_text, sanitize
from batchinfer.stop_signals import StopSignal
from batchinfer.verbosity import is_quiet, is_verbose

if TYPE_CHECKING:
    from batchinfer.config import JobConfig
    from batchinfer.data.tokenizer_process import TokenizerProcess
    from batchinfer.finish.finish import FinishedRun
    from batchinfer.launch.rank_loader import RankLoader
    from batchinfer.manifest import Manifest
    from batchinfer.run.session import Session
    from batchinfer.run.trace import Tracer
    from batchinfer.rundir import RunDir

LOOK_S = 0.5  # between looks at a run that another process plans or finishes
Result = TypeVar("Result")


@click.command(epilog=EXIT_CODES)
@click.argument("job", type=click.Path(path_type=Path))
@click.option(
    "--again",
    is_flag=True,
    help="Make a damaged plan again; results of work units with the same rows are kept.",
)
@click.option("--show", metavar="ROW", help="Print one prompt as the model gets it, by id or number; plan nothing.")
@click.option(
    "--suggest",
    is_flag=True,
    help="Then search the layout with the fewest GPU-hours on cluster.gpu (default: H800), in FP8, print its keys, and "
    "write a job file with it beside JOB.",
)
@earlier_run_options
@job_options
@click.pass_obj
def plan(
    process: Process,
    job: Path,
    again: bool,
    show: str | None,
    suggest: bool,
    overrides: tuple[str, ...],
    strict: bool,
    trace: bool,
    earlier_runs: EarlierRuns,
) -> None:
    """Check all rows of JOB, order the requests, print a summary.

    JOB is a .toml file or a run folder. No model is loaded. Bad rows are reported here, before any accelerator is used.
    Errors that ranks would report, such as tensors that do not fit config.json, are reported before a row is read.
    """
    from batchinfer.controller.kept_units import keep_same_units
    from batchinfer.plan.bad_rows import bad_rows
    from batchinfer.run.planned import job_of
    from batchinfer.run.store.open import storage_of

    if show is not None:
        flags = {"--again": again, "--strict": strict, "--trace": trace, "--suggest": suggest}
        if useless := [*(option for option, is_given in flags.items() if is_given), *earlier_runs.options]:
            raise click.UsageError(f"--show prints a prompt and plans nothing; leave {', '.join(useless)} out")
        _show_prompt(job_of(job, overrides), show, process.tokenizer)
        return
    if suggest and earlier_runs.reuse is not None:
        raise click.UsageError("--suggest searches a layout for all rows of a job; leave --reuse out")
    if again and earlier_runs.reuse is not None:
        raise click.UsageError("--again repairs a plan and keeps the answers that it reuses; leave --reuse out")
    with alone("plan", process.stop) as session:
        config = job_of(job, overrides)
        run_dir = plan_here(
            config,
            session,
            tracer_of(trace),
            strict=strict,
            earlier_runs=earlier_runs,
            again=keep_same_units if again else None,
            tokenizer=process.tokenizer,
            has_caller=process.has_caller,
        )
        _note_stream(config, run_dir)
        if is_verbose():
            storage_of(config).fetch("tokens")
            for sentence in bad_rows(run_dir):
                click.echo(sanitize(sentence))
    if suggest:
        _suggest(run_dir, config, job)


def _suggest(run_dir: RunDir, config: JobConfig, source: Path) -> None:
    """Search the cheapest layout for the planned requests, write a job file with it and print its keys."""
    from batchinfer.config import dump_job
    from batchinfer.config.toml_text import toml_value
    from batchinfer.model.config import load_model_config
    from batchinfer.sim.suggest import planned_layouts, planned_rater, shares, simulated_job, with_layout
    from batchinfer.whole_files import create_exclusively

    simulated = simulated_job(config)
    rater = planned_rater(run_dir.root, simulated, load_model_config(Path(config.model.path)))
    best, *others = planned_layouts(rater, simulated)
    text = dump_job(with_layout(simulated, best, output=f"{config.output.dir}-suggested"))
    folder = source.absolute().parent if source.exists() else Path.cwd()  # a run folder may be in a bucket
    stem = source.stem if source.suffix == ".toml" else source.name
    names = (f"{stem}-suggested{'' if number == 1 else f'-{number}'}.toml" for number in itertools.count(1))
    target = next(target for name in names if create_exclusively(target := folder / name, text))
    click.echo(f"\nFewest GPU-hours on {simulated.cluster.gpu}, simulated: {best.gpu_hours:.3g} h; in {target}:")
    changed = {"model": {"dtype": simulated.model.dtype}} if simulated.model.dtype != config.model.dtype else {}
    for table, keys in {**changed, **best.keys()}.items():
        click.echo(f"[{table}]")
        for key, value in keys.items():
            click.echo(f"{key} = {toml_value(value)}")
    before = None
    for change, hours in shares(rater, simulated, best):
        shown = "does not fit" if hours is None else f"{hours:.3g} h"
        better = "" if hours is None or before is None else f" ({before / hours:.2f}x)"
        click.echo(f"  {change}: {shown}{better}")
        before = hours if hours is not None else before
    for other in others[:3]:
        click.echo(f"  next: {other.sizes}: {other.gpu_hours:.3g} h")


@click.command(epilog=EXIT_CODES)
@click.argument("target", metavar="JOB", type=click.Path(path_type=Path))
@job_options
@pass_stop
def work(stop: StopSignal, target: Path, overrides: tuple[str, ...], strict: bool, trace: bool) -> None:
    """Compute the units of a planned JOB until none is left.

    JOB is a .toml file or a run folder. Several `work` commands may run at once, also on other machines that see the
    same run folder. After an interrupt, run it again: finished requests are kept.
    """
    from batchinfer.host_info import launcher_name, node_name, task_name, task_restarts
    from batchinfer.run.planned import planned_run
    from batchinfer.run.session import Session
    from batchinfer.run.store.open import storage_of
    from batchinfer.rundir import check_no_bad_rows

    with Session("work", stop) as session:
        run, config = planned_run(target, overrides)
        if strict:
            check_no_bad_rows(run)
        storage, tracer = storage_of(config), tracer_of(trace)
        session.attach(storage)
        tracer.go_on(storage)
        if task_name() is not None:
            click.echo(f"{launcher_name()} task {task_name()} on {node_name()}, restart {task_restarts()}", err=True)
        _work(run, config, session, stop, tracer)


@click.command(epilog=EXIT_CODES)
@click.argument("target", metavar="JOB", type=click.Path(path_type=Path))
@click.option("--allow-partial", is_flag=True, help="Write error rows for requests that are not computed yet.")
@click.option("--wait", is_flag=True, help="Wait until all units are done, if no cluster starts this after the tasks.")
@job_options
@pass_stop
def finish(
    stop: StopSignal,
    target: Path,
    overrides: tuple[str, ...],
    strict: bool,
    trace: bool,
    allow_partial: bool,
    wait: bool,
) -> None:
    """Write outputs and statistics of a computed JOB.

    JOB is a .toml file or a run folder. The command checks first that no row is missing or double.
    """
    with stop.held():  # as in _finish
        from batchinfer.finish.finish import wait_for_units
    from batchinfer.run.planned import planned_run
    from batchinfer.run.store.open import storage_of
    from batchinfer.rundir import check_no_bad_rows

    if wait and allow_partial:
        raise click.UsageError("--wait is for all units, --allow-partial for the finished ones; leave one out")
    with alone("finish", stop) as session:
        run, config = planned_run(target, overrides)
        if strict:
            check_no_bad_rows(run)
        storage = storage_of(config)
        session.attach(storage)
        if wait:
            wait_for_units(storage, session)
        tracer = tracer_of(trace)
        tracer.go_on(storage)
        result = _finish(run, config, session, stop, tracer, allow_partial=allow_partial)
    _note_finished(run, config, result)
    sys.exit(result.exit_code)


@click.command()
@run_argument
@json_option
@verbosity_options
def verify(target: Path, as_json: bool) -> None:
    """Compare every file of RUN with its checksum; change nothing.

    RUN is a run folder or a .toml file. Each damaged file is printed with a remedy. Exit code 3 if a file is damaged.
    """
    from batchinfer.finish.verify import verify_run
    from batchinfer.run.planned import run_folder
    from batchinfer.run.store.interface import ALL_PARTS
    from batchinfer.rundir import RunDir

    found = verify_run(RunDir(run_folder(target, *ALL_PARTS).absolute()))
    if as_json:
        click.echo(json.dumps(asdict(found), indent=1))
    else:
        for damaged in found.damaged:
            click.echo(sanitize(f"{damaged.file}: {damaged.reason}; {damaged.remedy}"))
        click.echo(f"{count_text(found.files, 'file')} checked, {len(found.damaged):,} of them damaged")
    sys.exit(ExitCode.ROW_ERRORS if found.damaged else ExitCode.OK)


@click.command(epilog=EXIT_CODES)
@click.argument("job", type=click.Path(path_type=Path))
@earlier_run_options
@job_options
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON document on stdout, as `report --json`.")
@click.pass_obj
def run(
    process: Process,
    job: Path,
    overrides: tuple[str, ...],
    strict: bool,
    trace: bool,
    earlier_runs: EarlierRuns,
    as_json: bool,
) -> None:
    """Plan, compute and finish JOB here, then print a summary.

    JOB is a .toml file or a run folder. `batchinfer report JOB` prints all figures. After an interrupt, the same
    command continues where it stopped and ends with the same outputs.
    """
    from batchinfer.launch.can_run_here import refuse_if_job_cannot_run
    from batchinfer.launch.nodes import refuse_several_processes
    from batchinfer.launch.rank_loader import ranks_ahead
    from batchinfer.run.planned import job_of

    refuse_several_processes("run")
    stop = process.stop
    config = job_of(job, overrides)
    know_experts = earlier_runs.learn_from is not None or earlier_runs.expert_loads is not None
    ahead: AbstractContextManager[RankLoader | None]
    if process.kept is None:
        ahead = ranks_ahead(config, stop, know_experts=know_experts)
    else:
        ahead = nullcontext(process.kept.load_for(config, stop))
    with ahead as ranks, alone("run", stop) as session:
        tracer = tracer_of(trace)
        run_dir = _when_free(
            config,
            partial(
                plan_here,
                config,
                session,
                tracer,
                strict=strict,
                earlier_runs=earlier_runs,
                can_run_here=lambda: refuse_if_job_cannot_run(config, ranks, stop),
                tokenizer=process.tokenizer,
                has_caller=process.has_caller,
            ),
        )
        if ranks is not None:
            with stop.held():  # as in _finish
                import batchinfer.finish.finish  # while the ranks load: this process only waits for them
                import batchinfer.report.summary  # noqa: F401
        stop.check()
        _work(run_dir, config, session, stop, tracer, ranks)
        stop.check()
        # another `run` that has joined this one may finish first: its result counts for both
        result = _when_free(config, partial(_finish, run_dir, config, session, stop, tracer, allow_partial=False))
    if as_json or not sys.stdout.isatty():  # else the summary on the same terminal says this
        _note_finished(run_dir, config, result)
    if not process.has_caller:
        _print_end(run_dir, config, as_json=as_json)
    sys.exit(result.exit_code)


def _when_free(config: JobConfig, do: Callable[[], Result]) -> Result:
    """Call `do`, which locks the run, again whenever another process has planned or finished the run in between."""
    from batchinfer.progress import note
    from batchinfer.run.store.open import storage_of

    while True:
        try:
            return do()
        except RunBusyError as busy:
            note(f"waiting: {str(busy).partition(';')[0]}")
        is_free = False
        while not is_free:
            time.sleep(LOOK_S)
            with suppress(RunBusyError), storage_of(config).locked(doing="run this job"):
                is_free = True


def _print_end(run_dir: RunDir, config: JobConfig, *, as_json: bool) -> None:
    if as_json or is_verbose():
        print_report([run_dir.root], as_json=as_json)
    if not as_json and not is_quiet():
        print_end(run_dir, has_dataset=config.output.push is not None)


def _show_prompt(config: JobConfig, row: str, tokenizer: TokenizerProcess | None) -> None:
    from batchinfer.plan.show_prompt import show_prompt

    found = show_prompt(config, row, tokenizer=tokenizer)
    click.echo(sanitize(f"{found.where}: {count_text(found.num_tokens, 'token')}\n\n{found.text}"))
    for number, (num_tokens, text) in enumerate(found.choices):
        click.echo(sanitize(f"\nchoice {number}: {count_text(num_tokens, 'token')}\n{text}"))


def plan_here(
    config: JobConfig,
    session: Session,
    tracer: Tracer,
    *,
    strict: bool,
    earlier_runs: EarlierRuns,
    can_run_here: Callable[[], None] | None = None,
    again: Callable[[RunDir, Manifest], None] | None = None,
    tokenizer: TokenizerProcess | None = None,
    has_caller: bool = False,
) -> RunDir:
    """Plan the job and print its summary: on stdout, or on stderr for `run`, whose stdout is the report.

    A warning on stderr says if the run will not end with exit code 0, unless a Python program called (`has_caller`).
    """
    from batchinfer.plan.planner import plan_job
    from batchinfer.plan.summary import expected_end, format_summary, read_summary
    from batchinfer.progress import note
    from batchinfer.run.store.open import storage_of

    with tracer.span("plan", "controller"):
        run_dir = plan_job(
            config,
            session,
            strict=strict,
            **earlier_runs._asdict(),
            can_run_here=can_run_here,
            again=again,
            tokenizer=tokenizer,
        )
        tracer.go_on(storage_of(config))
    tracer.write(run_dir.trace)
    summary = format_summary(read_summary(run_dir), config.cluster.num_ranks)
    if session.command == "run":
        note(summary)  # not click.echo: loading ranks may show a progress bar
    elif not is_quiet():
        click.echo(summary)
    warning = None if has_caller else expected_end(run_dir)
    if warning is not None:
        note(warning)
    return run_dir


def _note_stream(config: JobConfig, run_dir: RunDir) -> None:
    """Report the cost of streaming if this host's memory is too small for the weights; other hosts may have more."""
    from batchinfer.data.parquet import read_rows
    from batchinfer.launch.host_memory import stream_words, with_weights
    from batchinfer.launch.nodes import this_node
    from batchinfer.manifest import Manifest
    from batchinfer.progress import note
    from batchinfer.records import ConfigError
    from batchinfer.rundir import read_state

    with suppress(ConfigError):  # work tells it where it matters
        config = with_weights(config, this_node(config.cluster.num_ranks).ranks)
        if config.cluster.weights == "stream":
            units = read_rows(run_dir.units, Manifest(run_dir.root, read_state(run_dir).get("files")))
            note(f"on this host {stream_words(config, units)[0]}")


def _work(
    run_dir: RunDir,
    config: JobConfig,
    session: Session,
    stop: StopSignal,
    tracer: Tracer,
    ranks: RankLoader | None = None,
) -> None:
    from batchinfer.controller.work import work_on

    try:
        work_on(run_dir, config, session, stop, tracer, ranks)
    finally:
        tracer.write(run_dir.trace)


def _finish(
    run_dir: RunDir, config: JobConfig, session: Session, stop: StopSignal, tracer: Tracer, *, allow_partial: bool
) -> FinishedRun:
    with stop.held():  # DuckDB calls Python while it is imported
        from batchinfer.finish.finish import finish_run
    from batchinfer.run.store.open import storage_of

    with tracer.span("finish", "controller"):
        result = finish_run(run_dir, config, session, allow_partial=allow_partial)
    if tracer.enabled:
        tracer.write(run_dir.trace)
        storage_of(config).put(run_dir.trace)
    return result


def _note_finished(run_dir: RunDir, config: JobConfig, result: FinishedRun) -> None:
    from batchinfer.progress import note

    what = "an error row" if result.num_errors == 1 else "error rows"
    rows = count_text(result.num_rows, "row")
    lines = [f"{rows} in {run_dir.shown}/outputs, {result.num_errors:,} of them {what}"]
    if result.commonest_error is not None:
        share = f"{result.num_commonest:,} of {result.num_errors:,}"
        lines.append(f"the most frequent reason ({share}): {result.commonest_error}")
    if result.num_missing:
        were = "was" if result.num_missing == 1 else "were"
        lines.append(f"partial: {count_text(result.num_missing, 'request')} {were} not computed")
    if config.output.push is not None:
        lines.append(f"outputs as a Hugging Face dataset: {run_dir.shown}/dataset; name the licence in its README.md")
    lines += [f"no outputs for {path}: it could not be read" for path in result.unreadable]
    note("\n".join(lines))
