"""A model that does not fit into this host's memory is refused before it is read, with what would fit."""

import json
import shutil

import pytest

from batchinfer.checked_json import json_text
from batchinfer.config import load_job
from batchinfer.host_info import free_memory_bytes
from batchinfer.launch import host_memory
from batchinfer.model.config import load_model_config
from batchinfer.model.packed_folder import ENDS, LAYOUT, MANIFEST, layer_name
from batchinfer.model.weight_bytes import weight_bytes
from batchinfer.records import ConfigError
from support.hollow_weights import write_hollow_weights
from support.jobs import batchinfer, write_job, write_shard
from support.paths import RANDOM_MODEL
from support.published_shapes import V2_LITE

GB = 1_000_000_000
ONE_RANK = {"prefill_ranks": 1}
TWO_RANKS = {"prefill_ranks": 2}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RANDOM_MODEL / file, tmp_path / "model" / file)
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": ["a", "b"]})
    write_config(tmp_path)
    return tmp_path


def write_config(folder, **changes):
    (folder / "model" / "config.json").write_text(json.dumps(V2_LITE | changes))


def job_of(folder, dtype, cluster):
    return write_job(folder, model={"path": "model", "dtype": dtype}, cluster={"backend": "cpu"} | cluster)


def test_v2_lite_takes_what_its_weights_take(folder):
    model = load_model_config(folder / "model")
    assert weight_bytes(model, "bfloat16") == pytest.approx(31.4 * GB, rel=0.03)
    assert weight_bytes(model, "fp8") == pytest.approx(16.9 * GB, rel=0.03)
    experts = 26 * 64 * 3 * 2048 * 1408  # 4.5 bits each instead of 8.3
    assert weight_bytes(model, "fp8") - weight_bytes(model, "int4") == pytest.approx((1.04 - 18 / 32) * experts)
    # half of the experts of 26 layers, three matrices each
    half = 26 * 32 * 3 * 2048 * 1408 * 2
    assert weight_bytes(model, "bfloat16") - weight_bytes(model, "bfloat16", num_experts=32) == pytest.approx(half)


@pytest.mark.parametrize(
    ("free_gb", "dtype", "cluster", "words"),
    [
        (24, "bfloat16", ONE_RANK, ["31.7 GB", "1 rank on", "24.0 GB is free", 'model.dtype = "fp8" (17']),
        (24, "float32", ONE_RANK, ["1 rank on", 'use model.dtype = "fp8"']),
        (40, "float32", ONE_RANK, ['model.dtype = "bfloat16" (31.7 GB) or model.dtype = "fp8"']),
        (12, "fp8", ONE_RANK, ['use model.dtype = "int4" (10.']),
        (24, "bfloat16", ONE_RANK, ['or model.dtype = "int4" (10.']),
        (8, "bfloat16", ONE_RANK, ["it fits in no dtype", "more hosts"]),
        (34, "bfloat16", TWO_RANKS, ["2 ranks on this host"]),
    ],
)
def test_the_sentence_says_what_it_takes_and_what_would_fit(folder, monkeypatch, free_gb, dtype, cluster, words):
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: free_gb * GB)
    job = load_job(job_of(folder, dtype, cluster))
    with pytest.raises(ConfigError) as refused:
        host_memory.with_weights(job, range(job.cluster.num_ranks))
    for word in (str(folder / "model"), dtype, *words):
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("free_gb", "dtype", "cluster", "ranks"),
    [(33, "bfloat16", ONE_RANK, range(1)), (18, "fp8", ONE_RANK, range(1)), (20, "bfloat16", TWO_RANKS, range(1, 2))],
)
def test_what_fits_passes(folder, monkeypatch, free_gb, dtype, cluster, ranks):
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: free_gb * GB)
    host_memory.with_weights(load_job(job_of(folder, dtype, cluster)), ranks)


def write_manifest(folder, dtype):
    """As if the model were converted; nothing of its files is read."""
    model = load_model_config(folder / "model")
    names = [ENDS, *(layer_name(number) for number in range(27))]
    size = weight_bytes(model, dtype) // len(names)
    manifest = {
        "dtype": dtype,
        "layout": LAYOUT,
        "source": "original",
        "files": {name: {"bytes": size} for name in names},
    }
    (folder / "model" / MANIFEST).write_text(json_text(manifest))


@pytest.mark.parametrize(
    ("free_gb", "memory_gb", "asked", "given"),
    [
        (24, None, "auto", "stream"),
        (40, None, "auto", "resident"),
        (40, 8, "auto", "stream"),
        (31.75, None, "auto", "stream"),  # no room for KV
        (31.75, None, "resident", "resident"),
        (40, None, "stream", "stream"),
    ],
)
def test_a_converted_folder_is_streamed_where_it_does_not_fit(folder, monkeypatch, free_gb, memory_gb, asked, given):
    write_manifest(folder, "bfloat16")
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: int(free_gb * GB))
    cluster = {"weights": asked} | ({} if memory_gb is None else {"memory_bytes": memory_gb * GB})
    job = load_job(job_of(folder, "bfloat16", cluster))
    assert host_memory.with_weights(job, range(1)).cluster.weights == given


@pytest.mark.parametrize(
    ("free_gb", "cluster", "words"),
    [
        (3, {}, ["cannot be streamed in 2.70 GB of memory", "GB for 2 of 27 layers at a time"]),
        (24, {"weights": "resident"}, ["24.0 GB is free", 'use model.dtype = "fp8"']),
        (40, {"weights": "resident", "memory_bytes": 8 * GB}, ["of which cluster.memory_bytes allows 8.0 GB"]),
        (24, {"prefill_ranks": 2}, ["weights are streamed by one rank, and the job has 2"]),
    ],
)
def test_what_neither_fits_nor_streams_is_refused(folder, monkeypatch, free_gb, cluster, words):
    write_manifest(folder, "bfloat16")
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: free_gb * GB)
    job = load_job(job_of(folder, "bfloat16", cluster))
    with pytest.raises(ConfigError) as refused:
        host_memory.with_weights(job, range(job.cluster.num_ranks))
    for word in words:
        assert word in str(refused.value)


def test_a_checkpoint_that_is_not_converted_is_told_how_to_stream(folder, monkeypatch):
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: 8 * GB)
    job = load_job(job_of(folder, "bfloat16", ONE_RANK))
    with pytest.raises(
        ConfigError, match=r"run `batchinfer convert .* DIR --dtype bfloat16` and set model.path to DIR"
    ):
        host_memory.with_weights(job, range(1))


@pytest.mark.parametrize("is_planned", [False, True], ids=["run", "plan, then work"])
def test_a_job_that_does_not_fit_ends_with_2_before_anything_is_read(folder, is_planned):
    layers = 27 + round(free_memory_bytes() / GB)  # of 1.2 GB each in bfloat16
    write_config(folder, num_hidden_layers=layers)
    write_hollow_weights(folder / "model")
    job = job_of(folder, "bfloat16", ONE_RANK)
    if is_planned:
        assert batchinfer("plan", job).code == 0
    ended = batchinfer("work" if is_planned else "run", job)
    assert ended.code == 2
    assert "takes" in ended.err
    assert "GB is free" in ended.err
    assert "rank 0 died" not in ended.err
    assert len([line for line in ended.err.splitlines() if line.startswith("error: ")]) == 1
