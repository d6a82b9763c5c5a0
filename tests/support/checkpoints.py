"""Tiny random models in Hugging Face format, made with transformers' own save_pretrained; shared by several tests.

Every weight is random and none is trivial (norms are not ones, the router's bias is not zero), so that a term left
out or applied twice shows up in the logits.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    YoutuConfig,
    YoutuForCausalLM,
)

from batchinfer.model.families import FAMILIES
from support.mistral_files import write_as_mistral

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}
_MOE_KEYS = (
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "first_k_dense_replace",
)
V3 = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5}
INDEXER = {"index_topk": 16, "index_n_heads": 32, "index_head_dim": 16}
# the factor on queries changes every 24 positions, which is no divisor of a page
MISTRAL_YARN = YARN | {"original_max_position_embeddings": 24, "factor": 16.0, "llama_4_scaling_beta": 0.4}
UNSCALED_YARN = MISTRAL_YARN | {"attention_factor": 1.0}  # what `apply_scale` false says in params.json
MISTRAL = {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "rope_parameters": MISTRAL_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
V2 = {"routed_scaling_factor": 1.5, "topk_method": "greedy", "n_shared_experts": 2}

# of models with grouped-query attention, where MLA's keys mean nothing
GQA: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GQA_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GLM4_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,  # so that pairs of each kind are among the few of a small head
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5], "long_factor": [1.0, 2.7, 9.5]}
GEMMA3: dict[str, Any] = {
    "num_attention_heads": 4,
    "head_dim": 10,
    "query_pre_attn_scalar": 7,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}

# name -> (family, what differs from its base)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("deepseek_v3", V3),
    "v3-no-q-lora": ("deepseek_v3", V3 | {"q_lora_rank": None, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "v3-groups": (
        "deepseek_v3",
        V3 | {"n_group": 4, "topk_group": 2, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2},
    ),
    "v3-yarn": ("deepseek_v3", V3 | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "v3-yarn-mscale": (
        "deepseek_v3",
        V3 | {"n_group": 2, "topk_group": 1, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    ),
    "v3-odd-sizes": (
        "deepseek_v3",
        V3
        | {
            "hidden_size": 45,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 7,
            "qk_rope_head_dim": 6,
            "v_head_dim": 5,
            "moe_intermediate_size": 9,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "attention_bias": True,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
        },
    ),
    "v3-wide": (
        "deepseek_v3",
        V3
        | {
            "hidden_size": 128,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "kv_lora_rank": 64,
            "v_head_dim": 32,
            "n_routed_experts": 32,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 4,
        },
    ),
    "v2-greedy": ("deepseek_v2", V2 | {"q_lora_rank": None}),
    "v2-groups": (
        "deepseek_v2",
        V2 | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "mlp_bias": True},
    ),
    "glm": ("glm4_moe_lite", {"routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "qk_nope_head_dim": 24}),
    "glm-two-dense": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["dense", "dense", "sparse"], "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    ),
    "youtu": ("youtu", {}),
    "youtu-yarn": ("youtu", {"q_lora_rank": None, "tie_word_embeddings": False, "rope_parameters": YARN}),
    "kimi-k2": ("kimi_k2", V3 | {"routed_scaling_factor": 2.827}),
    "kimi-k2-yarn": ("kimi_k2", V3 | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "kimi-k25": ("kimi_k25", V3 | {"routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5}),
    "kimi-k25-yarn": ("kimi_k25", V3 | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "v32": ("deepseek_v32", V3 | INDEXER),
    "v32-yarn": (
        "deepseek_v32",
        V3
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "n_group": 4, "topk_group": 2}
        | {"index_topk": 21, "index_n_heads": 29, "index_head_dim": 11, "num_attention_heads": 9}
        | {"num_key_value_heads": 9},
    ),
    "glm-dsa": ("glm_moe_dsa", V3 | INDEXER | {"rms_norm_eps": 1e-5}),
    "glm-dsa-shared": (
        "glm_moe_dsa",
        V3 | INDEXER | {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "mistral4": (
        "mistral4",
        MISTRAL
        | {"n_group": 4, "topk_group": 2, "n_routed_experts": 16, "num_experts_per_tok": 3, "q_lora_rank": None}
        | {"routed_scaling_factor": 1.7, "num_attention_heads": 3, "num_key_value_heads": 3, "rms_norm_eps": 1e-5},
    ),
    "mistral3": ("mistral3", MISTRAL | {"first_k_dense_replace": 0}),
    "mistral-params": ("mistral_params", MISTRAL | {"rope_parameters": UNSCALED_YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": (
        "qwen3",
        {"tie_word_embeddings": True, "attention_bias": True}
        | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    ),
    "qwen3-windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    "qwen3-moe": ("qwen3_moe", GQA_EXPERTS),
    "qwen3-moe-normed": ("qwen3_moe", GQA_EXPERTS | {"norm_topk_prob": True, "num_key_value_heads": 1}),
    "glm4-moe": (
        "glm4_moe",
        GLM4_EXPERTS
        | {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5, "n_shared_experts": 2},
    ),
    "glm4-moe-groups": (
        "glm4_moe",
        GLM4_EXPERTS | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "rms_norm_eps": 1e-6},
    ),
    "minimax-m2": ("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 4}),
    "minimax-m2-odd": (
        "minimax_m2",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "rotary_dim": 6, "head_dim": 10, "num_attention_heads": 5}
        | {"num_key_value_heads": 1, "hidden_size": 45, "intermediate_size": 9, "tie_word_embeddings": True},
    ),
    "gpt-oss": (
        "gpt_oss",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 40, "swiglu_limit": 1.5, "head_dim": 8}
        | {"rope_parameters": YARN | {"rope_theta": 1500.0, "truncate": False}},
    ),
    "gpt-oss-odd": (
        "gpt_oss",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7, "swiglu_limit": 7.0, "head_dim": 6}
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 45, "intermediate_size": 9}
        | {"rope_parameters": YARN | {"rope_theta": 1500.0}},
    ),
    "llama": ("llama", {"num_attention_heads": 4, "rope_parameters": LLAMA3}),
    "llama-biased": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 10, "rms_norm_eps": 1e-5}
        | {"num_attention_heads": 4, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-dynamic": (
        "llama",
        {"num_attention_heads": 4, "num_key_value_heads": 4}
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "qwen2": ("qwen2", {"rope_parameters": YARN}),
    "qwen2-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", {"sliding_window": None, "rms_norm_eps": 1e-5}),
    "mistral-windows": ("mistral", {"sliding_window": 40, "head_dim": 10}),
    "mistral3-dense": ("mistral3_dense", {"sliding_window": None}),
    "seed-oss": ("seed_oss", {"mlp_bias": True}),
    "gemma3-text": ("gemma3_text", GEMMA3),
    "gemma3": ("gemma3", GEMMA3 | {"num_key_value_heads": 1, "tie_word_embeddings": True, "sliding_window": 7}),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": None}),
    "qwen2-moe": ("qwen2_moe", GQA_EXPERTS | {"shared_expert_intermediate_size": 48}),
    "qwen2-moe-normed": (
        "qwen2_moe",
        GQA_EXPERTS | {"shared_expert_intermediate_size": 24, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "granite": (
        "granite",
        {"embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 0.22, "logits_scaling": 8.0}
        | {"tie_word_embeddings": True, "num_attention_heads": 4, "rms_norm_eps": 1e-3},
    ),
    "granite-biased": (
        "granite",
        {"embedding_multiplier": 0.3, "residual_multiplier": 1.7, "logits_scaling": 0.7, "attention_multiplier": 0.4}
        | {"attention_bias": True, "mlp_bias": True, "num_attention_heads": 4},
    ),
    "olmo2": ("olmo2", {"rope_parameters": YARN, "num_attention_heads": 4}),
    "olmo2-biased": ("olmo2", {"attention_bias": True, "num_attention_heads": 4, "tie_word_embeddings": True}),
    "olmo3": (
        "olmo3",
        {
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "sliding_window": 40,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "glm4": ("glm4", {"num_attention_heads": 4, "rms_norm_eps": 1e-4, "rope_parameters": YARN}),
    "glm4-plain": (
        "glm4",
        {"attention_bias": False, "head_dim": 12, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    ),
    "ernie4-5": ("ernie4_5", {"num_attention_heads": 4}),
    "exaone4": ("exaone4", {"num_hidden_layers": 4, "sliding_window": 40, "rope_parameters": LLAMA3, "head_dim": 10}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3, "head_dim": 10}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "smollm3-yarn": (
        "smollm3",
        {"no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
        | {"rope_parameters": YARN},
    ),
    "phi3": ("phi3", {"sliding_window": 40, "num_key_value_heads": 6, "tie_word_embeddings": True}),
    "phi3-long": (
        "phi3",
        {"max_position_embeddings": 512, "original_max_position_embeddings": 16, "head_dim": 10, "hidden_size": 60}
        | {"rope_parameters": LONGROPE, "partial_rotary_factor": 0.6},
    ),
    "phi3-short": (
        "phi3",
        {"original_max_position_embeddings": 512, "head_dim": 10, "hidden_size": 60, "sliding_window": 512}
        | {"rope_parameters": LONGROPE | {"factor": 4.0}, "partial_rotary_factor": 0.6},
    ),
    "v2-yarn": ("deepseek_v2", V2 | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
}
_TEXT_OF = {"mistral3": "mistral4", "mistral3_dense": "mistral", "gemma3": "gemma3_text"}  # the language model's family
_FAMILY_OF = {name: FAMILIES.get(_TEXT_OF.get(family, family)) for name, (family, _) in MODELS.items()}
GROUPED_MODELS = [name for name, family in _FAMILY_OF.items() if family is not None and family.grouped]
SPARSE_MODELS = [name for name, (family, _) in MODELS.items() if family in ("deepseek_v32", "glm_moe_dsa")]


# The classes that transformers has for a family; those of Kimi-K2 are DeepSeek-V3's under another name.
_CLASSES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
    "deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
    "youtu": (YoutuConfig, YoutuForCausalLM),
    "kimi_k2": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "mistral4": (Mistral4Config, Mistral4ForCausalLM),
    "mistral_params": (Mistral4Config, Mistral4ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "minimax_m2": (MiniMaxM2Config, MiniMaxM2ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "olmo3": (Olmo3Config, Olmo3ForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
    "ernie4_5": (Ernie4_5Config, Ernie4_5ForCausalLM),
    "exaone4": (Exaone4Config, Exaone4ForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
}
_BASES = {
    **dict.fromkeys(("qwen3", "qwen3_moe", "llama", "glm4_moe", "minimax_m2", "gpt_oss"), GQA),
    **dict.fromkeys(("qwen2", "mistral", "mistral3_dense", "mixtral", "seed_oss", "gemma3_text", "gemma3"), GQA),
    **dict.fromkeys(
        ("qwen2_moe", "granite", "olmo2", "olmo3", "glm4", "ernie4_5", "exaone4"), GQA | {"pad_token_id": None}
    ),
    "smollm3": GQA | {"pad_token_id": None},
    "phi3": GQA | {"head_dim": 8, "hidden_size": 48, "pad_token_id": None},
    "glm4_moe_lite": {key: value for key, value in BASE.items() if key != "first_k_dense_replace"},
    "youtu": {key: value for key, value in BASE.items() if key not in _MOE_KEYS}
    | {"bos_token_id": 0, "eos_token_id": 1},
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 2,
}
_SIGLIP = _VISION | {"model_type": "siglip_vision_model", "image_size": 16}
_PIXTRAL = _VISION | {"model_type": "pixtral", "image_size": 16, "head_dim": 8}


def make_checkpoint(folder: Path, name: str = "v3", *, seed: int = 0, **overrides: Any) -> torch.nn.Module:
    """Write the named model to `folder` and return transformers' own float32 model of it."""
    family, fields = MODELS[name]
    fields = copy.deepcopy(_BASES.get(family, BASE) | fields | overrides)  # configs fill them in
    torch.manual_seed(seed)
    if family == "kimi_k25":
        parts: dict[str, Any] = {"text_config": {"model_type": "kimi_k2", **fields}, "vision_config": _VISION}
        model: PreTrainedModel = Kimi_K25ForConditionalGeneration(
            Kimi_K25Config(**parts, projection_hidden_size=16, tie_word_embeddings=False)
        )
    elif family == "gemma3":
        text = {"model_type": "gemma3_text", **fields}
        model = Gemma3ForConditionalGeneration(
            Gemma3Config(text_config=text, vision_config=_SIGLIP, mm_tokens_per_image=4, image_token_index=95)
        )
    elif family in _TEXT_OF:
        text = {"model_type": _TEXT_OF[family], **fields}
        model = Mistral3ForConditionalGeneration(
            Mistral3Config(text_config=text, vision_config=_PIXTRAL, tie_word_embeddings=False)
        )
    else:
        config, of_config = _CLASSES[family]
        model = of_config(config(**fields))
    model = model.float().eval()
    model.set_experts_implementation("eager")  # the default one needs sizes that are multiples of 4
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in key and "embed_scale" not in key:
                tensor.copy_(_random_values(key, tensor, generator))
                if "norm" in key and family in ("gemma3_text", "gemma3"):
                    tensor.sub_(1)  # as their weights are stored
    model.save_pretrained(folder)
    if family == "kimi_k2":
        edit_config(folder, model_type=family)
    if family == "kimi_k25":
        write_tensors(folder, {_released_name(key): value for key, value in read_tensors(folder).items()})
    if family == "mistral_params":
        write_as_mistral(folder)
    return model


def _released_name(name: str) -> str:
    """The name that a tensor of Kimi-K2.5 has in the release, where transformers writes another."""
    return name.replace("model.blocks.", "model.layers.").replace("model.mm_projector.", "mm_projector.")


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; a value of None removes the key."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    path.write_text(json.dumps(config))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint that is one file."""
    return load_file(folder / "model.safetensors")


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the file of a checkpoint that is one file."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def split_into_shards(folder: Path, num_shards: int) -> None:
    """Replace model.safetensors by several files and their index."""
    tensors = read_tensors(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard::num_shards]
        save_file({name: tensors[name].contiguous() for name in part}, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _random_values(key: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(tensor.shape, generator=generator)
    if "norm" in key:
        return 1 + 0.2 * values
    if "sinks" in key:
        return values
    if "e_score_correction_bias" in key:
        return 0.1 * values
    if key.endswith("bias"):
        return 0.1 * values
    if "embed_tokens" in key:
        return values
    return values * 1.2 / tensor.shape[-1] ** 0.5
