"""Submission to Slurm: checks before anything is submitted, and the commands; test_real_slurm.py has a real Slurm."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from batchinfer.checked_json import publish_json
from batchinfer.plan.summary import read_summary
from batchinfer.records import ConfigError
from batchinfer.rundir import RunDir
from batchinfer.submit.size import ArraySize, parse_size
from batchinfer.submit.slurm import client
from batchinfer.submit.slurm.client import (
    SlurmUnavailableError,
    Task,
    check_extra_argument,
    limit_seconds,
    log_pattern,
    slices,
)
from batchinfer.submit.slurm.environment import surprising_variables
from batchinfer.submit.slurm.schedule import parse_schedule, size_at
from batchinfer.submit.slurm.tasks import Shape, resize, submissions, tasks_to_remove
from support.jobs import batchinfer, start, write_job, write_questions
from support.paths import ROOT


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("submit")
    write_questions(folder / "prompts", (4,))
    return write_job(folder, cluster={"prefill_ranks": 4})


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", ArraySize(8)), ("8%3", ArraySize(8, 3)), ("0", ArraySize(0)), ("1000000", ArraySize(10**6))],
)
def test_sizes_of_arrays(text, size):
    assert parse_size(text) == size
    assert str(size) == text


@pytest.mark.parametrize("text", ["", "-1", "8%", "8%0", "%2", "0-7", "8 ", "8;ls", "1000001", "8\n"])
def test_what_is_no_size_of_an_array(text):
    with pytest.raises(ConfigError):
        parse_size(text)


def test_arrays_beyond_the_clusters_limit():
    assert slices(8, 1001) == [8]
    assert slices(2500, 1001) == [1001, 1001, 498]
    assert slices(2002, 1001) == [1001, 1001]


def test_those_that_wait_leave_first_then_the_idle_then_the_youngest():
    states = {"5_0": "RUNNING", "5_1": "RUNNING", "5_2": "RUNNING", "7_0": "RUNNING", "7_1": "PENDING"}
    live = [Task(*name.split("_"), state, "", "") for name, state in states.items()]
    names = [task.name for task in tasks_to_remove(live, 4, busy={"5_0", "5_2", "7_0"})]
    assert names == ["7_1", "5_1", "7_0", "5_2"]


def dry_run(job, *options):
    done = batchinfer("submit", job, "--dry-run", *options)
    assert done.code == 0, done.err
    return [shlex.split(line) for line in done.out.splitlines()]


def test_a_dry_run_prints_the_commands_and_leaves_no_trace(job):
    array, finish = dry_run(
        job,
        "--array",
        "8%2",
        "--nodes-per-group",
        "2",
        "--gpus-per-node",
        "2",
        "--time",
        "1:00:00",
        "--partition",
        "main",
        "--qos",
        "low",
        "--account",
        "me",
        "--sbatch-arg=--mem=0",
    )
    run = str(job.parent / "run")
    assert array[:2] == finish[:2] == ["sbatch", "--parsable"]
    wanted = {"--array=0-7%2", "--nodes=2", "--gpus-per-node=2", "--time=1:00:00", "--partition=main", "--qos=low"}
    assert wanted | {"--account=me", "--mem=0", f"--output={run}/slurm/%A_%a.log", f"--chdir={run}"} <= set(array)
    assert {"--dependency=afterany:ARRAY1", "--partition=main", "--qos=low", "--account=me"} <= set(finish)
    assert array[array.index(str(ROOT / "jobs" / "array.sbatch")) + 1] == run
    assert not (job.parent / "run").exists()


def test_an_array_too_large_is_cut_and_the_limit_holds_over_all(job, monkeypatch):
    monkeypatch.setattr(client, "is_installed", lambda: True)
    monkeypatch.setattr(client, "max_array_size", lambda: 3)
    first, second, third, finish = dry_run(job, "--array", "8%2")
    assert [command[3] for command in (first, second, third)] == ["--array=0-2%2", "--array=0-2%2", "--array=0-1%2"]
    assert "--dependency=afterany:ARRAY1" in second
    assert "--dependency=afterany:ARRAY2" in third
    assert "--dependency=afterany:ARRAY1:ARRAY2:ARRAY3" in finish
    without_limit = dry_run(job, "--array", "8")
    assert not any("afterany" in word for command in without_limit[:3] for word in command)


@pytest.mark.parametrize(
    ("parameters", "most"),
    [
        ("(null)", 1001),
        ("bf_interval=1,max_array_tasks=4", 4),
        ("max_array_tasks=9999,x", 1001),
        ("max_array_tasks=0", 1),
    ],
)
def test_the_most_tasks_of_an_array(fake_program, parameters, most):
    fake_program(f"echo 'MaxArraySize = 1001'; echo 'SchedulerParameters     = {parameters}'", "scontrol")
    assert client.max_array_size() == most


def test_own_templates(job, tmp_path):
    own = tmp_path / "my array.sbatch"
    own.write_text("#!/bin/bash\n")
    array, finish = dry_run(job, "--array", "1", "--template", own)
    assert str(own) in array
    assert str(ROOT / "jobs" / "finish.sbatch") in finish


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--array", "8%0"), "'8%0'"),
        (("--array", "1", "--partition", "main;ls"), "--partition is 'main;ls'"),
        (("--array", "1", "--account", ""), "--account is ''"),
        (("--array", "1", "--time", "soon"), "--time is 'soon'"),
        (("--array", "1", "--time", "2"), "120 s before that"),
        (("--array", "1", "--time", "1:59"), "120 s before that"),
        (("--array", "1", "--time", "0-0:02:00"), "120 s before that"),
        (("--array", "1", "--time", "3:00"), "60 s early"),
        (("--array", "1", "--sbatch-arg", "script.sh"), "one whole option"),
        (("--array", "1", "--sbatch-arg=--array=1"), "submit sets itself"),
        (("--array", "1", "--sbatch-arg=--depend=singleton"), "submit sets itself"),
        (("--array", "1", "--sbatch-arg=-N4"), "submit sets itself"),
        (("--array", "1", "--sbatch-arg=--wait"), "lose its tasks"),
        (("--array", "1", "--sbatch-arg=--clusters=other"), "lose its tasks"),
        (("--array", "1", "--sbatch-arg=-Mother"), "lose its tasks"),
        (("--array", "1", "--template", "nowhere.sbatch"), "no Slurm template"),
        (("--array", "1", "--nodes-per-group", "3"), "4 ranks do not spread evenly over 3 nodes"),
        (("--array", "1", "--gpus-per-node", "2"), "4 ranks per node need as many GPUs"),
        (("--array", "0"), "would submit nothing"),
        ((), "needs a JOB and --array"),
        (("--array", "1", "--resize", "run", "3"), "take no other options"),
        (("--follow", "run"), "take no other options"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_planned(job, options, sentence):
    refused = batchinfer("submit", job, *options)
    assert refused.code == 2
    assert sentence in refused.err
    assert not (job.parent / "run").exists()


def test_sizes_by_time_of_day():
    #       06:00 ─────── 22:00 ─────── 06:00
    #         4            32%16 (past midnight)
    schedule = parse_schedule(["22:00 32%16", "06:00 4"])
    sizes = {minute: size_at(schedule, minute) for minute in range(24 * 60)}
    assert {minute for minute, size in sizes.items() if size == ArraySize(4)} == set(range(6 * 60, 22 * 60))
    assert set(sizes.values()) == {ArraySize(4), ArraySize(32, 16)}


@pytest.mark.parametrize("entries", [["8:00 4"], ["24:00 4"], ["08:00"], ["08:00 x"], ["08:00 4", "08:00 5"]])
def test_wrong_schedules_are_refused_before_anything_is_planned(job, entries):
    refused = batchinfer("submit", job, "--array", "1", "--set", f"slurm.schedule={json.dumps(entries)}")
    assert refused.code == 2
    assert "08:00" in refused.err or "slurm.schedule" in refused.err or "number of tasks" in refused.err
    assert not (job.parent / "run").exists()


@pytest.mark.parametrize(
    "argument", ["--mem=0", "--exclusive", "--wait-all-nodes=1", "-C", "-Cskylake", "--nodelist=a[1-3]", "--no-kill"]
)
def test_other_options_of_sbatch_pass(argument):
    assert check_extra_argument(argument) == argument


def test_log_folders_of_any_name():
    assert log_pattern(Path("/runs/50% of it"), "%A_%a.log") == "/runs/50%% of it/%A_%a.log"
    for name in ("a\\b", "a\nb"):
        with pytest.raises(ConfigError, match="backslash"):
            log_pattern(Path("/runs") / name, "%A.log")


def test_without_slurm_a_sentence_says_so(job, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = batchinfer("submit", job, "--set", f"output.dir={tmp_path / 'run'}", "--array", "2")
    assert refused.code == 2
    assert "cannot run scontrol" in refused.err
    assert not (tmp_path / "run").exists()
    assert batchinfer("plan", job, "--set", f"output.dir={tmp_path / 'run'}").code == 0
    assert batchinfer("status", tmp_path / "run").code == 0
    assert "no tasks of" in batchinfer("cancel", tmp_path / "run").out
    assert "was never submitted" in batchinfer("submit", "--resize", tmp_path / "run", "3").err
    assert "no slurm.schedule" in batchinfer("submit", "--follow", tmp_path / "run").err


@pytest.mark.parametrize("launcher", ["slurm", "k8s", "ray"])
def test_a_record_that_is_another_document_is_a_sentence(job, tmp_path, launcher):
    run = tmp_path / "run"
    assert batchinfer("plan", job, "--set", f"output.dir={run}").code == 0
    record = run / launcher / "0000.json"
    record.parent.mkdir()
    publish_json(record, {"submitted_s": 1.0})
    for command in (["cancel", run], ["submit", "--resize", run, "3"]):
        refused = batchinfer(*command)
        assert refused.code == 2
        assert f"{record} is damaged: it is another document" in refused.err


@pytest.fixture
def fake_program(tmp_path, monkeypatch):
    """A squeue, or another of Slurm's programs, that is this shell code."""

    def answer(code: str, name: str = "squeue") -> None:
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")

    return answer


