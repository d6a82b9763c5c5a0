"""Norm, activation and rotation of values in plain PyTorch: nothing here depends on another row.

exp and whatever is built on it, and all sums, run in float64 and are rounded once: float32 exp differs between the
vectorised body of a tensor and its tail.
"""

# T tokens (rows), D hidden, F intermediate, R rotary width

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x ÷ root mean square over the last dim × weight; [..., D] and [D] to [..., D] in the dtype of x."""
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) × up, the SwiGLU activation (arXiv 2002.05202); both [T, F], result in their dtype."""
    wide = gate.double()
    return (wide * sigmoid(wide)).to(gate.dtype) * up


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
    wide = x.float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    out = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return out.to(x.dtype)


def sigmoid(wide: torch.Tensor) -> torch.Tensor:
    """Sigmoid of a float64 tensor from exp alone (the library's own differs between body and tail of a tensor)."""
    return 1.0 / (1.0 + torch.exp(-wide))
