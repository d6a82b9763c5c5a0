"""Time and cost of a session that was killed before its first commit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from batchinfer.data.parquet import read_rows
from batchinfer.rundir import RunDir
from support.jobs import batchinfer, write_job, write_questions

LOADING_S = 2.0
KILLED = """
import os, signal, sys, time
from pathlib import Path
from batchinfer.config import load_job
from batchinfer.run import heartbeat
from batchinfer.run.session import Session
from batchinfer.run.store.folder import FolderStorage
from batchinfer.rundir import RunDir
from batchinfer.stop_signals import StopSignal

heartbeat.BEAT_S = 0.1
run = RunDir(Path(sys.argv[1]))
session = Session("work", StopSignal())
session.attach(FolderStorage(run))
session.hold_ranks(load_job(run.job).cluster, range(1))
time.sleep(float(sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_session_that_is_killed_while_its_ranks_load_lasts_until_its_last_sign_of_life(tmp_path):
    write_questions(tmp_path / "prompts", (3,))
    job = write_job(tmp_path, pricing={"gpu_hour": 36.0})
    run = RunDir(tmp_path / "run")
    assert batchinfer("plan", job).code == 0
    killed = subprocess.run([sys.executable, "-c", KILLED, run.root, str(LOADING_S)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (row,) = (row for path in (run.stats / "nodes").iterdir() for row in read_rows(path) if row["command"] == "work")
    assert batchinfer("run", job).code == 0
    (after,) = read_rows(run.session_stats("nodes", row["session"]))
    assert (after["state"], after["num_ranks"]) == ("running", 1)
    assert after["end_s"] - row["end_s"] > LOADING_S / 2
    assert after | {"end_s": 0.0} == row | {"end_s": 0.0}
    assert json.loads(batchinfer("report", run.root, "--json").out)["startup_s"] > LOADING_S / 2
    assert batchinfer("verify", run.root).code == 0
