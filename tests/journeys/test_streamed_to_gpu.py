"""Whole jobs whose weights are streamed to a GPU, in Triton's interpreter: the bytes of resident runs."""

from __future__ import annotations

import json

import duckdb
import pytest

from batchinfer_kernels.triton import probe
from support.jobs import batchinfer, output_bytes, write_job, write_shard
from support.paths import RANDOM_MODEL
from support.tiers import first_in_make_test
from support.triton_device import needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(not probe.interprets(), reason="Triton is not interpreted: it runs on the GPU here"),
]


def run(folder, name, model, **cluster):
    cluster = {"backend": "triton", "prefill_tokens": 4, "decode_requests": 2, "speculate": "off"} | cluster
    job = write_job(
        folder,
        name=f"{name}.toml",
        output={"dir": name},
        model={"path": str(model), "dtype": "fp8"},
        sampling={"max_tokens": 2, "temperature": 0.8, "logprobs": 1, "ignore_eos": True},
        cluster=cluster,
    )
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    return output_bytes(folder / name), ended.err


@pytest.mark.parametrize("source", first_in_make_test(("converted", "checkpoint")))
def test_outputs_are_those_of_resident_weights_to_the_byte(tmp_path, source):
    write_shard(tmp_path / "prompts" / "part-0.parquet", {"prompt": ["a b", "c", "a b d"]})
    model, memory = RANDOM_MODEL, {}
    if source == "converted":
        model = tmp_path / "for-gpus"
        ended = batchinfer("convert", RANDOM_MODEL, model, "--dtype", "fp8", "--gpu")
        assert ended.code == 0, ended.err
    expected, _ = run(tmp_path, "resident", RANDOM_MODEL)
    found, said = run(tmp_path, "streamed", model, weights="stream", **memory)
    assert found == expected
    size = sum(path.stat().st_size for path in model.glob("layer-*"))
    words = f"at most {size / 1e9:,.2f} GB per sweep, from a copy in the host's memory; "
    assert ("weights are streamed to the GPU: " + (words if size else "")) in said
    steps = tmp_path / "streamed" / "stats" / "steps"
    ((sweeps, num_bytes),) = duckdb.sql(
        f"SELECT count(*) FILTER (streamed_bytes > 0), sum(streamed_bytes)::BIGINT FROM '{steps}/*.parquet'"
    ).fetchall()
    assert sweeps >= 2
    assert num_bytes > 0
    report = json.loads(batchinfer("report", tmp_path / "streamed", "--json").out)
    assert report["weights_streamed_bytes"] == num_bytes
