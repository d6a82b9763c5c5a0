"""Runs on a real Slurm: requeued, killed, moved and cancelled tasks do not change the outputs."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer.checked_json import publish_json, read_json
from batchinfer.config import load_job
from batchinfer.pace.follow_goal import follow_goal
from batchinfer.pace.follow_schedule import follow_schedule
from batchinfer.pace.goal import Goal, read_goal
from batchinfer.plan import packing
from batchinfer.records import ConfigError, IncompleteRunError, InterruptedRunError
from batchinfer.report.price.price_list import PriceList
from batchinfer.run.store.folder import FolderStorage
from batchinfer.rundir import RunDir
from batchinfer.submit.slurm import client
from batchinfer.submit.slurm.client import Task
from batchinfer.submit.slurm.tasks import live_tasks, num_tasks, submissions
from support import sent_jobs
from support.jobs import batchinfer, output_bytes
from support.paths import ROOT
from support.s3_servers import BOTH, running
from support.sent_jobs import SLOW, computed_here, submitted

ROWS = (25, 20, 19)

pytestmark = [
    pytest.mark.system,
    pytest.mark.usefixtures("cluster"),
]  # make test: test_submit and test_goal


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A job of 64 rows in 64 units, and the outputs computed on one machine."""
    return computed_here(tmp_path_factory.mktemp("reference"), ROWS)


@pytest.fixture
def submit(reference, tmp_path, monkeypatch):
    """A function that plans the job into a new folder, whose name a shell would split, and submits it."""
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 1)
    runs: list[RunDir] = []

    def send(*options: str, folder: Path = tmp_path, **cluster: Any) -> RunDir:
        runs.append(submitted(reference[0], folder / "a run; of 100% $(touch x)", *options, **cluster))
        return runs[-1]

    yield send
    for run in runs:
        batchinfer("cancel", run.root)


@pytest.fixture
def stumble(tmp_path, monkeypatch):
    """A function that slows down ranks started from now on (seconds per prefill step), and makes rows fail."""
    return partial(sent_jobs.stumble, monkeypatch, tmp_path / "stumbling")


def wait_for(condition: Callable[[], Any], run: RunDir) -> Any:
    return sent_jobs.wait_for(condition, lambda: logs(run))


def logs(run: RunDir) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(run.slurm.glob("*.log")))


def show(job: str) -> str:
    return subprocess.run(["scontrol", "-o", "show", "job", job], check=True, capture_output=True, text=True).stdout


def state(job: str) -> str:
    return re.search(r" JobState=(\w+)", show(job))[1]


def num_parts(run: RunDir) -> int:
    return len(list(run.root.glob("units/*/[0-9]*/part-*.parquet")))


def is_in_the_middle(run: RunDir) -> bool:
    num_done = len(list(run.root.glob("done/*")))
    assert num_done < 60, "too quick to be disturbed"
    return num_parts(run) > 3


def busy_task(run: RunDir) -> Task:
    """Return a task that holds a unit now, by the status."""
    running = json.loads(batchinfer("status", run.root, "--json").out)["running"]
    names = {holder["task"] for holder in running}
    return next((task for task in live_tasks(run) if task.state == "RUNNING" and task.name in names), None)


def finish_state(run: RunDir) -> str | None:
    """Return the final state of the finishing job, None before its end."""
    found = state(submissions(run)[-1].finish)
    return found if found in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT") else None


def expect_outputs(run: RunDir, reference: tuple[Path, dict[str, bytes]]) -> None:
    """Check that the outputs are those of one machine, and that every request was counted exactly once."""
    assert wait_for(lambda: finish_state(run), run) == "COMPLETED", logs(run)
    assert output_bytes(run.root) == reference[1]
    requests = pq.read_table(run.stats_file("requests"))
    assert requests.num_rows == sum(ROWS)
    assert set(requests["status"].to_pylist()) == {"ok"}
    assert not live_tasks(run)


def log_of(run: RunDir, task: str) -> str:
    return (run.slurm / f"{task}.log").read_text()


