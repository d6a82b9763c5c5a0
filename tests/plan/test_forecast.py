"""A plan's predictions of balance and time, its use of an earlier run, and the report's figures."""

from __future__ import annotations

import json
import random
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.config import ClusterConfig
from batchinfer.model.config import load_model_config
from batchinfer.plan.earlier_run import NO_GROUP, Speeds, answer_lengths, expert_loads, measured_speeds
from batchinfer.plan.forecast import PlannedWork, balances, work_seconds
from batchinfer.records import ConfigError
from batchinfer.report.read import read_report
from batchinfer.rundir import RunDir
from support.damage import flip_bit
from support.jobs import batchinfer, output_bytes, question, write_job, write_shard
from support.paths import RANDOM_MODEL
from support.runs import request, session, step, write_run

NUM_ROWS = 48
TASKS = {"short": 2, "long": 30}  # answers' tokens


def work_of(prompt: list[int], shared: list[int], limit: list[int], expected: list[float], starts: list[int]):
    return PlannedWork(np.array(starts), *map(np.array, (prompt, shared, limit, expected)))


def test_unknown_answers_count_with_their_limit():
    work = work_of([5, 5, 5], [0, 3, 3], [8, 8, 8], [np.nan, 2.5, 99.0], [0, 3])
    assert work.answer_tokens.tolist() == [8, 2.5, 8]


def test_seconds_of_a_colocated_and_of_a_disaggregated_group():
    work = work_of([100, 100], [0, 40], [11, 11], [np.nan, np.nan], [0, 2])  # 160 tokens of prefill, 20 of decode
    speeds = Speeds(prefill_tokens_per_s=40, decode_tokens_per_s=10, seconds_per_busy_second=1.5, startup_s=3)
    together = ClusterConfig(prefill_ranks=2)
    assert work_seconds(work, together, speeds) == pytest.approx(3 + 1.5 * (160 / 80 + 20 / 20))
    apart = ClusterConfig(mode="disaggregated", prefill_ranks=4, decode_ranks=1)
    assert work_seconds(work, apart, speeds) == pytest.approx(3 + 1.5 * max(160 / 160, 20 / 10))


@pytest.mark.parametrize(
    "cluster", [{"prefill_ranks": 4}, {"mode": "disaggregated", "prefill_ranks": 2, "decode_ranks": 4}]
)
def test_balance_is_never_below_its_bound_and_one_giant_shows(cluster):
    rng = np.random.default_rng(3)
    prompt, limit = rng.integers(50, 200, 400), rng.integers(1, 50, 400)
    shared = np.minimum(rng.integers(0, 40, 400), prompt - 1)
    starts = np.array([0, 150, 400])
    even = PlannedWork(starts, prompt, shared, limit, np.full(400, np.nan))
    prefill, decode, _ = balances(even, ClusterConfig(**cluster))
    assert max(prefill.tokens, prefill.attention) < 1.1
    assert 1.0 <= decode.bound <= decode.max_over_mean < 1.2
    prompt[7] = 100_000
    giant = PlannedWork(starts, prompt, shared, limit, np.full(400, np.nan))
    prefill, decode, _ = balances(giant, ClusterConfig(**cluster))
    assert min(prefill.tokens, prefill.attention) > 1.4
    assert 1.4 < decode.bound <= decode.max_over_mean


def test_without_a_known_speed_of_decode_only_jobs_that_need_none_have_a_time():
    speeds = Speeds(prefill_tokens_per_s=40, decode_tokens_per_s=None, seconds_per_busy_second=1, startup_s=3)
    one_token = work_of([100], [0], [1], [np.nan], [0, 1])
    assert work_seconds(one_token, ClusterConfig(prefill_ranks=1), speeds) == pytest.approx(3 + 100 / 40)
    assert work_seconds(work_of([100], [0], [2], [np.nan], [0, 1]), ClusterConfig(prefill_ranks=1), speeds) is None


def test_one_rank_and_no_request_are_even():
    empty = work_of([], [], [], [], [0])
    prefill, decode, _ = balances(empty, ClusterConfig(prefill_ranks=3))
    assert (prefill.tokens, prefill.attention, decode.max_over_mean, decode.bound) == (1, 1, 1, 1)


