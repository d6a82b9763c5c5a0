"""Whole jobs in bfloat16 and with 8-bit products on the C++ operations: a row's output depends on the row alone."""

from __future__ import annotations

import json

import pytest

from batchinfer_kernels.cpu import build
from jobs import answers, batchinfer, output_bytes, write_job, write_questions
from paths import DEMO_JOB, RANDOM_MODEL

REASON = build.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no C++ operations on this machine: {REASON}")

VARIANTS = {
    "small steps": {"prefill_tokens": 48, "decode_requests": 3},
    "few requests at once": {"decode_requests": 2},
    "two ranks": {"prefill_ranks": 2},
    "two ranks, prefill apart": {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 1},
    "four ranks, redundant experts": {"prefill_ranks": 4, "redundant_experts": 4},
    "without overlap": {"prefill_ranks": 2, "overlap": False},
}


SLOW = pytest.mark.slow  # what others show, too
FEW_VARIANTS = ("small steps", "two ranks, prefill apart", "four ranks, redundant experts", "without overlap")
FP8_VARIANTS = (
    "small steps",
    "two ranks, prefill apart",
    pytest.param("four ranks, redundant experts", marks=SLOW),
)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Per dtype a folder with prompts, and their answers from one rank with all requests at once."""
    folders = {}
    for dtype in ("bfloat16", "fp8"):
        folders[dtype] = tmp_path_factory.mktemp(dtype)
        write_questions(folders[dtype] / "prompts", (12, 5, 9))
        run(folders[dtype], "one", dtype=dtype)
    return folders


@pytest.fixture
def job(jobs):
    return jobs["bfloat16"]


def run(folder, name, *, dtype="bfloat16", cluster=None, **parts):
    job = write_job(
        folder,
        name=f"{name}.toml",
        output={"dir": name},
        model={"path": str(RANDOM_MODEL), "dtype": dtype},
        sampling={"max_tokens": 24, "ignore_eos": True, "logprobs": 2},
        cluster={"backend": "cpu", **(cluster or {})},
        **parts,
    )
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    return folder / name


@pytest.mark.parametrize(
    "variant", [name if name in FEW_VARIANTS else pytest.param(name, marks=SLOW) for name in VARIANTS]
)
def test_how_a_job_is_run_changes_no_byte(job, variant):
    assert output_bytes(run(job, variant.replace(" ", "-"), cluster=VARIANTS[variant])) == output_bytes(job / "one")


@pytest.mark.parametrize("variant", FP8_VARIANTS)
def test_how_a_job_is_run_changes_no_byte_with_8_bit_products(jobs, variant):
    folder = jobs["fp8"]
    other = run(folder, variant.replace(" ", "-"), dtype="fp8", cluster=VARIANTS[variant])
    assert output_bytes(other) == output_bytes(folder / "one")
    assert output_bytes(other) != output_bytes(jobs["bfloat16"] / "one")  # it is another computation


def test_a_store_changes_no_answer(job, tmp_path):
    for state in ("cold", "warm"):
        assert answers(run(job, state, kv={"dir": str(tmp_path / "kv"), "persist": "all"})) == answers(job / "one")


def test_a_store_is_not_shared_with_other_kernels(job, tmp_path):
    store = {"dir": str(tmp_path / "kv"), "persist": "all"}
    run(job, "cpu", kv=store)
    run(job, "reference", kv=store, cluster={"backend": "reference"})
    sql = "SELECT sum(hit_blocks)::INT AS hits FROM kv"
    assert '"hits": 0' in batchinfer("report", job / "reference", "--json", "--sql", sql).out


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_the_sample_model_answers_as_well_as_ever(dtype, tmp_path):
    settings = {"output.dir": tmp_path / "run", "model.dtype": dtype, "cluster.backend": "cpu"}
    options = [item for key, value in settings.items() for item in ("--set", f"{key}={value}")]
    assert batchinfer("run", DEMO_JOB, *options).code == 3  # its bad rows
    report = batchinfer("report", tmp_path / "run", "--json", "--sql", f"@{DEMO_JOB.parent / 'accuracy.sql'}")
    (every,) = [row for row in json.loads(report.out) if row["task"] == "all tasks"]
    assert every["right_answers"] >= 0.99 * every["prompts"]
