"""A report over damaged statistics is a sentence, never a traceback; `verify` names the files."""

from __future__ import annotations

import random
import shutil

import pytest

from support.damage import flip_bit, truncate
from support.jobs import batchinfer, write_job, write_questions

NUM_TRIALS = 40


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    write_questions(folder / "prompts", (6, 3))
    assert batchinfer("run", write_job(folder, sampling={"max_tokens": 3})).code == 0
    assert batchinfer("verify", folder / "run").code == 0
    return folder / "run"


@pytest.mark.parametrize("number", range(NUM_TRIALS))
def test_damaged_statistics_are_a_sentence(finished, tmp_path, number):
    rng = random.Random(number)
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    path = rng.choice(sorted((run / "stats").rglob("*.parquet")))
    (truncate if number % 4 == 0 else flip_bit)(path, rng)
    for ended in (batchinfer("report", run), batchinfer("report", run, "--sql", "SELECT count(*) FROM requests")):
        assert "Traceback" not in ended.err, (path, ended.err)
        assert ended.code == 0 or (ended.code == 2 and ended.err.startswith("error: ")), (path, ended)


def test_verify_names_truncated_statistics_and_a_flipped_output(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    rng = random.Random(1)
    steps = next((run / "stats" / "steps").glob("*.parquet"))
    truncate(steps, rng)
    flip_bit(run / "outputs" / "part-0.parquet", rng)
    ended = batchinfer("verify", run)
    assert ended.code == 3
    assert f"stats/steps/{steps.name}: " in ended.out
    assert "outputs/part-0.parquet: bytes 0 to " in ended.out
    assert "2 of them damaged" in ended.out
    # the next finish writes the outputs again
    assert batchinfer("finish", run).code == 0
    steps.unlink()
    assert batchinfer("verify", run).code == 0


def test_verify_of_something_else_is_a_sentence(tmp_path):
    ended = batchinfer("verify", tmp_path)
    assert ended.code == 2
    assert "not a run folder" in ended.err
