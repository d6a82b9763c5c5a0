"""2,000 flipped bits in KV stores: `make chaos`. A quick share: tests/kv_store/test_kv_damage.py."""

from __future__ import annotations

import random
import shutil

import pytest

from support.damage import flip_bit
from support.jobs import answers, batchinfer, write_job, write_questions

NUM_RUNS = 200
FLIPS_PER_RUN = 10


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A job, its store after one run, and its answers."""
    folder = tmp_path_factory.mktemp("filled")
    write_questions(folder / "prompts", (6, 3))
    job = write_job(folder, sampling={"max_tokens": 3}, kv={"dir": "kv", "persist": "all"})
    assert batchinfer("run", job).code == 0
    return job, answers(folder / "run")


@pytest.mark.parametrize("number", range(NUM_RUNS))
def test_no_flipped_bit_of_a_store_reaches_an_answer(filled, tmp_path, number):
    job, expected = filled
    rng = random.Random(number)
    store = tmp_path / "kv"
    shutil.copytree(job.parent / "kv", store)
    blocks = sorted(path for path in store.rglob("*.kv"))
    others = sorted(path for path in store.rglob("*") if path.is_file() and path not in blocks and path.stat().st_size)
    assert blocks
    # a store that is refused shows nothing of its blocks: every tenth run has damage elsewhere
    for _ in range(FLIPS_PER_RUN):
        flip_bit(rng.choice(others if number % 10 == 0 else blocks), rng)
    places = ("--set", f"kv.dir={store}", "--set", f"output.dir={tmp_path / 'run'}")
    ended = batchinfer("run", job, *places)
    assert "Traceback" not in ended.err, ended.err
    if ended.code == 0:
        assert answers(tmp_path / "run") == expected
    else:
        assert number % 10 == 0, ended.err
        assert ended.code == 2
        assert "error: " in ended.err
    checked = batchinfer("kv", "verify", store)
    assert "Traceback" not in checked.err, checked.err