OF_A_JOB = {
    "SLURM_CPU_BIND": "mask_cpu:0xF",
    "SLURM_CPUS_PER_TASK": "4",
    "SLURM_MEM_PER_NODE": "1000",
    "SLURM_NTASKS": "8",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURMD_NODENAME": "node7",
    "SRUN_CPUS_PER_TASK": "4",
    "PMI_RANK": "3",
    "PMI2_FD": "5",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "slurm.pmix.1.0",
    "SBATCH_CPU_BIND_LIST": "0xF",
    "SBATCH_MEM_BIND": "local",
}
OPTIONS = {"SBATCH_ARRAY_INX": "0-3", "SBATCH_WAIT": "1", "SBATCH_CLUSTERS": "other"}
OF_A_PERSON = {
    "SBATCH_ACCOUNT": "physics",
    "SBATCH_PARTITION": "gpu",
    "SBATCH_QOS": "night",
    "SLURM_CONF": "/etc/other.conf",
    "SLURM_CLUSTERS": "here",
    "SLURM_JWT": "token",
    "AWS_REGION": "eu-central-1",
    "PMIX": "not of a job",
}


@pytest.mark.parametrize("is_inside", [False, True], ids=["behind a job", "inside of a job"])
def test_sbatch_gets_what_a_person_has_set_and_nothing_of_another_job(fake_program, tmp_path, monkeypatch, is_inside):
    for name, value in {**OF_A_JOB, **OPTIONS, **OF_A_PERSON}.items():
        monkeypatch.setenv(name, value)
    if is_inside:
        monkeypatch.setenv("SLURM_JOB_ID", "17")
    fake_program(f"env -0 > {tmp_path}/env; echo 5", "sbatch")
    assert client.send(["sbatch", "--array=0"]) == "5"
    given = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().split("\0") if line)
    assert given.keys() >= OF_A_PERSON.keys()
    assert not given.keys() & {"SLURM_JOB_ID", *OF_A_JOB, *OPTIONS}
    assert surprising_variables() == sorted(OPTIONS if is_inside else [*OPTIONS, *OF_A_JOB])