def test_eight_tasks_of_which_one_is_requeued_in_the_middle(submit, reference, stumble):
    stumble(0.5)
    run = submit("--array", "8")
    assert len(pq.read_table(run.units)) == 64
    refused = batchinfer("submit", run.root, "--array", "2")
    assert refused.code == 2
    assert "are pending or running already" in refused.err
    other = batchinfer(
        "submit",
        reference[0],
        "--set",
        f"output.dir={json.dumps(str(run.root))}",
        "--set",
        "sampling.max_tokens=3",
        "--array",
        "1",
    )
    assert other.code == 2
    assert "sampling.max_tokens" in other.err  # another job has no business in this folder
    wait_for(lambda: is_in_the_middle(run), run)
    task = wait_for(lambda: busy_task(run), run)
    subprocess.run(["scontrol", "requeue", task.name], check=True)
    expect_outputs(run, reference)
    assert "Slurm task " + task.name in log_of(run, task.name)
    assert "restart 0" in log_of(run, task.name)
    assert "restart 1" in log_of(run, task.name)
    assert "goes back into the queue" not in log_of(run, task.name)  # it was put there by us
    metrics = json.loads(batchinfer("report", run.root, "--json").out)
    assert metrics["peak_nodes"] >= 2
    assert json.loads(batchinfer("status", run.root, "--json").out)["tasks_running"] == 0


def test_a_group_of_two_nodes_with_two_ranks_each_and_a_warning(submit, reference, stumble, monkeypatch):
    stumble(0.2)
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 150)  # four ranks work on a unit together
    run = submit("--array", "1", "--nodes-per-group", "2", prefill_ranks=4)
    wait_for(lambda: is_in_the_middle(run), run)
    task = wait_for(lambda: busy_task(run), run)
    subprocess.run(["scancel", "--batch", "--signal=USR1", task.name], check=True)
    expect_outputs(run, reference)
    log = log_of(run, task.name)
    assert "ended with code 75" in log
    assert "goes back into the queue" in log
    assert "restart 1" in log
    rows = json.loads(
        batchinfer("report", run.root, "--json", "--sql", "SELECT * FROM nodes WHERE command = 'work'").out
    )
    assert len(rows) == 4  # two lives on two nodes
    assert {row["num_ranks"] for row in rows} == {2}
    assert len({row["node"] for row in rows}) >= 2
    assert sorted(row["state"] for row in rows) == ["done", "done", "interrupted", "interrupted"]


@pytest.mark.slow
def test_a_task_that_a_more_important_job_preempts_comes_back(submit, reference, stumble):
    stumble(0.2)
    run = submit("--array", "1")
    wait_for(lambda: is_in_the_middle(run), run)
    (task,) = live_tasks(run)
    other = ["--partition=high", f"--nodelist={task.nodes}", "--exclusive", "--output=/dev/null", "--wrap=true"]
    subprocess.run(["sbatch", *other], check=True, capture_output=True)
    expect_outputs(run, reference)
    log = log_of(run, task.name)
    # the task has to requeue itself within the grace time: Slurm does not restart a task that exits
    assert "goes back into the queue" in log
    assert "restart 1" in log


@pytest.mark.slow
def test_half_of_the_tasks_cancelled_then_retry(submit, reference, stumble):
    stumble(0.2, {(0, 5)})
    run = submit("--array", "4")
    wait_for(lambda: is_in_the_middle(run), run)
    array = submissions(run)[0].arrays[0]
    subprocess.run(["scancel", f"{array}_[0-1]"], check=True)
    assert wait_for(lambda: finish_state(run), run) == "FAILED"
    assert " ExitCode=3:0 " in show(submissions(run)[0].finish)  # finished, with an error row
    found = json.loads(batchinfer("status", run.root, "--json").out)
    assert (found["requests_failed"], found["units_done"]) == (1, 64)
    stumble(0.0)
    retried = batchinfer("retry", run.root, "--array", "2")
    assert retried.code == 0, retried.err
    assert "1 failed request in 1 unit is" in retried.out
    expect_outputs(run, reference)


@pytest.mark.slow
def test_the_clusters_own_warning_before_the_time_limit(submit, reference, stumble, tmp_path):
    """One minute is the shortest limit. Slurm looks every half minute: the warning comes within 30 s of the start."""
    stumble(0.7)  # a life is too short for 64 steps of that length
    own = tmp_path / "own.sbatch"
    own.write_text((ROOT / "jobs" / "array.sbatch").read_text().replace("B:USR1@120", "B:USR1@30"))
    run = submit("--array", "1", "--time", "1", "--template", str(own))
    expect_outputs(run, reference)
    log = log_of(run, f"{submissions(run)[0].arrays[0]}_0")
    assert "ended with code 75" in log
    assert "goes back into the queue" in log
    assert "restart 1" in log
    assert "TIME LIMIT" not in log  # it was gone before


