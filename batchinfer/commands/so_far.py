"""Run folders for reports: a finished run's own folder, or a temporary one with an unfinished run's figures so far."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batchinfer.checked_json import publish_json
from batchinfer.finish.so_far import write_so_far
from batchinfer.progress import note
from batchinfer.report.read import as_document, read_report
from batchinfer.report.unfinished import KEY, Unfinished
from batchinfer.run.planned import job_of
from batchinfer.rundir import RunDir, read_state
from batchinfer.status.status import StatusReader

NAMED = 3  # damaged files in a sentence


def is_unfinished(folder: Path) -> bool:
    """Return whether a run folder has rows to compute or outputs to write."""
    run = RunDir(folder)
    if not run.run_json.is_file():
        return False
    state = read_state(run)["state"]
    return state == "partial" or (state != "finished" and not run.stats_file("run").exists())


@contextmanager
def readable(folders: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield the folder to read for each run folder; temporary folders are removed at the end.

    Raises:
        ConfigError: an unfinished run is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="batchinfer-") as scratch:
        made: dict[Path, Path] = {}  # a folder that occurs twice is read once
        for folder in (folder.resolve() for folder in folders):
            if folder not in made:
                made[folder] = _so_far(folder, Path(scratch, str(len(made)))) if is_unfinished(folder) else folder
        yield [made[folder.resolve()] for folder in folders]


def report_document(folder: Path) -> dict[str, Any]:
    """Return the document that `report --json` prints for a run folder.

    Raises:
        ConfigError: the folder has no run, or a damaged one.
    """
    with readable([folder]) as (found,):
        return as_document(read_report(found))


def damaged_files(damaged: dict[Path, str]) -> str:
    """Return one sentence on damaged files: all of a few, else the first ones and how many more."""
    if len(damaged) == 1:
        ((path, reason),) = damaged.items()
        return f"{path} is damaged ({reason}); it is left out"
    named = ", ".join(f"{path} ({reason})" for path, reason in list(damaged.items())[:NAMED])
    more = f" and {len(damaged) - NAMED:,} more" if len(damaged) > NAMED else ""
    return f"{len(damaged):,} files are damaged: {named}{more}; they are left out"


def _so_far(folder: Path, scratch: Path) -> Path:
    run, target = RunDir(folder), scratch / folder.name
    reader = StatusReader(run, checks_results=True)
    status = reader.read()
    if reader.damaged:
        note(f"warning: {damaged_files(reader.damaged)}; `batchinfer run` computes lost rows again")
    num_rows = write_so_far(run, job_of(run.root, ()), reader.counted, target)
    is_planned = status.state != "planning"
    how_far = Unfinished(
        activity=status.activity,
        rows_done=num_rows,
        rows_planned=status.rows if is_planned else None,
        tokens_done=status.prompt_tokens_done + status.output_tokens_done,
        tokens_planned=status.prompt_tokens + status.output_tokens if is_planned else None,
    )
    shards = read_state(run)["shards"]
    if run.job.is_file():
        shutil.copyfile(run.job, RunDir(target).job)
    publish_json(RunDir(target).run_json, {"state": status.state, "shards": shards, KEY: asdict(how_far)})
    return target
