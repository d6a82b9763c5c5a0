"""Whole jobs with KV in FP8: their answers differ from those of bfloat16 pages and not from run to run."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.config import load_model_config
from batchinfer.model.indexer_config import IndexerConfig
from batchinfer.model.page_format import PageFormat
from batchinfer.records import ConfigError
from batchinfer_kernels.cpu import build
from batchinfer_kernels.reference import fp8_pages
from support.jobs import answers, batchinfer, output_bytes, write_job, write_questions
from support.model_configs import with_attention, with_indexer
from support.paths import DEMO_JOB, RANDOM_MODEL
from support.tiers import first_in_make_test

pytestmark = pytest.mark.all  # make test: tests/kernels/test_fp8_pages.py

needs_cpp = pytest.mark.skipif(build.why_not() is not None, reason=f"no C++ operations: {build.why_not()}")
POINT = 0.01
FEW_PAGES = 7  # of a rank, fewer than all requests take together
# prefixes are shared in all
VARIANTS = {
    "prefill-apart": {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 1},
    "few-pages": {
        "prefill_tokens": 5,
        "decode_requests": 2,
        "page_bytes": FEW_PAGES * PAGE_TOKENS * PageFormat("fp8").bytes_per_token(load_model_config(RANDOM_MODEL)),
    },
    "two-ranks": {"prefill_ranks": 2},
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
    assert not any(pq.read_table(folder / name / "stats" / "nodes")["restarts"].to_pylist())
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
    "variant",
    first_in_make_test(
        [pytest.param(name, marks=pytest.mark.slow if name == "two-ranks" else ()) for name in VARIANTS]
    ),
)
def test_how_a_job_is_run_changes_no_byte(folder, variant):
    other, _ = run(folder, variant, cluster=VARIANTS[variant])
    assert output_bytes(other) == output_bytes(folder / "one")


@pytest.mark.all  # make test: how a job is run, above
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


@needs_cpp
@pytest.mark.slow
def test_the_sample_model_answers_within_a_point_of_kv_in_bfloat16(tmp_path):
    right = {}
    for dtype, backend in (("auto", "cpu"), ("fp8", "cpu"), ("fp8", "reference")):
        settings = {
            "output.dir": tmp_path / f"{dtype}-{backend}",
            "model.dtype": "bfloat16",
            "kv.dtype": dtype,
            "cluster.backend": backend,
        }
        options = [item for key, value in settings.items() for item in ("--set", f"{key}={value}")]
        assert batchinfer("run", DEMO_JOB, *options).code == 3  # its bad rows
        query = f"@{DEMO_JOB.parent / 'accuracy.sql'}"
        found = json.loads(batchinfer("report", settings["output.dir"], "--json", "--sql", query).out)
        (every,) = [row for row in found if row["task"] == "all tasks"]
        right[dtype, backend], num_prompts = every["right_answers"], every["prompts"]
    print(f"right answers of {num_prompts}: {right}")
    assert min(right.values()) >= right["auto", "cpu"] - POINT * num_prompts
    assert right["auto", "cpu"] >= 0.99 * num_prompts


@needs_cpp
def test_a_run_and_its_report_name_it_and_a_job_of_the_other_kind_is_refused(folder):
    one, _ = run(folder, "named", cluster={"speculate": "auto"})
    assert ", bfloat16, KV in fp8)" in batchinfer("report", one).out.splitlines()[0]
    other = batchinfer("run", folder / "named.toml", "--set", "kv.dtype=auto")
    assert other.code == 2
    assert "model.dtype was bfloat16, KV in fp8 and is now bfloat16" in other.err
    told = batchinfer("run", folder / "one.toml", "--set", "output.dir=told").err
    assert "KV is stored in FP8 (kv.dtype): answers differ from those with KV in bfloat16" in told
    assert "on a CPU each step widens it" in told


def test_what_cannot_be_held_so_is_refused_before_a_row_is_read(folder, tmp_path):
    float32 = batchinfer("plan", folder / "one.toml", "--set", "model.dtype=float32")
    assert float32.code == 2
    assert "kv.dtype is 'fp8', but model.dtype is 'float32'; FP8 is rounded from bfloat16" in float32.err
    model = load_model_config(RANDOM_MODEL)
    form = PageFormat("fp8")
    form.check(model)
    with pytest.raises(ConfigError, match=r"kv_lora_rank of the model is 30, not a multiple of 4; leave kv.dtype out"):
        form.check(with_attention(model, kv_lora_rank=30))
    indexer = IndexerConfig(1, 8, 4, rope_interleave=False, sharing_layers=frozenset())
    with pytest.raises(ConfigError, match="the model has an indexer"):
        form.check(with_indexer(model, indexer))
    PageFormat("bfloat16").check(with_indexer(model, indexer))


def test_a_token_takes_what_flash_mla_gives_it():
    model = with_attention(load_model_config(RANDOM_MODEL), kv_lora_rank=512, qk_rope_head_dim=64)
    model = replace(model, num_hidden_layers=61)
    assert [PageFormat(dtype).bytes_per_token(model) for dtype in ("fp8", "bfloat16", "float32")] == [
        61 * 656,
        70_272,
        2 * 70_272,
    ]
    for latent, rotary in ((512, 64), (16, 6), (192, 10)):
        of_width = with_attention(model, kv_lora_rank=latent, qk_rope_head_dim=rotary)
        assert PageFormat("fp8").row_width(of_width) == fp8_pages.row_bytes(latent, rotary)
