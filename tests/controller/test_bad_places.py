"""Full and read-only disks, input that changes meanwhile, two jobs in one folder: a sentence, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from support.faults import MIXED, ended, wait_until
from support.jobs import Ended, batchinfer, output_bytes, question, start, write_job, write_questions, write_shard
from support.small_disks import SmallDisk, small_disk
from support.tiers import first_in_make_test

__all__ = ["small_disk"]

COMMITS = {"decode_requests": 4, "commit_seconds": 0.05}
QUICK = MIXED | {"max_tokens": 8}


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """A job, its run folder when only planned and when worked on, and its outputs."""
    folder = tmp_path_factory.mktemp("calm")
    write_questions(folder / "prompts", (6, 4, 2))
    job = write_job(folder, cluster=COMMITS, sampling=QUICK)
    assert batchinfer("plan", job).code == 0
    shutil.copytree(folder / "run", folder / "planned")
    assert batchinfer("work", job).code == 0
    shutil.copytree(folder / "run", folder / "worked")
    assert batchinfer("finish", job).code == 0
    return job, output_bytes(folder / "run")


def expect_sentence(done: Ended, *words: str, code: int = 2) -> None:
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    last = done.err.strip().splitlines()[-1]
    for word in words:
        assert word in last


@pytest.mark.parametrize("free_kib", first_in_make_test([0, 24]))
def test_a_disk_that_is_full_while_working(calm, small_disk: SmallDisk, free_kib):
    job, expected = calm
    run = shutil.copytree(job.parent / "planned", small_disk.folder / "run")
    small_disk.fill(but_bytes=free_kib << 10)
    # processes of their own: the lease that cannot be given back ends with its process
    expect_sentence(ended(start("work", run)), "cannot write", "No space left on device", "free space")
    small_disk.free()
    assert batchinfer("work", run).code == 0
    assert batchinfer("finish", run).code == 0
    assert output_bytes(run) == expected


def test_a_run_folder_that_is_read_only(calm, small_disk: SmallDisk):
    job, expected = calm
    planned = shutil.copytree(job.parent / "planned", small_disk.folder / "planned")
    worked = shutil.copytree(job.parent / "worked", small_disk.folder / "worked")
    small_disk.set_read_only(True)
    for command in (("work", planned), ("finish", worked), ("retry", worked)):
        expect_sentence(batchinfer(*command), "cannot write", "Read-only file system")
    new = ("plan", job, "--set", f"output.dir={small_disk.folder / 'new'}")
    expect_sentence(batchinfer(*new), "Read-only file system")
    assert json.loads(batchinfer("status", worked, "--json").out)["requests_done"] == 12
    small_disk.set_read_only(False)
    assert batchinfer("finish", worked).code == 0
    assert output_bytes(worked) == expected


def test_a_shard_that_is_replaced_while_the_job_runs(calm, tmp_path):
    _, expected = calm
    first, *_ = write_questions(tmp_path / "prompts", (6, 4, 2))
    job = write_job(tmp_path, cluster=COMMITS, sampling=QUICK)
    original = first.read_bytes()
    process = start("run", job)
    wait_until(lambda: list((tmp_path / "run").glob("units/*/[0-9]*/part-*.parquet")), process)
    write_shard(first, {"id": ["new"], "prompt": [question(99)], "extra": [1]})
    expect_sentence(ended(process), "part-0.parquet changed", "restore it")
    assert not list((tmp_path / "run" / "outputs").glob("*"))
    first.write_bytes(original)
    assert batchinfer("run", job).code == 0
    assert output_bytes(tmp_path / "run") == expected


def test_two_different_jobs_that_are_started_in_one_folder_at_once(calm, tmp_path):
    write_questions(tmp_path / "prompts", (6, 4, 2))
    other = write_job(tmp_path, name="other.toml", cluster=COMMITS, sampling=QUICK | {"max_tokens": 7})
    job = write_job(tmp_path, cluster=COMMITS, sampling=QUICK)
    processes = [start("run", path) for path in (job, other)]
    ours, theirs = (ended(process) for process in processes)
    assert sorted((ours.code, theirs.code)) == [0, 2], (ours.err, theirs.err)
    loser = ours if ours.code else theirs
    expect_sentence(loser, str(tmp_path / "run"))
    kept, refused = (job, other) if ours.code == 0 else (other, job)
    again = batchinfer("run", refused)
    expect_sentence(again, "max_tokens")
    assert batchinfer("run", kept).code == 0
    if kept == job:
        assert output_bytes(tmp_path / "run") == calm[1]
    else:
        assert os.listdir(tmp_path / "run" / "outputs")
