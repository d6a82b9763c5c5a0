"""The implementations that the GPU scripts check and time, and single grouped products of theirs.

The grouped products are the halves of `grouped_mlp` and `masked_mlp`: alone they can stand beside published figures.
"""

# G groups (experts), M rows of a group, N columns of the result, K depth

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from batchinfer_kernels import hopper
from batchinfer_kernels import hopper_libraries as libraries
from batchinfer_kernels.block_scaled import BlockScaled
from batchinfer_kernels.triton import ops as triton_ops
from batchinfer_kernels.triton import probe

NAMES = ("hopper", "triton")
CONTIGUOUS, MASKED = "product, contiguous", "product, masked"
_HOPPER_PROBES = {
    "linear": libraries.why_not_deep_gemm,
    "grouped_mlp": libraries.why_not_deep_gemm,
    "masked_mlp": libraries.why_not_deep_gemm,
    "mla_decode": libraries.why_not_flash_mla,
    CONTIGUOUS: libraries.why_not_deep_gemm,
    MASKED: libraries.why_not_deep_gemm,
}


def has(name: str, op: str) -> bool:
    """Whether the candidate has a version of this operation at all."""
    return name == "triton" or op in _HOPPER_PROBES


def why_not(name: str, op: str) -> str | None:
    """Why the candidate's version cannot run here, or None."""
    return probe.why_not() if name == "triton" else _HOPPER_PROBES[op]()


def function(name: str, op: str) -> Callable[..., Any]:
    """The candidate's version; signatures as in the `reference` modules, those of grouped products as below."""
    if op == CONTIGUOUS:
        return {"hopper": _hopper_contiguous, "triton": _triton_contiguous}[name]
    if op == MASKED:
        return {"hopper": _hopper_masked, "triton": _triton_masked}[name]
    return getattr({"hopper": hopper, "triton": triton_ops}[name], op)


def _hopper_contiguous(x_GMK: torch.Tensor, scales: torch.Tensor, weight: BlockScaled) -> torch.Tensor:
    """[G * M, N] bfloat16; M a multiple of 128."""
    num_groups, num_rows, _ = x_GMK.shape
    out = torch.empty(num_groups * num_rows, weight.values.shape[1], dtype=torch.bfloat16, device=x_GMK.device)
    group = torch.arange(num_groups, dtype=torch.int32, device=x_GMK.device).repeat_interleave(num_rows)
    gemm = libraries.deep_gemm(libraries.FP8_CONTIGUOUS)
    assert gemm is not None
    gemm((x_GMK.flatten(0, 1), scales.flatten(0, 1)), (weight.values, weight.scales), out, group)
    return out


def _triton_contiguous(x_GMK: torch.Tensor, scales: torch.Tensor, weight: BlockScaled) -> torch.Tensor:
    from batchinfer_kernels.triton import tiles

    num_groups, num_rows, _ = x_GMK.shape
    counts = torch.full((num_groups,), num_rows, device=x_GMK.device)
    return _triton_product(x_GMK, scales, weight, tiles.contiguous_tiles(counts, num_groups * num_rows))


def _hopper_masked(x_GMK: torch.Tensor, scales: torch.Tensor, weight: BlockScaled) -> torch.Tensor:
    """[G * M, N] bfloat16, all rows filled; M a multiple of 128."""
    num_groups, num_rows, _ = x_GMK.shape
    out = torch.empty(num_groups, num_rows, weight.values.shape[1], dtype=torch.bfloat16, device=x_GMK.device)
    counts = torch.full((num_groups,), num_rows, dtype=torch.int32, device=x_GMK.device)
    gemm = libraries.deep_gemm(libraries.FP8_MASKED)
    assert gemm is not None
    gemm((x_GMK, scales), (weight.values, weight.scales), out, counts, num_rows)
    return out.flatten(0, 1)


def _triton_masked(x_GMK: torch.Tensor, scales: torch.Tensor, weight: BlockScaled) -> torch.Tensor:
    from batchinfer_kernels.triton import tiles

    num_groups, num_rows, _ = x_GMK.shape
    counts = torch.full((num_groups,), num_rows, device=x_GMK.device)
    return _triton_product(x_GMK, scales, weight, tiles.masked_tiles(counts, num_rows))


def _triton_product(x_GMK: torch.Tensor, scales: torch.Tensor, weight: BlockScaled, tiles: Any) -> torch.Tensor:
    from batchinfer_kernels.triton import gemm

    x, row_scales = x_GMK.flatten(0, 1), scales.flatten(0, 1)
    out = torch.empty(len(x), weight.values.shape[1], dtype=torch.bfloat16, device=x.device)
    return gemm.product(x, weight, row_scales, out=out, tiles=tiles)
