"""Kill workers and inject errors, hundreds of each, while a run folder is in an object store (`make chaos`).

Shorter forms: tests/controller/test_bucket_claims.py and tests/journeys/test_run_in_bucket.py.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

import pytest

from support.bucket_claimants import disturbed
from support.faults import MIXED, SLOW, plan_units
from support.faulty_store import Faults, faulty_store
from support.jobs import batchinfer, output_bytes, start, write_job, write_questions
from support.s3_servers import BOTH, server_with

KILLS, ERRORS = 200, 200
PARTS = 4  # of the test of whole jobs, each with its share of them
COUNTS = (60, 40, 20)  # rows of a job's shards


server = server_with("runs", which=BOTH)


def test_workers_are_killed_and_the_store_fails_while_units_are_claimed(server, tmp_path):
    # three listings of 1,500 names at once take this server 2.5 s on two cores of a Cascade Lake
    faults = Faults(share=0.02, hold_s=5.0, seed=1)
    disturbed(server, tmp_path, "claims", faults, num_units=1500, num_kills=KILLS, pause_s=1.5, request_s=4.0)
    assert faults.injected.total() >= ERRORS
    assert set(faults.injected) == {"500", "503", "lost", "timeout", "late", "stale"}
    assert (faults.most_writes > 1) == server.is_atomic
    print(f"kills {KILLS}, errors {dict(faults.injected)}, requests {dict(faults.requests)} of 1500 units")


@pytest.mark.parametrize("part", range(PARTS))
def test_jobs_are_killed_and_the_store_fails_and_outputs_stay_equal(server, tmp_path, part):
    """Whole jobs, one after the other, by three `work` commands at a time, until there were enough kills and errors."""
    write_questions(tmp_path / "prompts", COUNTS)
    job = write_job(tmp_path, cluster=SLOW, sampling=MIXED)
    assert batchinfer("run", job).code == 0
    expected, rng = output_bytes(tmp_path / "run"), random.Random(part)
    faults = Faults(share=0.05, kinds=("500", "503", "lost", "late", "stale"), seed=part)
    num_killed = number = 0
    with faulty_store(server, faults) as url:
        while num_killed < KILLS / PARTS or faults.injected.total() < ERRORS / PARTS:
            name = f"part-{part}-job-{number}"
            uri = f"s3://runs/{name}"
            settings = {"output.dir": uri, "output.work_dir": tmp_path / f"node-{number}", "s3.endpoint": url}
            options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
            plan_units(job, uri, *options)
            num_killed += _work_and_kill(job, options, rng)
            ended = batchinfer("finish", job, *options)
            assert ended.code == 0, ended.err
            found = server.objects("runs", name)
            assert {name: data for name, data in found.items() if name.startswith("outputs/")} == expected
            marks = [path for path in faults.written if path.startswith(f"/runs/{name}/done/")]
            assert sorted(marks) == sorted(set(marks))
            number += 1
            print(f"{number} jobs, kills {num_killed}, errors {dict(faults.injected)}", flush=True)
    print(f"requests {dict(faults.requests)}")


def _work_and_kill(job, options, rng):
    """Three `work` commands at a time, killed with all their ranks at random moments, until one finds nothing to do."""
    num_killed, deadline = 0, time.monotonic() + 460
    working: list[subprocess.Popen[str]] = []
    is_done = False
    while working or not is_done:
        assert time.monotonic() < deadline
        while len(working) < 3 and not is_done:
            working.append(start("work", job, *options))
        time.sleep(rng.uniform(0.2, 3.5))
        for process in [process for process in working if process.poll() is not None]:
            _, err = process.communicate()
            assert process.returncode == 0, err
            working.remove(process)
            is_done = True
        if working and not is_done:
            process = rng.choice(working)
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            working.remove(process)
            num_killed += 1
    return num_killed
