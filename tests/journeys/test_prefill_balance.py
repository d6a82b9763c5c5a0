"""Prefill steps of real ranks are even in new tokens and attention work, and as even as planned."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from support.checkpoints import make_checkpoint
from support.jobs import batchinfer, output_bytes, write_job, write_shard
from support.many_ranks import settings
from support.paths import SAMPLE_MODEL

EXPERTS = {"n_routed_experts": 32, "num_experts_per_tok": 4}
NUM_ROWS, MAX_ATTENTION, MAX_TOKENS, MAX_SURPRISE = 240, 1.25, 1.10, 0.05


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job with prompts of 20 to 1,500 tokens (lognormal, sigma 1.1); every third begins with the same 64 tokens."""
    folder = tmp_path_factory.mktemp("prefill")
    make_checkpoint(folder / "model", "v3", max_position_embeddings=2048, vocab_size=1024, **EXPERTS)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(SAMPLE_MODEL / name, folder / "model")
    rng = np.random.default_rng(11)
    lengths = np.clip(rng.lognormal(5.2, 1.1, NUM_ROWS).astype(int), 20, 1500)
    prompts = [rng.integers(8, 300, length).tolist() for length in lengths]
    prompts = [[7] * 64 + tokens if row % 3 == 0 else tokens for row, tokens in enumerate(prompts)]
    write_shard(folder / "prompts" / "part-0.parquet", {"id": list(range(NUM_ROWS)), "tokens": prompts})
    return write_job(
        folder,
        input={"id": "id", "prompt": None, "token_ids": "tokens"},
        model={"path": str(folder / "model"), "dtype": "float32"},
        sampling={"max_tokens": 3},
    )


@pytest.mark.parametrize(
    "ranks",
    [
        "4",
        pytest.param("4+2", marks=pytest.mark.all),
        *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in ("1", "8", "8+2")),
    ],
)
def test_the_busiest_rank_of_each_step_is_near_the_mean_as_planned(job, ranks):
    run = job.parent / f"ranks-{ranks}"
    ended = batchinfer("run", job, "--set", f"output.dir={run}", *settings(ranks))
    assert ended.code == 0, ended.err
    report = json.loads(batchinfer("report", run, "--json").out)
    if ranks == "1":
        assert report["prefill_attention_max_over_mean"] is None
        return
    sql = (
        "SELECT predicted_prefill_attention_max_over_mean AS attention, "
        "predicted_prefill_tokens_max_over_mean AS tokens FROM run"
    )
    (planned,) = json.loads(batchinfer("report", run, "--json", "--sql", sql).out)
    attention, tokens = (report[f"prefill_{kind}_max_over_mean"] for kind in ("attention", "tokens"))
    print(f"{ranks} ranks: attention {attention:.3f}, tokens {tokens:.3f}; planned {planned}")
    assert 1.0 <= attention <= MAX_ATTENTION
    assert 1.0 <= tokens <= MAX_TOKENS
    assert attention == pytest.approx(planned["attention"], rel=MAX_SURPRISE)
    assert tokens == pytest.approx(planned["tokens"], rel=MAX_SURPRISE)
    assert report["recomputed_tokens"] == 0


def test_outputs_are_those_of_one_rank(job):
    runs = [job.parent / f"same-{ranks}" for ranks in ("1", "4")]
    for run, ranks in zip(runs, ("1", "4"), strict=True):
        assert batchinfer("run", job, "--set", f"output.dir={run}", *settings(ranks)).code == 0
    assert output_bytes(runs[0]) == output_bytes(runs[1])
