"""Interrupted at any moment and run again, a job ends with the same output files; nothing is lost or doubled."""

import json
import signal
import time

import pyarrow.parquet as pq
import pytest

from batchinfer.plan import packing
from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.units.claims import UnitClaims, last_claim
from batchinfer.rundir import RunDir
from support.faults import make_reference
from support.jobs import batchinfer, output_bytes, outputs, question, start, write_job, write_questions, write_shard


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A job, and its outputs when nothing disturbs it."""
    return make_reference(tmp_path_factory.mktemp("reference"))


def another(reference, name):
    """The same job in a run folder of its own."""
    return ("--set", f"output.dir={name}"), reference[0] / name


def wait_for(pattern, run, process):
    deadline = time.monotonic() + 60
    while not list(run.glob(pattern)):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def holders(run):
    """The processes that hold units."""
    return {json.loads(path.read_text())["pid"] for path in run.glob("work/workers/*[!.tmp]")}


LONG = pytest.mark.slow  # what a quicker case shows, too
ANOTHER = pytest.mark.all  # make test: another key of the same job


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=LONG),
        pytest.param(signal.SIGTERM, marks=LONG),
        signal.SIGUSR1,
        pytest.param(signal.SIGHUP, marks=LONG),
        signal.SIGKILL,
    ],
)
def test_a_signal_while_working(reference, number):
    options, run = another(reference, f"signal-{number}")
    job = reference[0] / "job.toml"
    process = start("run", job, *options)
    wait_for("units/*/[0-9]*/part-*.parquet", run, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (75 if number != signal.SIGKILL else -9)
    if number != signal.SIGKILL:
        assert "run the same command" in err
    assert not list(run.glob("outputs/**/*.parquet"))
    kept = sum(pq.read_metadata(path).num_rows for path in run.glob("units/*/[0-9]*/part-*.parquet"))
    assert 0 < kept < 27

    again = batchinfer("run", job, *options)
    assert again.code == 0, again.err
    assert output_bytes(run) == reference[1]
    rows = sum(pq.read_metadata(path).num_rows for path in run.glob("units/*/[0-9]*/part-*.parquet"))
    assert rows == 27, "what was finished before the signal is not computed again"
    metrics = json.loads(batchinfer("report", run, "--json").out)
    assert metrics["rows_ok"] == 27
    assert metrics["cached_tokens"] == metrics["optimal_cached_tokens"]
    # what ran beside the finished requests was dropped and computed again
    assert metrics["wasted_tokens"] > 0
    states = batchinfer("report", run, "--json", "--sql", "SELECT state FROM nodes ORDER BY start_s").out
    assert json.loads(states)[0]["state"] == ("running" if number == signal.SIGKILL else "interrupted")


def test_plan_work_and_finish_one_by_one_equal_run(reference):
    options, run = another(reference, "steps")
    job = reference[0] / "job.toml"
    assert "to compute" in batchinfer("plan", job, *options).out
    early = batchinfer("finish", run)
    assert early.code == 1
    assert "batchinfer work" in early.err
    assert batchinfer("work", run).code == 0
    assert batchinfer("work", job, *options).code == 0  # nothing left: still fine
    assert batchinfer("finish", run).code == 0
    assert output_bytes(run) == reference[1]
    assert batchinfer("finish", run).code == 0
    assert batchinfer("run", job, *options).code == 0
    assert output_bytes(run) == reference[1]


def test_finish_with_allow_partial_marks_what_is_missing(reference):
    options, run = another(reference, "partial")
    job = reference[0] / "job.toml"
    assert batchinfer("plan", job, *options).code == 0
    partial = batchinfer("finish", run, "--allow-partial")
    assert partial.code == 3
    rows = [row for shard in outputs(run).values() for row in shard]
    assert len(rows) == 27
    assert all("not computed" in row["error"] for row in rows)
    assert batchinfer("work", run).code == 0
    assert batchinfer("finish", run).code == 0
    assert output_bytes(run) == reference[1]


def test_two_controllers_share_the_units_of_one_run(reference, monkeypatch):
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 300)
    options, run = another(reference, "two")
    assert batchinfer("plan", reference[0] / "job.toml", *options).code == 0
    num_units = pq.read_table(run / "plan" / "units.parquet").num_rows
    assert num_units > 3
    controllers = [start("work", run) for _ in range(2)]
    for controller in controllers:
        _, err = controller.communicate(timeout=120)
        assert controller.returncode == 0, err
    assert batchinfer("finish", run).code == 0
    assert output_bytes(run) == reference[1]
    assert len(list(run.glob("done/*"))) == num_units


def test_a_second_controller_takes_over_from_a_killed_one(reference, monkeypatch):
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 300)
    options, run = another(reference, "takeover")
    assert batchinfer("plan", reference[0] / "job.toml", *options).code == 0
    first = start("work", run)
    wait_for("units/*/[0-9]*/part-*.parquet", run, first)
    second = start("work", run)
    deadline = time.monotonic() + 60
    while not holders(run) >= {first.pid, second.pid}:
        assert first.poll() is second.poll() is None, "both work"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    first.kill()
    first.communicate()
    _, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    assert list(run.glob("units/*/0001")), "a unit was claimed by both, one after the other"
    assert batchinfer("finish", run).code == 0
    assert output_bytes(run) == reference[1]


@pytest.mark.parametrize("num_earlier", [2, 10_001])
def test_a_unit_whose_first_claims_were_deleted_can_be_claimed(tmp_path, num_earlier):
    run = RunDir(tmp_path)
    with UnitClaims(FolderStorage(run)) as claiming:
        assert claiming.try_claim(0) is not None
        claiming.end()
        run.claim(0, "0000").rename(run.claim(0, f"{num_earlier - 1:04d}"))
        taken = claiming.try_claim(0)
        assert taken is not None
        assert taken.name == f"{num_earlier:04d}"
        assert last_claim(run, 0) == taken.folder


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling": {"max_tokens": 7}}, "sampling.max_tokens"),
        pytest.param({"sampling": {"seed": 1}}, "sampling.seed", marks=ANOTHER),
        pytest.param({"model": {"dtype": "bfloat16"}}, "model.dtype", marks=ANOTHER),
        pytest.param({"output": {"keep_columns": ["extra"]}}, "output.keep_columns", marks=ANOTHER),
        pytest.param({"input": {"id": "extra"}}, "input columns.id", marks=ANOTHER),
        ({"input": {"files": ["prompts/part-0.parquet"]}}, "input shards"),
    ],
)
def test_another_job_on_the_same_run_folder_is_refused_by_name(tmp_path, change, named):
    write_questions(tmp_path / "prompts", (3, 2))
    job = write_job(tmp_path)
    assert batchinfer("plan", job).code == batchinfer("work", job).code == 0
    refused = batchinfer("plan", write_job(tmp_path, **change))
    assert refused.code == 2
    assert named in refused.err
    assert len(refused.err.strip().splitlines()) == 1


@pytest.mark.all  # make test: other settings are refused, above
def test_settings_that_change_no_result_may_change_on_resume(tmp_path):
    write_questions(tmp_path / "prompts", (3, 2))
    assert batchinfer("plan", write_job(tmp_path)).code == 0
    job = write_job(tmp_path, cluster={"decode_requests": 2, "commit_seconds": 1.5}, pricing={"gpu_hour": 9.0})
    assert batchinfer("run", job).code == 0
    assert json.loads(batchinfer("report", tmp_path / "run", "--json").out)["cost_usd"] > 0


def test_a_shard_replaced_after_planning_is_refused(tmp_path):
    first, _ = write_questions(tmp_path / "prompts", (3, 2))
    job = write_job(tmp_path)
    assert batchinfer("plan", job).code == 0
    assert batchinfer("work", job).code == 0
    write_shard(first, {"id": ["new"], "prompt": [question(99)]})
    for command in (("run", job), ("finish", tmp_path / "run")):
        refused = batchinfer(*command)
        assert refused.code == 2
        assert "part-0.parquet" in refused.err