def test_submit_names_the_variables_that_it_leaves_out(job, fake_program, tmp_path, monkeypatch):
    for program in ("sbatch", "scontrol", "squeue"):
        fake_program("echo MaxArraySize = 1000" if program == "scontrol" else "echo 5", program)
    run = tmp_path / "run"
    monkeypatch.setenv("SLURM_CPU_BIND", "mask_cpu:0xF")
    sent = batchinfer("submit", job, "--set", f"output.dir={run}", "--array", "2")
    assert sent.code == 0, sent.err
    assert "warning: neither sbatch nor the tasks get SLURM_CPU_BIND of this shell; give sbatch's options" in sent.err


def test_tasks_of_another_cluster(fake_program):
    fake_program("echo 'CLUSTER: other'; echo '5|0|RUNNING|node1|None'")
    assert client.live_tasks(["5"]) == [Task("5", "0", "RUNNING", "node1", "None")]


@pytest.mark.parametrize(
    "said",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
    ],
)
def test_a_controller_that_is_away_is_told_from_a_refusal(fake_program, said):
    fake_program(f"echo '{said}' >&2; exit 1")
    with pytest.raises(SlurmUnavailableError, match=re.escape(said)):
        client.live_tasks(["5"])
    fake_program("echo 'slurm_load_jobs error: Access denied' >&2; exit 1")
    with pytest.raises(ConfigError) as refused:
        client.live_tasks(["5"])
    assert not isinstance(refused.value, SlurmUnavailableError)


