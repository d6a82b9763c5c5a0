"""Whole jobs on several rank processes: however the work is spread, the outputs are those of one rank, to the byte."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.config import load_model_config
from batchinfer.plan import packing
from support.checkpoints import make_checkpoint
from support.jobs import batchinfer, output_bytes, outputs, question, start, write_job, write_shard
from support.paths import RANDOM_MODEL, SAMPLE_MODEL, SAMPLE_PROMPTS

MODELS = ("sample", "random-v3", "random-v2")
LAYOUTS = {
    "1": {},
    "2": {"prefill_ranks": 2},
    "4": {"decode_ranks": 4},
    "1+1": {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 1},
    "1+2": {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 2},
    "1+3": {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 3},
    "2+1": {"mode": "disaggregated", "prefill_ranks": 2, "decode_ranks": 1},
    "2+2": {"mode": "disaggregated", "prefill_ranks": 2, "decode_ranks": 2},
}
SMALL = {"prefill_tokens": 50, "decode_requests": 3}  # prompts are cut, and requests wait for a place
# one row each in turn: greedy, drawn, done with its first token, two draws, ended by a string, greedy twice (of which
# one is a duplicate), two draws of one token
OVERRIDES: list[dict[str, Any] | None] = [
    None,
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 2},
    {"max_tokens": 1},
    {"temperature": 0.7, "top_k": 20, "n": 2, "ignore_eos": True},
    {"stop": ["e", " t", "3"]},
    {"n": 2, "logprobs": 0},
    {"temperature": 1.0, "n": 2, "max_tokens": 1, "logprobs": 1},
]
OVERRIDE_TYPE = pa.struct(
    [
        ("max_tokens", pa.int32()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),
        ("n", pa.int32()),
        ("ignore_eos", pa.bool_()),
        ("stop", pa.list_(pa.string())),
        ("logprobs", pa.int32()),
    ]
)


@dataclass(frozen=True)
class Case:
    """One way to run a model's job."""

    model: str
    ranks: str
    overlap: bool | str
    exchange: str = "auto"
    redundant_experts: int = 0
    spare_pages: int | None = (
        None  # in addition to the pages of the largest request, with SMALL; None: all useful pages
    )

    def __str__(self) -> str:
        parts = [self.model, self.ranks, self.exchange, f"overlap={self.overlap}"]
        parts += [f"redundant={self.redundant_experts}"] if self.redundant_experts else []
        parts += [f"spare={self.spare_pages}"] if self.is_small else []
        return "-".join(parts)

    @property
    def is_small(self) -> bool:
        return self.spare_pages is not None


SLOW = pytest.mark.slow  # what others show, too
MORE = pytest.mark.all  # make test: two ranks over gloo, and prefill apart from decode through shared memory
# every value of every option, not all their combinations; with the slow ones every value for every model
CASES = [
    pytest.param(Case("sample", "2", True), marks=MORE),
    pytest.param(Case("sample", "2", False, "gloo", redundant_experts=4, spare_pages=1), marks=SLOW),
    pytest.param(Case("sample", "4", "auto", spare_pages=1), marks=MORE),
    pytest.param(Case("sample", "2+2", True, "gloo", spare_pages=1), marks=MORE),
    pytest.param(Case("sample", "1+2", True), marks=SLOW),
    Case("random-v3", "2", True, "gloo", redundant_experts=2),
    pytest.param(Case("random-v3", "2", "auto", "gloo", spare_pages=0), marks=MORE),
    pytest.param(Case("random-v3", "4", False, redundant_experts=4), marks=SLOW),
    pytest.param(Case("random-v3", "2+2", True, spare_pages=1), marks=SLOW),
    Case("random-v3", "2+1", True, spare_pages=1),
    pytest.param(Case("random-v2", "2", False, spare_pages=1), marks=MORE),
    pytest.param(Case("random-v2", "2", "auto", "gloo"), marks=SLOW),
    pytest.param(Case("random-v2", "4", True, redundant_experts=8, spare_pages=1), marks=MORE),
    pytest.param(Case("random-v2", "2+2", "auto", "gloo", redundant_experts=2), marks=SLOW),
    pytest.param(Case("random-v2", "2+2", False, spare_pages=0), marks=SLOW),
]


