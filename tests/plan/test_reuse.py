"""Answers of an earlier run: only changed rows are computed, and the outputs are those of a run that computes all."""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.checked_json import publish_json
from batchinfer.launch import rank_loader
from batchinfer.plan import packing, planner
from batchinfer.plan.summary import read_summary
from batchinfer.records import InterruptedRunError
from batchinfer.rundir import RunDir, read_state
from support.damage import flip_bit
from support.faults import SLOW, fail_some, wait_until
from support.jobs import batchinfer, output_bytes, outputs, question, start, write_job, write_shard

ALL = pytest.mark.all  # make test: float32 in one layout
SAMPLED = {"max_tokens": 6, "temperature": 0.8, "top_p": 0.9}
GREEDY = {"max_tokens": 6, "temperature": 0.0}


def write_rows(folder: Path, name: str, ids: list[str], texts: list[str], sampling: list[dict] | None = None) -> None:
    columns = {"id": ids, "prompt": texts}
    if sampling is not None:
        columns["sampling"] = pa.array(
            sampling, pa.struct([("temperature", pa.float64()), ("seed", pa.int64()), ("logprobs", pa.int64())])
        )
    write_shard(folder / "prompts" / name, columns)


def run_job(job: Path, name: str, *options: str, code: int = 0):
    ended = batchinfer("run", job, "--set", f"output.dir={name}", *options)
    assert ended.code == code, ended.err
    return ended


