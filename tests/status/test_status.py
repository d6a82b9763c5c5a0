"""`status` and `retry` on run folders, without Slurm."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from batchinfer.checked_json import publish_json, read_json
from batchinfer.data.schemas.internal import RESULTS
from batchinfer.progress import Progress
from batchinfer.run.heartbeat import Heartbeat, SessionStatus
from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.units.claims import UnitClaims
from batchinfer.run.units.result_files import write_results
from batchinfer.rundir import RunDir
from batchinfer.status.status import Status
from batchinfer.status.text import format_status
from support.faults import LONG, SLOW, fail_some, plan_units
from support.jobs import batchinfer, output_bytes, outputs, start, write_job, write_questions, write_shard


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A finished job of several units, and its outputs."""
    folder = tmp_path_factory.mktemp("reference")
    write_questions(folder / "prompts", (12, 9, 6))
    write_shard(folder / "prompts" / "part-3.parquet", {"id": ["bad"], "prompt": [""], "extra": [0]})
    job = write_job(folder, cluster=SLOW, sampling=LONG)
    plan_units(job, folder / "run")
    assert batchinfer("run", job).code == 3
    return folder, output_bytes(folder / "run")


@pytest.fixture
def planned(reference, tmp_path):
    """The same job, only planned."""
    return plan_units(reference[0] / "job.toml", tmp_path / "run")