@pytest.mark.slow
def test_half_of_the_tasks_cancelled_and_others_added_and_sent_away(submit, reference, stumble):
    stumble(0.5)
    run = submit("--array", "4")
    wait_for(lambda: is_in_the_middle(run), run)
    array = submissions(run)[0].arrays[0]
    subprocess.run(["scancel", f"{array}_[0-1]"], check=True)
    wait_for(lambda: len(live_tasks(run)) == 2, run)
    added = batchinfer("submit", "--resize", run.root, "4")
    assert added.code == 0, added.err
    assert len(live_tasks(run)) == 4
    assert state(submissions(run)[0].finish) == "CANCELLED"  # the later one waits for all
    wait_for(lambda: len([task for task in live_tasks(run) if task.state == "RUNNING"]) == 4, run)
    fewer = batchinfer("submit", "--resize", run.root, "4%4")
    assert fewer.out == "at most 4 tasks run at once from now on\n", fewer.err
    away = batchinfer("submit", "--resize", run.root, "3")
    assert "removed" in away.out, away.err
    gone = away.out.split()[-1]
    wait_for(lambda: gone not in {task.name for task in live_tasks(run)}, run)
    assert "goes back into the queue" not in log_of(run, gone)
    expect_outputs(run, reference)


@pytest.mark.slow
def test_everything_cancelled_and_submitted_again_in_more_tasks_than_an_array_may_have(submit, reference):
    run = submit("--array", "2")
    wait_for(lambda: is_in_the_middle(run), run)
    assert "cancelled: " in batchinfer("cancel", run.root).out
    wait_for(lambda: not live_tasks(run), run)
    assert state(submissions(run)[0].finish) == "CANCELLED"
    early = batchinfer("finish", run.root)
    assert early.code == 1
    assert " not done; run " in early.err
    again = batchinfer("submit", run.root, "--array", "11%3")
    assert again.code == 0, again.err
    assert len(submissions(run)[-1].arrays) == 2
    expect_outputs(run, reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_a_run_in_a_bucket_of_which_tasks_are_added_and_sent_away(
    reference, tmp_path, tmp_path_factory, monkeypatch, name
):
    pytest.importorskip("obstore")
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 1)
    monkeypatch.chdir(tmp_path)  # logs come here
    uri = "s3://runs/by slurm"
    with running(name, tmp_path_factory) as server:
        server.make_bucket("runs")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
        (tmp_path / "nodes").mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / "nodes"))
        settings = {"output.dir": uri, "s3.endpoint": server.endpoint} | {f"cluster.{k}": v for k, v in SLOW.items()}
        sets = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
        sent = batchinfer("submit", reference[0], *sets, "--array", "3")
        assert sent.code == 0, sent.err
        assert f"batchinfer cancel {uri}" in sent.out

        def marks():
            return len(server.objects("runs", "by slurm/done"))

        def status():
            return json.loads(batchinfer("status", uri, "--json").out)

        try:
            # another login node goes on: what was sent is in the bucket
            (tmp_path / "other").mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other"))
            assert status()["launcher"] == "Slurm"
            (copy,) = (tmp_path / "other").glob("batchinfer-*/*/by slurm")
            run = RunDir(copy, uri)
            wait_for(lambda: marks() > 2, run)
            wait_for(lambda: status()["tasks_running"] == 3, run)
            away = batchinfer("submit", "--resize", uri, "1")
            assert "removed" in away.out, away.err
            gone = away.out.split()[-1]
            wait_for(lambda: gone not in {task.name for task in live_tasks(run)}, run)
            added = batchinfer("submit", "--resize", uri, "2")
            assert added.code == 0, added.err
            assert wait_for(lambda: finish_state(run), run) == "COMPLETED", (tmp_path / f"{gone}.log").read_text()
        finally:
            batchinfer("cancel", uri)
        found = server.objects("runs", "by slurm")
    assert {name: data for name, data in found.items() if name.startswith("outputs/")} == reference[1]
    said = (tmp_path / f"{gone}.log").read_text()
    assert "ended with code 75" in said
    assert "goes back into the queue" not in said


def test_a_task_that_must_not_requeue_itself_ends_with_75_and_finish_says_what_is_missing(submit, tmp_path):
    own = tmp_path / "own.sbatch"
    own.write_text((ROOT / "jobs" / "array.sbatch").read_text().replace("\nrequeue=yes\n", "\nrequeue=no\n"))
    run = submit("--array", "1", "--template", str(own))
    wait_for(lambda: is_in_the_middle(run), run)
    sent = submissions(run)[0]
    subprocess.run(["scancel", "--batch", "--signal=USR1", f"{sent.arrays[0]}_0"], check=True)
    assert wait_for(lambda: finish_state(run), run) == "FAILED"
    assert " ExitCode=75:0 " in show(sent.arrays[0])
    assert " ExitCode=1:0 " in show(sent.finish)
    assert "work unit" in (run.slurm / f"finish-{sent.finish}.log").read_text()
    found = json.loads(batchinfer("status", run.root, "--json").out)
    assert found["units_running"] == 0
    assert found["requests_done"] > 0


