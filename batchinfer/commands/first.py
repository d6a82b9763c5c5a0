"""First steps: `init` writes a job file for given data, `ask` asks a model one question."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import click

from batchinfer import own_process
from batchinfer.records import ExitCode
from batchinfer.sanitize import sanitize

_model_option = click.option(
    "--model",
    metavar="DIR",
    required=True,
    type=click.Path(path_type=Path),
    help="The model's folder, or owner/name of one in the Hugging Face cache.",
)


@click.command()
@click.argument("data")
@_model_option
@click.option(
    "-o",
    "--output",
    "target",
    metavar="JOB.toml",
    default="job.toml",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The job file to write; an existing file is not changed.",
)
@click.option("--system", metavar="TEXT", help="The same system message for every row, of texts sent to a chat model.")
def init(data: str, model: Path, target: Path, system: str | None) -> None:
    """Write a job file for DATA, a file, a folder or a glob.

    The columns of prompts and ids are chosen by types and names, model.dtype by the checkpoint and this machine's
    memory. The file has comments and other keys that are often set.
    """
    from batchinfer.plan.first_job import first_job
    from batchinfer.whole_files import create_exclusively

    taken = click.UsageError(f"{target} exists already; name another file with -o")
    if target.exists():
        raise taken
    made = first_job(data, model, target, system)
    if not create_exclusively(target, made.text):
        raise taken
    for what, choice in made.choices:
        click.echo(sanitize(f"{what:<11} {choice}"))
    click.echo(f"\nwritten: {target}\nnext:    batchinfer plan {target}    (checks every row; loads no model)")
    click.echo(f"then:    batchinfer run {target}")


@click.command()
@click.argument("question")
@_model_option
@click.option("--max-tokens", metavar="N", type=click.IntRange(1), default=512, show_default=True)
@click.option(
    "--date",
    metavar="YYYY-MM-DD",
    type=click.DateTime(["%Y-%m-%d"]),
    help="For chat templates that write the date; default: today.",
)
def ask(question: str, model: Path, max_tokens: int, date: datetime | None) -> None:
    """Ask a model one QUESTION and print its greedy answer.

    The question goes through the model's chat template if there is one. The command runs a job of one row in a
    temporary folder, so it takes as long as loading the model; a terminal shows the progress. For many questions, write
    a job file (`init`).
    """
    from batchinfer.plan.first_job import write_question
    from batchinfer.progress import ChildProgress

    if not question:
        raise click.UsageError("QUESTION is empty; write the question in quotes")
    with tempfile.TemporaryDirectory(prefix="batchinfer-ask-") as folder:
        job = write_question(Path(folder), question, model, max_tokens, date or datetime.now())
        command = own_process.command("batchinfer", "run", str(job))
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
            try:
                with ChildProgress() as words:
                    told = "".join(map(words.read_line, running.stderr or ()))
                running.wait()
            except BaseException:
                running.terminate()  # a signal may have reached this process alone
                raise
        code = running.returncode
        if code not in (ExitCode.OK, ExitCode.ROW_ERRORS):
            click.echo(sanitize(told).rstrip(), err=True)
            sys.exit(code)
        row = _only_row(Path(folder))
    if row["status"] != "ok":
        click.echo(sanitize(f"error: {row['error']}"), err=True)
        sys.exit(code)
    for line in told.splitlines():
        if line.startswith("warning: "):  # about the model, which the user wants to test
            click.echo(sanitize(line), err=True)
    click.echo(sanitize(row["text"]))
    if row["finish_reason"] == "length":
        click.echo(f"cut after {row['completion_tokens']} tokens; --max-tokens allows more", err=True)


def _only_row(folder: Path) -> dict[str, str]:
    from batchinfer.data.parquet import read_rows

    (file,) = (folder / "run" / "outputs").glob("*.parquet")
    return read_rows(file)[0]
