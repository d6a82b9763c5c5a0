"""A job for groups of many ranks: a tiny random model whose 32 experts spread over up to 32 of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from support.checkpoints import make_checkpoint
from support.jobs import batchinfer, output_bytes, question, write_job, write_shard
from support.paths import SAMPLE_MODEL

NUM_EXPERTS = 32


def make_job(folder: Path, *, num_rows: int, max_tokens: int) -> Path:
    """The job file; rows are sampled, answers end at different lengths."""
    sizes = {"n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": 4, "vocab_size": 1024}
    make_checkpoint(folder / "model", "v3", max_position_embeddings=2048, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(SAMPLE_MODEL / name, folder / "model")
    rows = range(num_rows)
    write_shard(folder / "prompts" / "part-0.parquet", {"id": list(rows), "prompt": [question(row) for row in rows]})
    return write_job(
        folder,
        input={"id": "id"},
        model={"path": str(folder / "model"), "dtype": "float32"},
        sampling={"max_tokens": max_tokens, "seed": 4, "temperature": 1.0},
    )


def layout(ranks: str) -> dict[str, int | str]:
    """The cluster settings of `8` ranks that do everything, or of `8+16` with prefill apart."""
    prefill, _, decode = ranks.partition("+")
    if not decode:
        return {"prefill_ranks": int(prefill)}
    return {"mode": "disaggregated", "prefill_ranks": int(prefill), "decode_ranks": int(decode)}


def settings(ranks: str) -> list[str]:
    """See `layout`, as options of a command."""
    return [item for key, value in layout(ranks).items() for item in ("--set", f"cluster.{key}={value}")]


def expect_outputs_of_one_rank(job: Path, ranks: str, *options: str) -> Path:
    """Run a job on a group of ranks, and on one when that has not been done yet; returns the group's run folder.

    Raises:
        AssertionError: a run failed, outputs differ, or a rank has had nothing to do.
    """
    one, many = (job.parent / f"ranks-{name}" for name in ("1", ranks))
    if not one.exists():
        _run(job, one)
    shutil.rmtree(many, ignore_errors=True)  # of the same group with other options
    _run(job, many, *settings(ranks), *options)
    assert output_bytes(many) == output_bytes(one)
    sql = "SELECT count(DISTINCT rank) AS n FROM steps WHERE expert_rows > 0"
    found = json.loads(batchinfer("report", many, "--json", "--sql", sql).out)
    assert found[0]["n"] == sum(map(int, ranks.split("+")))
    return many


def _run(job: Path, run: Path, *options: str) -> None:
    ended = batchinfer("run", job, "--set", f"output.dir={run}", *options)
    assert ended.code == 0, ended.err
