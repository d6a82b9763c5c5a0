"""Configs of models with grouped-query attention as they are published: accepted, with the sizes that are known."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from transformers import AutoConfig

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
LLAMA_1B = LLAMA | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": LLAMA["rope_scaling"] | {"factor": 32.0},
    "tie_word_embeddings": True,
}
LLAMA_70B = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
GLM_45 = GLM_AIR | {
    "first_k_dense_replace": 3,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_hidden_layers": 92,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
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
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
R1_DISTILL = QWEN2 | {
    "eos_token_id": 151643,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "max_window_layers": 21,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "use_mrope": False,
    "vocab_size": 151936,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32768,
}
MISTRAL_NEMO = MISTRAL | {
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 40,
    "vocab_size": 131072,
}
MIXTRAL = MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "vocab_size": 32000,
}
SEED_OSS = {
    "architectures": ["SeedOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.1,
    "attention_out_bias": False,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_position_embeddings": 524288,
    "mlp_bias": False,
    "model_type": "seed_oss",
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "residual_dropout": 0.1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 155136,
}
QWEN2_MOE = QWEN2 | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "mlp_only_layers": [],
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "vocab_size": 151936,
}
GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49159,
}
OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
OLMO3 = OLMO2 | {
    "architectures": ["Olmo3ForCausalLM"],
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "sliding_window": 4096,
    "vocab_size": 100278,
}
EXAONE4 = {
    "architectures": ["Exaone4ForCausalLM"],
    "attention_dropout": 0.0,
    "eos_token_id": 361,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
    "max_position_embeddings": 131072,
    "model_type": "exaone4",
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA["rope_scaling"] | {"factor": 16.0},
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
    "vocab_size": 102400,
}
EXAONE4_SMALL = EXAONE4 | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "layer_types": ["full_attention"] * 30,
    "num_attention_heads": 32,
    "num_hidden_layers": 30,
    "sliding_window": None,
    "sliding_window_pattern": None,
    "tie_word_embeddings": True,
}
GLM4 = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}
ERNIE = {
    "architectures": ["Ernie4_5ForCausalLM"],
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5",
    "num_attention_heads": 16,
    "num_hidden_layers": 18,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "vocab_size": 103424,
}
SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
PHI3_LONG = PHI3 | {
    "max_position_embeddings": 131072,
    "rope_scaling": {"long_factor": [1.0 + pair for pair in range(48)], "short_factor": [1.0] * 48, "type": "longrope"},
    "sliding_window": 262144,
}
PHI4_MINI = PHI3_LONG | {
    "eos_token_id": 199999,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
PHI4 = PHI3 | {
    "eos_token_id": 100265,
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "max_position_embeddings": 16384,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "original_max_position_embeddings": 16384,
    "rope_theta": 250000,
    "sliding_window": None,
    "vocab_size": 100352,
}
EVERY_FOURTH = frozenset(range(3, 36, 4))
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "use_cache": True,
    "vocab_size": 262144,
}
GEMMA3_270M = {key: value for key, value in GEMMA3_1B.items() if key != "sliding_window_pattern"} | {
    "_sliding_window_pattern": 6,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
    "num_hidden_layers": 18,
    "use_bidirectional_attention": False,
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model", "patch_size": 14},
}
GEMMA3_27B = GEMMA3_4B | {
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
}
PUBLISHED = {
    "qwen3-0.6b": (
        QWEN3
        | {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28}
        | {"max_window_layers": 28, "tie_word_embeddings": True},
        {"head_dim": 128, "tie_word_embeddings": True, "windows": (None,) * 28},
        114_688,
    ),
    "qwen3-8b": (QWEN3, {"qk_norm": "head", "rotary_dim": 128, "qkv_bias": False}, 147_456),
    "qwen3-8b-fp8": (QWEN3 | {"quantization_config": FP8}, {"fp8_block": (128, 128)}, 147_456),
    "qwen3-30b-a3b": (QWEN3_MOE, {"num_moe_layers": 48, "topk_method": "greedy", "norm_topk_prob": True}, 98_304),
    "qwen3-235b-a22b-2507": (
        QWEN3_MOE
        | {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_attention_heads": 64}
        | {"max_position_embeddings": 262144, "max_window_layers": 94, "num_hidden_layers": 94, "rope_theta": 5000000},
        {"num_moe_layers": 94, "n_routed_experts": 128, "max_positions": 262144},
        192_512,
    ),
    "llama-3-8b": (
        LLAMA | {"eos_token_id": 128001, "max_position_embeddings": 8192, "rope_scaling": None},
        {"max_positions": 8192, "eos_token_ids": (128001,)},
        131_072,
    ),
    "llama-3.1-8b": (LLAMA, {"head_dim": 128, "n_routed_experts": 0, "max_positions": 131072}, 131_072),
    "llama-3.2-1b": (LLAMA_1B, {"head_dim": 64, "tie_word_embeddings": True}, 32_768),
    "smollm2-1.7b": (
        LLAMA
        | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_key_value_heads": 32}
        | {"max_position_embeddings": 8192, "rope_scaling": None, "vocab_size": 49152, "eos_token_id": 2}
        | {"is_llama_config": True, "rope_interleaved": False, "tie_word_embeddings": True}
        | {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
        {"head_dim": 64, "tie_word_embeddings": True},
        196_608,
    ),
    "llama-3.3-70b": (LLAMA_70B, {"head_dim": 128, "num_hidden_layers": 80}, 327_680),
    "glm-4.5": (GLM_45, {"qk_norm": "head", "num_moe_layers": 89, "routed_scaling_factor": 2.5}, 376_832),
    "glm-4.6": (GLM_45 | {"max_position_embeddings": 202752}, {"max_positions": 202752, "rotary_dim": 64}, 376_832),
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
    "qwen2.5-7b": (QWEN2, {"qkv_bias": True, "out_bias": False, "head_dim": 128, "windows": (None,) * 28}, 57_344),
    "deepseek-r1-distill-qwen-1.5b": (R1_DISTILL, {"qkv_bias": True, "max_positions": 131072}, 28_672),
    "mistral-7b-v0.3": (MISTRAL, {"qkv_bias": False, "windows": (None,) * 32}, 131_072),
    "mistral-7b-v0.1": (MISTRAL | {"sliding_window": 4096, "rope_theta": 10000.0}, {"windows": (4096,) * 32}, 131_072),
    "mistral-nemo": (MISTRAL_NEMO, {"head_dim": 128, "max_positions": 131072}, 163_840),
    "mixtral-8x7b": (MIXTRAL, {"num_moe_layers": 32, "moe_intermediate_size": 14336, "n_routed_experts": 8}, 131_072),
    "gemma-3-270m": (GEMMA3_270M, {"windows": (*(512,) * 5, None) * 3, "vocab_size": 262144}, 18_432),
    "gemma-3-1b": (
        GEMMA3_1B,
        {"windows": (*(*(512,) * 5, None) * 4, 512, 512), "softmax_scale": 1 / 16, "eos_token_ids": (1, 106)},
        26_624,
    ),
    "gemma-3-4b": (
        GEMMA3_4B,
        {"num_attention_heads": 8, "head_dim": 256, "max_positions": 131072, "vocab_size": 262208},
        139_264,
    ),
    "gemma-3-27b": (
        GEMMA3_27B,
        {"num_attention_heads": 32, "softmax_scale": 168**-0.5, "eos_token_ids": (1, 106)},
        507_904,
    ),
    "seed-oss-36b": (SEED_OSS, {"qkv_bias": True, "out_bias": False}, 262_144),
    "qwen1.5-moe-a2.7b": (
        QWEN2_MOE,
        {"qkv_bias": True, "out_bias": False, "n_shared_experts": 4, "norm_topk_prob": False, "num_moe_layers": 24},
        196_608,
    ),
    "qwen2-57b-a14b": (
        QWEN2_MOE
        | {"hidden_size": 3584, "intermediate_size": 18944, "moe_intermediate_size": 2560, "num_hidden_layers": 28}
        | {"num_attention_heads": 28, "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8}
        | {"shared_expert_intermediate_size": 20480},
        {"n_shared_experts": 8, "n_routed_experts": 64, "topk_method": "greedy", "norm_topk_prob": False},
        57_344,
    ),
    "granite-3.3-8b": (
        GRANITE,
        {
            "softmax_scale": 0.0078125,
            "embedding_scale": 12 / 0.22,
            "logit_scale": 1 / 16,
            "rms_norm_eps": 1e-5 / 0.22**2,
        },
        163_840,
    ),
    "granite-says-nothing": (
        {key: value for key, value in GRANITE.items() if "multiplier" not in key and key != "logits_scaling"},
        {"softmax_scale": 1.0, "embedding_scale": 1.0, "logit_scale": 1.0, "rms_norm_eps": 1e-5},
        163_840,
    ),
    "olmo-2-7b": (OLMO2, {"qk_norm": "whole", "has_post_norms": True, "head_dim": 128}, 524_288),
    "olmo-2-32b": (
        OLMO2
        | {"hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_hidden_layers": 64}
        | {"num_key_value_heads": 8},
        {"head_dim": 128, "num_key_value_heads": 8},
        262_144,
    ),
    "olmo-3-7b": (OLMO3, {"windows": (4096, 4096, 4096, None) * 8, "qk_norm": "whole"}, 524_288),
    "exaone-4-32b": (
        EXAONE4,
        {"windows": (4096, 4096, 4096, None) * 16, "nope_layers": frozenset(range(3, 64, 4)), "qk_norm": "head"},
        262_144,
    ),
    "exaone-4-says-less": (
        {key: value for key, value in EXAONE4.items() if key not in ("layer_types", "sliding_window_pattern")},
        {"windows": (4096, 4096, 4096, None) * 16},
        262_144,
    ),
    "exaone-4-1.2b": (EXAONE4_SMALL, {"windows": (None,) * 30, "nope_layers": frozenset()}, 61_440),
    "glm-4-9b-0414": (GLM4, {"rotary_dim": 64, "qkv_bias": True, "out_bias": False, "rope_interleave": True}, 40_960),
    "ernie-4.5-0.3b": (ERNIE, {"rotary_dim": 128, "rope_interleave": True, "tie_word_embeddings": True}, 18_432),
    "ernie-of-null-head-dim": (ERNIE | {"head_dim": None}, {"head_dim": 64}, 9_216),
    "smollm3-3b": (SMOLLM3, {"nope_layers": EVERY_FOURTH, "tie_word_embeddings": True, "head_dim": 128}, 73_728),
    "smollm3-says-nothing": (SMOLLM3 | {"no_rope_layers": None}, {"nope_layers": EVERY_FOURTH}, 73_728),
    "phi-3-mini-4k": (PHI3, {"windows": (2047,) * 32, "head_dim": 96, "qkv_bias": False}, 393_216),
    "phi-3.5-mini": (PHI3_LONG, {"windows": (None,) * 32}, 393_216),
    "phi-4": (PHI4, {"head_dim": 128, "windows": (None,) * 40, "max_positions": 16384}, 204_800),
    "phi-4-mini": (PHI4_MINI, {"rotary_dim": 96, "head_dim": 128, "tie_word_embeddings": True}, 131_072),
    # pages of layers with windows are kept whole: twice what the others' would take
    "gpt-oss-120b": (GPT_OSS, {"has_sinks": True, "windows": (128, None) * 18, "has_fp4_experts": True}, 2 * 36_864),
    "gpt-oss-20b": (GPT_OSS_20B, {"windows": (128, None) * 12, "n_routed_experts": 32}, 2 * 24_576),
}


def long_rope(**changes):
    """Phi-3's config with other factors of its pairs."""
    return PHI3_LONG | {"rope_scaling": PHI3_LONG["rope_scaling"] | changes}


