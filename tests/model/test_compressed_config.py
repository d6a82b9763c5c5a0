"""Models with a window and compressed entries: config.json, sizes, and the tensors of their files."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from batchinfer.config import load_job
from batchinfer.launch import host_memory
from batchinfer.model.checkpoint import open_checkpoint
from batchinfer.model.compressed_config import CompressedConfig
from batchinfer.model.config import load_model_config
from batchinfer.model.headers import read_headers
from batchinfer.model.packed_folder import ENDS, LAYOUT, PackedFolder, layer_name
from batchinfer.model.stored_weights import StoredWeights
from batchinfer.model.tensor_names import check_tensors, expected_tensors, why_no_mtp
from batchinfer.model.weight_bytes import weight_bytes
from batchinfer.model.weight_mode import MOST_KEPT, split_for, streamed_states
from batchinfer.plan.preflight import memory_note
from batchinfer.records import ConfigError, ModelError
from batchinfer.sim.dealing import Skews
from batchinfer.sim.hardware import ACCELERATORS
from batchinfer.sim.speeds import rater_of
from batchinfer.sim.steps import Batch, Unit, prefill_batch
from batchinfer.sim.workload import Workload
from support.compressed_models import TINY, published_tensors, random_model, write_compressed
from support.jobs import write_job

FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
FLASH = TINY | {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rope_scaling": TINY["rope_scaling"] | {"original_max_position_embeddings": 65536},
    "max_position_embeddings": 1048576,
    "quantization_config": FP8,
    "expert_dtype": "fp4",
}
PRO = FLASH | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.5,
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0],
    "index_topk": 1024,
}


def load(folder, values):
    (folder / "config.json").write_text(json.dumps(values))
    return load_model_config(folder)


@pytest.mark.parametrize(("values", "kv_bytes", "weights"), [(FLASH, 6880, 284.3e9), (PRO, 9848, 1573e9)])
def test_a_published_config_has_the_published_sizes(tmp_path, values, kv_bytes, weights):
    config = load(tmp_path, values)
    assert config.unknown_keys == ()
    assert config.kv_bytes_per_token(2) == kv_bytes
    assert sum(math.prod(shape) for _, shape in expected_tensors(config)) == pytest.approx(weights, rel=1e-3)
    assert weight_bytes(config, "bfloat16") == pytest.approx(2 * weights, rel=1e-3)
    assert config.num_moe_layers == config.num_hidden_layers
    assert (config.num_hash_layers, config.expert_clamp.limit, config.hyper.num_streams) == (3, 10.0, 4)


def test_a_request_keeps_a_state_of_fixed_size(tmp_path):
    attention = load(tmp_path, FLASH).attention
    assert isinstance(attention, CompressedConfig)
    assert not attention.cuts_anywhere
    windows, indexed, wide = 43 * 128 * 512 * 2, 21 * 8 * (4 * 512 + 4 * 128) * 4, 20 * 128 * 2 * 512 * 4
    assert attention.state_bytes(2) == windows + indexed + wide  # 17.8 MB
    assert attention.state_bytes(2, stored=True) == windows + indexed  # 7.4 MB: after a multiple of 128 tokens
    assert attention.rope.theta == 10_000
    assert (attention.compressed_rope.theta, attention.compressed_rope.cos_sin_scale) == (160_000, 1.0)


def test_the_simulator_counts_states_as_memory_and_as_bytes_on_their_way(tmp_path):
    flash, gpu, unit = load(tmp_path, FLASH), ACCELERATORS["H200"], Unit(8)
    state = flash.attention.state_bytes(2) / 6880  # in tokens of KV
    prompts = np.full(100, 1000)
    work = Workload(prompts, prompts // 2, np.full(100, 200), np.zeros(100), part_tokens=8192)
    rater = rater_of(work, flash, gpu)
    assert rater.requests_that_fit(8 * (1200 + state) + 1) == 8
    assert rater.requests_that_fit(8 * (1200 + state) - 1) == 7
    limited = {}
    for name, network, disk in (("KV to decode", 1.0, 1e30), ("disk", 1e30, 1.0)):
        batch, slow = Batch(10.0, 10_000.0, 5_000.0, 1e6, 5_000.0), replace(gpu, network_bytes_per_s=network)
        limited[name], limit, _ = prefill_batch(batch, Skews(1.0, 1.0), flash, slow, unit, disk_bytes_per_s=disk)
        assert limit == name
    assert limited["KV to decode"] == pytest.approx((10_000 * 6880 + 10 * flash.attention.state_bytes(2)) / 8)
    assert limited["disk"] == pytest.approx(5_000 * 6880 + 10 * flash.attention.state_bytes(2, stored=True))


@pytest.mark.parametrize("gigabytes", [20, 40, 100])
@pytest.mark.parametrize("cluster", [{}, {"page_bytes": 10**9}])
def test_states_and_pages_of_streamed_weights_share_the_memory_for_kv(tmp_path, gigabytes, cluster):
    (tmp_path / "model").mkdir()
    flash, largest = load(tmp_path / "model", FLASH), 32_768
    given = {"weights": "stream", "memory_bytes": gigabytes * 10**9, "decode_requests": 64} | cluster
    job = load_job(write_job(tmp_path, model={"path": "model", "dtype": "fp4"}, cluster=given))
    sizes = {layer_name(layer): 3_700_000_000 for layer in range(43)} | {ENDS: 2_200_000_000}
    packed = PackedFolder(tmp_path, "fp4", LAYOUT, "model", sizes)
    tokens = 100_000 * largest
    split = split_for(job, flash, packed, free_bytes=10**12, most_tokens=tokens, largest_tokens=largest)
    state, most = flash.attention.state_bytes(2), job.cluster.running_requests + MOST_KEPT
    num_states = streamed_states(job, flash, split.kv_bytes, largest)
    pages = cluster.get("page_bytes", split.kv_bytes - num_states * state)
    assert 1 <= num_states <= most
    assert num_states * state + pages <= split.kv_bytes
    assert pages >= largest * 6880
    if not cluster:  # as many states as requests of the largest size, and an eighth of the memory for kept ones
        assert (num_states + 1) * (state + largest * 6880) > 0.87 * split.kv_bytes or num_states == most
        few = split_for(job, flash, packed, free_bytes=10**12, most_tokens=largest, largest_tokens=largest)
        assert few.kv_bytes <= split.kv_bytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compress_ratios": [0, 4, 128]}, ["compress_ratios", "each of 6 layers"]),
        ({"compress_ratios": [0, 4, 64, 4, 128, 0, 0]}, ["compress_ratios", "0 or 4 or 128"]),
        ({"compress_ratios": None}, ["compress_ratios is null"]),
        ({"compress_ratios": [True] * 6}, ["compress_ratios", "whole numbers"]),
        ({"o_groups": 3}, ["o_groups is 3", "num_attention_heads = 4"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads is 4"]),
        ({"qk_rope_head_dim": 7}, ["qk_rope_head_dim is 7", "even"]),
        ({"index_head_dim": 4}, ["index_head_dim is 4", "from 8"]),
        ({"scoring_func": "sigmoid"}, ["scoring_func", "sqrtsoftplus"]),
        ({"hc_mult": None}, ["hc_mult is missing"]),
        ({"swiglu_limit": None}, ["swiglu_limit is missing"]),
        ({"num_hash_layers": 7}, ["num_hash_layers is 7", "from 0 to 6"]),
        ({"rope_scaling": TINY["rope_scaling"] | {"mscale": 1.0}}, ["rope_scaling", "without any mscale"]),
        ({"expert_dtype": "int3", "quantization_config": FP8}, ["expert_dtype", '"fp4" or "fp8"']),
    ],
)
def test_a_config_that_cannot_be_is_refused(tmp_path, changes, words):
    with pytest.raises(ModelError) as error:
        load(tmp_path, TINY | changes)
    assert all(word in str(error.value) for word in words), error.value


def test_keys_of_a_drafter_are_passed_over(tmp_path):
    assert load(tmp_path, TINY | {"dspark_block_size": 16}).unknown_keys == ()


def test_published_names_are_those_that_are_expected(tmp_path):
    tensors = published_tensors(random_model())
    folder = write_compressed(tmp_path, tensors | {"mtp.0.e_proj.weight": torch.zeros(2, 2)})
    config, headers = load_model_config(folder), read_headers(folder)
    check_tensors(headers, config)
    assert "mtp.*" in why_no_mtp(headers, config)
    lost = dict(tensors)
    del lost["layers.0.ffn.gate.tid2eid"]
    save_file(lost, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 missing: model.layers.0.mlp.gate.tid2eid"):
        check_tensors(read_headers(folder), config)


def test_fp8_and_fp4_weights_are_read_as_they_are_published(tmp_path):
    tensors = published_tensors(random_model(moe_intermediate_size=32))
    draw = torch.Generator().manual_seed(0)
    wide = torch.randn(32, 20, generator=draw).to(torch.float8_e4m3fn)
    packed = torch.randint(0, 256, (32, 16), generator=draw, dtype=torch.uint8)
    exponents = torch.randint(120, 134, (32, 1), generator=draw, dtype=torch.uint8)
    expert = "layers.3.ffn.experts.5.w1"
    e8m0 = torch.float8_e8m0fnu
    tensors["layers.2.attn.wq_b.weight"] = torch.cat([wide] * 4)
    tensors["layers.2.attn.wq_b.scale"] = torch.full((1, 1), 129, dtype=torch.uint8).view(e8m0)
    tensors |= {f"{expert}.weight": packed.view(torch.int8), f"{expert}.scale": exponents.view(e8m0)}
    changes = {"quantization_config": FP8, "moe_intermediate_size": 32}
    folder = write_compressed(tmp_path, tensors, **changes)
    config = load_model_config(folder)
    checkpoint = open_checkpoint(folder)
    check_tensors(checkpoint, config)
    stored = StoredWeights(checkpoint, config)
    assert stored.read("model.layers.2.self_attn.wq_b.weight", torch.float32).equal(torch.cat([wide] * 4).float() * 4)
    name = "model.layers.3.mlp.experts.5.gate_proj.weight"
    assert stored.shape(name) == (32, 32)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for row, column in ((0, 0), (3, 7), (31, 30), (9, 31)):
        nibble = int(packed[row, column // 2]) >> (4 * (column % 2)) & 15
        value = (-1 if nibble & 8 else 1) * magnitudes[nibble & 7] * 2.0 ** (int(exponents[row, 0]) - 127)
        assert stored.read(name, torch.float32)[row, column] == value


@pytest.mark.parametrize(
    ("free_gb", "dtype", "words"),
    [
        (24, "fp4", ["fp4 takes 166.3 GB", "24.0 GB is free; it fits in no dtype"]),
        (200, "bfloat16", ["bfloat16 takes 568.7 GB", 'model.dtype = "fp4" (166.3 GB)']),
        (200, "fp4", []),
    ],
)
def test_flash_is_refused_with_sizes_where_it_does_not_fit(tmp_path, monkeypatch, free_gb, dtype, words):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(FLASH))
    job = load_job(write_job(tmp_path, model={"path": "model", "dtype": dtype}, cluster={"backend": "cpu"}))
    weights = "568.6" if dtype == "bfloat16" else "166.1"
    assert memory_note(job, load_model_config(tmp_path / "model")) == (
        f"the model takes {weights} GB of weights in all, 6,880 bytes of KV per token, and 17.8 MB per running request"
    )
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: free_gb * 10**9)
    if not words:
        host_memory.with_weights(job, range(1))
        return
    with pytest.raises(ConfigError) as refused:
        host_memory.with_weights(job, range(1))
    assert all(word in str(refused.value) for word in words)