def test_what_a_person_has_set_for_squeue_hides_no_tasks(submit, monkeypatch):
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    monkeypatch.setenv("SQUEUE_PARTITION", "high")
    run = submit("--array", "2", "--sbatch-arg=--hold")
    refused = batchinfer("submit", run.root, "--array", "2")
    assert "2 tasks of" in refused.err


@pytest.mark.parametrize("given", [{"JOB_ID": "1"}, {}], ids=["inside of it", "behind it"])
def test_a_run_submitted_within_another_job_does_not_get_its_processors_and_memory(
    submit, reference, monkeypatch, given
):
    """The environment is that of `srun --pty bash` on a node's fourth processor, or of a tmux started there."""
    binding = {"CPU_BIND": "quiet,mask_cpu:0x8", "CPU_BIND_TYPE": "mask_cpu:", "CPU_BIND_LIST": "0x8"}
    for name, value in (given | binding | {"MEM_PER_NODE": "200000", "CPUS_PER_TASK": "9"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SRUN_CPUS_PER_TASK", "9")
    monkeypatch.setenv("SBATCH_ARRAY_INX", "0-3")  # the job that finishes would become four
    run = submit("--array", "1")
    expect_outputs(run, reference)


def test_tasks_that_have_ended_are_in_the_way_of_no_change():
    command = ["sbatch", "--parsable", "--array=0-3%1", "--output=/dev/null"]
    script = "[ $SLURM_ARRAY_TASK_ID = 0 ] || sleep 60"
    job = subprocess.run([*command, f"--wrap={script}"], check=True, capture_output=True, text=True).stdout.strip()
    names = [f"{job}_{index}" for index in range(4)]
    sent_jobs.wait_for(lambda: {task.index: task.state for task in client.live_tasks([job])}.get("1") == "RUNNING")
    client.throttle(job, 2)
    assert "ArrayTaskThrottle=2" in show(f"{job}_3")
    client.forbid_requeue(names[:2])
    assert "Requeue=0" in show(names[1])
    client.terminate(names[:2])
    with pytest.raises(ConfigError, match="scontrol refused"):
        client._change(["scontrol", "update", f"JobId={job}_3", "Partition=nowhere"])
    client.cancel(names)


@pytest.mark.parametrize(
    ("options", "processors"), [([], 1), (["--exclusive"], 4), (["--mincpus=3"], 3), (["--cpus-per-task=2"], 2)]
)
def test_a_task_works_with_all_processors_that_it_has(tmp_path, options, processors):
    program = tmp_path / "says what it has"
    program.write_text("#!/bin/bash\nscontrol show step $SLURM_JOB_ID.$SLURM_STEP_ID\n")
    program.chmod(0o755)
    log = tmp_path / "log"
    command = ["sbatch", "--wait", "--array=0", "--nodes=1", f"--output={log}", *options]
    template = ROOT / "jobs" / "array.sbatch"
    ended = subprocess.run([*command, template, tmp_path, program], check=False, capture_output=True, text=True)
    if options == ["--mincpus=3"] and "node configuration is not available" in ended.stderr:
        pytest.skip("NOT TESTED: this Slurm has no node for --mincpus, as 23.11.4 has none")
    assert ended.returncode == 0, ended.stderr
    assert f"TRES=cpu={processors}," in log.read_text()


@pytest.mark.slow
def test_the_number_of_tasks_follows_the_hour(submit, reference, stumble):
    stumble(0.5)  # so that units are left at 09:00: without any, the finishing job is right to complete the run
    run = submit("--array", "2")
    wait_for(lambda: is_in_the_middle(run), run)
    minutes = itertools.chain([8 * 60, 9 * 60 + 1], itertools.repeat(20 * 60 + 30))
    numbers = []

    def minute_now() -> int:
        numbers.append(len([task for task in live_tasks(run) if not task.is_ending]))
        if len(numbers) == 3:
            wait_for(lambda: not live_tasks(run), run)  # at 09:00 all go
            assert not list(run.outputs.glob("*.parquet"))
        return next(minutes)

    follow_schedule(FolderStorage(run), ["08:00 1", "09:00 0", "20:00 3"], minute_now, look_s=0.5)
    assert [sent.size.tasks for sent in submissions(run)] == [2, 3]
    assert state(submissions(run)[0].finish) == "CANCELLED"
    expect_outputs(run, reference)


def goal_of(**changes: Any) -> Goal:
    now = time.time()
    goal = Goal(finish_by_s=now + 20, max_cost=None, most_tasks=4, prices=PriceList(gpu_hour=36.0), set_s=now)
    return replace(goal, **changes)


def forecast(run: RunDir, seconds: float) -> None:
    """Set the plan's forecast for one task, as if the plan had learnt from an earlier run."""
    state = read_json(run.run_json)
    publish_json(run.run_json, {**state, "counts": {**state["counts"], "work_s": seconds}})


def running_tasks(run: RunDir) -> list[str]:
    return [task.name for task in live_tasks(run) if task.state == "RUNNING"]


def test_tasks_follow_a_deadline_and_killed_ones_are_made_up_for(submit, reference, stumble):
    """The clock is the test's: a deadline far away, then near."""
    stumble(0.5)
    run = submit("--array", "1")
    forecast(run, 40.0)
    wait_for(lambda: is_in_the_middle(run), run)
    goal = goal_of()
    numbers: list[int] = []

    def now_s() -> float:
        numbers.append(num_tasks(run))
        if len(numbers) == 4:
            assert numbers == [1, 1, 1, 1]  # there is time enough for one
        if len(numbers) == 6:
            assert numbers[-1] == 4  # as many as there may be
            wait_for(lambda: len(running_tasks(run)) == 4, run)
            subprocess.run(["scancel", "--signal=KILL", "--full", *running_tasks(run)[:2]], check=True)
            wait_for(lambda: num_tasks(run) == 2, run)
        if len(numbers) == 8:
            assert numbers[-2:] == [2, 4]  # two were sent for the two that died
        return goal.finish_by_s - (1e5 if len(numbers) < 5 else 1)

    follow_goal(FolderStorage(run), load_job(run.job), goal, now_s=now_s, look_s=0.2)
    assert len(numbers) >= 8
    assert [sent.size.tasks for sent in submissions(run)][:3] == [1, 3, 2]
    expect_outputs(run, reference)


@pytest.mark.slow
def test_a_budget_that_is_spent_pauses_the_run_and_more_of_it_goes_on(submit, reference, stumble, monkeypatch):
    stumble(0.5)
    monkeypatch.setattr("batchinfer.pace.follow_goal.LEAVE_S", 5.0)
    run = submit("--array", "1")
    wait_for(lambda: is_in_the_middle(run), run)
    # a cent per second of a task; ten seconds for what has been spent, and a few more
    goal = goal_of(max_cost=0.25, finish_by_s=None, most_tasks=2)
    with pytest.raises(InterruptedRunError, match=r"before more than --max-cost 0\.25 is spent") as paused:
        follow_goal(FolderStorage(run), load_job(run.job), goal, look_s=0.2)
    assert paused.value.exit_code == 75
    assert not live_tasks(run)
    rows = [row for path in run.stats.glob("nodes/*.parquet") for row in pq.read_table(path).to_pylist()]
    assert sum(row["end_s"] - row["start_s"] for row in rows if row["command"] == "work") / 100 <= 0.25
    assert len(list(run.root.glob("done/*"))) < 64
    follow_goal(FolderStorage(run), load_job(run.job), replace(goal, max_cost=100.0), look_s=0.2)
    expect_outputs(run, reference)


def test_tasks_that_end_without_results_are_not_sent_for_ever(submit, tmp_path):
    own = tmp_path / "own.sbatch"
    own.write_text("#!/bin/bash\nexit 1\n")
    run = submit("--array", "1", "--template", str(own))
    with pytest.raises(IncompleteRunError, match=r"tasks of .* were submitted since its last result"):
        follow_goal(FolderStorage(run), load_job(run.job), goal_of(), look_s=0.2)
    assert len(submissions(run)) < 10


@pytest.mark.slow
def test_the_command_sends_tasks_and_stays_until_the_run_is_finished(submit, reference):
    soon = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + 60))
    run = submit("--finish-by", soon, "--array", "3")
    expect_outputs(run, reference)
    assert [sent.size.tasks for sent in submissions(run)][:2] == [0, 1]  # the shape, then what measures the speed
    assert read_goal(run).most_tasks == 3
    assert batchinfer("submit", "--follow", run.root).code == 0  # nothing left to do
