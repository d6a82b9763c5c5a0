"""Weights in FP8 E4M3 with one float32 scale per block of 128 × 128 values, as DeepSeek-V3's checkpoints hold them.

DeepSeek-V3 report section 3.3.2. Products with such a weight round the rows they multiply to E4M3, with one scale per
128 values of a row, and add in float32 (reference/fp8.py says how exactly).
"""

# B weights, N columns of the result (out), M depth of the sum (in)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from batchinfer_kernels.reference.fp8 import BLOCK, FP8, quantize_fp8_block

__all__ = ["BLOCK", "BlockScaled", "stack", "to_blocks", "whole_blocks"]


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """One weight [N, M], or B of one shape [B, N, M]: weight ≈ values × their block's scale."""

    values: torch.Tensor  # [(B,) N, M] float8_e4m3fn
    scales: torch.Tensor  # [(B,) ceil(N / 128), ceil(M / 128)] float32

    @classmethod
    def empty(cls, count: int, num_rows: int, num_columns: int, device: torch.device | str = "cpu") -> BlockScaled:
        """Room for `count` weights [N, M] of this shape."""
        values = torch.empty(count, num_rows, num_columns, dtype=FP8, device=device)
        num_blocks = (-(-num_rows // BLOCK), -(-num_columns // BLOCK))
        return cls(values, torch.empty(count, *num_blocks, dtype=torch.float32, device=device))

    def __getitem__(self, place: int) -> BlockScaled:
        """One of B weights; shares its memory."""
        return BlockScaled(self.values[place], self.scales[place])

    def room(self, count: int) -> BlockScaled:
        """Room for `count` weights of this shape."""
        num_rows, num_columns = self.values.shape[-2:]
        return BlockScaled.empty(count, num_rows, num_columns, self.values.device)

    def put(self, place: int, weight: torch.Tensor | BlockScaled) -> None:
        """Put a weight [N, M] into place `place`: one in blocks bit for bit, a plain one rounded."""
        one = weight if isinstance(weight, BlockScaled) else to_blocks(weight)
        self.values[place] = one.values
        self.scales[place] = one.scales

    def to(self, device: torch.device) -> BlockScaled:
        """The same on another device."""
        return BlockScaled(self.values.to(device), self.scales.to(device))

    def padded(self, num_rows: int, num_columns: int) -> BlockScaled:
        """One weight with zeros below it and to its right, which may fill its last blocks but start no others."""
        rows, columns = num_rows - self.values.shape[0], num_columns - self.values.shape[1]
        needed = (-(-num_rows // BLOCK), -(-num_columns // BLOCK))
        assert self.scales.shape == needed, f"scales {list(self.scales.shape)} are not those of blocks {needed}"
        if not rows and not columns:
            return self
        bytes_NM = F.pad(self.values.view(torch.uint8), (0, columns, 0, rows))  # the byte 0 is the number 0
        return BlockScaled(bytes_NM.view(self.values.dtype), self.scales)


def to_blocks(weight: torch.Tensor) -> BlockScaled:
    """Round a float weight [N, M], or each of [B, N, M], to E4M3."""
    if weight.dim() == 2:
        return BlockScaled(*quantize_fp8_block(weight))
    count, num_rows, num_columns = weight.shape
    blocks = BlockScaled.empty(count, num_rows, num_columns, weight.device)
    for place, one in enumerate(weight):
        blocks.put(place, one)
    return blocks


def stack(parts: Sequence[BlockScaled]) -> BlockScaled:
    """Weights of one depth above each other, bit for bit; all but the last must end with a whole block."""
    assert all(len(part.values) % BLOCK == 0 for part in parts[:-1]), "a block would have rows of two weights"
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(parts[0].values.dtype)
    return BlockScaled(values, torch.cat([part.scales for part in parts]))


def whole_blocks(size: int) -> int:
    """`size` or the next multiple of 128."""
    return -(-size // BLOCK) * BLOCK
