"""First steps: a job file for data that somebody has, and one question to a model."""

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
    "--model", metavar="DIR", required=True, type=click.Path(path_type=Path), help="The model's Hugging Face folder."
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
    help="The job file to write; one that is there is left alone.",
)
def init(data: str, model: Path, target: Path) -> None:
    """Write a job file for DATA (a file, a folder of them or a glob) that runs as it is.

    Which columns hold prompts and ids is told by their types and names, model.dtype by the checkpoint and what fits
    into this machine. The file has comments and what else is often set.
    """
    from batchinfer.plan.first_job import first_job
    from batchinfer.whole_files import create_exclusively

    taken = click.UsageError(f"{target} is there already; name another file with -o")
    if target.exists():
        raise taken
    made = first_job(data, model, target)
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
    """Ask a model one QUESTION and print its answer, greedy: is the model what it should be?

    The question is put through the model's chat template where it has one. It runs as a job of one row in a temporary
    folder, so it takes as long as loading the model; a terminal shows meanwhile what it is at. For many questions write
    a job file (`init`).
    """
    from batchinfer.plan.first_job import write_question
    from batchinfer.progress import LastWords

    with tempfile.TemporaryDirectory(prefix="batchinfer-ask-") as folder:
        job = write_question(Path(folder), question, model, max_tokens, date or datetime.now())
        command = own_process.command("batchinfer", "run", str(job))
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
            try:
                with LastWords() as words:
                    told = "".join(map(words.hear, running.stderr or ()))
                running.wait()
            except BaseException:
                running.terminate()  # a signal may have come to this process alone
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
        if line.startswith("warning: "):  # of the model: the answer is to say what it is like
            click.echo(sanitize(line), err=True)
    click.echo(sanitize(row["text"]))
    if row["finish_reason"] == "length":
        click.echo(f"cut after {row['completion_tokens']} tokens; --max-tokens gives it more", err=True)


def _only_row(folder: Path) -> dict[str, str]:
    from batchinfer.data.parquet import read_rows

    (file,) = (folder / "run" / "outputs").glob("*.parquet")
    return read_rows(file)[0]
