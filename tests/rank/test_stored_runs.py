"""Jobs with a KV store on disk: the same outputs whatever it holds, nothing computed twice, no trouble ends a job."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchinfer.config import PAGE_TOKENS
from batchinfer.report.read import read_report
from support.faults import descendants, run_while_killing, wait_until
from support.jobs import answers, batchinfer, start, write_job, write_shard
from support.paths import RANDOM_MODEL, SAMPLE_MODEL
from support.small_disks import remount

NUM_ROWS = 24
LAYOUTS = {
    "1": {},
    "2": {"prefill_ranks": 2},
    "1+1": {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 1},
}
SYSTEMS = ["You are a careful clerk who reads each line twice. " * 6, "Say what it costs. " * 20]


@pytest.fixture(scope="module")
def job_folder(tmp_path_factory):
    """A folder with prompts of two instructions, and the outputs without a store by model."""
    folder = tmp_path_factory.mktemp("stored")
    rng = random.Random(1)
    texts = [" ".join(f"item {rng.randrange(1000)}" for _ in range(rng.randrange(10, 60))) for _ in range(NUM_ROWS)]
    prompts = [f"{SYSTEMS[row % 2]}Row {row}: {text}." for row, text in enumerate(texts)]
    rng.shuffle(prompts)
    write_shard(folder / "prompts" / "part-0.parquet", {"id": list(range(NUM_ROWS)), "prompt": prompts})
    return SimpleNamespace(path=folder, plain={})


def run_job(folder: Path, name: str, *, store: Path | None, model: Path = RANDOM_MODEL, layout: str = "1", **kv):
    """Run the job; returns how it ended and its run folder."""
    job = write_job(
        folder,
        name=f"{name}.toml",
        output={"dir": name},
        model={"path": str(model), "dtype": "float32"},
        cluster=LAYOUTS[layout],
        sampling={"max_tokens": 6},
        kv={} if store is None else {"dir": str(store), **kv},
    )
    shutil.rmtree(folder / name, ignore_errors=True)
    return batchinfer("run", job), folder / name


@pytest.fixture(scope="module")
def filled(job_folder, tmp_path_factory):
    """A store that holds all blocks of the job, written by a run on one rank; tests take copies of it."""
    store = tmp_path_factory.mktemp("filled") / "store"
    ended, run = run_job(job_folder.path, "filled", store=store, persist="all")
    assert ended.code == 0, ended.err
    return SimpleNamespace(store=store, run=run)


@pytest.fixture
def copied_store(filled, tmp_path):
    """A copy of the filled store."""
    return Path(shutil.copytree(filled.store, tmp_path / "store"))


def prefill_tokens(run: Path) -> int:
    """Prompt tokens run through the model."""
    steps = pq.read_table(run / "stats" / "steps").to_pylist()
    return sum(step["new_tokens"] for step in steps if step["kind"] == "prefill")


def plain_answers(job_folder, model: Path) -> list:
    """The answers of a run without a store, made once for each model."""
    if model not in job_folder.plain:
        ended, run = run_job(job_folder.path, f"plain-{model.name}", store=None, model=model)
        assert ended.code == 0, ended.err
        job_folder.plain[model] = answers(run)
    return job_folder.plain[model]


def accounts_balance(run: Path) -> None:
    """Every prompt token is computed or has a source, row by row; what was run is what the rows say."""
    rows = pq.read_table(run / "stats" / "requests.parquet").to_pylist()
    sources = ("cached_memory_tokens", "cached_disk_tokens", "cached_duplicate_tokens")
    computed = 0
    for row in rows:
        cached = [row[name] for name in sources]
        assert min(cached) >= 0
        assert sum(cached) < row["prompt_tokens"] or row["cached_duplicate_tokens"]
        if row["generated_tokens"]:
            computed += row["prompt_tokens"] - sum(cached)
    metrics = read_report(run).values
    assert prefill_tokens(run) == computed + metrics["replicated_tokens"]
    assert metrics["wasted_tokens"] == 0


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (SAMPLE_MODEL, "1"),
        pytest.param(RANDOM_MODEL, "2", marks=pytest.mark.all),
        pytest.param(RANDOM_MODEL, "1+1", marks=pytest.mark.slow),
    ],
)
def test_cold_warm_and_half_evicted_stores_give_the_outputs_of_none(job_folder, tmp_path, model, layout):
    plain, store = plain_answers(job_folder, model), tmp_path / "store"
    found = {}
    # a store that is half evicted is no matter of ranks
    for state in ("cold", "warm", "half") if layout == "1" else ("cold", "warm"):
        if state == "half":
            held = json.loads(batchinfer("kv", "stat", store, "--json").out)["bytes"]
            assert batchinfer("kv", "gc", store, "--max-bytes", held // 2).code == 0
        name = f"{state}-{model.name}-{layout}"
        ended, run = run_job(job_folder.path, name, store=store, model=model, layout=layout, persist="all")
        assert ended.code == 0, ended.err
        assert answers(run) == plain
        accounts_balance(run)
        found[state] = (prefill_tokens(run), read_report(run).values)
    lengths = [row["prompt_tokens"] for row in plain]
    # whole blocks come from the disk, less the last token of a prompt that ends with one: it has to run
    beyond_blocks = sum((length - 1) % PAGE_TOKENS + 1 for length in lengths)
    cold, warm = found["cold"], found["warm"]
    assert cold[1]["disk_tokens"] == 0
    assert cold[1]["store_written_bytes"] == warm[1]["store_read_bytes"] > 0
    assert warm[0] <= beyond_blocks < cold[0]
    assert warm[1]["disk_tokens"] >= cold[0] - cold[1]["replicated_tokens"] - beyond_blocks
    assert warm[1]["store_written_bytes"] == 0
    assert "half" not in found or warm[0] < found["half"][0] < cold[0]
    for _, metrics in found.values():
        assert metrics["cached_tokens"] == metrics["optimal_cached_tokens"]


@pytest.mark.all  # make test: tests/kv_store/test_kv_blocks.py, tests/rank/test_stored_prefixes.py
def test_shared_prefixes_alone_are_kept_when_asked_for(job_folder, tmp_path):
    store = tmp_path / "store"
    runs = [run_job(job_folder.path, f"shared-{turn}", store=store, persist="shared")[1] for turn in range(2)]
    first, second = (read_report(run).values for run in runs)
    assert answers(runs[1]) == plain_answers(job_folder, RANDOM_MODEL)
    held = json.loads(batchinfer("kv", "stat", store, "--json").out)
    # the blocks that several prompts begin with
    prompts = [tuple(row["token_ids"]) for row in pq.read_table(runs[0] / "plan" / "requests.parquet").to_pylist()]
    starts = Counter(p[:end] for p in prompts for end in range(PAGE_TOKENS, len(p) + 1, PAGE_TOKENS))
    num_shared = sum(count > 1 for count in starts.values())
    assert 2 <= num_shared == held["blocks"] < len(starts)
    assert first["store_written_bytes"] == second["store_read_bytes"] > 0
    # a token with which all prompts begin is in memory by then
    assert num_shared * PAGE_TOKENS - len(SYSTEMS) < second["disk_tokens"] <= num_shared * PAGE_TOKENS
    nothing, run = run_job(job_folder.path, "none", store=tmp_path / "unused", persist="none")
    assert nothing.code == 0, nothing.err
    assert read_report(run).values["store_written_bytes"] == 0


@pytest.mark.all  # make test: tests/report/test_report.py
def test_the_report_says_what_is_written_where_nothing_was(tmp_path):
    """Prompts shorter than a block; longer ones; and the same once more, which are in the store by then."""
    note = "only new, whole blocks (kv.block_tokens), by kv.persist"
    for name, prompts in (("short", ["Two plus two is"]), ("long", ["word " * 100]), ("again", ["word " * 100])):
        write_shard(tmp_path / name / "a.parquet", {"prompt": prompts})
        parts = {"input": {"files": [f"{name}/*.parquet"]}, "output": {"dir": f"{name}/run"}}
        job = write_job(tmp_path, kv={"dir": str(tmp_path / "kv"), "persist": "all"}, **parts)
        shown = " ".join(batchinfer("run", job, "--verbose").out.split())
        assert "KV store read" in shown
        assert (note in shown) == (name != "long")


def test_prompts_that_a_killed_run_had_computed_are_read_by_the_next_one(job_folder, tmp_path):
    """The store belongs to no run: it keeps computed blocks after a run was killed."""
    store = tmp_path / "store"
    ended, run = run_job(job_folder.path, "first", store=store, persist="all")
    assert ended.code == 0, ended.err
    for lost in ("units", "done", "outputs"):
        shutil.rmtree(run / lost)
    again = batchinfer("run", job_folder.path / "first.toml")
    assert again.code == 0, again.err
    assert answers(run) == plain_answers(job_folder, RANDOM_MODEL)
    values = read_report(run).values
    assert values["store_read_bytes"] > 0 == values["disk_tokens"], "read, but it is what this run has computed itself"


@pytest.mark.all  # make test: test_prompts_that_a_killed_run_had_computed_...
def test_killed_ranks_leave_a_store_that_serves_only_what_is_whole(job_folder, tmp_path):
    job = write_job(
        job_folder.path,
        name="killed.toml",
        cluster=LAYOUTS["2"],
        sampling={"max_tokens": 6},
        kv={"dir": str(tmp_path / "store"), "persist": "all"},
    )
    killed, calm = tmp_path / "killed", tmp_path / "calm"
    first, _ = run_while_killing(job, killed, (), num_kills=2, seed=0)
    second = batchinfer("run", job, "--set", f"output.dir={calm}")
    for run, ended in ((killed, first), (calm, second)):
        assert ended.code == 0, ended.err
        assert answers(run) == plain_answers(job_folder, RANDOM_MODEL)
    verified = batchinfer("kv", "verify", tmp_path / "store")
    assert verified.code == 0, verified.out


@pytest.mark.all  # make test: test_prompts_that_a_killed_run_had_computed_...
def test_what_a_killed_session_had_stored_was_not_there_before(job_folder, tmp_path):
    """Tokens that the run has computed itself are needed, not found on disk; some rows are done by then."""
    how = [{"max_tokens": 2 if row % 3 else 120} for row in range(NUM_ROWS)]
    prompts = pq.read_table(job_folder.path / "prompts" / "part-0.parquet")["prompt"].to_pylist()
    write_shard(tmp_path / "prompts" / "part-0.parquet", {"prompt": prompts, "how": how})
    cluster = {"backend": "reference", "commit_seconds": 0.05, "decode_requests": NUM_ROWS}
    jobs = [
        write_job(
            tmp_path,
            name=f"{name}.toml",
            input={"sampling": "how"},
            output={"dir": name},
            cluster=cluster,
            sampling={"ignore_eos": True},
            kv={"dir": str(tmp_path / f"store-{name}"), "persist": "all", "reuse": "always"},
        )
        for name in ("calm", "killed")
    ]
    assert batchinfer("run", jobs[0]).code == 0
    process = start("run", jobs[1])
    wait_until(lambda: list((tmp_path / "killed").glob("units/*/[0-9]*/part-*.parquet")), process)
    for pid in (process.pid, *descendants(process.pid)):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    ended = batchinfer("run", jobs[1])
    assert ended.code == 0, ended.err
    calm, killed = (read_report(tmp_path / name).values for name in ("calm", "killed"))
    assert killed["store_read_bytes"] > 0 == calm["store_read_bytes"]
    assert (killed["disk_tokens"], killed["optimal_cached_tokens"]) == (0, calm["optimal_cached_tokens"])
    assert killed["needed_tokens"] == calm["needed_tokens"]
    assert calm["wasted_prompt_tokens"] == 0
    assert killed["wasted_prompt_tokens"] < killed["needed_tokens"] / 2
    # another run of the same job finds all of it
    again = batchinfer("run", jobs[1], "--set", "output.dir=again")
    assert again.code == 0, again.err
    assert read_report(tmp_path / "again").values["disk_tokens"] > calm["needed_tokens"] / 2


@pytest.mark.all  # make test: test_figures_of_runs[killed]
def test_what_rows_that_are_done_share_with_those_that_go_on_counts_once(filled, tmp_path):
    """The rows that are dealt first are done first, and count the instructions that the others begin with."""
    prompts = filled.run.parent / "prompts" / "part-0.parquet"
    (tmp_path / "prompts").mkdir()
    shutil.copy(prompts, tmp_path / "prompts")
    figures = ("memory_tokens", "disk_tokens", "optimal_cached_tokens", "needed_tokens")
    for held in ("nothing", "all"):
        found = []
        for ending in ("calm", "killed"):
            run, store = tmp_path / f"{held}-{ending}", tmp_path / f"store-{held}-{ending}"
            if held == "all":
                shutil.copytree(filled.store, store)
            job = write_job(
                tmp_path,
                name=f"{run.name}.toml",
                output={"dir": run.name},
                cluster={"commit_seconds": 0.05, "decode_requests": 2},
                sampling={"max_tokens": 20, "ignore_eos": True},
                kv={"dir": str(store), "persist": "all", "reuse": "always"},
            )
            if ending == "killed":
                process = start("run", job)
                wait_until(lambda run=run: list(run.glob("units/*/[0-9]*/part-*.parquet")), process)
                for pid in (process.pid, *descendants(process.pid)):
                    os.kill(pid, signal.SIGKILL)
                process.communicate()
            ended = batchinfer("run", job)
            assert ended.code == 0, ended.err
            found.append(read_report(run).values)
        calm, killed = found
        assert {name: killed[name] for name in figures} == {name: calm[name] for name in figures}
        assert (calm["disk_tokens"] > 0) == (held == "all")


def test_damaged_files_are_never_served(job_folder, copied_store):
    store, rng = copied_store, random.Random(4)
    files = sorted(store.glob("models/*/*/*.kv"))
    harmed = rng.sample(files, len(files) // 2)
    assert len(harmed) >= 3
    for file, harm in zip(harmed, itertools.cycle(("flip", "truncate", "empty")), strict=False):
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes({"flip": content, "truncate": content[: len(content) // 2], "empty": b""}[harm])
    ended, run = run_job(job_folder.path, "harmed", store=store, persist="all")
    assert ended.code == 0, ended.err
    assert answers(run) == plain_answers(job_folder, RANDOM_MODEL)
    accounts_balance(run)
    details = read_report(run)
    assert 0 < details.values["store_damaged_files"] <= len(harmed)
    assert "damaged" in ended.out
    # what was computed again is good again
    ended, run = run_job(job_folder.path, "healed", store=store, persist="all")
    assert read_report(run).values["store_damaged_files"] + details.values["store_damaged_files"] <= len(harmed)
    assert answers(run) == plain_answers(job_folder, RANDOM_MODEL)


# of other salts, too, in test_kv_damage; of blocks of all lengths in test_stored_prefixes
@pytest.mark.parametrize(
    "other", ["config", *(pytest.param(o, marks=pytest.mark.slow) for o in ("salt", "block_tokens"))]
)
def test_nothing_is_shared_with_another_model_or_salt(job_folder, copied_store, tmp_path, other):
    store, model, kv = copied_store, RANDOM_MODEL, {}
    if other == "config":
        model = tmp_path / "model"
        shutil.copytree(RANDOM_MODEL, model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    else:
        kv = {"salt": {"salt": "x"}, "block_tokens": {"block_tokens": 128}}[other]
    ended, run = run_job(job_folder.path, "other", store=store, model=model, persist="all", **kv)
    assert ended.code == 0, ended.err
    assert read_report(run).values["disk_tokens"] == 0
    assert read_report(run).values["store_written_bytes"] > 0


@pytest.mark.all  # make test: test_weights_digest
def test_a_store_notices_a_change_of_one_weight_that_the_fingerprint_does_not_sample(job_folder, tmp_path):
    """A run's fingerprint samples the weights; a store outlives many versions of a model and must not."""
    store, model = tmp_path / "store", tmp_path / "model"
    shutil.copytree(RANDOM_MODEL, model)
    _, run = run_job(job_folder.path, "before", store=store, model=model, persist="all")
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][5:200] += 1  # outside the sampled first bytes of each quarter
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    ended, changed = run_job(job_folder.path, "after", store=store, model=model, persist="all")
    assert ended.code == 0, ended.err
    digests = [
        json.loads((folder / "run.json").read_text())["fingerprint"]["model.weights"] for folder in (run, changed)
    ]
    assert digests[0] == digests[1], "otherwise this says nothing"
    assert read_report(changed).values["disk_tokens"] == 0
    plain = run_job(job_folder.path, "afresh", store=None, model=model)[1]
    assert answers(changed) == answers(plain) != answers(run)


