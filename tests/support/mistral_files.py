"""Checkpoints in the form of Mistral's own code: params.json, consolidated.safetensors, names as in Mistral Large 3."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# params.json of Mistral-Large-3-675B-Instruct-2512
LARGE_3: dict[str, Any] = {
    "dim": 7168,
    "n_layers": 61,
    "head_dim": 192,
    "hidden_dim": 16384,
    "n_heads": 128,
    "n_kv_heads": 128,
    "rope_theta": 10000.0,
    "norm_eps": 1e-06,
    "vocab_size": 131072,
    "tied_embeddings": False,
    "max_position_embeddings": 294912,
    "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "kv_lora_rank": 512,
    "v_head_dim": 128,
    "yarn": {"original_max_position_embeddings": 8192, "factor": 36, "apply_scale": False, "beta": 32, "alpha": 1},
    "moe": {
        "expert_parallel": 1,
        "expert_model_parallel": 1,
        "route_every_n": 1,
        "first_k_dense_replace": 3,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "num_expert_groups": 1,
        "num_expert_groups_per_tok": 1,
        "routed_scale": 1.0,
        "expert_hidden_dim": 4096,
        "num_shared_experts": 1,
    },
    "vision_encoder": {"image_token_id": 10, "patch_size": 14, "hidden_size": 1664, "num_hidden_layers": 48},
    "quantization_config": {
        "config_groups": {
            "FP8_BLOCK": {
                "format": "float-quantized",
                "input_activations": {
                    "dynamic": True,
                    "group_size": 128,
                    "num_bits": 8,
                    "strategy": "group",
                    "symmetric": True,
                    "type": "float",
                },
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "block_structure": [128, 128],
                    "dynamic": False,
                    "num_bits": 8,
                    "strategy": "block",
                    "symmetric": True,
                    "type": "float",
                },
            }
        },
        "format": "float-quantized",
        "ignore": ["model.embed_tokens", "re:patch_merger.*", "re:vision_encoder.*", "re:.*gate$", "lm_head"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    },
}
_NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.": "layers.",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate.weight": "gate.weight",
    "mlp.shared_experts": "shared_experts",
    "mlp.experts": "experts",
    "mlp.": "feed_forward.",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}


def write_as_mistral(folder: Path) -> None:
    """Give a checkpoint of `mistral4` that form, with a tensor of a vision encoder."""
    config = json.loads((folder / "config.json").read_text())
    stored = one_by_one(load_file(folder / "model.safetensors"))
    tensors = {_own_name(name): tensor.contiguous() for name, tensor in stored.items()}
    tensors["vision_encoder.patch_conv.weight"] = torch.ones(4, 3, 2, 2)
    save_file(tensors, folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps(_params(config)))
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()


def one_by_one(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint with each expert's weights, and the scales of weights that have one, in tensors of their own."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        stacked = re.fullmatch(r"(.+\.experts)\.(gate_up|down)_proj(_scale_inv)?", name)
        if stacked is None:
            tensors[name] = tensor
            continue
        parts, suffix = (("gate", "up") if stacked[2] == "gate_up" else ("down",)), stacked[3] or ""
        for expert, of_expert in enumerate(tensor):
            cut = [of_expert] * len(parts) if suffix else of_expert.chunk(len(parts))
            for part, values in zip(parts, cut, strict=True):
                tensors[f"{stacked[1]}.{expert}.{part}_proj.weight{suffix}"] = values.clone()
    return tensors


def _own_name(name: str) -> str:
    for theirs, own in _NAMES.items():
        name = name.replace(theirs, own)
    return name


def _params(config: dict[str, Any]) -> dict[str, Any]:
    """config.json in the words of params.json."""
    rope, keys = config["rope_parameters"], ("vocab_size", "q_lora_rank", "kv_lora_rank", "v_head_dim")
    window = rope["original_max_position_embeddings"]
    assert rope["attention_factor"] == 1
    return LARGE_3 | {
        **{key: config[key] for key in (*keys, "qk_nope_head_dim", "qk_rope_head_dim", "max_position_embeddings")},
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": config["qk_head_dim"],
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "llama_4_scaling": {"original_max_position_embeddings": window, "beta": rope["llama_4_scaling_beta"]},
        "yarn": LARGE_3["yarn"] | {"original_max_position_embeddings": window, "factor": rope["factor"]},
        "moe": LARGE_3["moe"]
        | {
            "first_k_dense_replace": config["first_k_dense_replace"],
            "num_experts": config["n_routed_experts"],
            "num_experts_per_tok": config["num_experts_per_tok"],
            "expert_hidden_dim": config["moe_intermediate_size"],
        },
        "quantization_config": None,
    }