def status(run):
    done = batchinfer("status", run, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_before_and_after_the_work(reference, planned):
    before = status(planned)
    assert (before["state"], before["activity"], before["workers"]) == ("planned", "planned", 0)
    assert before["units"] > 3
    assert (before["units_done"], before["units_running"], before["units_waiting"]) == (0, 0, before["units"])
    assert (before["requests"], before["requests_done"], before["rows"], before["rows_bad"]) == (27, 0, 28, 1)
    assert before["tokens_per_s"] is before["left_s"] is before["tasks_running"] is None
    plan = pq.read_table(planned / "plan" / "summary.parquet").to_pylist()[0]
    assert (before["prompt_tokens"], before["output_tokens"]) == (plan["computed_tokens"], plan["max_output_tokens"])
    assert (before["prompt_tokens_done"], before["output_tokens_done"], before["sessions"]) == (0, 0, [])
    after = status(reference[0] / "run")
    assert after["state"] == after["activity"] == "finished"
    assert (after["units_done"], after["units_waiting"], after["units_failed"]) == (before["units"], 0, 0)
    assert (after["requests_done"], after["requests_failed"]) == (27, 0)
    rows = [row for path in reference[0].glob("run/units/*/*/part-*") for row in pq.read_table(path).to_pylist()]
    for name, column in (("prompt_tokens", "computed_tokens"), ("output_tokens", "completion_tokens")):
        assert after[name] == after[f"{name}_done"] == sum(row[column] for row in rows)
    assert "27 of 27 (100.0%)" in batchinfer("status", reference[0] / "run").out
    assert "finished" in batchinfer("status", reference[0] / "run", "--watch").out


@pytest.mark.all  # make test: before and after the work, above
def test_while_somebody_works(planned, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    worker = start("work", planned)
    try:
        deadline = time.monotonic() + 90
        while not (list(planned.glob("units/*/[0-9]*/part-*.parquet")) and list(planned.glob("stats/steps/*.parquet"))):
            assert worker.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        worker.send_signal(signal.SIGSTOP)  # so that it still works when we look
        found = status(planned)
        assert found["units_running"] >= 1
        assert (found["state"], found["activity"], found["workers"]) == ("planned", "running", 1)
        assert "running with 1 worker\n" in batchinfer("status", planned).out
        assert 0 < found["requests_done"] < 27
        assert found["tokens_per_s"] > 0
        assert found["left_s"] > 0
        assert 0 < found["output_tokens_done"] < found["output_tokens"] <= 27 * 24
        assert found["prompt_tokens_done"] <= found["prompt_tokens"]
        (session,) = found["sessions"]
        assert (session["command"], session["node"], session["task"]) == ("work", "node7", "12_3")
        (work,) = session["under_way"]
        assert work["phase"] in ("prefill", "decode")
        assert work["own_tokens"] > 0
        doing = r"work on node7, task 12_3, restart 2: (prefill|decode), [\d,]+ tokens by it, [\d,]+ tokens/s"
        assert re.search(doing, batchinfer("status", planned).out)
        holder = found["running"][0]
        assert (holder["node"], holder["task"], holder["restarts"]) == ("node7", "12_3", 2)
        assert "node7, task 12_3, restart 2" in batchinfer("status", planned).out
    finally:
        worker.send_signal(signal.SIGCONT)
        worker.terminate()
        _, err = worker.communicate(timeout=60)
    assert worker.returncode == 75, err
    assert "Slurm task 12_3 on node7, restart 2" in err
    found = status(planned)
    assert (found["activity"], found["units_running"], found["workers"]) == ("interrupted", 0, 0)
    assert "interrupted, no worker is left" in batchinfer("status", planned).out
    assert batchinfer("work", planned).code == 0
    assert status(planned)["activity"] == "computed"


def test_a_killed_worker_of_this_host_is_no_worker(planned):
    worker = start("work", planned)
    try:
        deadline = time.monotonic() + 90
        while not status(planned)["units_running"]:
            assert worker.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        worker.kill()
        worker.communicate(timeout=60)
    assert status(planned)["activity"] == "interrupted"


def test_a_plan_under_way_is_planning(planned):
    run = RunDir(planned)
    publish_json(run.run_json, read_json(run.run_json) | {"state": "planning"})
    found = status(planned)
    assert (found["state"], found["activity"], found["units"], found["sessions"]) == ("planning", "planning", 0, [])
    assert "planning was interrupted; `batchinfer plan` continues" in batchinfer("status", planned).out
    session, meter = Heartbeat(FolderStorage(run), "1", "plan"), Progress("tokenise", 30, "rows", phase="planning")
    with meter:
        meter.advance(12)
        session.start()
        (shown,) = status(planned)["sessions"]
        out = batchinfer("status", planned).out
        session.stop()
    assert (shown["command"], shown["under_way"][0]["phase"]) == ("plan", "planning")
    assert "planning; there are no tokens to count yet" in out
    assert re.search("plan on .*: planning 40%", out)
    assert batchinfer("work", planned).code == 2


def test_a_worker_that_is_silent_is_a_problem(planned):
    with UnitClaims(FolderStorage(RunDir(planned))) as claims:
        assert claims.try_claim(0) is not None
        (lease,) = planned.glob("work/workers/*")
        assert (status(planned)["units_running"], status(planned)["activity"]) == (1, "running")
        os.utime(lease, (lease.stat().st_mtime - 300,) * 2)
        found = status(planned)
    assert (found["units_running"], found["activity"]) == (0, "interrupted")
    assert any("unit 0" in problem and "silent for 5 min" in problem for problem in found["problems"])


def test_all_failed_requests_are_counted_however_many_a_file_holds(planned):
    said = {"status": "error", "finish_reason": "error", "computed_tokens": 0, "completion_tokens": 0}
    errors = ["the rank died"] * 25 + ["it fits no page"] * 12
    rows = [{"unit": 0, "shard": 0, "row": row, "sample": 0, "error": text, **said} for row, text in enumerate(errors)]
    with UnitClaims(FolderStorage(RunDir(planned))) as claims:
        write_results(claims.try_claim(0).folder, 0, pa.Table.from_pylist(rows, schema=RESULTS.schema))
        found = status(planned)
    assert found["requests_failed"] == 37
    assert {"25 x the rank died", "12 x it fits no page"} <= set(found["problems"])


def test_no_plan_and_no_run_are_sentences(tmp_path):
    assert "not a run folder" in batchinfer("status", tmp_path).err
    assert batchinfer("status", tmp_path / "nothing.toml").code == 2
    assert batchinfer("status", tmp_path, "--watch", "--json").code == 2


def test_status_retry_and_cancel_start_without_torch(reference):
    code = (
        "import sys\nfrom batchinfer.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    for command in ("status", "retry", "cancel"):
        done = subprocess.run([sys.executable, "-c", code, command, reference[0] / "run"], check=False)
        assert done.returncode == 0, command


@pytest.mark.parametrize("finished", [False, pytest.param(True, marks=pytest.mark.all)])  # make test: unfinished
def test_retry_computes_failed_rows_and_no_others(reference, planned, finished):
    assert batchinfer("work", planned, "--set", "cluster.commit_seconds=30").code == 0
    failed = fail_some(planned, 3)
    if finished:
        assert batchinfer("finish", planned).code == 3
        assert sum(row["error"] == "the rank died" for rows in outputs(planned).values() for row in rows) == 3
    found = status(planned)
    assert (found["requests_failed"], found["units_failed"]) == (3, 3)
    assert any("3 x the rank died" in problem for problem in found["problems"])

    again = batchinfer("retry", planned)
    assert again.code == 0
    assert "3 failed requests in 3 units" in again.out
    assert "1 row is bad in the input" in again.out
    found = status(planned)
    assert (found["requests_failed"], found["requests_done"], found["units_waiting"]) == (0, 24, 3)
    assert found["activity"] == "interrupted"
    assert "0 failed requests" in batchinfer("retry", planned).out

    before = set(planned.glob("units/*/[0-9]*/part-*.parquet"))
    assert batchinfer("work", planned).code == 0
    new = [pq.read_table(path) for path in set(planned.glob("units/*/[0-9]*/part-*.parquet")) - before]
    assert sorted((row["shard"], row["row"]) for table in new for row in table.to_pylist()) == sorted(failed)
    assert all(pc.all(pc.equal(table["status"], "ok")).as_py() for table in new)
    assert batchinfer("finish", planned).code == 3  # the bad row of the input
    assert output_bytes(planned) == reference[1]


def test_a_run_of_another_version_is_read_and_not_continued(planned):
    assert batchinfer("work", planned, "--set", "cluster.commit_seconds=30").code == 0
    run_json = read_json(planned / "run.json")
    before = status(planned)
    fingerprint = {**run_json["fingerprint"], "version of batchinfer": "0.0.9", "sampling": {"an old key": 1}}
    publish_json(planned / "run.json", {**run_json, "fingerprint": fingerprint})
    for command in ("status", "peek", "cancel"):
        ended = batchinfer(command, planned)
        assert ended.code == 0, ended.err
        assert ended.err.startswith(f"warning: {planned} was planned by batchinfer 0.0.9; this version, ")
    assert status(planned) == before
    for command in ("work", "finish", "retry"):
        refused = batchinfer(command, planned)
        assert refused.code == 2
        assert "version of batchinfer was 0.0.9 and is now" in refused.err


@pytest.mark.all  # make test: retry computes failed rows, above
def test_retry_leaves_units_alone_that_somebody_works_on(planned):
    assert batchinfer("work", planned, "--set", "cluster.commit_seconds=30").code == 0
    fail_some(planned, 1)
    run = RunDir(planned)
    unit = next(iter(unit for unit in range(10) if status(planned)["units_failed"] and _has_failed(planned, unit)))
    run.done(unit).unlink()
    with UnitClaims(FolderStorage(run)) as claims:
        assert claims.try_claim(unit) is not None
        assert "1 more unit with failed requests is being worked on" in batchinfer("retry", planned).out
    assert "1 failed request in 1 unit is to be computed again" in batchinfer("retry", planned).out


@pytest.mark.all  # make test: retry computes failed rows, above
def test_retry_waits_for_a_finish(planned):
    with open(planned / "plan.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused = batchinfer("retry", planned)
    assert refused.code == 2
    assert "another process plans or finishes" in refused.err


def _has_failed(run, unit):
    files = sorted((run / "units" / f"{unit:06d}").glob("*/part-*.parquet"))
    return any("error" in pq.read_table(path)["status"].to_pylist() for path in files)


@pytest.mark.parametrize(("planned", "about"), [(40, " of about 40"), (2, " of about 3"), (None, "")])
def test_sweeps_of_streamed_weights_have_a_line(planned, about):
    sweeps = {"sweep": 3, "planned_sweeps": planned, "read_bytes_per_s": 1.2e9, "waited_s": 155.0}
    figures = {"phase": "decode", "own_tokens": 5, "tokens_per_s": None}
    parts = {"task": None, "restarts": 0, "time_s": 0.0, "silent_s": 0.0, "is_dead": False}
    session = SessionStatus("s", "work", "node", under_way=[figures | sweeps], **parts)
    lines = format_status(Status(run="r", state="planned", activity="running", sessions=[session])).splitlines()
    assert f"  sweep 3{about}, weights at 1.20 GB/s, 3 min waited for them" in lines


@pytest.mark.parametrize("activity", ["planned", "interrupted"])
def test_a_run_whose_tasks_wait_in_their_launcher_is_not_to_be_computed_here(activity):
    idle = Status(run="/data/run", state="planned", activity=activity, launcher="Slurm", tasks_running=0)
    first, waiting = (format_status(replace(idle, tasks_waiting=tasks)).splitlines()[0] for tasks in (0, 2))
    assert "`batchinfer run /data/run`" in first
    assert waiting == f"/data/run: {activity}, no worker at present; its tasks in Slurm go on with it"
