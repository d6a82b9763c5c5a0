"""Norm, activation and rotation of values in plain PyTorch: nothing here depends on another row.

exp, functions built on exp, and all sums run in float64 and are rounded once: float32 exp differs between the
vectorised body of a tensor and its tail.
"""

# T tokens (rows), D hidden, F intermediate, R rotary width

import math
from typing import NamedTuple

import torch

from batchinfer_kernels.reference.fp8 import ScaledRows, quantize_fp8_rows


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x ÷ root mean square over the last dim × weight; [..., D] and [D] to [..., D] in the dtype of x.

    The quotient is rounded before it meets a weight in the dtype of x; with a weight in float32 only the result is.
    """
    x64 = x.double()
    normed = x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + eps)
    if weight.dtype is not x.dtype:
        return (normed * weight).to(x.dtype)
    return normed.to(x.dtype) * weight


def rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, keeps: bool = False
) -> tuple[torch.Tensor | None, ScaledRows]:
    """Return rms_norm of rows [T, D] rounded as `quantize_fp8_rows` does; with `keeps` the unrounded result, too."""
    normed = rms_norm(x, weight, eps)
    return normed if keeps else None, ScaledRows(*quantize_fp8_rows(normed))


class Activation(NamedTuple):
    """A form of SwiGLU (arXiv 2002.05202): g × sigmoid(alpha × (g + cubic × g³)) × (u + shift).

    g is the gate's value, at most `limit`; u the up value, from -limit to limit. Without values this is silu(g) × u.
    """

    limit: float = math.inf
    alpha: float = 1.0
    shift: float = 0.0
    cubic: float = 0.0


SWIGLU = Activation()
GEGLU_TANH = Activation(alpha=math.sqrt(8 / math.pi), cubic=0.044715)  # GELU's approximation by tanh (arXiv 1606.08415)


def silu_mul(gate: torch.Tensor, up: torch.Tensor, activation: Activation = SWIGLU) -> torch.Tensor:
    """Return the activation of gate and up; both [T, F], result in their dtype."""
    limit, alpha, shift, cubic = activation
    gate64, up64 = gate.double().clamp(max=limit), up.double().clamp(-limit, limit) + shift
    inner = alpha * gate64
    if cubic:
        inner *= 1 + cubic * gate64.square()
    active = (gate64 * sigmoid(inner)).to(gate.dtype)
    return (active.double() * up64).to(gate.dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate pairs of values by the angle of their position (arXiv 2104.09864).

    Args:
        x: [T, ..., R].
        cos, sin: [T, R / 2] float32.
        interleaved: pairs are (0, 1), (2, 3), …; otherwise (0, R / 2), (1, R / 2 + 1), …

    Returns:
        [T, ..., R] in the dtype of x and the same order of values.
    """
    shape = (x.shape[0], *[1] * (x.dim() - 2), cos.shape[-1])
    cos, sin = cos.view(shape), sin.view(shape)
    x32 = x.float()
    first, second = (x32[..., 0::2], x32[..., 1::2]) if interleaved else x32.chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    out = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return out.to(x.dtype)


def sigmoid(x64: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid of a float64 tensor from exp alone; torch's own differs between body and tail of a tensor."""
    return 1.0 / (1.0 + torch.exp(-x64))