@dataclass(frozen=True)
class Run:
    """A finished run folder."""

    root: Path

    def query(self, sql: str) -> list[dict[str, Any]]:
        return json.loads(batchinfer("report", self.root, "--json", "--sql", sql).out)

    def value(self, sql: str) -> Any:
        (row,) = self.query(sql)
        (value,) = row.values()
        return value

    def metrics(self) -> dict[str, Any]:
        return json.loads(batchinfer("report", self.root, "--json").out)

    def expert_tokens(self, phase: str) -> np.ndarray:
        """[layers * experts], added up over ranks."""
        counts = f"SELECT sum(tokens)::BIGINT AS tokens FROM experts WHERE phase = '{phase}'"
        rows = self.query(f"{counts} GROUP BY layer, expert ORDER BY layer, expert")
        return np.array([row["tokens"] for row in rows])


@dataclass(frozen=True)
class ModelJob:
    """A model's job in a separate folder, and its run on one rank."""

    folder: Path
    parts: dict[str, dict[str, Any]]
    reference: Run
    least_page_bytes: int
    page_bytes: int  # of one page

    def write(self, name: str, ranks: str = "1", **cluster: Any) -> Path:
        """The job file of one more run of the same job."""
        parts = {**self.parts, "output": {"dir": name}, "cluster": {**LAYOUTS[ranks], **cluster}}
        return write_job(self.folder, name=f"{name}.toml", **parts)

    def run(self, name: str, ranks: str, **cluster: Any) -> Run:
        ended = batchinfer("run", self.write(name, ranks, **cluster))
        assert ended.code == 0, ended.err
        return Run(self.folder / name)


def write_prompts(folder: Path, model: str) -> dict[str, Any]:
    """Shards with a column of sampling overrides; returns the input part of the job."""
    if model == "sample":
        parts = [pq.read_table(SAMPLE_PROMPTS / f"part-0000{part}.parquet") for part in (3, 1)]
        tables = [parts[0].slice(0, 16), parts[1].slice(0, 5)]
        shards = [{"id": table["id"], "messages": table["messages"]} for table in tables]
        keys: dict[str, Any] = {"id": "id", "messages": "messages", "prompt": None}
    else:
        numbers = [range(11), range(11, 14), range(14, 21)]
        shards = [{"id": [f"q{i}" for i in part], "prompt": [question(i) for i in part]} for part in numbers]
        keys = {"id": "id"}
    overrides = itertools.cycle(OVERRIDES)
    for index, columns in enumerate(shards):
        how = pa.array(list(itertools.islice(overrides, len(columns["id"]))), OVERRIDE_TYPE)
        write_shard(folder / "prompts" / f"part-{index}.parquet", {**columns, "how": how})
    return {**keys, "sampling": "how"}


def make_v2(folder: Path) -> Path:
    """A random DeepSeek-V2 model with the sample model's tokenizer; all its layers are mixtures."""
    make_checkpoint(folder, "v2-groups", vocab_size=1024, max_position_embeddings=2048, first_k_dense_replace=0)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(SAMPLE_MODEL / name, folder)
    return folder


@pytest.fixture(scope="module")
def job_of(tmp_path_factory):
    """model -> its job, computed on one rank when first asked for."""
    made: dict[str, ModelJob] = {}

    def get(model: str) -> ModelJob:
        if model not in made:
            folder = tmp_path_factory.mktemp(model)
            path = {"sample": SAMPLE_MODEL, "random-v3": RANDOM_MODEL}.get(model) or make_v2(folder / "model")
            parts = {
                "input": write_prompts(folder, model),
                "model": {"path": str(path), "dtype": "float32"},
                "sampling": {"max_tokens": 12, "seed": 4},
            }
            refused = batchinfer("plan", write_job(folder, **parts, cluster={"page_bytes": 1}))
            least = int(re.search(r"at least (\d+)", refused.err)[1])
            page = PAGE_TOKENS * load_model_config(path).kv_bytes_per_token(4)
            job = ModelJob(folder, parts, Run(folder / "one"), least, page)
            job.run("one", "1")
            made[model] = job
        return made[model]

    return get


