"""Jobs with a KV store on disk: the same outputs whatever it holds, nothing computed twice, no trouble ends a job."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchinfer.config import PAGE_TOKENS
from batchinfer.report.read import read_report
from support.jobs import answers, batchinfer, start, write_job, write_shard
from support.paths import RANDOM_MODEL, SAMPLE_MODEL

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
    assert "damaged" in batchinfer("report", run).out
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


def test_nothing_is_shared_with_other_code_of_the_model(job_folder, copied_store, tmp_path, monkeypatch):
    for package in ("batchinfer", "batchinfer_kernels"):
        source = Path(find_spec(package).origin).parent
        shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "batchinfer" / "model" / "moe.py", "a", encoding="utf-8") as file:
        file.write("# changed\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "other"
    job = write_job(
        job_folder.path,
        name="code.toml",
        output={"dir": str(run)},
        model={"path": str(RANDOM_MODEL), "dtype": "float32"},
        sampling={"max_tokens": 6},
        kv={"dir": str(copied_store), "persist": "all"},
    )
    running = start("run", job)
    _, err = running.communicate()
    assert running.returncode == 0, err
    assert read_report(run).values["disk_tokens"] == 0
    assert read_report(run).values["store_written_bytes"] > 0
    assert answers(run) == plain_answers(job_folder, RANDOM_MODEL)


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