def test_sbatch_without_an_answer_may_have_sent_its_tasks(fake_program, monkeypatch):
    monkeypatch.setattr(client, "ANSWER_S", 0.1)
    fake_program("exec sleep 60", "sbatch")
    with pytest.raises(ConfigError, match="look at `squeue --me`") as error:
        client.send(["sbatch"])
    assert not isinstance(error.value, SlurmUnavailableError)


def test_two_submits_at_a_time_send_tasks_once(job, tmp_path, fake_program, monkeypatch):
    """Slurm takes its time: the second one waits, and finds what the first has sent."""
    sent = tmp_path / "sent"
    sent.touch()
    fake_program("echo MaxArraySize = 1001", "scontrol")
    fake_program(f"sleep 0.3; echo x >> {sent}; wc -l < {sent}", "sbatch")
    fake_program(f"[ ! -s {sent} ] || echo '1|0|RUNNING|node1|None'")
    run = tmp_path / "run"
    assert batchinfer("plan", job, "--set", f"output.dir={run}").code == 0
    both = [start("submit", run, "--array", "1") for _ in range(2)]
    said = sorted(process.communicate()[1] for process in both)
    assert sorted(process.returncode for process in both) == [0, 2], said
    assert "1 task of" in said[1]
    assert len(sent.read_text().split()) == 2  # the array, and the job that finishes
    assert len(submissions(RunDir(run))) == 1


def test_a_submitted_job_reuses_answers_of_an_earlier_run(tmp_path, fake_program):
    fake_program("echo MaxArraySize = 1001", "scontrol")
    fake_program("echo 5", "sbatch")
    fake_program("true")
    write_questions(tmp_path / "prompts", (4,))
    job = write_job(tmp_path)
    assert batchinfer("run", job).code == 0
    sent = batchinfer("submit", job, "--array", "1", "--set", "output.dir=next", "--reuse", tmp_path / "run")
    assert sent.code == 0, sent.err
    summary = read_summary(RunDir(tmp_path / "next"))
    assert (summary["reused_requests"], summary["requests"]) == (4, 0)
    refused = batchinfer("submit", tmp_path / "next", "--array", "1", "--reuse", tmp_path / "run")
    assert refused.code == 2
    assert "count when a plan is made; a run has its plan" in refused.err
    by = time.strftime("%Y-%m-%d", time.localtime(time.time() + 30 * 24 * 3600))
    for size in (["--array", "1"], ["--finish-by", by]):  # what is finished needs no task
        done = batchinfer("submit", job, *size)
        assert (done.code, "is finished, so that nothing is submitted" in done.out) == (0, True), done.err
        tried = batchinfer("submit", job, *size, "--dry-run")
        assert (tried.code, tried.out) == (0, "")
        assert "is finished, so that nothing is submitted" in tried.err
    assert not (tmp_path / "run" / "slurm").exists()


