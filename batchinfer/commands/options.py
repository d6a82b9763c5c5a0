"""Options that several commands have, and the session with which a run begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from batchinfer.stop_signals import StopSignal
from batchinfer.verbosity import Verbosity, set_verbosity

if TYPE_CHECKING:
    from batchinfer.data.tokenizer_process import TokenizerProcess
    from batchinfer.launch.kept_ranks import KeptRanks
    from batchinfer.run.session import Session
    from batchinfer.run.trace import Tracer

EXIT_CODES = """
\b
Exit codes:
  0   done (finish and run: all rows ok)
  1   internal failure
  2   bad job, input or usage
  3   finished, some rows are error rows
  75  interrupted; the same command continues where it stopped
"""

run_argument = click.argument("target", metavar="RUN", type=click.Path(path_type=Path))
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


@dataclass(frozen=True, slots=True)
class Process:
    """Objects of a command's process, made before the command is known."""

    stop: StopSignal
    tokenizer: TokenizerProcess | None  # a tokenizer process that is started already
    kept: KeptRanks | None = None  # ranks that stay for several jobs of a Python caller
    has_caller: bool = False  # a Python program, to which exit codes and a printed report mean nothing


def pass_stop(command: Callable[..., None]) -> Callable[..., None]:
    """Pass the process's StopSignal to a command as the first argument."""

    @click.pass_obj
    @wraps(command)
    def with_stop(process: Process, *arguments: Any, **options: Any) -> None:
        command(process.stop, *arguments, **options)

    return with_stop


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        verbosity_options,
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


def verbosity_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --quiet and --verbose, which hold for the whole process."""

    def set_to(verbosity: Verbosity) -> Callable[[click.Context, click.Parameter, bool], None]:
        def callback(context: click.Context, _: click.Parameter, is_given: bool) -> None:
            if is_given and context.meta.setdefault(__name__, verbosity) is not verbosity:
                raise click.UsageError("--quiet and --verbose contradict each other; leave one out")
            if is_given:
                set_verbosity(verbosity)

        return callback

    for names, verbosity, text in (
        (
            ("-v", "--verbose"),
            Verbosity.VERBOSE,
            "More lines of progress; `plan` lists all bad rows, `run` prints the report.",
        ),
        (("-q", "--quiet"), Verbosity.QUIET, "No progress and no summary, only warnings and errors."),
    ):
        callback = set_to(verbosity)
        command = click.option(*names, is_flag=True, expose_value=False, callback=callback, help=text)(command)
    return command


class EarlierRuns(NamedTuple):
    """The earlier runs that a plan uses, by the options of `earlier_run_options`."""

    learn_from: Path | None
    expert_loads: Path | None
    reuse: Path | None

    @property
    def options(self) -> list[str]:
        """The options that are given."""
        return [f"--{name.replace('_', '-')}" for name, run in self._asdict().items() if run is not None]


def earlier_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for earlier runs, which the command gets as one argument, `earlier_runs`."""

    @wraps(command)
    def with_earlier_runs(
        *arguments: Any, learn_from: Path | None, expert_loads: Path | None, reuse: Path | None, **options: Any
    ) -> None:
        command(*arguments, earlier_runs=EarlierRuns(learn_from, expert_loads, reuse), **options)

    with_options: Callable[..., None] = with_earlier_runs
    for option in (
        click.option(
            "--reuse",
            metavar="RUN",
            type=click.Path(path_type=Path),
            help="Take over the answers of this earlier run, finished or not, for rows with the same prompt, sampling "
            "and draws: only other rows are computed. Model, dtype and version must be the same.",
        ),
        click.option(
            "--expert-loads",
            metavar="RUN",
            type=click.Path(path_type=Path),
            help="Place experts by the token counts of this earlier run instead of a calibration.",
        ),
        click.option(
            "--learn-from",
            metavar="RUN",
            type=click.Path(path_type=Path),
            help="Use answer lengths, speed and expert loads of this finished run to spread work over ranks and to "
            "predict time and cost. Shards that it tokenised with the same tokenizer are not tokenised again.",
        ),
    ):
        with_options = option(with_options)
    return with_options


def alone(command: str, stop: StopSignal) -> Session:
    """Return the session of a command, after a check that no launcher runs it in several processes."""
    from batchinfer.launch.nodes import refuse_several_processes
    from batchinfer.run.session import Session

    refuse_several_processes(command)
    return Session(command, stop)


def tracer_of(enabled: bool) -> Tracer:
    from batchinfer.run.trace import Tracer

    return Tracer(enabled=enabled)
