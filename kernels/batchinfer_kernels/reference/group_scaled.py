"""Weights in 4 bits with one bfloat16 scale per group of 32 values of a row, as INT4 checkpoints hold them.

Products with such a weight round the rows they multiply to 8 bits, with one scale per 128 values of a row. The sum of a
group's 32 products is exact; the groups are added in ascending order in float32. So a row's result depends on nothing
but the row and the weight, on any processor.
"""

# B weights, N columns of the result (out), M depth of the sum (in), G groups of m = 32 values, T rows, J blocks of rows

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from batchinfer_kernels.reference.fp8 import BLOCK, divided

GROUP = 32
_MOST_INT8 = 127.0
_LEAST_SCALE = torch.finfo(torch.bfloat16).tiny  # smaller numbers count as zero, as in the C++ operations


@dataclass(frozen=True, slots=True)
class GroupScaled:
    """One weight [N, M], or B of one shape [B, N, M]: weight ≈ values × their group's scale; rows end with zeros."""

    values: torch.Tensor  # [(B,) N, G * 16] uint8: two values from -8 to 7 plus 8, the first in the lower half
    scales: torch.Tensor  # [(B,) N, G] bfloat16

    @classmethod
    def empty(
        cls,
        count: int,
        num_rows: int,
        num_columns: int,
        *,
        is_paired: bool = False,
        memory: Callable[..., torch.Tensor] = torch.empty,
    ) -> GroupScaled:
        """Allocate room for `count` weights [N, M] by `memory(shape, dtype=...)`."""
        num_groups = -(-num_columns // GROUP)
        values = memory((count, num_rows, num_groups * GROUP // 2), dtype=torch.uint8)
        return cls(values, memory((count, num_rows, num_groups), dtype=torch.bfloat16))

    def __getitem__(self, slot: int) -> GroupScaled:
        """Return one of B weights, sharing its memory."""
        return GroupScaled(self.values[slot], self.scales[slot])

    def put(self, slot: int, *parts: torch.Tensor | GroupScaled) -> None:
        """Put a weight into a slot, in one part or in equal parts above each other; plain parts are rounded."""
        groups = [part if isinstance(part, GroupScaled) else to_groups(part) for part in parts]
        for place, weight in enumerate(groups):
            self.values[slot].chunk(len(parts))[place].copy_(weight.values)
            self.scales[slot].chunk(len(parts))[place].copy_(weight.scales)

    def slots(self) -> list[torch.Tensor]:
        """Return the tensors that can be indexed by weight, which an expert that moves takes along."""
        return [self.values, self.scales]

    def plain(self) -> torch.Tensor:
        """Return value × scale in float32, which holds the product exactly; [(B,) N, G * 32]."""
        return (self._whole().unflatten(-1, (-1, GROUP)) * self.scales.float()[..., None]).flatten(-2)

    def _whole(self) -> torch.Tensor:
        """Unpack the 4-bit values to float32."""
        return torch.stack((self.values & 15, self.values >> 4), dim=-1).flatten(-2).float().sub_(8)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x · weightᵀ, [T, M] to [T, N] float32, after rounding the rows to 8 bits."""
        values_TM, scales_TJ = quantize_int8_rows(F.pad(x, (0, self.values.shape[-1] * 2 - x.shape[-1])))
        values_NM = self._whole()
        total_TN = torch.zeros(len(x), len(values_NM), dtype=torch.float32, device=x.device)
        for group, (rows, columns) in enumerate(
            zip(values_TM.split(GROUP, dim=1), values_NM.split(GROUP, dim=1), strict=True)
        ):
            scales = scales_TJ[:, group * GROUP // BLOCK, None] * self.scales[:, group].float()
            total_TN += (rows @ columns.T) * scales  # 32 products below 2**10 each: exact in any order
        return total_TN


def to_groups(weight: torch.Tensor) -> GroupScaled:
    """Round a float weight [N, M], or each of [B, N, M], to 4 bits.

    The value of a group with the largest magnitude becomes -8 of the scale, as there is one step more on that side.
    """
    if weight.dim() == 3:
        held = GroupScaled.empty(*weight.shape, memory=partial(torch.empty, device=weight.device))
        for slot, one in enumerate(weight):
            held.put(slot, one)
        return held
    groups = F.pad(weight.float(), (0, -weight.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    least, most = groups.aminmax(dim=-1)
    scales = torch.where(-least >= most, -least, -most).div(8)
    scales = torch.where(groups.isfinite().all(-1), scales, torch.nan).bfloat16()
    scales[scales.abs() < _LEAST_SCALE] = 0
    by = scales.float()[..., None]
    steps = torch.where(by == 0, 0, groups / by).round().clamp(-8, 7).nan_to_num(0).add(8).byte().flatten(-2)
    return GroupScaled(steps[:, 0::2] | steps[:, 1::2] << 4, scales)


def quantize_int8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows [T, M] to whole numbers from -127 to 127, in float32, with scales [T, ceil(M / 128)] float32."""
    blocks = F.pad(x.float(), (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    peaks = blocks.abs().amax(-1)
    factors = torch.where((peaks > 0) & peaks.isfinite(), torch.full_like(peaks, _MOST_INT8) / peaks, 0.0)
    values = (blocks * factors[..., None]).round().nan_to_num(0).flatten(-2)[:, : x.shape[-1]]
    return values, torch.where(peaks.isfinite(), divided(peaks, _MOST_INT8), torch.nan)
