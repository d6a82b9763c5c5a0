"""Weights in FP8 E4M3 with one float32 scale per block of 128 × 128 values, as DeepSeek-V3's checkpoints hold them.

DeepSeek-V3 report section 3.3.2. Products with such a weight round the rows they multiply to E4M3, with one scale per
128 values of a row, and add in float32.
"""

# B weights, N columns of the result (out), M depth of the sum (in)

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 128


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """One weight [N, M], or B of one shape [B, N, M]: weight ≈ values × their block's scale."""

    values: torch.Tensor  # [(B,) N, M] float8_e4m3fn
    scales: torch.Tensor  # [(B,) ceil(N / 128), ceil(M / 128)] float32

    def room(self, count: int) -> BlockScaled:
        """Room for `count` weights of this shape."""
        values, scales = self.values, self.scales
        return BlockScaled(values.new_empty(count, *values.shape[-2:]), scales.new_empty(count, *scales.shape[-2:]))