@pytest.mark.parametrize(
    ("dtype", "backend"), [("bfloat16", "auto"), pytest.param("float32", "reference", marks=pytest.mark.all)]
)
def test_a_prompt_that_is_not_finite_harms_no_prompt_that_begins_like_it(tmp_path, dtype, backend):
    """The prompt runs first, and a page that it shares is finite only in part; a later job reads its blocks."""
    shutil.copytree(RANDOM_MODEL, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.embed_tokens.weight"][3] = torch.nan
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    shared = [10 + place % 40 for place in range(100)]
    good = [[*shared, 60 + row, *range(20, 60)] for row in range(4)]
    bad = [*shared, 3, *range(20, 60)]

    def run(name, prompts, **kv):
        write_shard(tmp_path / name / "a.parquet", {"prompt": prompts})
        job = write_job(
            tmp_path,
            name=f"{name}.toml",
            input={"files": [f"{name}/*.parquet"], "prompt": None, "token_ids": "prompt"},
            output={"dir": f"runs/{name}"},
            model={"path": "model", "dtype": dtype},
            cluster={"backend": backend},
            sampling={"max_tokens": 4},
            kv=kv,
        )
        return batchinfer("run", job).code, answers(tmp_path / "runs" / name)

    store = {"dir": str(tmp_path / "store"), "persist": "all", "reuse": "always"}
    _, alone = run("alone", good)
    code, beside = run("beside", [*good, bad], **store)
    assert code == 3
    assert beside[:-1] == alone
    assert "not finite" in str(beside[-1])
    assert run("later", good, **store) == (0, alone)


# ---- trouble with the disk


def warnings(ended) -> list[str]:
    """Return the warnings but that of `plan` about plain prompts, which go to the model as they are here."""
    found = [line for line in ended.err.splitlines() if line.startswith("warning: ")]
    return [line for line in found if "has a chat template" not in line]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("not allowed to mount a tmpfs here, so a full disk cannot be tried")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.all  # make test: tests/kv_store/test_kv_failures.py
@pytest.mark.parametrize("layout", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_a_full_disk_is_told_once_and_the_job_goes_on(job_folder, small_disk, layout):
    ended, run = run_job(job_folder.path, "full", store=small_disk / "store", layout=layout, persist="all")
    assert ended.code == 0, ended.err
    assert answers(run) == plain_answers(job_folder, RANDOM_MODEL)
    told = [line for line in warnings(ended) if "No space left" in line]
    assert len(told) == 1
    assert "what it holds is still read; free space there or set a lower kv.max_bytes" in told[0]


@pytest.mark.all  # make test: tests/kv_store/test_kv_failures.py
def test_a_folder_that_cannot_be_written_is_told_once(job_folder, small_disk):
    remount(small_disk, "ro")
    ended, run = run_job(job_folder.path, "readonly", store=small_disk / "store", layout="2", persist="all")
    assert ended.code == 0, ended.err
    assert answers(run) == plain_answers(job_folder, RANDOM_MODEL)
    assert len(warnings(ended)) == 1
    assert "Read-only file system" in warnings(ended)[0]


@pytest.mark.all  # make test: tests/kv_store/test_kv_failures.py
def test_a_file_in_place_of_the_folder_is_told_once(job_folder, tmp_path):
    (tmp_path / "store").write_text("not a folder")
    ended, run = run_job(job_folder.path, "file", store=tmp_path / "store", persist="all")
    assert ended.code == 0, ended.err
    assert answers(run) == plain_answers(job_folder, RANDOM_MODEL)
    assert len(warnings(ended)) == 1
    assert str(tmp_path / "store") in warnings(ended)[0]


@pytest.mark.all  # make test: test_kv_failures
def test_a_store_that_is_deleted_while_it_is_used_is_told_at_most_once_per_failure(job_folder, copied_store):
    store = copied_store
    job = write_job(
        job_folder.path,
        name="cold.toml",
        output={"dir": "cold"},
        sampling={"max_tokens": 6},
        kv={"dir": str(store), "persist": "all"},
    )
    assert batchinfer("plan", job).code == 0
    # as soon as a rank has opened the store: its claims file appears
    script = f"until ls {store}/claims/* >/dev/null 2>&1; do sleep 0.01; done; rm -rf {store}"
    remover = subprocess.Popen(["bash", "-c", script])
    ended = batchinfer("run", job)
    remover.kill() if remover.poll() is None else None
    assert ended.code == 0, ended.err
    assert answers(job_folder.path / "cold") == plain_answers(job_folder, RANDOM_MODEL)
    assert len(warnings(ended)) <= 1


@pytest.mark.all  # make test: tests/kv_store/test_kv_trust.py
def test_the_files_are_the_owner_s_alone(filled):
    for folder, _, names in os.walk(filled.store):
        assert os.stat(folder).st_mode & 0o077 == 0
        assert all((Path(folder) / name).stat().st_mode & 0o077 == 0 for name in names)
