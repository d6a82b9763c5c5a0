"""The whole command killed at random moments, many times over: `make chaos`. A quick share stands in test_resume.py."""

from __future__ import annotations

import random

import pytest

from support.faults import LAYOUTS, kill_the_command, make_reference
from support.jobs import answers, batchinfer, output_bytes


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return make_reference(tmp_path_factory.mktemp("reference"), (30, 20, 10))


@pytest.mark.parametrize("with_store", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_kill_at_random_moments_until_it_ends(reference, tmp_path, seed, layout, with_store):
    folder, expected = reference
    rng, job, run = random.Random(seed), folder / "job.toml", tmp_path / "run"
    store = ("--set", f"kv.dir={tmp_path / 'store'}", "--set", "kv.persist=all") if with_store else ()
    options = ("--set", f"output.dir={run}", *LAYOUTS[layout], *store)
    kill_the_command(job, options, rng, num_kills=5, longest_s=8.0)
    assert batchinfer("run", job, *options).code == 0
    assert answers(run) == answers(folder / "run")
    if with_store:
        assert batchinfer("kv", "verify", tmp_path / "store").code == 0
    else:
        assert output_bytes(run) == expected
