"""Jobs whose weights are streamed from disk: the bytes of resident runs, whatever is asked for and whatever happens."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from batchinfer.config import load_job
from batchinfer.host_info import free_memory_bytes
from batchinfer.launch.host_memory import stream_forecast
from batchinfer.model.config import load_model_config
from batchinfer.model.packed_folder import read_packed
from batchinfer.model.weight_mode import split_for
from support.jobs import batchinfer, output_bytes, question, start, write_job, write_questions, write_shard
from support.paths import RANDOM_MODEL, TESTS
from support.small_disks import small_disk
from support.tiers import first_in_make_test

__all__ = ["small_disk"]

pytestmark = pytest.mark.usefixtures("cpp")

FAULTY_READS = TESTS / "support" / "faulty_reads.c"
DTYPES = ("bfloat16", "int4", "float32", "fp8")
# several steps of either kind in a sweep; prompts are cut between them
SMALL_STEPS = {"prefill_tokens": 90, "decode_requests": 3}
DRAWN = {"max_tokens": 12, "temperature": 0.8, "logprobs": 2, "ignore_eos": True}
# 120 requests, of which 16 run at once
LONG, WAVES = DRAWN | {"max_tokens": 60, "n": 6}, {"decode_requests": 1, "commit_seconds": 0.05}
JOURNEYS = {
    "samples": {"sampling": DRAWN | {"n": 3}},
    "penalties": {"sampling": DRAWN | {"presence_penalty": 0.7, "min_tokens": 3, "logit_bias": {"40": 2.0}}},
    "greedy": {"sampling": {"max_tokens": 12, "n": 1}},
    "stop strings": {"sampling": DRAWN | {"stop": ["e", "the", "a b"], "min_tokens": 2}},
    "structured": {"sampling": {"max_tokens": 12, "structured_outputs": {"regex": "[a-c]{2,9}x"}}},
    "scores": {"sampling": DRAWN | {"prompt_logprobs": 2}},
    "choices": {"input": {"choices": "options"}, "sampling": {"max_tokens": 0}},
    "one token": {"sampling": {"max_tokens": 1, "logprobs": 3}, "cluster": {"prefill_tokens": 10}},
    "scores alone": {"sampling": {"max_tokens": 0, "prompt_logprobs": 3}, "cluster": {"prefill_tokens": 10}},
    "few pages": {"sampling": DRAWN, "cluster": {"page_bytes": 700_000}},
    "drafts asked for": {"sampling": DRAWN, "cluster": {"speculate": "auto"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streamed")
    write_questions(folder / "plain", (9, 4, 7))
    numbers = list(range(6))
    options = [[f" {number}", " none at all", f" {number} {number}"] for number in numbers]
    prompts = [question(number) for number in numbers]
    write_shard(folder / "choices" / "a.parquet", {"id": numbers, "prompt": prompts, "options": options})
    return folder


@pytest.fixture(scope="module")
def converted(folder):
    """A function that returns the model converted to a dtype."""

    def of(dtype):
        if not (folder / dtype).exists():
            assert batchinfer("convert", RANDOM_MODEL, folder / dtype, "--dtype", dtype).code == 0
        return folder / dtype

    return of


def job_of(folder, model, name, weights, **parts):
    given = {
        "input": {"files": ["choices/*" if "choices" in parts.get("input", {}) else "plain/*"]}
        | parts.get("input", {}),
        "cluster": SMALL_STEPS | {"weights": weights} | parts.get("cluster", {}),
    }
    model = {"path": str(model), "dtype": model.name}
    return write_job(folder, name=f"{name}.toml", output={"dir": name}, model=model, **(parts | given))


def run(folder, model, name, weights, **parts):
    ended = batchinfer("run", job_of(folder, model, name, weights, **parts))
    assert ended.code == 0, ended.err
    return output_bytes(folder / name)


def test_there_are_several_steps_of_each_kind_in_a_sweep_and_bytes_are_counted(folder, converted):
    model = converted("bfloat16")
    run(folder, model, "counted", "stream", sampling=DRAWN)
    steps = folder / "counted" / "stats" / "steps"
    ((sweeps, prefill, decode, num_bytes),) = duckdb.sql(
        "SELECT count(*) FILTER (streamed_bytes > 0), count(*) FILTER (kind = 'prefill'), "
        f"count(*) FILTER (kind = 'decode'), sum(streamed_bytes)::BIGINT FROM '{steps}/*.parquet'"
    ).fetchall()
    layers = sum(path.stat().st_size for path in model.glob("layer-*"))
    assert 12 <= sweeps <= decode + 1  # one token each; prompts ride along
    assert prefill > 1
    assert (sweeps - 1) * layers <= num_bytes <= (sweeps + 1) * layers


@pytest.mark.parametrize(
    ("waves", "at_once"),
    [({"cluster": {"decode_requests": 8}}, 120), ({"cluster": WAVES}, 16)],
    ids=["one wave", "waves"],
)
def test_the_forecast_counts_the_sweeps_bytes_and_tokens_that_are_recorded(folder, converted, waves, at_once):
    name = f"forecast-{at_once}"
    path = job_of(folder, converted("bfloat16"), name, "stream", sampling=LONG, **waves)
    assert batchinfer("run", path).code == 0
    found = stream_forecast(load_job(path), pq.read_table(folder / name / "plan" / "units.parquet").to_pylist())
    steps = f"'{folder / name}/stats/steps/*.parquet'"
    ((sweeps, num_bytes, prompts, answers, running),) = duckdb.sql(
        "SELECT count(*) FILTER (streamed_bytes > 0), sum(streamed_bytes)::BIGINT, "
        "sum(new_tokens) FILTER (kind = 'prefill')::BIGINT, sum(output_tokens)::BIGINT, "
        f"max(num_requests) FILTER (kind = 'decode') FROM {steps}"
    ).fetchall()
    assert found.job.num_at_once == running == at_once
    assert sweeps == pytest.approx(found.schedule.num_sweeps, rel=0.05)
    assert num_bytes == pytest.approx(sweeps * found.split.sweep_bytes, rel=0.05)
    assert (found.tokens.new, found.tokens.output) == (prompts, answers)


@pytest.mark.parametrize("dtype", first_in_make_test(DTYPES, 2))
@pytest.mark.parametrize("journey", first_in_make_test(JOURNEYS, 5))
def test_outputs_are_those_of_resident_weights_to_the_byte(folder, converted, journey, dtype):
    model = converted(dtype)
    found = [
        run(folder, model, f"{journey} {dtype} {weights}".replace(" ", "-"), weights, **JOURNEYS[journey])
        for weights in ("resident", "stream")
    ]
    assert found[0] == found[1]


# experts of two ranks follow each other in the file, or are chosen one by one
RANKS = {"2 ranks": {"prefill_ranks": 2}, "redundant experts": {"prefill_ranks": 2, "redundant_experts": 2}}
OF_RANKS = [
    *((journey, "bfloat16", ranks) for ranks in RANKS for journey in ("samples", "choices", "one token", "few pages")),
    *(("samples", dtype, "redundant experts") for dtype in ("int4", "fp8", "float32")),
    *((journey, "int4", "2 ranks") for journey in JOURNEYS if journey not in ("choices", "few pages")),
]


@pytest.mark.parametrize(("journey", "dtype", "ranks"), first_in_make_test(OF_RANKS, 1))
def test_outputs_of_ranks_that_stream_their_own_experts_are_those_of_one_resident_rank(
    folder, converted, journey, dtype, ranks
):
    model, parts = converted(dtype), JOURNEYS[journey]
    name = f"{journey} {dtype} {ranks}".replace(" ", "-")
    calm = run(folder, model, f"{name}-one", "resident", **parts)
    cluster = parts.get("cluster", {}) | RANKS[ranks]
    assert run(folder, model, name, "stream", **(parts | {"cluster": cluster})) == calm


def test_each_rank_reads_its_own_experts_in_the_same_sweeps_and_the_plan_counts_them(folder, converted):
    model = converted("bfloat16")
    path = job_of(folder, model, "own", "stream", sampling=DRAWN, cluster={"prefill_ranks": 2, "decode_requests": 4})
    ended = batchinfer("run", path)
    assert ended.code == 0, ended.err
    steps = f"'{folder}/own/stats/steps/*.parquet'"
    ranks = duckdb.sql(
        "SELECT count(*) FILTER (streamed_bytes > 0), sum(streamed_bytes)::BIGINT, sum(expert_rows)::BIGINT, "
        f"sum(new_tokens)::BIGINT FROM {steps} GROUP BY rank ORDER BY rank"
    ).fetchall()
    assert len(ranks) == 2
    (sweeps, *_), (other_sweeps, *_) = ranks
    found = stream_forecast(load_job(path), pq.read_table(folder / "own" / "plan" / "units.parquet").to_pylist())
    assert sweeps == other_sweeps == pytest.approx(found.schedule.num_sweeps, abs=3)
    for _, num_bytes, _, _ in ranks:
        assert num_bytes == pytest.approx(sweeps * found.split.sweep_bytes, abs=1.5 * found.split.sweep_bytes)
    layers = [path.stat().st_size for path in sorted(model.glob("layer-*"))]
    assert max(layers) / 2 < found.split.sweep_bytes / len(layers) < 0.9 * max(layers)
    moe = load_model_config(model)
    tokens = sum(new for *_, new in ranks)
    # the last layer computes the tokens that are sampled alone
    assert sum(rows for *_, rows, _ in ranks) <= tokens * moe.num_experts_per_tok * moe.num_moe_layers
    assert all(rows for *_, rows, _ in ranks)
    assert f"{found.split.sweep_bytes / 1e9:.2f} GB per sweep on each of 2 ranks" in ended.err
    report = json.loads(batchinfer("report", folder / "own", "--json").out)
    assert report["weights_streamed_bytes"] == sum(num_bytes for _, num_bytes, _, _ in ranks)
    assert report["sweeps"] == sweeps


def test_prompts_alone_keep_the_kv_of_one_layer_and_are_ended_in_their_sweep(folder, converted):
    model = converted("bfloat16")
    run(folder, model, "alone", "stream", **JOURNEYS["one token"])
    steps = folder / "alone" / "stats" / "steps"
    ((sweeps, decode, prefill, computed, most_pages),) = duckdb.sql(
        "SELECT count(*) FILTER (streamed_bytes > 0), count(*) FILTER (kind = 'decode'), count(*), sum(new_tokens), "
        f"max(pages_used) FROM '{steps}/*.parquet'"
    ).fetchall()
    assert sweeps > 1
    assert decode == 0
    assert prefill > sweeps
    assert computed > 435  # each sweep computes what it shares with the one before again
    assert most_pages < 20 * 3  # nothing is kept from sweep to sweep


@pytest.mark.parametrize("dtype", first_in_make_test(DTYPES))
def test_a_kv_store_serves_streamed_and_resident_runs_alike(folder, converted, dtype):
    model = converted(dtype)
    found = []
    for name, weights, store in [("r-c", "resident", "a"), ("s-c", "stream", "b"), ("s-w", "stream", "a")]:
        kv = {"dir": f"store-{dtype}-{store}", "persist": "all"}
        found.append(run(folder, model, f"kv-{dtype}-{name}", weights, sampling=DRAWN, kv=kv))
    assert found[0] == found[1]
    found.append(run(folder, model, f"kv-{dtype}-r-w", "resident", sampling=DRAWN, kv=kv))
    assert found[2] == found[3]


@pytest.mark.parametrize("dtype", first_in_make_test(("int4", "bfloat16", "float32", "fp8")))
def test_kills_at_random_moments_leave_the_same_outputs(folder, converted, dtype):
    """Rank, controller, or both are killed again and again; a run that is left alone then finishes the job."""
    draw, model, num_kills = random.Random(60), converted(dtype), Counter()
    calm = run(folder, model, f"calm-{dtype}", "resident", sampling=LONG)
    name = f"killed-{dtype}"
    job = job_of(folder, model, name, "stream", sampling=LONG, cluster=WAVES)
    for deed in ("rank", "controller", "both") * 4:
        process = start("run", job)
        try:
            _wait_for_more_results(folder / name, process)
            time.sleep(draw.uniform(0, 0.15))
            if process.poll() is not None:
                break
            ranks = [child for child in _children(process.pid) if "batchinfer.rank.main" in _command(child)]
            if deed != "rank":
                process.kill()
            for rank in ranks if deed != "controller" else []:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            if deed == "rank":
                time.sleep(draw.uniform(0, 1))
                process.kill()
            num_kills[deed] += 1
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
        assert "Traceback" not in err, err
    assert len(num_kills) == 3
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    assert output_bytes(folder / name) == calm


def test_a_rank_stays_within_slots_kv_and_a_fixed_part(folder, converted):
    job = load_job(job_of(folder, converted("bfloat16"), "capped", "stream", sampling=DRAWN))
    model, packed = load_model_config(Path(job.model.path)), read_packed(Path(job.model.path))
    split = split_for(job, model, packed, free_bytes=free_memory_bytes(), most_tokens=20 * 500, largest_tokens=500)
    most = sum(split.slot_bytes) + split.kv_bytes + 1_200_000_000
    process, peak = start("run", folder / "capped.toml"), 0
    try:
        while process.poll() is None:
            with suppress(OSError, StopIteration, ValueError):
                rank = next(child for child in _children(process.pid) if "batchinfer.rank.main" in _command(child))
                status = Path(f"/proc/{rank}/status").read_text().split("VmHWM:")[1]
                peak = max(peak, int(status.split()[0]) * 1024)
            time.sleep(0.01)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert 0 < peak <= most


def test_a_disk_that_fails_is_one_sentence_and_the_run_goes_on_when_it_reads_again(folder, converted):
    """The layer is a link into a folder that is gone for a while: whoever opens it anew finds nothing."""
    model = converted("bfloat16")
    calm = run(folder, model, "calm-bfloat16", "resident", sampling=LONG)
    job = job_of(folder, model, "vanished", "stream", sampling=LONG, cluster=WAVES)
    process = start("run", job)
    layer = model / "layer-00001.safetensors"
    away = layer.with_suffix(".away")
    try:
        _wait_for_results(folder / "vanished", process)
        layer.rename(away)
        rank = next(child for child in _children(process.pid) if "batchinfer.rank.main" in _command(child))
        os.kill(rank, signal.SIGKILL)  # the next one cannot open the file
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
        away.rename(layer)
    assert process.returncode == 2, err
    (sentence,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert str(layer) in sentence
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    assert output_bytes(folder / "vanished") == calm


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_room(folder, converted, small_disk):
    model, target = converted("fp8"), small_disk.folder / "run"
    calm = run(folder, model, "calm-fp8", "resident", sampling=LONG)
    job = job_of(folder, model, "full", "stream", sampling=LONG, cluster=WAVES)
    process = start("run", job, "--set", f"output.dir={target}")
    try:
        _wait_for_results(target, process)
        small_disk.fill(but_bytes=0)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 2, err
    (sentence,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert "No space left on device" in sentence
    small_disk.free()
    ended = batchinfer("run", job, "--set", f"output.dir={target}")
    assert ended.code == 0, ended.err
    assert output_bytes(target) == calm


@pytest.mark.parametrize(
    ("deed", "ranks"),
    [("kill the run", 1), ("kill the rank", 1), ("stop", 1), ("kill the rank", 2), ("stop", 2)],
    ids=["kill the run", "kill the rank", "stop", "kill one of two ranks", "stop two ranks"],
)
def test_a_run_that_is_hit_in_the_middle_ends_with_the_same_outputs(folder, converted, deed, ranks):
    model, name = converted("fp8"), f"{deed} {ranks}".replace(" ", "-")
    calm = run(folder, model, f"calm-{name}", "resident", sampling=LONG)
    job = job_of(folder, model, name, "stream", sampling=LONG, cluster=WAVES | {"prefill_ranks": ranks})
    process = start("run", job)
    try:
        _wait_for_results(folder / name, process)
        if deed == "kill the rank":
            rank = next(child for child in _children(process.pid) if "batchinfer.rank.main" in _command(child))
            os.kill(rank, signal.SIGKILL)
        else:
            process.send_signal(signal.SIGKILL if deed == "kill the run" else signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert "Traceback" not in err
    assert process.returncode in ((0,) if deed == "kill the rank" else (-signal.SIGKILL, 75, 0))
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    assert output_bytes(folder / name) == calm


def test_a_file_that_ends_early_is_one_sentence_and_the_run_goes_on_when_it_is_whole_again(folder, converted):
    model = converted("float32")
    calm = run(folder, model, "calm-float32", "resident", sampling=LONG)
    job = job_of(folder, model, "damaged", "stream", sampling=LONG, cluster=WAVES)
    layer = model / "layer-00002.safetensors"
    content = layer.read_bytes()
    process = start("run", job)
    try:
        _wait_for_results(folder / "damaged", process)
        os.truncate(layer, 4096)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
        layer.write_bytes(content)
    assert process.returncode == 2, err
    (sentence,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert f"{layer} cannot be read: it ends after" in sentence
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    assert output_bytes(folder / "damaged") == calm


@pytest.fixture(scope="module")
def faulty_reads(tmp_path_factory):
    """A library to preload, see faulty_reads.c."""
    library = tmp_path_factory.mktemp("faulty") / "faulty_reads.so"
    compiler = shutil.which("cc") or shutil.which("g++")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-x", "c", FAULTY_READS, "-o", library], check=True)
    return library


@pytest.mark.parametrize(
    ("deed", "words"),
    [("EIO", "cannot be read: Input/output error"), ("torn", "it ends after"), ("short", None)],
    ids=["EIO", "torn", "short"],
)
def test_reads_that_fail_in_the_middle_are_one_sentence_and_short_ones_are_finished(
    folder, converted, faulty_reads, monkeypatch, deed, words
):
    model, name = converted("bfloat16"), f"reads-{deed}"
    calm = run(folder, model, f"calm-{deed}", "resident", sampling=LONG)
    job = job_of(folder, model, name, "stream", sampling=LONG, cluster=WAVES)
    layer = model / "layer-00002.safetensors"
    # it is read once in each sweep
    faulty = {"LD_PRELOAD": faulty_reads, "FAULTY_FILE": layer, "FAULTY_AFTER": 30, "FAULTY_DEED": deed}
    with monkeypatch.context() as of_process:
        for variable, value in faulty.items():
            of_process.setenv(variable, str(value))
        process = start("run", job)
    try:
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == (0 if words is None else 2), err
    sentences = [line for line in err.splitlines() if line.startswith("error: ")]
    if words is not None:
        (sentence,) = sentences
        assert str(layer) in sentence
        assert words in sentence
        assert "results are kept: run the same command to go on" in sentence
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    assert output_bytes(folder / name) == calm


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 1}, "set cluster.mode = 'colocated'"),
        ({"backend": "reference"}, "not for backend 'reference'"),
        ({"model": "plain"}, "run `batchinfer convert"),
    ],
)
def test_what_cannot_be_streamed_is_refused_by_the_plan(folder, converted, cluster, words):
    model = RANDOM_MODEL if cluster.pop("model", None) else converted("bfloat16")
    parts = {"model": {"path": str(model), "dtype": "bfloat16"}, "output": {"dir": "refused"}}
    job = write_job(folder, input={"files": ["plain/*"]}, cluster={"weights": "stream", **cluster}, **parts)
    ended = batchinfer("plan", job)
    assert ended.code == 2
    (sentence,) = (line for line in ended.err.splitlines() if line.startswith("error: "))
    assert sentence.startswith("error: cluster.weights is 'stream', but ")
    assert words in sentence
    assert not (folder / "refused" / "plan").exists()


def test_plan_and_run_say_what_streaming_takes(folder, converted):
    job = job_of(folder, converted("bfloat16"), "said", "stream", sampling=DRAWN)
    planned = batchinfer("plan", job)
    assert planned.code == 0
    layers = sum(path.stat().st_size for path in converted("bfloat16").glob("layer-*"))
    (line,) = (line for line in planned.err.splitlines() if "weights are streamed" in line)
    assert line.startswith(f"on this host weights are streamed: {layers / 1e9:.2f} GB per sweep, ")
    assert "20 requests at once, at most 12 sweeps: " in line
    assert "the longest answer (12 tokens) alone takes" in line
    ran = batchinfer("run", job).err
    assert "weights are streamed" in ran
    assert "CUDA" not in ran


def test_memory_beyond_what_is_free_is_refused(folder, converted):
    most = free_memory_bytes() * 2
    job = job_of(folder, converted("bfloat16"), "much", "stream", sampling=DRAWN, cluster={"memory_bytes": most})
    ended = batchinfer("run", job)
    assert ended.code == 2
    assert "cluster.memory_bytes is" in ended.err


def _wait_for_results(run, process):
    while process.poll() is None and not list(run.glob("units/*/*/*.parquet")):
        time.sleep(0.02)


def _wait_for_more_results(run, process):
    before = len(list(run.glob("units/*/*/*.parquet")))
    while process.poll() is None and len(list(run.glob("units/*/*/*.parquet"))) <= before:
        time.sleep(0.005)


def _children(pid):
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def _command(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()
