"""Jobs that tests send to a cluster: long enough to be disturbed in their middle, by ranks that take their time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import pytest

from batchinfer.rundir import RunDir
from support.jobs import batchinfer, output_bytes, write_job, write_questions

LONG = {"max_tokens": 16, "ignore_eos": True}
SLOW = {"decode_requests": 2, "commit_seconds": 0.2}  # many small steps and commits, so that there is a middle
WAIT_S = 300.0  # far more than it takes: only a job that hangs ends here

# In the ranks only, which find it by PYTHONPATH: steps take long, and perhaps one row fails whatever is tried.
STUMBLING = """
import os, time
if "BATCHINFER_RANK_NUMBER" in os.environ:
    from batchinfer.rank import prefill
    plain = prefill.Prefill._built
    def stumbling(self, chunks, *rest, **options):
        time.sleep(float(os.environ["STEP_S"]))
        keys = {(chunk.sequence.request.key.shard, chunk.sequence.request.key.row) for chunk in chunks}
        if keys & FAILING:
            raise RuntimeError("no luck with this row")
        return plain(self, chunks, *rest, **options)
    prefill.Prefill._built = stumbling
"""


def stumble(
    patch: pytest.MonkeyPatch, folder: Path, step_s: float, failing: AbstractSet[tuple[int, int]] = frozenset()
) -> None:
    """Ranks that are started from now on lose seconds per prefill step, and fail with these rows.

    Args:
        folder: gets the program that has them do so.
    """
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(STUMBLING.replace("FAILING", repr(failing)))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    patch.setenv("PYTHONPATH", os.pathsep.join(paths))
    patch.setenv("STEP_S", str(step_s))


def computed_here(folder: Path, num_rows: tuple[int, ...]) -> tuple[Path, dict[str, bytes]]:
    """A job of shards with these numbers of rows, and their outputs from one machine."""
    write_questions(folder / "prompts", num_rows)
    job = write_job(folder, sampling=LONG)
    assert batchinfer("run", job).code == 0
    return job, output_bytes(folder / "run")


def submitted(job: Path, run: Path, *options: str, **cluster: Any) -> RunDir:
    """The run folder of a job that is planned into it and sent."""
    keys = [
        f"output.dir={json.dumps(str(run))}",
        *(f"cluster.{key}={value}" for key, value in (SLOW | cluster).items()),
    ]
    sent = batchinfer("submit", job, *(word for key in keys for word in ("--set", key)), *options)
    assert sent.code == 0, sent.err
    return RunDir(run)


def wait_for(condition: Callable[[], Any], said: Callable[[], str] = str) -> Any:
    """Wait for something to become true.

    Args:
        said: what tells of a cluster where it does not.
    """
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)
    return value