REFUSED = {
    "qwen3-moe-with-windows": (QWEN3_MOE | {"use_sliding_window": True}, ["use_sliding_window is true", "false for"]),
    "llama3-of-another-window": (
        LLAMA | {"original_max_position_embeddings": 4096},
        ["original_max_position_embeddings is 4096", "the same as in rope_scaling"],
    ),
    "qwen3-moe-with-dense-layers": (QWEN3_MOE | {"mlp_only_layers": [3]}, ["mlp_only_layers is [3]"]),
    "qwen3-moe-every-other-layer": (QWEN3_MOE | {"decoder_sparse_step": 2}, ["decoder_sparse_step is 2"]),
    "qwen3-moe-with-a-factor": (QWEN3_MOE | {"routed_scaling_factor": 2.5}, ["routed_scaling_factor is 2.5", "1 for"]),
    "minimax-with-groups": (MINIMAX | {"n_group": 8, "topk_group": 4}, ["n_group is 8", "1 for this model_type"]),
    "minimax-not-normed": (MINIMAX | {"norm_topk_prob": False}, ["norm_topk_prob is false", "true for"]),
    "gpt-oss-not-normed": (GPT_OSS | {"norm_topk_prob": False}, ["norm_topk_prob is false", "true for"]),
    "llama-of-longrope": (
        LLAMA | {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        ["rope_scaling.rope_type", "longrope", "llama3"],
    ),
    "glm-rotated-otherwise": (
        GLM_AIR | {"partial_rotary_factor": 0.26},
        ["partial_rotary_factor is 0.26", "share of head_dim = 128"],
    ),
    "llama-half-rotated": (LLAMA | {"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5", "all of a head"]),
    "qwen3-half-rotated": (
        QWEN3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        ["rope_parameters.partial_rotary_factor is 0.5", "all of a head"],
    ),
    "minimax-of-linear-attention": (MINIMAX | {"attn_type_list": [0] * 62}, ["attn_type_list", "full attention"]),
    "minimax-of-other-norms": (MINIMAX | {"qk_norm_type": "per_head"}, ["qk_norm_type", '"per_layer"']),
    "minimax-with-shared-experts": (MINIMAX | {"shared_intermediate_size": 512}, ["shared_intermediate_size is 512"]),
    "qwen2-without-biases": (
        QWEN2 | {"attention_bias": False},
        ["attention_bias is false", "true for this model_type"],
    ),
    "mistral-with-biases": (
        MISTRAL | {"attention_bias": True},
        ["attention_bias is true", "false for this model_type"],
    ),
    "mistral-of-other-layers": (
        MISTRAL | {"sliding_window": 4096, "layer_types": ["full_attention"] * 32},
        ["layer_types", '"sliding_attention" for every layer'],
    ),
    "mixtral-not-normed": (MIXTRAL | {"norm_topk_prob": False}, ["norm_topk_prob is false", "true for"]),
    "seed-oss-with-a-biased-output": (SEED_OSS | {"attention_out_bias": True}, ["attention_out_bias is true"]),
    "qwen2-moe-of-another-width": (
        QWEN2_MOE | {"shared_expert_intermediate_size": 2000},
        ["shared_expert_intermediate_size is 2000", "a multiple of moe_intermediate_size = 1408"],
    ),
    "qwen2-moe-with-dense-layers": (QWEN2_MOE | {"mlp_only_layers": [0]}, ["mlp_only_layers is [0]"]),
    "qwen2-moe-with-windows": (QWEN2_MOE | {"use_sliding_window": True}, ["use_sliding_window is true", "false for"]),
    "granite-without-residual": (GRANITE | {"residual_multiplier": 0.0}, ["residual_multiplier is 0.0", "above 0"]),
    "llama-with-multipliers": (
        LLAMA | {"embedding_multiplier": 12.0, "logits_scaling": 1.0},
        ["embedding_multiplier is 12.0", "changes what"],
    ),
    "olmo2-with-windows": (OLMO2 | {"sliding_window": 4096}, ["sliding_window is 4096", "changes what"]),
    "exaone-4-of-letters-alone": (
        EXAONE4 | {"layer_types": None},
        ['sliding_window_pattern is "LLLG"', "a whole number"],
    ),
    "exaone-4-without-window": (EXAONE4 | {"sliding_window": None}, ["layer_types", '"full_attention" for every']),
    "exaone-4-of-an-unused-window": (
        EXAONE4_SMALL | {"sliding_window": 4096},
        ["sliding_window is 4096", "null where no layer has a window"],
    ),
    "exaone-4-with-biases": (EXAONE4 | {"attention_bias": True}, ["attention_bias is true", "false for"]),
    "glm-4-of-other-heads": (GLM4 | {"partial_rotary_factor": 0.26}, ["partial_rotary_factor is 0.26", "even number"]),
    "ernie-with-biases": (ERNIE | {"use_bias": True}, ["use_bias is true", "changes what"]),
    "smollm3-with-windows": (SMOLLM3 | {"use_sliding_window": True}, ["use_sliding_window is true", "false for"]),
    "smollm3-of-fewer-layers": (SMOLLM3 | {"no_rope_layers": [1, 0]}, ["no_rope_layers is [1, 0]", "each of 36"]),
    "llama-without-rope": (LLAMA | {"no_rope_layers": [1, 0] * 16}, ["no_rope_layers is [1", "changes what"]),
    "phi3-with-biases": (PHI3 | {"attention_bias": True}, ["attention_bias is true", "false for this model_type"]),
    "phi3-of-yarn": (long_rope(type="yarn"), ['rope_scaling.rope_type is "yarn"', '"longrope"']),
    "phi3-without-factors": (
        long_rope(short_factor=None),
        ["rope_scaling.short_factor is null", "one per rotary pair"],
    ),
    "phi3-of-zeros": (long_rope(long_factor=[0.0] * 48), ["rope_scaling.long_factor is [0.0", "above 0"]),
    "phi3-of-unequal-lists": (long_rope(short_factor=[1.0] * 47), ['"48 numbers"', "as many as short_factor has: 47"]),
    "phi3-of-more-pairs": (PHI3_LONG | {"partial_rotary_factor": 0.5}, ["rope_scaling.long_factor", "24 numbers"]),
    "phi3-of-two-scales": (long_rope(long_mscale=1.2), ["rope_scaling.long_mscale is 1.2"]),
    "phi3-of-two-lengths": (
        long_rope(original_max_position_embeddings=8192),
        ["rope_scaling.original_max_position_embeddings is 8192", "4096, as outside"],
    ),
    "phi4-mini-interpolated": (PHI4_MINI | {"interpolate_factor": 2}, ["interpolate_factor is 2"]),
    "gemma-of-both-directions": (GEMMA3_1B | {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
    "gemma-with-capped-logits": (GEMMA3_1B | {"final_logit_softcapping": 30.0}, ["final_logit_softcapping is 30.0"]),
    "gemma-with-capped-scores": (GEMMA3_1B | {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping is 50.0"]),
    "gemma-with-silu": (GEMMA3_1B | {"hidden_activation": "silu"}, ["hidden_activation", '"gelu_pytorch_tanh"']),
    "gemma-of-other-layers": (GEMMA3_270M | {"layer_types": ["full_attention"]}, ["layer_types", "each of 18"]),
    "gemma-without-window": (
        GEMMA3_270M | {"sliding_window": None},
        ["layer_types is [", 'supported is "full_attention" for every layer'],
    ),
    "gemma-of-a-pattern-without-window": (
        GEMMA3_1B | {"sliding_window": None},
        ["layer_types is missing", '"full_attention" for every layer'],
    ),
    "olmo-3-without-window": (OLMO3 | {"sliding_window": None}, ["layer_types", '"full_attention" for every layer']),
    "gemma-with-one-rope": (
        GEMMA3_1B | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        ["rope_parameters.rope_type", "change what the model computes"],
    ),
    "gemma-with-two-local-thetas": (
        GEMMA3_1B | {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}},
        ["rope_parameters.sliding_attention.rope_theta is 1000.0", "the same as the outer rope_local_base_freq"],
    ),
    "gpt-oss-without-window": (GPT_OSS | {"sliding_window": None}, ["sliding_window is missing"]),
    # transformers takes YaRN with a factor of 32 then
    "gpt-oss-without-yarn": (GPT_OSS | {"rope_scaling": None}, ["rope_parameters is null", "as rope_scaling"]),
    "gpt-oss-of-other-layers": (GPT_OSS | {"layer_types": ["chunked_attention"] * 36}, ["layer_types", "each of 36"]),
}
DELTA_NET = "three of four layers keep a linear-attention state (gated delta-net), which no pages hold"
# Hybrids -> model_type in config.json and the reason. Qwen3.6 has the type of Qwen3.5; some converters write its own.
HYBRIDS = {
    "Qwen3-Next-80B-A3B": ("qwen3_next", DELTA_NET),
    "Qwen3.5-397B-A17B, Qwen3.6-35B-A3B": ("qwen3_5_moe", DELTA_NET),
    "Qwen3.5-9B, Qwen3.6-27B": ("qwen3_5", DELTA_NET),
    "the text part of Qwen3.6-35B-A3B": ("qwen3_5_moe_text", DELTA_NET),
    "the text part of Qwen3.6-27B": ("qwen3_5_text", DELTA_NET),
    "Kimi-Linear-48B-A3B": ("kimi_linear", "most of its layers keep a linear-attention state (KDA)"),
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


@pytest.mark.parametrize(("model_type", "reason"), HYBRIDS.values(), ids=HYBRIDS)
def test_hybrids_are_refused_by_name_with_the_reason(tmp_path, model_type, reason):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as error:
        load_model_config(tmp_path)
    assert f'model_type is "{model_type}", which does not run here: {reason}' in str(error.value)


@pytest.mark.parametrize("model_type", ["qwen3_6", "qwen3_6_moe"])
def test_a_hybrid_is_refused_under_the_name_that_converters_give_it(tmp_path, model_type):
    with pytest.raises(ModelError) as error:
        load(tmp_path, QWEN3_MOE | {"model_type": model_type, "architectures": None})
    assert f'model_type is "{model_type}", which does not run here: {DELTA_NET}' in str(error.value)


def test_angles_of_gpt_oss_are_scaled_as_published(tmp_path):
    rope = load(tmp_path, GPT_OSS).attention.rope
    assert not rope.truncate
    assert rope.cos_sin_scale == pytest.approx(1.3466, abs=1e-4)


def test_long_factors_count_where_the_window_is_longer_than_the_original_one(tmp_path):
    rope = load(tmp_path, PHI3_LONG).attention.rope
    assert rope.pair_factors == tuple(PHI3_LONG["rope_scaling"]["long_factor"])
    assert rope.cos_sin_scale == pytest.approx(1.1902, abs=1e-4)
    rope = load(tmp_path, PHI3_LONG | {"max_position_embeddings": 4096}).attention.rope
    assert (rope.pair_factors, rope.cos_sin_scale) == ((1.0,) * 48, 1.0)
    rope = load(tmp_path, long_rope(attention_factor=1.25) | {"max_position_embeddings": 4096}).attention.rope
    assert (rope.pair_factors, rope.cos_sin_scale) == ((1.0,) * 48, 1.25)
    assert load(tmp_path, long_rope(type="su")).attention.rope == load(tmp_path, PHI3_LONG).attention.rope


@pytest.mark.parametrize("values", [GEMMA3_270M, GEMMA3_1B, GEMMA3_4B, GEMMA3_27B], ids=["270m", "1b", "4b", "27b"])
def test_gemma_is_read_as_by_transformers_from_old_and_new_files(tmp_path, values):
    of_type = {key: value for key, value in copy.deepcopy(values).items() if key != "model_type"}
    theirs = AutoConfig.for_model(values["model_type"], **of_type)
    theirs.save_pretrained(tmp_path)
    written = load_model_config(tmp_path)
    config, text = load(tmp_path, values), theirs.get_text_config()
    assert replace(written, eos_token_ids=config.eos_token_ids) == config
    kinds = ["full_attention" if window is None else "sliding_attention" for window in config.attention.windows]
    assert kinds == text.layer_types
    assert set(config.attention.windows) - {None} == {text.sliding_window}
    full, window = (text.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    assert (config.attention.rope.theta, config.attention.rope.factor) == (full["rope_theta"], full.get("factor", 1.0))
    assert (config.attention.window_rope.theta, config.attention.window_rope.factor) == (window["rope_theta"], 1.0)
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    others = ("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "intermediate_size")
    assert {key: value(config, key) for key in (*sizes, *others)} == {
        key: getattr(text, key) for key in (*sizes, *others)
    }
    assert config.attention.softmax_scale == text.query_pre_attn_scalar**-0.5


def test_a_missing_window_is_that_of_transformers(tmp_path):
    for values in (MISTRAL, MIXTRAL, PHI3):
        config = load(tmp_path, {key: value for key, value in values.items() if key != "sliding_window"})
        theirs = AutoConfig.for_model(values["model_type"]).sliding_window
        assert set(config.attention.windows) == {theirs}


@pytest.mark.parametrize(
    "values",
    [GLM_AIR, MINIMAX, QWEN3, QWEN2, MISTRAL, MIXTRAL, SEED_OSS, PHI3, SMOLLM3, QWEN2_MOE, OLMO2, EXAONE4, GLM4, ERNIE],
    ids=lambda values: values["model_type"],
)
def test_keys_that_are_missing_have_the_values_of_transformers(tmp_path, values):
    absent = ("rms_norm_eps", "rope_theta")
    config = load(tmp_path, {key: value for key, value in values.items() if key not in absent})
    theirs = AutoConfig.for_model(values["model_type"])
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.attention.rope.theta == theirs.rope_parameters["rope_theta"]
