"""Tiny random DeepSeek-V4 checkpoints with layers of all kinds, in the names of the published files.

transformers' save_pretrained writes other names, and leaves out keys of config.json.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

TINY: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 96,
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 20,
    "o_groups": 2,
    "o_lora_rank": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "num_hash_layers": 2,
    "swiglu_limit": 0.4,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4, 128, 0, 0],
    "index_n_heads": 16,  # of few heads some scores are exactly 0, and transformers does not say which goes first
    "index_head_dim": 16,
    "index_topk": 7,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attention_bias": False,
}
# Three models with layers of all kinds.
KINDS: dict[str, dict[str, Any]] = {
    "published": {},
    "small-window": {"sliding_window": 8, "index_topk": 3},
    "one-hash-layer": {"num_hash_layers": 1, "compress_ratios": [128, 4, 4, 0, 4, 128, 0], "o_groups": 4},
}
_PUBLISHED = {
    ".self_attn.compressor.indexer.scorer.weights_proj.": ".attn.indexer.weights_proj.",
    ".self_attn.compressor.indexer.q_b_proj.": ".attn.indexer.wq_b.",
    ".self_attn.compressor.indexer.": ".attn.indexer.compressor.",
    ".compressor.kv_norm.": ".compressor.norm.",
    ".compressor.gate_proj.": ".compressor.wgate.",
    ".position_bias": ".ape",
    ".self_attn.": ".attn.",
    ".sinks": ".attn_sink",
    ".q_a_norm.": ".q_norm.",
    ".q_a_proj.": ".wq_a.",
    ".q_b_proj.": ".wq_b.",
    ".o_a_proj.": ".wo_a.",
    ".o_b_proj.": ".wo_b.",
    ".kv_proj.": ".wkv.",
    ".mlp.": ".ffn.",
    ".shared_experts.gate_proj.": ".shared_experts.w1.",
    ".shared_experts.down_proj.": ".shared_experts.w2.",
    ".shared_experts.up_proj.": ".shared_experts.w3.",
    ".gate.e_score_correction_bias": ".gate.bias",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".attn_hc.": ".hc_attn_",
    ".ffn_hc.": ".hc_ffn_",
    "embed_tokens.": "embed.",
    "lm_head.": "head.",
    "hc_head.hc_": "hc_head_",
}
_BELOW_DIAGONAL = 6.0  # less than others, before the softmax
_DRAWN = {"scale": (0.5, 0.3), "norm.weight": (1.0, 0.3), "ape": (0.0, 0.7), "sink": (0.0, 0.7), "base": (0.0, 0.7)}


def random_model(seed: int = 0, **changes: Any) -> DeepseekV4ForCausalLM:
    """A model of transformers in float32, in which each part counts."""
    config = DeepseekV4Config(**copy.deepcopy(TINY | changes))  # it changes what it is given
    model = DeepseekV4ForCausalLM._from_config(config, attn_implementation="eager").float().eval()
    draw = torch.Generator().manual_seed(seed)
    for name, values in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        published = _published(name)
        noise = torch.randn(values.shape, generator=draw)
        mean, spread = next(
            (
                one
                for end, one in _DRAWN.items()
                if published.removesuffix(".weight").endswith(end.removesuffix(".weight"))
            ),
            (0.0, 0.7 if published.endswith("gate.bias") else 1.4 / values.shape[-1] ** 0.5),
        )
        if published.endswith("tid2eid"):
            values.data.copy_(
                torch.rand(len(values), config.n_routed_experts, generator=draw).argsort(-1)[:, : values.shape[1]]
            )
        else:
            values.data.copy_(mean + spread * noise.abs() if published.endswith("scale") else mean + spread * noise)
        if published.endswith(
            ("hc_attn_base", "hc_ffn_base")
        ):  # a nearly triangular mixture, so that each round counts
            num_streams = config.hc_mult
            below = torch.ones(num_streams, num_streams).tril(-1)
            values.data[2 * num_streams :] -= _BELOW_DIAGONAL * below.flatten()
    return model


def published_tensors(model: DeepseekV4ForCausalLM) -> dict[str, torch.Tensor]:
    """The model's tensors by the names of the published files."""
    tensors = {}
    for name, value in model.state_dict().items():
        own = _published(name)
        parts = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}.get(own.rpartition(".")[2])
        if parts is None:
            tensors[own] = value.contiguous()
            continue
        for expert, both in enumerate(value):
            for part, matrix in zip(parts, both.chunk(len(parts)), strict=True):
                tensors[f"{own.rpartition('.')[0]}.{expert}.{part}.weight"] = matrix.contiguous()
    return tensors


def write_compressed(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    """Write a model folder of these tensors; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _published(name: str) -> str:
    name = name.removeprefix("model.")
    for old, new in _PUBLISHED.items():
        name = name.replace(old, new)
    return name
