"""Small jobs for tests: shards, a job file, and the command run in this process or in a child process."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer import cli
from batchinfer.commands import jobs, reports
from support.paths import RANDOM_MODEL

SYSTEM = "You answer with one word. Read the question twice, think about each word of it, then give the word. " * 3


@dataclass
class Ended:
    """The end of a command: exit code, output and errors."""

    code: int
    said: str  # on stdout before the summary or report of a run
    err: str
    report: list[Callable[[], None]] = field(default_factory=list)

    @cached_property
    def out(self) -> str:
        """All that stdout got; the end of a run, half the work of a small one, is made for who reads it."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            for print_it in self.report:
                print_it()
        return self.said + out.getvalue()


def batchinfer(*arguments: str | Path) -> Ended:
    """Run the command in this process: quick, since torch is loaded once."""
    out, err = io.StringIO(), io.StringIO()
    report: list[Callable[[], None]] = []

    def later(print_it: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments, **options: report.append(partial(print_it, *arguments, **options))

    before = sys.argv
    sys.argv = ["batchinfer", *map(str, arguments)]
    try:
        with (
            patch.object(jobs, "print_report", later(reports.print_report)),
            patch.object(jobs, "print_end", later(reports.print_end)),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            cli.main()
        code: Any = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = before
    return Ended(code, out.getvalue(), err.getvalue(), report)


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """Start the command as a child process."""
    command = [sys.executable, "-c", "from batchinfer.program import program; program()", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def question(number: int, system: str = SYSTEM) -> str:
    return f"{system}Question {number}: what is {number} times {number + 1}, roughly?"


def write_shard(path: Path, columns: dict[str, Any], *, row_group_size: int = 5) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def write_questions(folder: Path, counts: tuple[int, ...] = (9, 4, 7)) -> list[Path]:
    """Shards of prompts with a common start, in several row groups."""
    paths, number = [], 0
    for index, count in enumerate(counts):
        numbers = list(range(number, number + count))
        number += count
        columns = {"id": [f"q{i}" for i in numbers], "prompt": [question(i) for i in numbers], "extra": numbers}
        paths.append(write_shard(folder / f"part-{index}.parquet", columns))
    return paths


def write_job(folder: Path, *, name: str = "job.toml", **parts: dict[str, Any]) -> Path:
    """A job over prompts/*.parquet with the sample model; `parts` override or add keys."""
    job: dict[str, dict[str, Any]] = {
        "input": {"files": ["prompts/*.parquet"], "prompt": "prompt"},
        "output": {"dir": "run"},
        "model": {"path": str(RANDOM_MODEL), "dtype": "float32"},
        "sampling": {"max_tokens": 8},
    }
    for part, keys in parts.items():
        job.setdefault(part, {}).update(keys)
        job[part] = {key: value for key, value in job[part].items() if value is not None}
    lines = []
    for part, keys in job.items():
        lines += [f"[{part}]", *(f"{key} = {toml(value)}" for key, value in keys.items())]
    path = folder / name
    path.write_text("\n".join(lines))
    return path


def toml(value: Any) -> str:
    """A TOML value; JSON has the same form for texts, numbers, true, false and lists of these."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def outputs(run: Path) -> dict[str, list[dict[str, Any]]]:
    """All output rows by file name."""
    files = sorted((run / "outputs").rglob("*.parquet"))
    return {str(file.relative_to(run / "outputs")): pq.read_table(file).to_pylist() for file in files}


def answers(run: Path) -> list[dict[str, Any]]:
    """All output rows without the column that says where their KV came from."""
    files = outputs(run)
    return [{key: row[key] for key in row if key != "cached_tokens"} for name in files for row in files[name]]


def output_bytes(run: Path) -> dict[str, bytes]:
    """The output files to the last byte."""
    return {str(file.relative_to(run)): file.read_bytes() for file in sorted((run / "outputs").rglob("*.*"))}