@pytest.fixture(scope="module", params=CASES, ids=str)
def ran(request, job_of):
    """A case, its job and the finished run."""
    case = request.param
    job = job_of(case.model)
    small = SMALL | {"page_bytes": job.least_page_bytes + case.spare_pages * job.page_bytes} if case.is_small else {}
    run = job.run(
        str(case),
        case.ranks,
        overlap=case.overlap,
        exchange=case.exchange,
        redundant_experts=case.redundant_experts,
        **small,
    )
    return case, job, run


@pytest.fixture
def mark(monkeypatch):
    """A text in the environment of every process that this test starts, however deep."""
    text = f"BATCHINFER_TEST_{uuid.uuid4().hex}"
    monkeypatch.setenv(text, "1")
    return text


def processes_with(mark: str) -> list[Path]:
    """Folders in /proc of the processes that are there now."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(folder)
    return found


def kv_transfers(mark: str) -> dict[int, int]:
    """Return the bytes of each KV transfer that these processes hold, by inode, one process after the other."""
    transfers = {}
    for folder in processes_with(mark):
        with contextlib.suppress(OSError):
            for descriptor in (folder / "fd").iterdir():
                if "batchinfer-kv" in os.readlink(descriptor):
                    status = os.stat(descriptor)
                    transfers[status.st_ino] = status.st_size
    return transfers


def kv_under_way(mark: str) -> int:
    """Return the bytes of the KV transfers that were held at one moment: those that two looks in a row both saw."""
    first, second = kv_transfers(mark), kv_transfers(mark)
    return sum(size for inode, size in first.items() if inode in second)


def refused(*arguments: str | Path) -> str:
    """Run a command that must end with 2 and one sentence; returns it."""
    process = start(*arguments)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    *progress, sentence = err.strip().splitlines()
    assert all(re.match("(planning|loading|to come|prefill|decode|warning): ", line) for line in progress), err
    assert sentence.startswith("error: ")
    return sentence


def prefill_tokens(run: Run) -> tuple[int, int, int]:
    """Tokens that prefill steps ran, how many of them some rank had to run, and how many ran again, short of pages."""
    computed = run.value("SELECT sum(new_tokens)::BIGINT FROM steps WHERE kind = 'prefill'")
    # the last token of a prompt that was run before runs again, to give the logits of its second draw
    repeats = run.value("SELECT count(*) FROM requests WHERE sample > 0 AND cached_duplicate_tokens = 0")
    assert repeats > 0
    metrics = run.metrics()
    needed = run.value("SELECT distinct_tokens FROM run") + repeats + metrics["replicated_tokens"]
    assert metrics["wasted_tokens"] == 0
    return computed, needed, metrics["recomputed_tokens"]


@pytest.mark.parametrize("model", MODELS)
def test_the_job_holds_every_way_in_which_a_request_can_end(job_of, model):
    rows = [row for shard in outputs(job_of(model).reference.root).values() for row in shard]
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    assert {row["completion_tokens"] for row in rows} > {1, 12}
    assert {row["stop_reason"] for row in rows} & {"e", " t", "3"}
    assert {None if row["logprobs"] is None else len(row["logprobs"][0]["top"]) for row in rows} == {None, 0, 1, 2}
    assert job_of(model).reference.value("SELECT sum(cached_duplicate_tokens)::BIGINT FROM requests") > 0


def test_outputs_equal_those_of_one_rank(ran):
    _, job, run = ran
    assert output_bytes(run.root) == output_bytes(job.reference.root)


def test_every_prefix_is_computed_once_by_each_rank_that_needs_it(ran):
    case, _, run = ran
    computed, needed, recomputed = prefill_tokens(run)
    assert computed == needed + recomputed
    # with no page to spare a prompt cannot be copied from one that it branches from inside a page
    assert recomputed == 0 or case.spare_pages == 0
    assert (run.metrics()["replicated_tokens"] > 0) == (not case.ranks.startswith("1"))


def test_steps_keep_to_the_jobs_limits(ran):
    case, job, run = ran
    sql = "SELECT max(new_tokens) AS tokens, max(num_requests) AS requests, max(pages_used) AS pages FROM steps"
    (largest,) = run.query(f"{sql} WHERE kind = 'prefill'")
    (most,) = run.query(f"{sql} WHERE kind = 'decode'")
    if case.is_small:
        assert largest["tokens"] == SMALL["prefill_tokens"]
        assert most["requests"] <= SMALL["decode_requests"]
        num_pages = job.least_page_bytes // job.page_bytes + case.spare_pages
        assert max(largest["pages"], most["pages"]) <= num_pages
    pairs = {row["kind"] for row in run.query("SELECT DISTINCT kind FROM steps WHERE micro_batches = 2")}
    has_peers = {"prefill": not case.ranks.startswith("1+"), "decode": not case.ranks.endswith("+1")}
    possible = {kind for kind in has_peers if has_peers[kind] and case.overlap is not False}
    if case.overlap == "auto":  # by what the ranks measure; in shared memory there is nothing to hide
        assert pairs <= (possible if case.exchange == "gloo" else set())
    else:  # with few pages no rank may ever have two requests to decode
        assert pairs == possible or (case.is_small and pairs == possible - {"decode"})
    shares = {kind: run.metrics()[f"overlap_{kind}"] for kind in has_peers}
    assert {kind for kind in has_peers if shares[kind] is not None} == {kind for kind in has_peers if has_peers[kind]}
    assert {kind for kind in has_peers if shares[kind]} == pairs


def test_every_rank_takes_part_and_is_in_the_report(ran):
    case, _, run = ran
    sizes = [int(size) for size in case.ranks.split("+")]
    roles = ["prefill + decode"] * sizes[0] if len(sizes) == 1 else ["prefill"] * sizes[0] + ["decode"] * sizes[1]
    counts = run.query("SELECT rank, kind, count(*) AS steps FROM steps GROUP BY ALL ORDER BY rank, kind DESC")
    expected = [(rank, kind) for rank, role in enumerate(roles) for kind in ("prefill", "decode") if kind in role]
    assert [(row["rank"], row["kind"]) for row in counts] == expected
    for kind in ("prefill", "decode"):
        assert len({row["steps"] for row in counts if row["kind"] == kind}) == 1, "a group steps together"
    panel = batchinfer("report", run.root).out
    for rank, role in enumerate(roles):
        assert f"  rank {rank}  {role} " in panel
    assert max(map(len, panel.splitlines())) <= 80


def test_the_share_of_hidden_communication_is_known_where_there_is_some(ran):
    _, job, run = ran
    assert 0 <= run.metrics()["hidden_comm_share"] <= 1
    assert job.reference.metrics()["hidden_comm_share"] is None
    assert (
        run.value("SELECT count(*) FROM steps WHERE hidden_comm_s + wait_comm_s > comm_s + 1e-9 OR comm_s > duration_s")
        == 0
    )


def test_experts_get_the_tokens_they_get_on_one_rank(ran):
    _, job, run = ran
    assert (run.expert_tokens("decode") == job.reference.expert_tokens("decode")).all()
    more = run.expert_tokens("prefill") - job.reference.expert_tokens("prefill")
    assert (more >= 0).all()
    config = load_model_config(Path(job.parts["model"]["path"]))
    metrics = run.metrics()
    computed_again = metrics["replicated_tokens"] + metrics["recomputed_tokens"]
    # the last layer finishes only the rows whose logits are wanted, and those of a prompt are computed once
    assert more.sum() == computed_again * (config.num_moe_layers - 1) * config.num_experts_per_tok
    rows = run.value("SELECT sum(expert_rows)::BIGINT FROM steps")
    assert rows == run.value("SELECT sum(tokens)::BIGINT FROM experts")


@pytest.mark.all  # make test: of one unit, above
@pytest.mark.parametrize("ranks", [pytest.param("2", marks=SLOW), "2+2"])
def test_a_plan_of_many_units_computes_no_prefix_more_often(job_of, monkeypatch, ranks):
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 100)
    job = job_of("random-v3")
    run = job.run(f"units-{ranks}", ranks, decode_requests=4)
    assert run.value("SELECT count(*) FROM units") > 5
    assert output_bytes(run.root) == output_bytes(job.reference.root)
    computed, needed, recomputed = prefill_tokens(run)
    assert (computed, recomputed) == (needed, 0)


def test_kv_on_its_way_to_decode_ranks_is_no_more_than_their_pages(tmp_path, mark):
    # all prompts are one long prefix and a few tokens: all fit into one prefill step, but each travels whole
    rng = np.random.default_rng(0)
    prefix = rng.integers(8, 900, 5 * PAGE_TOKENS)
    prompts = [np.concatenate([prefix, rng.integers(8, 900, 3)]) for _ in range(50)]
    write_shard(tmp_path / "prompts" / "a.parquet", {"token_ids": pa.array(prompts, pa.list_(pa.int64()))})
    prompt_bytes = 6 * PAGE_TOKENS * load_model_config(RANDOM_MODEL).kv_bytes_per_token(4)
    cluster = LAYOUTS["1+2"] | {"page_bytes": 3 * prompt_bytes}
    job = write_job(tmp_path, input={"prompt": None, "token_ids": "token_ids"}, cluster=cluster)
    process = start("run", job)
    most_bytes = 0
    while process.poll() is None:
        most_bytes = max(most_bytes, kv_under_way(mark))
        time.sleep(0.002)
    assert process.returncode == 0, process.communicate()[1]
    # each transfer has a header in addition to its pages
    assert prompt_bytes <= most_bytes <= 2 * 3 * prompt_bytes * 1.01


@pytest.mark.parametrize("ranks", ["2", pytest.param("2+2", marks=SLOW)])
def test_a_request_beyond_the_page_budget_is_refused_and_leaves_no_process(job_of, mark, ranks):
    job = job_of("random-v3")
    too_small = f"cluster.page_bytes={job.least_page_bytes - 1}"
    path = job.write(f"budget-{ranks}", ranks)
    assert "raise it to at least" in refused("run", path, "--set", too_small)
    # a budget that is made smaller after planning: only the ranks see it
    assert batchinfer("plan", path).code == 0
    assert "lower max_tokens" in refused("work", path, "--set", too_small)
    assert processes_with(mark) == []


def test_experts_that_do_not_spread_evenly_are_refused_with_a_remedy_that_works(job_of, mark, monkeypatch):
    job = job_of("random-v2")
    path = job.write("uneven", "1+3")
    remedy = re.search(r"cluster\.redundant_experts = \d+", refused("run", path))[0]
    assert batchinfer("plan", path, "--set", remedy).code == 0
    # planned with the remedy and worked on without it: the ranks find out
    assert remedy in refused("work", path)
    assert processes_with(mark) == []
    monkeypatch.delenv(mark)
    ended = batchinfer("run", path, "--set", remedy)
    assert ended.code == 0, ended.err
    assert output_bytes(job.folder / "uneven") == output_bytes(job.reference.root)


def test_an_exchange_that_needs_gpus_is_refused_without_one(job_of, mark):
    path = job_of("random-v3").write("nccl", "2", exchange="nccl")
    assert "use 'auto'" in refused("run", path)
    # a plan may be for another machine
    assert batchinfer("plan", path).code == 0
    assert "use 'auto'" in refused("work", path)
    assert processes_with(mark) == []


def test_two_jobs_at_once_on_one_machine(job_of, mark):
    before = set(os.listdir("/dev/shm"))
    jobs = {"2": job_of("random-v3"), "1+1": job_of("random-v2")}
    running = {ranks: start("run", job.write(f"beside-{ranks}", ranks)) for ranks, job in jobs.items()}
    for ranks, process in running.items():
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert output_bytes(jobs[ranks].folder / f"beside-{ranks}") == output_bytes(jobs[ranks].reference.root)
    assert processes_with(mark) == []
    # others on this machine may have something there for a moment
    deadline = time.monotonic() + 10
    while set(os.listdir("/dev/shm")) - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert set(os.listdir("/dev/shm")) <= before