def plan_small_units(job: Path, run: Path, *options: str | Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MIN_UNIT_TOKENS", 60)
        ended = batchinfer("plan", job, "--set", f"output.dir={run}", *options)
    assert ended.code == 0, ended.err


def figures(run: Path) -> dict:
    return json.loads(batchinfer("report", run, "--json").out)


def reused_ids(run: Path) -> set[str]:
    query = (
        "SELECT DISTINCT o.id FROM outputs o JOIN requests r ON o.row = r.row AND o.sample = r.sample WHERE r.is_reused"
    )
    return {row["id"] for row in json.loads(batchinfer("report", run, "--json", "--sql", query).out)}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A job of greedy and sampled rows, some of them equal, and its finished run `run`."""
    folder = tmp_path_factory.mktemp("first")
    write_rows(folder, "a.parquet", *some_rows())
    job = write_job(folder, input={"sampling": "sampling"}, sampling={"max_tokens": 6, "n": 1})
    assert batchinfer("run", job).code == 0
    return job


def some_rows() -> tuple[list[str], list[str], list[dict]]:
    """Ids, prompts and sampling of 14 rows: sampled ones are odd; rows 10 and 12 are equal to row 0."""
    ids = [f"q{number}" for number in range(14)]
    texts = [question(0 if number in (10, 12) else number) for number in range(14)]
    sampling = [
        {"temperature": 0.8 if number % 2 else 0.0, "logprobs": 2 if number < 4 else None} for number in range(14)
    ]
    return ids, texts, sampling


@pytest.fixture
def corrected(first, tmp_path):
    """The job with corrected input, in another folder: one text and one sampled row's id changed, two rows added."""
    ids, texts, sampling = some_rows()
    texts[4] += " Really?"
    ids[7] = "renamed"
    ids[8] = "renamed greedy"
    for number in (14, 15):
        ids.insert(3, f"q{number}")
        texts.insert(3, question(number))
        sampling.insert(3, {"temperature": 0.8, "logprobs": None})
    write_rows(tmp_path, "b.parquet", ids, texts, sampling)
    return write_job(tmp_path, input={"sampling": "sampling"}, sampling={"max_tokens": 6, "n": 1})


def test_only_what_changed_is_computed(first, corrected, tmp_path):
    run_job(corrected, "full")
    ended = run_job(corrected, "again", "--reuse", first.parent / "run")
    assert output_bytes(tmp_path / "again") == output_bytes(tmp_path / "full")
    changed = {"q4", "renamed", "q14", "q15"}
    all_ids = {row["id"] for rows in outputs(tmp_path / "again").values() for row in rows}
    assert reused_ids(tmp_path / "again") == all_ids - changed
    found, full = figures(tmp_path / "again"), figures(tmp_path / "full")
    assert (found["rows_ok"], found["reused_rows"], full["reused_rows"]) == (16, 12, 0)
    assert found["input_tokens"] + found["reused_input_tokens"] == full["input_tokens"]
    assert found["output_tokens"] + found["reused_output_tokens"] == full["output_tokens"]
    assert found["computed_tokens"] == found["needed_tokens"] < full["computed_tokens"]
    assert found["predictions"]["computed_tokens"]["planned"] == found["computed_tokens"]
    assert found["cached_tokens"] == found["optimal_cached_tokens"]
    assert (found["wasted_tokens"], found["replicated_tokens"]) == (0, 0)
    assert found["bit_equal"] is True
    assert "further requests, answered by an earlier run" in ended.err
    assert "% shared or reused\n" in ended.err
    assert "reused" in batchinfer("report", tmp_path / "again").out
    status = json.loads(batchinfer("status", tmp_path / "again", "--json").out)
    assert status["requests_done"] == status["requests"]
    assert batchinfer("verify", tmp_path / "again").code == 0
    assert batchinfer("peek", tmp_path / "again").code == 0


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"model.dtype": "bfloat16"}, marks=ALL),
        pytest.param({"cluster.prefill_ranks": 2}, marks=ALL),
        pytest.param(
            {"cluster.mode": "disaggregated", "cluster.prefill_ranks": 1, "cluster.decode_ranks": 1}, marks=ALL
        ),
        pytest.param({"output.format": "jsonl"}, marks=ALL),
        pytest.param({"model.dtype": "bfloat16", "sampling.n": 2}, marks=ALL),
    ],
    ids=str,
)
def test_further_dtypes_and_layouts(first, corrected, tmp_path, settings):
    options = [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    run_job(first, tmp_path / "earlier", *options)
    run_job(corrected, "full", *options)
    run_job(corrected, "again", *options, "--reuse", tmp_path / "earlier")
    assert output_bytes(tmp_path / "again") == output_bytes(tmp_path / "full")
    assert figures(tmp_path / "again")["reused_rows"] >= 12


def test_more_samples_and_another_order_keep_the_first_answers(tmp_path):
    ids, texts = [f"q{number}" for number in range(6)], [question(number) for number in range(6)]
    write_rows(tmp_path, "a.parquet", ids, texts)
    job = write_job(tmp_path, sampling=SAMPLED)
    run_job(job, "one")
    write_rows(tmp_path, "a.parquet", ids[::-1], texts[::-1])
    run_job(job, "full", "--set", "sampling.n=3")
    run_job(job, "three", "--set", "sampling.n=3", "--reuse", tmp_path / "one")
    assert output_bytes(tmp_path / "three") == output_bytes(tmp_path / "full")
    assert figures(tmp_path / "three")["reused_rows"] == 6
    other = run_job(job, "other", "--set", "sampling.seed=9", "--reuse", tmp_path / "one")
    assert "no request of this job has an answer in" in other.err
    assert figures(tmp_path / "other")["reused_rows"] == 0  # other draws
    run_job(job, "two", "--reuse", tmp_path / "three")  # a run that has reused answers itself
    assert figures(tmp_path / "two")["reused_rows"] == 6


def test_a_job_without_changes_starts_no_rank(first, tmp_path, monkeypatch):
    """Planned, computed and finished by commands of their own: `work` has nothing left to do."""

    def fail(*_, **__):
        pytest.fail("ranks were started")

    run = tmp_path / "same"
    planned = batchinfer("plan", first, "--set", f"output.dir={run}", "--reuse", first.parent / "run")
    assert planned.code == 0, planned.err
    assert "0 to compute" in planned.out
    assert json.loads(batchinfer("status", run, "--json").out)["activity"] == "computed"
    monkeypatch.setattr(rank_loader, "open_ranks", fail)
    for command in ("work", "finish"):
        assert batchinfer(command, run).code == 0
    assert output_bytes(run) == output_bytes(first.parent / "run")
    found, before = figures(run), figures(first.parent / "run")
    assert found["reused_rows"] == found["rows"] == 14
    assert (found["input_tokens"], found["output_tokens"], found["computed_tokens"]) == (0, 0, 0)
    assert (found["bit_equal"], found["processor"]) == (before["bit_equal"], before["processor"])


def test_a_part_of_a_run_is_reused_and_damaged_files_are_not(first, corrected, tmp_path):
    """Of units that are not done the results count, and those of a damaged file are computed again."""
    run_job(corrected, "full")
    earlier = tmp_path / "earlier"
    plan_small_units(first, earlier)
    assert batchinfer("work", earlier).code == 0
    units = sorted((earlier / "units").iterdir())
    assert len(units) > 3
    shutil.rmtree(units[0])
    for unit in units[:2]:
        (earlier / "done" / unit.name).unlink()
    part = next(units[2].rglob("part-*"))
    num_lost = pq.read_metadata(part).num_rows
    flip_bit(part, random.Random(3))
    before = sorted(earlier.rglob("*"))
    ended = run_job(corrected, "again", "--reuse", earlier)
    assert f"{part} is damaged" in ended.err
    assert sorted(earlier.rglob("*")) == before, "the earlier run is only read"
    assert output_bytes(tmp_path / "again") == output_bytes(tmp_path / "full")
    assert 0 < figures(tmp_path / "again")["reused_rows"] < 12 - num_lost + 1


def test_error_rows_are_computed_again(first, corrected, tmp_path):
    run_job(corrected, "full")
    shutil.copytree(first.parent / "run", tmp_path / "earlier")
    ((_, row),) = fail_some(tmp_path / "earlier", 1)
    run_job(corrected, "again", "--reuse", tmp_path / "earlier")
    assert output_bytes(tmp_path / "again") == output_bytes(tmp_path / "full")
    assert some_rows()[0][row] not in reused_ids(tmp_path / "again")


def test_ranks_that_round_differently_compute_all_rows(first, corrected, tmp_path):
    run_job(corrected, "full")
    run = tmp_path / "again"
    planned = batchinfer("plan", corrected, "--set", f"output.dir={run}", "--reuse", first.parent / "run")
    assert planned.code == 0, planned.err
    state = read_state(RunDir(run))
    publish_json(run / "run.json", {**state, "reused": {**state["reused"], "numerics": "another processor"}})
    worked = batchinfer("work", run)
    assert worked.code == 0, worked.err
    assert "are not reused, and their rows are computed again" in worked.err
    assert "another processor, which may round differently" in worked.err
    assert batchinfer("finish", run).code == 0
    assert output_bytes(run) == output_bytes(tmp_path / "full")
    assert (figures(run)["reused_rows"], figures(run)["bit_equal"]) == (0, True)


@pytest.mark.parametrize("moment", ["before the plan is valid", "before the answers are offered"])
def test_a_plan_that_was_killed_goes_on(first, corrected, tmp_path, monkeypatch, moment):
    def killed(*_):
        raise InterruptedRunError("killed")

    name = "_publish_state" if moment == "before the plan is valid" else "offer_reused"
    options = ("--set", f"output.dir={tmp_path / 'again'}", "--reuse", first.parent / "run")
    with monkeypatch.context() as patch:
        patch.setattr(planner, name, killed)
        assert batchinfer("plan", corrected, *options).code == 75
    run_job(corrected, "full")
    again = batchinfer("run", corrected, *options)
    assert again.code == 0, again.err
    assert output_bytes(tmp_path / "again") == output_bytes(tmp_path / "full")
    assert figures(tmp_path / "again")["reused_rows"] == 12


def test_answers_that_are_lost_later_are_computed_again_and_a_plan_made_again_keeps_them(first, corrected, tmp_path):
    run_job(corrected, "full")
    run = tmp_path / "again"
    plan_small_units(corrected, run, "--reuse", first.parent / "run")
    parts = sorted(run.rglob("reused-*/part-*"))
    assert len(parts) > 2
    flip_bit(parts[0], random.Random(1))
    assert batchinfer("plan", "--again", "--reuse", first.parent / "run", run).code == 2
    planned = read_summary(RunDir(run))["reused_requests"]
    num_lost = pq.read_metadata(parts[0]).num_rows
    plan_small_units(corrected, run, "--again")
    assert read_summary(RunDir(run))["reused_requests"] == planned - num_lost
    for command in ("work", "finish"):
        ended = batchinfer(command, run)
        assert ended.code == 0, ended.err
    assert output_bytes(run) == output_bytes(tmp_path / "full")
    assert 0 < figures(run)["reused_rows"] < 12


@ALL  # make test: the same with damaged answers
def test_with_run_json_their_origin_is_lost_and_all_rows_are_computed(first, corrected, tmp_path):
    run_job(corrected, "full")
    run = tmp_path / "again"
    options = ("--set", f"output.dir={run}")
    assert batchinfer("plan", corrected, *options, "--reuse", first.parent / "run").code == 0
    (run / "run.json").unlink()
    assert batchinfer("plan", "--again", corrected, *options).code == 0
    for command in ("work", "finish"):
        ended = batchinfer(command, run)
        assert ended.code == 0, ended.err
    assert output_bytes(run) == output_bytes(tmp_path / "full")
    assert figures(run)["reused_rows"] == 0


@ALL  # make test: test_a_plan_that_was_killed_goes_on, and kills of other runs
def test_a_killed_run_goes_on_without_the_earlier_run(first, corrected, tmp_path):
    slow = [part for name, value in SLOW.items() for part in ("--set", f"cluster.{name}={value}")]
    options = (*slow, "--set", "sampling.ignore_eos=true", "--set", "sampling.max_tokens=24")
    earlier, run = tmp_path / "earlier", tmp_path / "again"
    run_job(first, earlier, *options)
    run_job(corrected, "full", *options)
    command = ("run", corrected, "--set", f"output.dir={run}", *options, "--reuse", earlier)
    process = start(*command)
    wait_until(lambda: list(run.glob("units/*/[0-9]*/part-*.parquet")), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    shutil.rmtree(earlier)
    again = batchinfer(*command)
    assert again.code == 0, again.err
    assert output_bytes(run) == output_bytes(tmp_path / "full")
    assert figures(run)["reused_rows"] == 12


@ALL
def test_scored_rows(tmp_path):
    ids, texts = [f"q{number}" for number in range(5)], [question(number) for number in range(5)]
    choices = [["yes", "no, never", "perhaps"]] * 5
    write_shard(tmp_path / "prompts" / "a.parquet", {"id": ids, "prompt": texts, "choices": choices})
    job = write_job(tmp_path, input={"choices": "choices"}, sampling={"max_tokens": 0})
    run_job(job, "earlier")
    choices = [["yes", "no, never", "perhaps", "now"], *choices[1:]]
    texts[3] += " Why?"
    write_shard(tmp_path / "prompts" / "a.parquet", {"id": ids, "prompt": texts, "choices": choices})
    run_job(job, "full")
    run_job(job, "again", "--reuse", tmp_path / "earlier")
    assert output_bytes(tmp_path / "again") == output_bytes(tmp_path / "full")
    assert figures(tmp_path / "again")["reused_rows"] == 3  # of one more row three of four choices are


def edited(run: Path, **fingerprint) -> Path:
    state = read_state(RunDir(run))
    publish_json(run / "run.json", {**state, "fingerprint": {**state["fingerprint"], **fingerprint}})
    return run


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda run: edited(run, **{"model.weights": "0"}), 'model.weights was "0" and is now'),
        (lambda run: edited(run, **{"version of batchinfer": "0.1"}), "version of batchinfer was 0.1 and is now"),
        (lambda run: edited(run, **{"model code": "0"}), "model code was 0 and is now"),
        (lambda run: (run / "run.json").unlink(), "is not a run folder of batchinfer"),
        (lambda run: flip_bit(run / "plan" / "requests.parquet", random.Random(0)), "is damaged"),
        (lambda run: run.chmod(0o777), "can be written by every user"),
    ],
)
def test_another_run_is_refused_in_one_sentence(first, tmp_path, change, reason):
    run = shutil.copytree(first.parent / "run", tmp_path / "earlier")
    change(run)
    ended = batchinfer("plan", first, "--set", f"output.dir={tmp_path / 'new'}", "--reuse", run)
    assert ended.code == 2
    (line,) = [line for line in ended.err.splitlines() if "error: " in line]
    assert reason.replace('"', "") in line.replace('"', "")


def test_the_own_folder_another_dtype_and_mixed_processors_are_refused(first, tmp_path):
    run = first.parent / "run"
    new = ("--set", f"output.dir={tmp_path / 'new'}")
    mixed = shutil.copytree(run, tmp_path / "mixed")
    nodes = next((mixed / "stats" / "nodes").glob("*"))
    table = pq.read_table(nodes).to_pylist()
    pq.write_table(pa.Table.from_pylist([{**table[0], "numerics": "a + b"}], schema=pq.read_schema(nodes)), nodes)
    for options, named, reason in (
        (new, mixed, "a + b, which may round differently from each other"),
        ((*new, "--set", "model.dtype=bfloat16"), run, "model.dtype was float32 and is now bfloat16"),
        (("--set", f"output.dir={mixed}"), mixed, "is planned already"),
    ):
        ended = batchinfer("plan", first, *options, "--reuse", named)
        assert reason in ended.err
        assert ended.code == (0 if "already" in reason else 2)
