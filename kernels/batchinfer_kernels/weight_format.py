"""The forms of weights in products, filled slot by slot: plain tensors, blocks, groups, tiles for C++."""

# B slots, N columns of the result (out), M depth of the sum (in)

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from batchinfer_kernels.cpu.packed import Packed, WeightKind
from batchinfer_kernels.reference.block_scaled import BLOCK, BlockScaled
from batchinfer_kernels.reference.fp4 import Fp4Scaled
from batchinfer_kernels.reference.group_scaled import GroupScaled

# as the operation `pack` returns it; weight[slot] is one of several
Weight = torch.Tensor | BlockScaled | GroupScaled | Fp4Scaled | Packed


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One form of weights.

    empty: (count, num_rows, num_columns, *, memory, is_paired) allocates `count` weights [N, M] by
        `memory(shape, dtype=...)`; `is_paired`: each a gate projection above an up projection.
    put: (weight, slot, *parts) fills a slot with copies of equal parts [N / parts, M] above each other.
    slots: (weight) returns its tensors; the first dim of each has one entry per slot.
    keeps_fp8: parts stored in FP8 are put as BlockScaled, bit for bit; else they are dequantized before.
    keeps_fp4: parts have to be Fp4Scaled, bit for bit.
    keeps_int4: parts stored in groups of 32 are put as GroupScaled, value by value; else they are dequantized.
    copies: `pack` copies any weight into this form, so that it may get a view of a mapped file.
    multiple: the width between two products is padded with zeros to a multiple of this, so that no block has rows of
        two parts.
    """

    empty: Callable[..., Weight]
    put: Callable[..., None]
    slots: Callable[[Any], list[torch.Tensor]]
    keeps_fp8: bool = False
    keeps_int4: bool = False
    keeps_fp4: bool = False
    copies: bool = False
    multiple: int = 1


def format_of(weight: Weight) -> WeightFormat:
    """Return the form of a weight."""
    if isinstance(weight, Packed):
        return _packed_format(weight.kind)
    if isinstance(weight, BlockScaled):
        return WeightFormat(BlockScaled.empty, BlockScaled.put, BlockScaled.slots, keeps_fp8=True, multiple=BLOCK)
    if isinstance(weight, GroupScaled):
        return WeightFormat(GroupScaled.empty, GroupScaled.put, GroupScaled.slots, keeps_int4=True)
    if isinstance(weight, Fp4Scaled):
        return _FP4
    return WeightFormat(partial(_empty, weight.dtype), _put, lambda plain: [plain])


_FP4 = WeightFormat(Fp4Scaled.empty, Fp4Scaled.put, Fp4Scaled.slots, keeps_fp4=True)


def fp4_format_beside(weight: Weight) -> WeightFormat:
    """Return the form of weights in FP4 for the operations that packed this weight."""
    return _packed_format(WeightKind.FP4) if isinstance(weight, Packed) else _FP4


def _packed_format(kind: WeightKind) -> WeightFormat:
    keeps_int4, keeps_fp4 = kind is WeightKind.INT4, kind is WeightKind.FP4
    empty = partial(Packed.empty, kind=kind)
    return WeightFormat(empty, Packed.put, Packed.slots, keeps_int4=keeps_int4, keeps_fp4=keeps_fp4, copies=True)


def _empty(
    dtype: torch.dtype,
    count: int,
    num_rows: int,
    num_columns: int,
    *,
    memory: Callable[..., torch.Tensor],
    is_paired: bool = False,
) -> torch.Tensor:
    return memory((count, num_rows, num_columns), dtype=dtype)


def _put(weight_BNM: torch.Tensor, slot: int, *parts: torch.Tensor) -> None:
    for room, part in zip(weight_BNM[slot].chunk(len(parts)), parts, strict=True):
        room.copy_(part)
