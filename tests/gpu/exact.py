"""The operations in float64, and the distance of a result from them.

FP8 operands count as they are after rounding, and what an operation rounds in between is rounded here too: the error is
that of the operation, not that of FP8.
"""

# T rows, M depth, E experts, B requests, H heads, W latent and rotary width, C latent width

from __future__ import annotations

import torch
import torch.nn.functional as F

from batchinfer_kernels import reference
from batchinfer_kernels.reference.block_scaled import BLOCK, BlockScaled
from batchinfer_kernels.reference.fp4 import Fp4Scaled
from batchinfer_kernels.reference.fp8 import ROW_BLOCK
from batchinfer_kernels.reference.group_scaled import GroupScaled

PAGE = 64
TOLERANCE = {"relative": 1e-2, "diff": 1e-3, "unequal": 0.0}
Weight = torch.Tensor | BlockScaled | GroupScaled | Fp4Scaled


def error(measure: str, result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance of `result` from `expected` by one of three measures; infinite if a value is not finite.

    Args:
        measure: "relative" (largest error ÷ largest value), "diff" (1 - 2xy ÷ (x² + y²), as DeepGEMM's tests measure
            it) or "unequal" (how many values differ).
    """
    if result.shape != expected.shape:
        return torch.inf
    if measure == "unequal":
        return float((_plain(result) != _plain(expected).to(result.device)).sum())
    result, expected = result.double(), expected.double()
    if not torch.isfinite(result).all():
        return torch.inf
    if measure == "relative":
        return float((result - expected).abs().max() / expected.abs().max())
    return float(1 - 2 * (result * expected).sum() / (result.square() + expected.square()).sum())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same shape and values."""
    return one.shape == other.shape and torch.equal(_plain(one), _plain(other))


def wide(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Values × their block's scale."""
    spread = scales.double().repeat_interleave(block[0], 0)[: values.shape[0]]
    return values.double() * spread.repeat_interleave(block[1], 1)[:, : values.shape[1]]


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return x · weightᵀ, both rounded if the weight is in FP8."""
    return _rows(x, weight) @ _wide_weight(weight).T


def swiglu(x: torch.Tensor, gate_up: Weight, down: Weight) -> torch.Tensor:
    """One expert: down(silu(gate(x)) × up(x))."""
    gate, up = linear(x, gate_up).bfloat16().chunk(2, dim=-1)
    active = F.silu(gate.double()).bfloat16() * up
    return linear(active, down)


def experts(x: torch.Tensor, counts: list[int], gate_up: Weight, down: Weight) -> torch.Tensor:
    """All experts over rows sorted by expert."""
    parts = x.split(counts)
    return torch.cat([swiglu(part, gate_up[place], down[place]) for place, part in enumerate(parts)])


def decode(
    q_BHW: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, lengths: list[int], latent_dim: int, scale: float
) -> torch.Tensor:
    """Attention of one query per request over its latents, [B, H, C]."""
    out = []
    for q_HW, page_ids, length in zip(q_BHW, table, lengths, strict=True):
        latents = pages[page_ids].flatten(0, 1)[:length].double()
        weights = torch.softmax(q_HW.double() @ latents.T * scale, dim=-1)
        out.append(weights @ latents[:, :latent_dim])
    return torch.stack(out)


def prefill(
    q_BTHA: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    kv_b_HZC: torch.Tensor,
    v_dim: int,
    scale: float,
    behind: int = 0,
) -> torch.Tensor:
    """Causal attention of chunks of one length, [B, T, H, V], head by head; keys and values are rounded.

    `behind` is the number of earlier tokens of each prompt.
    """
    num_tokens, num_heads, width = q_BTHA.shape[1:]
    latent_dim = kv_b_HZC.shape[-1]
    out = torch.empty(*q_BTHA.shape[:3], v_dim, dtype=torch.float64, device=q_BTHA.device)
    num_keys = behind + num_tokens
    unseen = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=q_BTHA.device).triu(behind + 1)
    for request, page_ids in enumerate(table):
        latents = pages[page_ids].flatten(0, 1)[:num_keys].double()
        for head in range(num_heads):
            kv = (latents[:, :latent_dim] @ kv_b_HZC[head].double().T).bfloat16().double()
            k = torch.cat([kv[:, :-v_dim], latents[:, latent_dim:]], dim=-1)
            assert k.shape[-1] == width
            scores = (q_BTHA[request, :, head].double() @ k.T * scale).masked_fill_(unseen, -torch.inf)
            out[request, :, head] = torch.softmax(scores, dim=-1) @ kv[:, -v_dim:]
    return out


def _rows(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    if isinstance(weight, BlockScaled):
        return wide(*reference.quantize_fp8_block(x, ROW_BLOCK), ROW_BLOCK)
    return x.double()


def _wide_weight(weight: Weight) -> torch.Tensor:
    if isinstance(weight, BlockScaled):
        return wide(weight.values, weight.scales, (BLOCK, BLOCK))
    if isinstance(weight, GroupScaled | Fp4Scaled):
        weight = weight.plain().bfloat16()  # as it is on its way into the product
    return weight.double()


def _plain(x: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes: not every device compares it."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x
