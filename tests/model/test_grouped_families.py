"""Configs of models with grouped-query attention as they are published: accepted, with the sizes that are known."""

from __future__ import annotations

import json

import pytest

from batchinfer.model.config import load_model_config
from batchinfer.records import ModelError
from support.model_configs import value
from support.published_shapes import FP8, GPT_OSS, GPT_OSS_20B, QWEN3, QWEN3_MOE

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
GLM_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "eos_token_id": 200020,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": FP8 | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["lm_head"]},
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
PUBLISHED = {
    "qwen3-8b": (QWEN3, {"qk_norm": "head", "rotary_dim": 128, "qkv_bias": False}, 147_456),
    "qwen3-8b-fp8": (QWEN3 | {"quantization_config": FP8}, {"fp8_block": (128, 128)}, 147_456),
    "qwen3-30b-a3b": (QWEN3_MOE, {"num_moe_layers": 48, "topk_method": "greedy", "norm_topk_prob": True}, 98_304),
    "llama-3.1-8b": (LLAMA, {"head_dim": 128, "n_routed_experts": 0, "max_positions": 131072}, 131_072),
    "glm-4.5-air": (
        GLM_AIR,
        {"rotary_dim": 64, "qk_norm": None, "qkv_bias": True, "out_bias": False, "num_moe_layers": 45},
        188_416,
    ),
    "minimax-m2": (
        MINIMAX,
        {"qk_norm": "whole", "rotary_dim": 64, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.0},
        253_952,
    ),
    # pages of layers with windows are kept whole: twice what the others' would take
    "gpt-oss-120b": (GPT_OSS, {"has_sinks": True, "windows": (128, None) * 18, "has_fp4_experts": True}, 2 * 36_864),
    "gpt-oss-20b": (GPT_OSS_20B, {"windows": (128, None) * 12, "n_routed_experts": 32}, 2 * 24_576),
}
REFUSED = {
    "qwen3-moe-with-dense-layers": (QWEN3_MOE | {"mlp_only_layers": [3]}, ["mlp_only_layers is [3]"]),
    "qwen3-moe-every-other-layer": (QWEN3_MOE | {"decoder_sparse_step": 2}, ["decoder_sparse_step is 2"]),
    "llama-of-longrope": (
        LLAMA | {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        ["rope_scaling.rope_type", "longrope", "llama3"],
    ),
    "glm-rotated-otherwise": (GLM_AIR | {"partial_rotary_factor": 0.26}, ["partial_rotary_factor is 0.26"]),
    "minimax-of-linear-attention": (MINIMAX | {"attn_type_list": [0] * 62}, ["attn_type_list", "full attention"]),
    "minimax-of-other-norms": (MINIMAX | {"qk_norm_type": "per_head"}, ["qk_norm_type", '"per_layer"']),
    "minimax-with-shared-experts": (MINIMAX | {"shared_intermediate_size": 512}, ["shared_intermediate_size is 512"]),
    "gpt-oss-without-window": (GPT_OSS | {"sliding_window": None}, ["sliding_window is missing"]),
    "gpt-oss-of-other-layers": (GPT_OSS | {"layer_types": ["chunked_attention"] * 36}, ["layer_types", "each of 36"]),
    "qwen3-next": (QWEN3_MOE | {"model_type": "qwen3_next"}, ["qwen3_next", "no pages hold"]),
    "qwen3.5": (QWEN3 | {"model_type": "qwen3_5_moe"}, ["qwen3_5_moe", "no pages hold"]),
}


def load(folder, values):
    (folder / "config.json").write_text(json.dumps(values))
    return load_model_config(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_accepted_and_a_token_takes_what_is_known(tmp_path, name):
    values, expected, kv_bytes = PUBLISHED[name]
    config = load(tmp_path, values)
    assert config.unknown_keys == ()
    assert {key: value(config, key) for key in expected} == expected
    assert config.kv_bytes_per_token(2) == kv_bytes


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_key(tmp_path, name):
    values, words = REFUSED[name]
    with pytest.raises(ModelError) as error:
        load(tmp_path, values)
    for word in words:
        assert word in str(error.value)


def test_angles_of_gpt_oss_are_scaled_as_published(tmp_path):
    rope = load(tmp_path, GPT_OSS).attention.rope
    assert not rope.truncate
    assert rope.cos_sin_scale == pytest.approx(1.3466, abs=1e-4)
