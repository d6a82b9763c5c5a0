"""Weights in FP4 E2M1 with one E8M0 scale per group of 32 values of a row: MXFP4, as gpt-oss and DeepSeek V4 hold them.

Four bits are a sign, two of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. A scale's
byte b is 2^(b - 127), and 255 is no number (OCP Microscaling Formats, version 1.0). A value times its scale is a
bfloat16 without rounding, but for the smallest numbers. So products are those of the plain weight in bfloat16; rows are
not rounded.
"""

# B weights, N columns of the result (out), M depth of the sum (in), G groups of m = 32 values

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

GROUP = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # by their four bits


@dataclass(frozen=True, slots=True)
class Fp4Scaled:
    """One weight [N, M], or B of one shape [B, N, M]: values × their group's scale."""

    values: torch.Tensor  # [(B,) N, G * 16] uint8: two values in each, the first in the lower half
    scales: torch.Tensor  # [(B,) N, G] uint8, E8M0

    @classmethod
    def empty(
        cls,
        count: int,
        num_rows: int,
        num_columns: int,
        *,
        is_paired: bool = False,
        memory: Callable[..., torch.Tensor] = torch.empty,
    ) -> Fp4Scaled:
        """Allocate room for `count` weights [N, M], M a multiple of 32, by `memory(shape, dtype=...)`."""
        values = memory((count, num_rows, num_columns // 2), dtype=torch.uint8)
        return cls(values, memory((count, num_rows, num_columns // GROUP), dtype=torch.uint8))

    def put(self, slot: int, *parts: Fp4Scaled) -> None:
        """Put a weight into a slot, in one part or in equal parts above each other."""
        for place, part in enumerate(parts):
            self.values[slot].chunk(len(parts))[place].copy_(part.values)
            self.scales[slot].chunk(len(parts))[place].copy_(part.scales)

    def slots(self) -> list[torch.Tensor]:
        """Return the tensors that can be indexed by weight, which an expert that moves takes along."""
        return [self.values, self.scales]

    def __getitem__(self, slot: int) -> Fp4Scaled:
        """Return one of B weights, sharing its memory."""
        return Fp4Scaled(self.values[slot], self.scales[slot])

    def factors(self) -> torch.Tensor:
        """Return the scales as bfloat16, [(B,) N, G]."""
        bits = torch.where(self.scales == 255, 0x7FC0, self.scales.to(torch.int16) << 7)
        bits[self.scales == 0] = 0x0040  # 2^-127, which is subnormal
        return bits.to(torch.int16).view(torch.bfloat16)

    def plain(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return value × scale, [(B,) N, G * 32]."""
        table = torch.tensor(VALUES, device=self.values.device)
        both = torch.stack((self.values & 15, self.values >> 4), dim=-1).flatten(-2).long()
        groups = table[both].unflatten(-1, (-1, GROUP))
        return (groups * self.factors().float()[..., None]).flatten(-2).to(dtype)
