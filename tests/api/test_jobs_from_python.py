"""batchinfer.Job: the commands as methods, and what they refuse."""

import json
import os
import pickle
import subprocess
import sys
import tomllib
import tracemalloc

import numpy as np
import pyarrow.parquet as pq
import pytest

import batchinfer
from support.jobs import batchinfer as command
from support.jobs import write_job, write_questions, write_shard
from support.paths import RANDOM_MODEL


@pytest.fixture
def path(tmp_path):
    write_questions(tmp_path / "prompts")
    return write_job(tmp_path, sampling={"n": 2, "temperature": 1.0})


def test_a_job_is_planned_run_and_read(path):
    job = batchinfer.Job.from_toml(path)
    with pytest.raises(batchinfer.ConfigError, match=r"has no complete plan yet; call plan\(\) or run\(\) first"):
        job.status()
    assert job.plan()["rows"] == 40
    assert (job.status()["activity"], job.status()["rows"]) == ("planned", 40)
    with pytest.raises(batchinfer.IncompleteRunError, match=r"is not finished; call run\(\)"):
        job.outputs()
    job.run()
    assert job.status()["activity"] == "finished"
    files = [pq.read_table(job.folder / "outputs" / f"part-{shard}.parquet") for shard in range(3)]
    assert job.outputs().to_pylist() == [row for file in files for row in file.to_pylist()]
    assert job.report() == json.loads(command("report", job.folder, "--json").out)
    rows = list(job.rows())
    assert sorted((row["id"], row["sample"]) for row in rows) == sorted(
        (row["id"], row["sample"]) for file in files for row in file.to_pylist()
    )


def test_of_wide_rows_few_are_python_objects_at_a_time(tmp_path):
    num_rows, values = 40, 20_000
    wide = np.arange(1000, 1000 + num_rows * values).reshape(num_rows, values)
    columns = {"id": list(range(num_rows)), "prompt": [f"Row {row}" for row in range(num_rows)], "wide": list(wide)}
    write_shard(tmp_path / "prompts" / "a.parquet", columns)
    job = batchinfer.Job.from_toml(write_job(tmp_path, output={"keep_columns": ["wide"]}, sampling={"max_tokens": 1}))
    job.run()
    tracemalloc.start()
    try:
        found = {row["id"]: row["wide"][-1] for row in job.rows()}
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == dict(enumerate(wide[:, -1].tolist()))
    all_bytes = wide.size * (sys.getsizeof(1000) + 8)
    assert peak_bytes < all_bytes / 2


READ = """
import os, sys
import batchinfer
job = batchinfer.Job.from_toml(sys.argv[1])
job.report()  # brings DuckDB in
before = os.listdir("/proc/self/task")
assert len(list(job.rows())) == job.outputs().num_rows == 40
assert os.listdir("/proc/self/task") == before
"""


def test_reading_leaves_no_threads_that_could_abort_the_end_of_the_callers_process(path):
    batchinfer.Job.from_toml(path).run()
    subprocess.run([sys.executable, "-c", READ, path], check=True)


def test_a_dict_is_a_job_file(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    table = tomllib.loads(path.read_text())
    assert batchinfer.Job(table).config == batchinfer.Job.from_toml(path).config
    table["output"]["dir"] = path.parent / "run"
    assert batchinfer.Job(table).folder == path.parent / "run"
    del table["sampling"]["max_tokens"]
    with pytest.raises(batchinfer.ConfigError, match=r"Job: the key sampling\.max_tokens is missing; add it"):
        batchinfer.Job(table)


def test_the_folder_of_another_job_is_not_read(path):
    batchinfer.Job.from_toml(path).run()
    write_job(path.parent, sampling={"n": 3})
    other = batchinfer.Job.from_toml(path)
    for use in (other.status, other.outputs, other.report, other.run):
        with pytest.raises(batchinfer.RunMismatchError, match="belongs to another job"):
            use()


def test_errors_come_with_their_class_and_what_they_know(path):
    job = batchinfer.Job.from_toml(path)
    job.plan()
    os.truncate(job.folder / "plan" / "units.parquet", 10)
    with pytest.raises(batchinfer.DamagedFileError, match=r"units\.parquet is damaged") as raised:
        job.run()
    assert raised.value.path == job.folder / "plan" / "units.parquet"
    assert raised.value.exit_code == 2


def test_a_deleted_working_folder_is_one_sentence(path, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    job = batchinfer.Job.from_toml(path)
    (tmp_path / "gone").rmdir()
    settings = {"model": RANDOM_MODEL, "max_tokens": 2}
    for use in (job.plan, lambda: batchinfer.Job({}), lambda: batchinfer.generate(["a"], **settings)):
        with pytest.raises(batchinfer.ConfigError, match=r"the working folder was deleted; call os\.chdir with one"):
            use()


def test_a_model_is_not_pickled():
    with (
        batchinfer.Model(RANDOM_MODEL) as model,
        pytest.raises(batchinfer.ConfigError, match=r"cannot be pickled; make one in each process"),
    ):
        pickle.dumps(model)
