"""Sizes of the sample model, and the two smallest parts of its layers; used by attention.py, moe.py and model.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes under the key names of config.json, which `config_json` of export.py writes."""

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 384
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 4
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    q_lora_rank: int = 64
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    n_routed_experts: int = 16
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 1
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rope_factor: float = 4.0
    rope_original_positions: int = 512


class RmsNorm(nn.Module):
    """x ÷ root mean square × weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def linear(num_in: int, num_out: int) -> nn.Linear:
    """Make a linear map without bias that keeps the size of its input."""
    layer = nn.Linear(num_in, num_out, bias=False)
    nn.init.normal_(layer.weight, std=num_in**-0.5)
    return layer
