"""Whole jobs on the C++ operations, in every dtype: a row's output depends on the row alone."""

from __future__ import annotations

import functools
import json

import duckdb
import pytest
import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.config import load_model_config
from batchinfer_kernels.cpu import build
from support.jobs import answers, batchinfer, output_bytes, write_job, write_questions
from support.paths import RANDOM_MODEL

REASON = build.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no C++ operations on this machine: {REASON}")

DTYPES = ("float32", "bfloat16", "fp8", "int4")
CONFIG = load_model_config(RANDOM_MODEL)
FEW_PAGES = 9  # of a rank, where the largest request needs 6: two at a time at most

VARIANTS = {
    "small steps": {"prefill_tokens": 48, "decode_requests": 3},
    "tiny steps": {"prefill_tokens": 5, "decode_requests": 2},
    "two ranks": {"prefill_ranks": 2},
    "two ranks, prefill apart": {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 1},
    "four ranks, redundant experts": {"prefill_ranks": 4, "redundant_experts": 4, "overlap": False},
    "two micro-batches": {"prefill_ranks": 2, "overlap": True},
}
MORE = pytest.mark.slow  # what others show, too
ANOTHER = pytest.mark.all  # make test: another dtype
QUICK = ("float32", "bfloat16")  # in make test
OFTEN = {
    "float32": {"tiny steps", "two ranks"},
    "bfloat16": {"four ranks, redundant experts", "two micro-batches"},
    "fp8": {"two ranks, prefill apart"},
    "int4": {"small steps"},
}


def some_dtypes(*often):
    """All, of which only these are run often, and the first alone in `make test`."""
    marks = {dtype: (ANOTHER,) if place else () for place, dtype in enumerate(often)}
    return [pytest.param(dtype, marks=marks.get(dtype, MORE)) for dtype in DTYPES]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Gives a dtype's folder with prompts, and their answers from one rank with all requests at once."""

    @functools.cache
    def get(dtype):
        folder = tmp_path_factory.mktemp(dtype)
        write_questions(folder / "prompts", (12, 5, 9))
        run(folder, "one", dtype=dtype)
        return folder

    return get


def run(folder, name, *, dtype, cluster=None, **parts):
    job = write_job(
        folder,
        name=f"{name}.toml",
        output={"dir": name},
        model={"path": str(RANDOM_MODEL), "dtype": dtype},
        sampling={"max_tokens": 24, "ignore_eos": True, "logprobs": 2, "temperature": 0.7, "top_p": 0.9},
        cluster={"backend": "cpu", **(cluster or {})},
        **parts,
    )
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    return folder / name


def most_at_once(folder):
    """The most requests and the most pages that a decode step had."""
    steps = f"read_parquet('{folder}/stats/steps/*.parquet')"
    sql = f"SELECT max(num_requests), max(pages_used) FROM {steps} WHERE kind = 'decode'"
    return duckdb.execute(sql).fetchall()[0]


@pytest.mark.parametrize(
    ("dtype", "variant"),
    [
        pytest.param(dtype, variant, marks=MORE if variant not in OFTEN[dtype] else () if dtype in QUICK else ANOTHER)
        for dtype in DTYPES
        for variant in VARIANTS
    ],
)
def test_how_a_job_is_run_changes_no_byte(jobs, dtype, variant):
    folder = jobs(dtype)
    other = run(folder, variant.replace(" ", "-"), dtype=dtype, cluster=VARIANTS[variant])
    assert output_bytes(other) == output_bytes(folder / "one")


@pytest.mark.parametrize("dtype", some_dtypes("float32", "fp8"))
def test_requests_that_wait_for_pages_get_the_same_bytes(jobs, dtype):
    folder = jobs(dtype)
    item_bytes = 4 if dtype == "float32" else 2
    page_bytes = FEW_PAGES * PAGE_TOKENS * CONFIG.kv_bytes_per_token(item_bytes)
    tight = run(folder, "tight", dtype=dtype, cluster={"page_bytes": page_bytes})
    (most_tight, pages), (most_ample, _) = most_at_once(tight), most_at_once(folder / "one")
    assert pages <= FEW_PAGES
    assert most_tight < most_ample == 26  # they did wait
    assert output_bytes(tight) == output_bytes(folder / "one")


@pytest.mark.parametrize("dtype", some_dtypes("bfloat16", "int4"))
def test_a_store_changes_no_answer(jobs, dtype, tmp_path):
    folder = jobs(dtype)
    for state in ("cold", "warm"):
        done = run(folder, state, dtype=dtype, kv={"dir": str(tmp_path / "kv"), "persist": "all"})
        assert answers(done) == answers(folder / "one")
    assert hits(folder / "warm") > 0


def hits(folder):
    sql = "SELECT sum(hit_blocks)::INT AS hits FROM kv"
    return json.loads(batchinfer("report", folder, "--json", "--sql", sql).out)[0]["hits"]


def test_a_run_names_the_family_that_its_bits_belong_to(jobs):
    for dtype in DTYPES:
        state = json.loads((jobs(dtype) / "one" / "run.json").read_text())
        family = build.numerics(torch.float32 if dtype == "float32" else torch.bfloat16)
        products = {"fp8": ", 8-bit products", "int4": ", 8-bit products, 4-bit experts"}.get(dtype, "")
        assert state["numerics"] == family + products
        assert state["bit_equal"] is True


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=() if dtype in QUICK else ANOTHER) for dtype in DTYPES])
def test_no_operation_of_a_run_falls_back(jobs, dtype):
    sql = "SELECT sum(fallback_calls)::INT AS calls FROM steps"
    assert json.loads(batchinfer("report", jobs(dtype) / "one", "--json", "--sql", sql).out)[0]["calls"] == 0


@pytest.mark.all  # make test: no operation falls back, above
def test_each_dtype_is_another_computation(jobs):
    assert len({str(answers(jobs(dtype) / "one")) for dtype in DTYPES}) == len(DTYPES)


def test_a_store_is_not_shared_with_other_kernels(jobs, tmp_path):
    store = {"dir": str(tmp_path / "kv"), "persist": "all"}
    folder = jobs("bfloat16")
    run(folder, "cpu", dtype="bfloat16", kv=store)
    assert hits(run(folder, "reference", dtype="bfloat16", kv=store, cluster={"backend": "reference"})) == 0
