"""A model that does not fit into this host's memory is refused before it is read, with what would fit."""

import json
import shutil

import pytest

from batchinfer.checked_json import json_text
from batchinfer.config import load_job
from batchinfer.host_info import free_memory_bytes
from batchinfer.launch import host_memory
from batchinfer.model import device_memory, weight_mode
from batchinfer.model.config import load_model_config
from batchinfer.model.packed_folder import ENDS, LAYOUT, MANIFEST, layer_name
from batchinfer.model.weight_bytes import weight_bytes
from batchinfer.records import ConfigError
from batchinfer_kernels.cpu import build
from batchinfer_kernels.cpu.packed import Packed, WeightKind
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
    # half of the experts of 26 layers, three matrices each
    half = 26 * 32 * 3 * 2048 * 1408 * 2
    assert weight_bytes(model, "bfloat16") - weight_bytes(model, "bfloat16", num_experts=32) == pytest.approx(half)


@pytest.mark.parametrize(("dtype", "kind"), [("fp8", WeightKind.INT8), ("int4", WeightKind.INT4)])
def test_experts_take_what_they_take_packed(folder, dtype, kind):
    if build.why_not() is not None:
        pytest.skip(f"no C++ operations on this machine: {build.why_not()}")
    model = load_model_config(folder / "model")
    packed = Packed.empty(1, 2 * 1408, 2048, kind=kind, is_paired=True), Packed.empty(1, 2048, 1408, kind=kind)
    experts = 26 * 64 * sum(weight.data.nbytes for weight in packed)
    assert weight_bytes(model, dtype) - weight_bytes(model, dtype, num_experts=0) == pytest.approx(experts)


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


def write_manifest(folder, dtype, *, for_gpus=False):
    """As if the model were converted; nothing of its files is read."""
    model = load_model_config(folder / "model")
    names = [ENDS, *(layer_name(number) for number in range(27))]
    size = weight_bytes(model, dtype) // len(names)
    manifest = {
        "dtype": dtype,
        "layout": LAYOUT,
        "source": "original",
        "for_gpus": for_gpus,
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
        (
            24,
            {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 1},
            ["streamed by ranks that run prompts and answers"],
        ),
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


ON_GPU = {"backend": "triton", "weights": "stream", "prefill_ranks": 1}


@pytest.mark.parametrize(
    ("free_gb", "memory_gb", "converted", "words"),
    [
        (40, None, False, "GB per sweep, from a copy in the host's memory; the GPU's link or products decide"),
        (40, None, True, "GB per sweep, from a copy in the host's memory"),
        (40, 20, True, "GB are read from disk in "),
        (8, None, True, "at 2.00 GB/s, as measured"),
    ],
)
def test_a_gpu_s_layers_come_from_a_copy_or_from_disk_by_the_host_s_memory(
    folder, monkeypatch, free_gb, memory_gb, converted, words
):
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: free_gb * GB)
    monkeypatch.setattr(device_memory, "read_speed", lambda files: 2.0 * GB)
    if converted:
        write_manifest(folder, "bfloat16", for_gpus=True)
    cluster = ON_GPU | ({} if memory_gb is None else {"memory_bytes": memory_gb * GB})
    job = host_memory.with_weights(load_job(job_of(folder, "bfloat16", cluster)), range(1))
    assert job.cluster.weights == "stream"
    said, num_sweeps = host_memory.stream_words(job, [])
    assert said.startswith("weights are streamed to the GPU: at most 3")
    assert words in said
    assert num_sweeps is None


@pytest.mark.parametrize(
    ("form", "free_gb", "dtype", "cluster", "words"),
    [
        (
            None,
            24,
            "bfloat16",
            {},
            r"takes 31\.\d+ GB of the host's memory, of which 21.60 GB .* DIR --gpu --dtype bfloat16",
        ),
        ("cpu", 40, "bfloat16", {}, r"is converted for CPUs; set model\.path to original if it fits .* DIR --gpu"),
        ("gpu", 2, "bfloat16", {}, r"cannot be streamed to the GPU: 2\.\d+ GB of the host's memory are needed for two"),
        (None, 40, "float32", {}, r"weights are streamed to GPUs in bfloat16 or fewer bits"),
        (None, 40, "bfloat16", {"memory_bytes": 50 * GB}, r"memory_bytes is 50\.00 GB, and 40\.00 GB is free"),
        ("gpu", 40, "bfloat16", {"prefill_ranks": 2}, r"streamed to a GPU by one rank, and the job has 2"),
    ],
)
def test_what_cannot_be_streamed_to_a_gpu_is_refused(folder, monkeypatch, form, free_gb, dtype, cluster, words):
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: free_gb * GB)
    if form is not None:
        write_manifest(folder, dtype, for_gpus=form == "gpu")
    job = load_job(job_of(folder, dtype, ON_GPU | cluster))
    with pytest.raises(ConfigError, match=words):
        host_memory.with_weights(job, range(job.cluster.num_ranks))


def test_auto_keeps_weights_on_a_gpu(folder, monkeypatch):
    monkeypatch.setattr(weight_mode, "has_gpu", lambda: True)
    job = load_job(job_of(folder, "bfloat16", {"backend": "auto", "prefill_ranks": 1}))
    assert host_memory.with_weights(job, range(1)).cluster.weights == "resident"


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
