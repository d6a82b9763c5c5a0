"""Queries and keys of an indexer in FP8, as DeepSeek's own inference code has them (DeepSeek-V3.2-Exp, inference/).

A Hadamard transform spreads outliers in a few values over the whole row. The transform is orthogonal: products of
transformed queries and keys are those of the plain ones, except for rounding.
"""

# N rows, M of these rows, I width, a power of two

import torch

from batchinfer_kernels.reference.fp8 import FP8

_LARGEST = 448.0
_LEAST_AMAX = 1e-4


def hadamard_fp8(x_NI: torch.Tensor, rows_M: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply rows with a Hadamard matrix ÷ √I, round to their dtype and then to E4M3, with a power of two per row.

    Args:
        x_NI: gaps between rows allowed.
        rows_M: int64, the wanted rows; None: all.

    Returns:
        [M, I] float8_e4m3fn and scales [M] float32: the smallest power of two with which no value is beyond 448.
    """
    x_MI = x_NI if rows_M is None else x_NI[rows_M]
    signs_II = hadamard_signs(x_NI.shape[-1], x_NI.device)
    turned_MI = (x_MI.double() @ signs_II.double() * x_NI.shape[-1] ** -0.5).to(x_NI.dtype).float()
    amax_M = turned_MI.abs().amax(-1).clamp_min(_LEAST_AMAX)
    mantissa_M, exponent_M = torch.frexp(amax_M * (1 / _LARGEST))  # a mantissa of 1/2 is a power of two
    scales_M = torch.ldexp(torch.ones_like(amax_M), exponent_M - (mantissa_M == 0.5).int())
    return (turned_MI / scales_M[:, None]).clamp(-_LARGEST, _LARGEST).to(FP8), scales_M


def hadamard_signs(width: int, device: torch.device) -> torch.Tensor:
    """Return Sylvester's matrix, [I, I] float32: -1 if row and column share an odd number of set bits, else 1.

    Raises:
        ValueError: the width is not a power of two.
    """
    if width & (width - 1):
        raise ValueError(f"there is no Hadamard matrix of this kind of {width} columns")
    signs = torch.ones(1, 1, device=device)
    while len(signs) < width:
        signs = torch.cat([torch.cat([signs, signs], dim=1), torch.cat([signs, -signs], dim=1)])
    return signs
