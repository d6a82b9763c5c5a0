"""The `batchinfer` command and its exit codes; the subcommands are in batchinfer/commands/."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchinfer.commands import clusters, first, jobs, kv, peek, reports
from batchinfer.commands.convert import convert
from batchinfer.commands.options import EXIT_CODES, Process
from batchinfer.commands.submit import submit
from batchinfer.host_info import set_up_matrix_library
from batchinfer.records import BatchinferError, ConfigError, ExitCode, InterruptedRunError, ModelError
from batchinfer.resource_errors import explain_resource_error
from batchinfer.sanitize import clip, sanitize
from batchinfer.stop_signals import StopSignal
from batchinfer.verbosity import Verbosity, set_verbosity

if TYPE_CHECKING:
    from batchinfer.data.tokenizer_process import TokenizerProcess
    from batchinfer.launch.kept_ranks import KeptRanks


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, epilog=EXIT_CODES)
@click.version_option(package_name="batchinfer")
def cli() -> None:
    """Offline batch inference for DeepSeek-V3/R1-style models: prompts in, Parquet outputs and statistics out.

    \b
    Start here:
      batchinfer ask "Why?" --model DIR        one question, one answer
      batchinfer init DATA --model DIR         a job file for your files
      batchinfer run JOB.toml                  plan, compute, write outputs, print a summary
      batchinfer peek RUN                      the answers so far
      batchinfer report RUN --sql "SELECT …"   ask the outputs and statistics anything
      batchinfer submit JOB.toml --array 8     the same on a cluster; then: status, cancel, retry
      batchinfer convert MODEL DIR --dtype D   a model that starts at once the second time
      batchinfer schema                        every key of a job file
      batchinfer doctor                        what this machine can run
    """
    set_verbosity(Verbosity.NORMAL)  # of an earlier command in this process


@cli.command()
@click.option("--stats", is_flag=True, help="The tables of a run folder and their columns instead.")
@click.option("--json", "as_json", is_flag=True, help="The job file's JSON Schema.")
def schema(stats: bool, as_json: bool) -> None:
    """Print every key of a job file: type, default and meaning."""
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
@click.option("--all", "every_kernel", is_flag=True, help="Every operation: what runs it and why others do not.")
@click.option(
    "--model",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Instead: whether this model runs here; a folder, or owner/name of one in the Hugging Face cache.",
)
@click.option("--json", "as_json", is_flag=True, help="With --model: one JSON document on stdout.")
def doctor(bench: bool, every_kernel: bool, model: Path | None, as_json: bool) -> None:
    """Report what this machine can run, and with which kernels.

    The report also says whether answers are equal bit for bit. With --model it says whether a model folder runs here,
    in which dtypes and with how much memory; exit code 2 if it does not run.
    """
    if model is not None and (bench or every_kernel):
        raise click.UsageError("--model is a report of its own; leave out --bench and --all")
    if model is None and as_json:
        raise click.UsageError("--json is for --model; name a model folder")
    set_up_matrix_library()  # with the settings of ranks
    if model is None:
        from batchinfer.doctor.machine import examine

        click.echo(examine(bench=bench, every_kernel=every_kernel))
        return
    _report_model(model, as_json=as_json)


def _report_model(model: Path, *, as_json: bool) -> None:
    from batchinfer.config.model_folder import model_folder
    from batchinfer.doctor.model_check import check_model, model_text

    folder = Path(model_folder(Path.cwd(), str(model)))
    try:
        found = check_model(folder)
    except ModelError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"runs": False, "reason": str(error), "model": str(folder)}, indent=1))
        sys.exit(ExitCode.BAD_JOB)
    click.echo(json.dumps(found.as_json(), indent=1) if as_json else sanitize(model_text(found)))
    if not found.runs:
        sys.exit(ExitCode.BAD_JOB)


FIRST = (first.init, first.ask)
JOBS = (jobs.plan, jobs.work, jobs.finish, jobs.run, jobs.verify)
CLUSTERS = (submit, clusters.status, clusters.cancel, clusters.retry)
REPORTS = (reports.report, peek.peek, reports.price, reports.simulate)
for command in (*FIRST, *JOBS, *CLUSTERS, *REPORTS, convert, kv.kv):
    cli.add_command(command)


def _print_error(*sentences: str) -> None:
    from batchinfer.progress import coloured

    for sentence in sentences:
        print(coloured(f"error: {sanitize(clip(sentence))}"), file=sys.stderr)


def _run_command(process: Process) -> None:
    try:
        os.getcwd()
    except FileNotFoundError:  # torch and other libraries need a working folder
        raise ConfigError("the working folder was deleted; `cd` to one that exists") from None
    try:
        cli.main(standalone_mode=False, obj=process)
        process.stop.check()
    except SystemExit:
        process.stop.check()
        raise
    except Exception as error:
        if process.stop.raised is not None:
            raise process.stop.raised from None
        if (explained := explain_resource_error(error)) is not None:
            raise ConfigError(explained) from None
        raise


def main(
    tokenizer: TokenizerProcess | None = None,
    on_error: Callable[[BatchinferError], None] | None = None,
    kept: KeptRanks | None = None,
) -> None:
    """Run the command in this process; report errors as one sentence on stderr and end with the documented exit code.

    Args:
        tokenizer: for a command that plans.
        on_error: a Python caller's, which receives errors instead of the person at stderr.
        kept: see Process.
    """
    try:
        # installed first: a signal during the imports below counts too
        _run_command(Process(StopSignal(), tokenizer, kept, has_caller=on_error is not None))
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.BAD_JOB)
    except BatchinferError as error:
        if on_error is None:
            _print_error(*error.sentences)
        else:
            on_error(error)
        sys.exit(error.exit_code)
    except InterruptedRunError as stopped:
        click.echo(str(stopped), err=True)
        sys.exit(stopped.exit_code)
    except PermissionError as error:
        _print_error(f"cannot open {error.filename}: {error.strerror}; run this as the user who owns it")
        sys.exit(ExitCode.BAD_JOB)
    except OSError as error:
        _print_error(str(error))
        sys.exit(ExitCode.INTERNAL)
    except Exception:
        traceback.print_exc()
        _print_error("batchinfer failed; the lines above say where. What was finished is kept.")
        sys.exit(ExitCode.INTERNAL)