def test_tasks_are_cancelled_when_the_job_that_finishes_is_refused(job, tmp_path, fake_program):
    fake_program("echo MaxArraySize = 1001", "scontrol")
    fake_program("[[ $* != *afterany* ]] || { echo 'Invalid account' >&2; exit 1; }; echo 5", "sbatch")
    fake_program(f"echo $* >> {tmp_path / 'cancelled'}", "scancel")
    fake_program("true")
    run = tmp_path / "run"
    assert batchinfer("plan", job, "--set", f"output.dir={run}").code == 0
    refused = batchinfer("submit", run, "--array", "2")
    assert refused.code == 2
    assert "sbatch refused: Invalid account; what was submitted before that is cancelled: 5" in refused.err
    fake_program("exit 1", "scancel")
    refused = batchinfer("submit", run, "--array", "2")
    assert refused.code == 2
    left = f"what was submitted before that is pending or running, end it with `batchinfer cancel {run}`: 5"
    assert f"Invalid account; {left}" in refused.err
    assert (tmp_path / "cancelled").read_text() == "5\n"


def recorded(folder):
    """A run folder with the record of one submission: array 5 and finishing job 6."""
    run = RunDir(folder)
    run.slurm.mkdir()
    shape = {"nodes_per_group": 2, "sbatch_args": ["--mem=0"], "partition": "main"}
    record = {"submitted_s": 1.0, "shape": shape, "size": {"tasks": 8, "at_once": None}, "arrays": ["5"], "finish": "6"}
    (run.slurm / "0000.json").write_text(json.dumps(record))
    return run


@pytest.mark.parametrize(("state", "cancelled"), [("COMPLETING", ["6"]), ("COMPLETED", [])])
def test_a_resize_to_0_cancels_the_finishing_job_while_tasks_are_ending(tmp_path, fake_program, state, cancelled):
    """The finishing job stays if all tasks have ended: it is about to start, and may find all units done."""
    fake_program(
        f"case $* in *--jobs=5,*) echo '5|0|{state}|node1|None';; *) echo '6|N/A|PENDING||Dependency';; esac", "squeue"
    )
    fake_program(f"echo $* >> {tmp_path / 'cancelled'}", "scancel")
    (tmp_path / "cancelled").touch()
    run = recorded(tmp_path)
    assert resize(run, ArraySize(0)) == (None, [])
    assert (tmp_path / "cancelled").read_text().split() == cancelled


def test_the_record_of_a_submission(tmp_path):
    (found,) = submissions(recorded(tmp_path))
    assert found.shape == Shape(nodes_per_group=2, partition="main", sbatch_args=("--mem=0",))
    assert (found.size, found.arrays, found.finish) == (ArraySize(8), ["5"], "6")


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("90", 5400), ("4:30", 270), ("1:02:03", 3723), ("2-3", 183_600), ("2-3:04", 183_840), ("2-3:04:05", 183_845)],
)
def test_time_limits_in_the_forms_of_sbatch(limit, seconds):
    assert limit_seconds(limit) == seconds


def test_no_time_limit_and_short_ones_with_an_own_signal_pass(job, tmp_path):
    own = tmp_path / "own.sbatch"
    own.write_text("#!/bin/bash\n#SBATCH --signal=B:USR1@30\n")
    assert "--time=0" in dry_run(job, "--array", "1", "--time", "0")[0]
    assert "--time=1" in dry_run(job, "--array", "1", "--time", "1", "--template", own)[0]
    assert "--time=1" in dry_run(job, "--array", "1", "--time", "1", "--sbatch-arg=--signal=B:USR1@30")[0]


@pytest.mark.parametrize("name", ["array.sbatch", "finish.sbatch"])
def test_the_templates_are_sound_shell(name):
    assert subprocess.run(["bash", "-n", ROOT / "jobs" / name], check=False).returncode == 0
