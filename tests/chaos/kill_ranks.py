"""Ranks killed at random moments, many times over: `make chaos`. A quick share: tests/controller/test_faults.py."""

from __future__ import annotations

import json

import pytest

from support.faults import LAYOUTS, make_reference, run_while_killing
from support.jobs import batchinfer, output_bytes

NUM_KILLS = 20


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return make_reference(tmp_path_factory.mktemp("reference"), (30, 20, 10))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_descendant_killed_twenty_times(reference, layout):
    """As many jobs as it takes, up to five kills in each."""
    folder, expected = reference
    num_killed, number = 0, 0
    while num_killed < NUM_KILLS:
        run = folder / f"{layout}-{number}"
        wanted = min(5, NUM_KILLS - num_killed)
        done, killed = run_while_killing(folder / "job.toml", run, LAYOUTS[layout], num_kills=wanted, seed=number)
        assert done.code == 0, done.err
        assert output_bytes(run) == expected
        assert json.loads(batchinfer("report", run, "--json").out)["rows_error"] == 0
        num_killed, number = num_killed + killed, number + 1


@pytest.mark.parametrize("layout", ["two", "apart"])
def test_one_job_that_is_disturbed_twenty_times(reference, layout):
    folder, expected = reference
    run = folder / f"{layout}-all"
    done, killed = run_while_killing(folder / "job.toml", run, LAYOUTS[layout], num_kills=NUM_KILLS, seed=1)
    assert killed > 0
    assert done.code == 0, done.err
    assert output_bytes(run) == expected