# ---- an earlier run


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A folder with a finished run on two ranks: two tasks, one with long answers."""
    folder = tmp_path_factory.mktemp("earlier")
    write_tasks(folder / "prompts" / "a.parquet", range(NUM_ROWS))
    ended = batchinfer("run", job_of(folder, "first"))
    assert ended.code == 0, ended.err
    assert "not known (an earlier run, --learn-from RUN, or cluster.gpu tells)" in ended.err
    return folder


def write_tasks(path, numbers):
    tasks = [list(TASKS)[number % 2] for number in numbers]
    limits = pa.array([{"max_tokens": TASKS[task]} for task in tasks], pa.struct([("max_tokens", pa.int32())]))
    prompts = [
        question(number, system=f"This is the task {task}. " * 8) for number, task in zip(numbers, tasks, strict=True)
    ]
    return write_shard(path, {"prompt": prompts, "how": limits})


def job_of(folder, name, **more):
    return write_job(
        folder,
        name=f"{name}.toml",
        input={"sampling": "how"},
        output={"dir": name},
        sampling={"max_tokens": 30, "ignore_eos": True},
        cluster={"prefill_ranks": 2, "prefill_tokens": 512},
        pricing={"gpu_hour": 2.0},
        **more,
    )


def test_answer_lengths_are_learned_by_task(earlier):
    lengths = answer_lengths(RunDir(earlier / "first"))
    assert sorted(set(lengths.values())) == [2.0, 16.0, 30.0]
    assert lengths[NO_GROUP] == 16.0  # over all prompts


def test_speeds_are_those_of_the_recorded_steps(earlier):
    speeds = measured_speeds(RunDir(earlier / "first"))
    steps = pq.read_table(earlier / "first" / "stats" / "steps").to_pylist()
    prefill = [item for item in steps if item["kind"] == "prefill"]
    tokens, seconds = (sum(item[name] for item in prefill) for name in ("new_tokens", "duration_s"))
    assert speeds.prefill_tokens_per_s == pytest.approx(tokens / seconds)
    assert speeds.seconds_per_busy_second >= 1
    assert speeds.startup_s > 0


@pytest.mark.all  # make test: lengths that are learned, above
def test_a_plan_that_learned_predicts_and_outputs_stay_the_same(earlier):
    write_tasks(earlier / "more" / "b.parquet", range(200, 200 + 2 * NUM_ROWS))
    job = job_of(earlier, "second")
    job.write_text(job.read_text().replace("prompts/*", "more/*"))
    plain = job_of(earlier, "plain")
    plain.write_text(plain.read_text().replace("prompts/*", "more/*"))
    assert batchinfer("run", plain).code == 0
    planned = batchinfer("plan", job, "--learn-from", earlier / "first")
    assert planned.code == 0, planned.err
    assert re.search(
        r"to generate +2,880 tokens at most|to generate +[\d,]+ tokens at most, 1,536 expected", planned.out
    )
    assert "done at 20" in planned.out
    (summary,) = pq.read_table(earlier / "second" / "plan" / "summary.parquet").to_pylist()
    assert summary["expected_output_tokens"] == NUM_ROWS * (2 + 30)
    assert summary["gpu_hours"] == pytest.approx(summary["work_s"] * 2 / 3600)
    assert summary["cost_usd"] == pytest.approx(2 * summary["gpu_hours"])
    assert "experts placed: busiest rank" in planned.err
    assert re.search(r"time by the earlier run: [\d,.]+ prompt and [\d,.]+ generated tokens/s per rank", planned.err)
    requests = pq.read_table(earlier / "second" / "plan" / "requests.parquet").to_pylist()
    assert {item["expected_tokens"] for item in requests} == {2.0, 30.0}
    assert all(item["expected_tokens"] == min(item["max_tokens"], 30) for item in requests)
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    assert output_bytes(earlier / "second") == output_bytes(earlier / "plain")
    details = read_report(earlier / "second")
    found = {item.name: item for item in details.predictions}
    assert found["output_tokens"].planned == found["output_tokens"].happened == NUM_ROWS * 32
    compared = batchinfer("report", earlier / "first", earlier / "second", "--compare").out
    assert "change" in compared
    assert re.search(r"second +[\d.]+ +[\d.]+ +[+-][\d.]+%", compared[compared.index("seconds on ranks") :])
    assert found["work_s"].planned == pytest.approx(summary["work_s"])
    for name in ("prefill_tokens_balance", "prefill_attention_balance"):
        assert found[name].happened == pytest.approx(found[name].planned, rel=0.05)
        assert 1.0 <= found[name].planned == summary[name.replace("balance", "max_over_mean")]
    assert 1.0 <= found["expert_balance"].at_best <= found["expert_balance"].planned
    assert found["expert_balance"].happened >= 1.0
    assert 1.0 <= summary["decode_bound"] <= found["decode_balance"].planned == summary["decode_max_over_mean"]
    assert 1.0 <= found["decode_balance"].at_best <= found["decode_balance"].happened
    panel = batchinfer("report", job).out.splitlines()
    assert any(line.split() == ["Plan", "planned", "happened", "at", "best"] for line in panel)
    assert any(line.startswith("  output tokens") and line.split()[-3:] == ["1,536", "1,536", "–"] for line in panel)


@pytest.mark.parametrize("option", ["--learn-from", "--expert-loads"])
def test_what_is_no_run_is_refused_by_name(earlier, tmp_path, option):
    ended = batchinfer("plan", job_of(earlier, "third"), option, tmp_path)
    assert ended.code == 2
    assert f"{tmp_path} is not a run folder of batchinfer" in ended.err
    assert not (earlier / "third").exists()


def test_a_run_that_has_computed_nothing_teaches_nothing(earlier, tmp_path):
    write_tasks(tmp_path / "prompts" / "a.parquet", range(4))
    assert batchinfer("plan", job_of(tmp_path, "only")).code == 0
    ended = batchinfer("plan", job_of(earlier, "third"), "--learn-from", tmp_path / "only")
    assert ended.code == 2
    assert f"{tmp_path / 'only'} is not finished; run its job to the end first" in ended.err
    with pytest.raises(ConfigError, match="has no steps; name a run that has computed something"):
        measured_speeds(RunDir(tmp_path / "only"))
    with pytest.raises(ConfigError, match="has no counts of tokens per expert"):
        expert_loads(RunDir(tmp_path / "only"), load_model_config(RANDOM_MODEL))


@pytest.mark.parametrize("name", ["stats/requests.parquet", "plan/requests.parquet", "plan/summary.parquet"])
def test_damage_of_the_earlier_run_is_named(earlier, tmp_path, name):
    shutil.copytree(earlier / "first", tmp_path / "first")
    flip_bit(tmp_path / "first" / name, random.Random(0))
    ended = batchinfer("plan", job_of(earlier, "third"), "--learn-from", tmp_path / "first")
    assert ended.code == 2
    assert f"{tmp_path / 'first' / name} is damaged: " in ended.err
    assert not (earlier / "third").exists()


def test_speeds_of_another_model_are_not_used(earlier, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for file in RANDOM_MODEL.iterdir():
        (model / file.name).symlink_to(file)
    config = json.loads((RANDOM_MODEL / "config.json").read_text())
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    write_tasks(tmp_path / "prompts" / "a.parquet", range(NUM_ROWS))
    job = job_of(tmp_path, "other", model={"path": str(model)})
    ended = batchinfer("plan", job, "--learn-from", earlier / "first")
    assert ended.code == 0, ended.err
    assert "ran another model or dtype: only its answer lengths are used" in ended.err
    (summary,) = pq.read_table(tmp_path / "other" / "plan" / "summary.parquet").to_pylist()
    assert summary["work_s"] is None
    assert summary["expected_output_tokens"] == NUM_ROWS // 2 * 32


# ---- balance in the report


def test_balance_idle_turns_and_tail_are_counted_from_steps(tmp_path):
    def decode(rank, number, start_s, requests, kv):
        return step(
            "a", "decode", 1.0, new=requests, cached=0, output=requests, rank=rank, step=number,
            start_s=start_s, num_requests=requests, kv_tokens=kv,
        )  # fmt: skip

    #          step 0       step 1       step 2   (after a restart) step 9
    # rank 0   30 KV        10           20       5
    # rank 1   10           10           none     5
    steps = [
        decode(0, 0, 10.0, 3, 30), decode(1, 0, 10.0, 1, 10),
        decode(0, 1, 11.0, 1, 10), decode(1, 1, 11.0, 1, 10),
        decode(0, 2, 12.5, 2, 20), decode(1, 2, 12.5, 0, 0),
        decode(0, 9, 8.0, 1, 5), decode(1, 9, 8.0, 1, 5),
        step("a", "prefill", 1.0, new=60, cached=0, output=1, rank=0, step=3, expert_rows=90, attention_work=300),
        step("a", "prefill", 1.0, new=20, cached=0, output=1, rank=1, step=3, expert_rows=30, attention_work=90),
        step("a", "prefill", 1.0, new=10, cached=0, output=1, rank=1, step=4, attention_work=10),  # nothing on rank 0
    ]  # fmt: skip
    node = session("a", 0, 20, ranks=2, prefill_s=1)
    planned = {"predicted_prefill_tokens_max_over_mean": 1.25, "gpu_hour": 3.0}
    run = write_run(
        tmp_path / "r", requests=[request(0, 9, 4)], steps=steps, nodes=[node], predicted_cost_usd=0.02, **planned
    )
    details = read_report(run)
    found = {item.name: item for item in details.predictions}
    # 60 + 10 tokens of 60 + 20 + 10 on two ranks
    assert found["prefill_tokens_balance"].happened == pytest.approx(70 / 45)
    assert found["prefill_attention_balance"].happened == pytest.approx(310 / 200)
    assert (found["prefill_tokens_balance"].planned, found["prefill_tokens_balance"].at_best) == (1.25, None)
    assert found["decode_balance"].happened == pytest.approx((30 + 10 + 20 + 5) / (20 + 10 + 10 + 5))
    assert found["expert_balance"].happened == pytest.approx(90 / 60)
    assert found["cost_usd"].happened == pytest.approx(details.values["cost_usd"])
    assert details.values["decode_idle_share"] == pytest.approx(1 / 8)
    assert details.values["tail_s"] == pytest.approx(13.5 - 12.0)


def test_one_rank_has_no_balance(tmp_path):
    steps = [step("a", "decode", 1.0, new=1, cached=0, output=1, step=0, num_requests=1, kv_tokens=4)]
    details = read_report(write_run(tmp_path / "r", steps=steps, nodes=[session("a", 0, 9, prefill_s=1)]))
    assert details.values["decode_idle_share"] is None
    assert {item.happened for item in details.predictions if item.name.endswith("balance")} == {None}
