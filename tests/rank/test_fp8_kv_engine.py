"""Whole jobs whose KV is in FP8: other answers than those of bfloat16 pages, the same however the job is run."""

from __future__ import annotations

import json

import pytest

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.config import load_model_config
from batchinfer.model.page_format import PageFormat
from batchinfer_kernels.cpu import build
from support.jobs import answers, batchinfer, output_bytes, write_job, write_questions
from support.paths import RANDOM_MODEL

needs_cpp = pytest.mark.skipif(build.why_not() is not None, reason=f"no C++ operations: {build.why_not()}")
FEW_PAGES = 9  # of a rank, where the largest request needs 6
# with a store, or in other steps and on other ranks; prefixes are shared in all
VARIANTS = {
    "two ranks, prefill apart": {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 1},
    "few pages, tiny steps": {
        "prefill_tokens": 5,
        "decode_requests": 2,
        "page_bytes": FEW_PAGES * PAGE_TOKENS * PageFormat("fp8").bytes_per_token(load_model_config(RANDOM_MODEL)),
    },
    "two ranks": {"prefill_ranks": 2},
}


def run(folder, name, *, cluster=None, kv=None, dtype="bfloat16"):
    job = write_job(
        folder,
        name=f"{name}.toml",
        output={"dir": name},
        model={"path": str(RANDOM_MODEL), "dtype": dtype},
        sampling={"max_tokens": 24, "ignore_eos": True, "logprobs": 2, "temperature": 0.7, "top_p": 0.9},
        cluster={"backend": "cpu", **(cluster or {})},
        kv={"dtype": "fp8", **(kv or {})},
    )
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    return folder / name, ended.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prompts, and in `one` their answers from one rank with all requests at once."""
    folder = tmp_path_factory.mktemp("fp8-kv")
    write_questions(folder / "prompts", (12, 5, 9))
    run(folder, "one")
    return folder


@needs_cpp
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.slow if name == "two ranks" else ()) for name in VARIANTS]
)
def test_how_a_job_is_run_changes_no_byte(folder, variant):
    other, _ = run(folder, variant.replace(" ", "-").replace(",", ""), cluster=VARIANTS[variant])
    assert output_bytes(other) == output_bytes(folder / "one")


@needs_cpp
def test_a_store_changes_no_answer_and_keeps_blocks_of_either_kind_apart(folder, tmp_path):
    store = {"dir": str(tmp_path / "kv"), "persist": "all"}
    plain, _ = run(folder, "plain", kv={**store, "dtype": "auto"})
    cold, _ = run(folder, "cold", kv=store)
    warm, _ = run(folder, "warm", kv=store)
    assert answers(cold) == answers(warm) == answers(folder / "one")
    assert [row["logprobs"] for row in answers(plain)] != [row["logprobs"] for row in answers(cold)]
    sql = "SELECT sum(hit_blocks)::INT AS hits, sum(written_bytes)::INT AS written FROM kv"
    found = [json.loads(batchinfer("report", done, "--json", "--sql", sql).out)[0] for done in (plain, cold, warm)]
    assert found[0]["hits"] == found[1]["hits"] == 0 < found[2]["hits"]
    model = load_model_config(RANDOM_MODEL)
    per_token = [form.bytes_per_token(model) for form in (PageFormat("bfloat16"), PageFormat("fp8"))]
    assert found[0]["written"] // per_token[0] == found[1]["written"] // per_token[1] > 0
