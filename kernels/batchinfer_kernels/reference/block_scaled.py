"""Weights in FP8 E4M3 with one float32 scale per block of 128 × 128 values, as DeepSeek-V3's checkpoints hold them.

DeepSeek-V3 report section 3.3.2. Products with such a weight round the rows they multiply to E4M3, with one scale per
128 values of a row, and add in float32 (reference/fp8.py says how exactly).
"""

# B weights, N columns of the result (out), M depth of the sum (in)

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from batchinfer_kernels.reference.fp8 import BLOCK, FP8, quantize_fp8_block

__all__ = ["BLOCK", "BlockScaled", "stack", "to_blocks"]


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """One weight [N, M], or B of one shape [B, N, M]: weight ≈ values × their block's scale."""

    values: torch.Tensor  # [(B,) N, M] float8_e4m3fn
    scales: torch.Tensor  # [(B,) ceil(N / 128), ceil(M / 128)] float32

    @classmethod
    def empty(
        cls,
        count: int,
        num_rows: int,
        num_columns: int,
        *,
        is_paired: bool = False,
        memory: Callable[..., torch.Tensor] = torch.empty,
    ) -> BlockScaled:
        """Allocate room for `count` weights [N, M] by `memory(shape, dtype=...)`."""
        num_blocks = (-(-num_rows // BLOCK), -(-num_columns // BLOCK))
        values = memory((count, num_rows, num_columns), dtype=FP8)
        return cls(values, memory((count, *num_blocks), dtype=torch.float32))

    def __getitem__(self, slot: int) -> BlockScaled:
        """Return one of B weights, sharing its memory."""
        return BlockScaled(self.values[slot], self.scales[slot])

    def rows(self, start: int, stop: int) -> BlockScaled:
        """Return rows [start, stop) of one weight, sharing its memory; `start` begins a block."""
        assert start % BLOCK == 0, "a block is cut"
        return BlockScaled(self.values[start:stop], self.scales[start // BLOCK : -(-stop // BLOCK)])

    def reordered(self, order: list[int]) -> BlockScaled:
        """Return one weight with its rows in this order, each in its block."""
        bytes_NM = self.values.view(torch.uint8)[order]
        return BlockScaled(bytes_NM.view(self.values.dtype), self.scales)

    def put(self, slot: int, *parts: torch.Tensor | BlockScaled) -> None:
        """Put a weight into a slot, in one part or in equal parts above each other.

        Parts in blocks are put bit for bit, plain ones are rounded; smaller ones get zeros below and to the right.
        """
        num_rows, num_columns = self.values.shape[-2:]
        blocks = [part if isinstance(part, BlockScaled) else to_blocks(part) for part in parts]
        whole = stack([part.padded(num_rows // len(parts), num_columns) for part in blocks])
        self.values[slot], self.scales[slot] = whole.values, whole.scales

    def slots(self) -> list[torch.Tensor]:
        """Return the tensors whose first dim has one entry per weight."""
        return [self.values, self.scales]

    def padded(self, num_rows: int, num_columns: int) -> BlockScaled:
        """Pad one weight with zeros below and to the right, inside its last blocks only."""
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
    blocks = BlockScaled.empty(*weight.shape, memory=partial(torch.empty, device=weight.device))
    for slot, one in enumerate(weight):
        blocks.put(slot, one)
    return blocks


def stack(parts: Sequence[BlockScaled]) -> BlockScaled:
    """Stack weights of one depth above each other, bit for bit; all but the last must end with a whole block."""
    assert all(len(part.values) % BLOCK == 0 for part in parts[:-1]), "a block would have rows of two weights"
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(parts[0].values.dtype)
    return BlockScaled(values, torch.cat([part.scales for part in parts]))
