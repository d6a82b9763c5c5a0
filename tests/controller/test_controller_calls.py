"""The Python calls that a request and a step cost a controller; time is measured by tests/bench/controller_host.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.jobs import batchinfer, write_job, write_shard
from support.scripted_ranks import ScriptedGroup, controller_of

CALLS_OF_A_REQUEST = 32  # 29 when this was written
CALLS_OF_A_STEP = 25  # 23


def count_calls(folder: Path, num_rows: int, max_tokens: int) -> tuple[int, int]:
    """Return (calls of Python functions, steps) of a controller that works off a job."""
    write_shard(folder / "prompts" / "a.parquet", {"prompt": [f"{row} is a number" for row in range(num_rows)]})
    job = write_job(folder, sampling={"max_tokens": max_tokens, "temperature": 1.0, "ignore_eos": True})
    planned = batchinfer("plan", job)
    assert planned.code == 0, planned.err
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    group = ScriptedGroup(num_slots=256)
    with controller_of(job, group) as controller:
        sys.setprofile(count)
        try:
            controller.run()
        finally:
            sys.setprofile(None)
    assert controller.units.is_done()
    return num_calls, group.num_steps


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    count_calls(tmp_path_factory.mktemp("warm"), 16, 4)  # imports
    return count_calls(tmp_path_factory.mktemp("few"), 256, 8)


def test_calls_of_a_request(few, tmp_path):
    calls, steps = count_calls(tmp_path, 1024, 8)
    of_requests = calls - few[0] - CALLS_OF_A_STEP * (steps - few[1])
    assert of_requests / (1024 - 256) < CALLS_OF_A_REQUEST


def test_calls_of_a_step(few, tmp_path):
    calls, steps = count_calls(tmp_path, 256, 108)
    assert steps == few[1] + 100
    assert (calls - few[0]) / 100 < CALLS_OF_A_STEP
