"""Latent attention in which many rows share one prefix (DeepSeek-V2 report section 2.1); a part of every layer.

Rotary angles follow YaRN (arXiv 2309.00071 section 3.2).
"""

# T tokens, D hidden, H heads, N width without position, R rotary width, A = N + R, V value width
# P tokens of a shared prefix, B rows of a segment, S tokens per row

from __future__ import annotations

import math
from functools import lru_cache

import torch
from batches import Segment
from shape import ModelShape, RmsNorm, linear
from torch import nn


class Attention(nn.Module):
    """Multi-head latent attention; rows of a segment see their prefix and their own earlier tokens."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        heads, rope = shape.num_attention_heads, shape.qk_rope_head_dim
        query_width = shape.qk_nope_head_dim + rope
        self.q_a_proj = linear(shape.hidden_size, shape.q_lora_rank)
        self.q_a_layernorm = RmsNorm(shape.q_lora_rank, 1e-6)
        self.q_b_proj = linear(shape.q_lora_rank, heads * query_width)
        self.kv_a_proj_with_mqa = linear(shape.hidden_size, shape.kv_lora_rank + rope)
        self.kv_a_layernorm = RmsNorm(shape.kv_lora_rank, 1e-6)
        self.kv_b_proj = linear(shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim))
        self.o_proj = linear(heads * shape.v_head_dim, shape.hidden_size)
        yarn_mscale = 0.1 * math.log(shape.rope_factor) + 1.0
        self.scale = query_width**-0.5 * yarn_mscale**2

    def forward(self, x_TD: torch.Tensor, turn: torch.Tensor, segments: list[Segment]) -> torch.Tensor:
        """[T, D] to [T, D]; `turn` is [T, R / 2] complex, the rotation of each token's position."""
        shape, heads = self.shape, self.shape.num_attention_heads
        q_THA = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD))).unflatten(-1, (heads, -1))
        q_nope, q_rope = q_THA.split([shape.qk_nope_head_dim, shape.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x_TD).split([shape.kv_lora_rank, shape.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1))
        k_nope, v_THV = kv.split([shape.qk_nope_head_dim, shape.v_head_dim], dim=-1)
        q_THA = torch.cat([q_nope, _rotate(q_rope, turn[:, None])], dim=-1) * self.scale
        k_rope = _rotate(k_rope, turn)[:, None].expand(-1, heads, -1)
        k_THA = torch.cat([k_nope, k_rope], dim=-1)
        sizes = [segment.num_tokens for segment in segments]
        parts = zip(segments, q_THA.split(sizes), k_THA.split(sizes), v_THV.split(sizes), strict=True)
        return self.o_proj(torch.cat([_attend(*part) for part in parts]).flatten(1))


def yarn_frequencies(shape: ModelShape) -> torch.Tensor:
    """Angle per position of each rotary pair, [R / 2]: fast pairs as usual, slow ones slower by the factor."""
    dim, theta = shape.qk_rope_head_dim, shape.rope_theta
    plain = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    pair_of = [
        dim * math.log(shape.rope_original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (32, 1)
    ]
    first, last = max(math.floor(pair_of[0]), 0), min(math.ceil(pair_of[1]), dim - 1)
    slowed = ((torch.arange(dim // 2) - first) / (last - first)).clamp(0, 1)
    return plain / shape.rope_factor * slowed + plain * (1 - slowed)


def _rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (0, 1), (2, 3), … of the last dim."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def _attend(segment: Segment, q_THA: torch.Tensor, k_THA: torch.Tensor, v_THV: torch.Tensor) -> torch.Tensor:
    """Causal attention of one segment, [tokens, H, V]; the prefix is worked on once for all its rows.

    keys seen by    the prefix: [0, own place]
                    a row:      the whole prefix, then [0, own place] of the row itself
    """
    num_prefix, rows = segment.num_prefix, segment.num_rows
    q_HTA, k_HTA, v_HTV = (x.transpose(0, 1) for x in (q_THA, k_THA, v_THV))
    qp, kp, vp = (x[:, :num_prefix] for x in (q_HTA, k_HTA, v_HTV))
    out_prefix = torch.softmax(qp @ kp.transpose(1, 2) + _causal(num_prefix, q_THA.dtype), dim=-1) @ vp

    qs, ks, vs = (x[:, num_prefix:] for x in (q_HTA, k_HTA, v_HTV))  # [H, B * S, A]
    ks_HBSA, vs_HBSV, qs_HBSA = (x.unflatten(1, (rows, -1)) for x in (ks, vs, qs))
    own = qs_HBSA @ ks_HBSA.transpose(2, 3) + _causal(segment.row_tokens, q_THA.dtype)
    weights = torch.softmax(torch.cat([qs @ kp.transpose(1, 2), own.flatten(1, 2)], dim=-1), dim=-1)
    on_prefix, on_own = weights.split([num_prefix, segment.row_tokens], dim=-1)
    out_rows = on_prefix @ vp + (on_own.unflatten(1, (rows, -1)) @ vs_HBSV).flatten(1, 2)
    return torch.cat([out_prefix, out_rows], dim=1).transpose(0, 1)


@lru_cache(maxsize=256)
def _causal(num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask to add to scores: zero for earlier tokens, minus infinity for later ones."""
    return torch.full((num_tokens, num_tokens), -torch.inf, dtype=dtype).triu(1)
