"""Weights in the order in which the C++ tiles read them; made once when a model is loaded.

A product with a packed weight gives the bits of the product with the plain one, which every call packs again. Weights
in float32 and bfloat16 keep their values. In 8 bits every 128 values of a row have their own scale, and products round
their input to 8 bits in the same way. In 4 bits every 32 values of a row have a scale (reference/group_scaled.py), and
input is rounded to 8 bits.
"""

# B weights, N columns of the result (out), M depth of the sum (in), P panels of 64 columns

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
import torch.nn.functional as F

from batchinfer_kernels.cpu import build
from batchinfer_kernels.reference.fp4 import Fp4Scaled
from batchinfer_kernels.reference.group_scaled import GroupScaled, to_groups

PANEL_COLUMNS = 64


class WeightKind(IntEnum):
    """Storage of a packed weight's values; numbers as in csrc/kernels.h."""

    BFLOAT16 = 0
    INT8 = 1
    FLOAT32 = 2
    INT4 = 3
    FP4 = 4

    @classmethod
    def of(cls, dtype: torch.dtype, *, is_int8: bool = False, is_int4: bool = False) -> WeightKind:
        """Return the kind for weights of a model in bfloat16 or float32; 8 and 4 bits meet bfloat16 rows."""
        if is_int8 or is_int4:
            return cls.INT4 if is_int4 else cls.INT8
        return cls.FLOAT32 if dtype is torch.float32 else cls.BFLOAT16


@dataclass(frozen=True, slots=True)
class Packed:
    """B weights [N, M]; with `is_paired` each column of the upper half follows its partner of the lower half."""

    data: torch.Tensor  # [B, bytes] uint8
    num_columns: int  # N
    depth: int  # M, made even where rows are bfloat16
    kind: WeightKind = WeightKind.BFLOAT16
    is_paired: bool = False

    @property
    def is_int8(self) -> bool:
        return self.kind is WeightKind.INT8

    @property
    def plain(self) -> tuple[torch.Tensor, int, int, int]:
        """The data, columns, depth and kind, as C++ takes them."""
        return self.data, self.num_columns, self.depth, self.kind

    def takes(self, x: torch.Tensor) -> bool:
        """Return whether products with this weight take rows of x's dtype and device."""
        row_dtype = torch.float32 if self.kind is WeightKind.FLOAT32 else torch.bfloat16
        return x.dtype is row_dtype and x.is_cpu

    @classmethod
    def empty(
        cls,
        count: int,
        num_columns: int,
        depth: int,
        *,
        kind: WeightKind = WeightKind.BFLOAT16,
        is_paired: bool = False,
        memory: Callable[..., torch.Tensor] = torch.empty,
    ) -> Packed:
        """Allocate room for `count` weights [num_columns, depth] by `memory(shape, dtype=...)`."""
        if kind is not WeightKind.FLOAT32:
            depth += depth % 2
        num_bytes = library().packed_bytes(num_columns, depth, kind, is_paired)
        return cls(memory((count, num_bytes), dtype=torch.uint8), num_columns, depth, kind, is_paired)

    def __getitem__(self, slot: int) -> Packed:
        """Return one of the weights, sharing its memory."""
        return replace(self, data=self.data[slot : slot + 1])

    def put(self, slot: int, *parts_NM: torch.Tensor | GroupScaled | Fp4Scaled) -> None:
        """Pack a weight into a slot, given in one part or in equal parts above each other.

        Plain parts beside one in groups are rounded to groups, with the bits of `pack`.
        """
        if any(isinstance(part, GroupScaled) for part in parts_NM):
            parts_NM = tuple(to_groups(part) if isinstance(part, torch.Tensor) else part for part in parts_NM)
        groups = [part for part in parts_NM if isinstance(part, GroupScaled | Fp4Scaled)]
        if groups:
            values = [part.values.contiguous() for part in groups]
            scales = [part.factors() if isinstance(part, Fp4Scaled) else part.scales.contiguous() for part in groups]
            library().pack_groups(self.data[slot], values, scales, self.depth, self.kind, self.is_paired)
            return
        parts = [whole_pairs(part).contiguous() for part in parts_NM if isinstance(part, torch.Tensor)]
        library().pack(self.data[slot], parts, self.kind, self.is_paired)

    def slots(self) -> list[torch.Tensor]:
        """Return the tensors whose first dim has one entry per weight."""
        return [self.data]


@dataclass(frozen=True, slots=True)
class PackedRouter:
    """A router's weight [E, D] in float32."""

    data_PDN: torch.Tensor  # [P, D, 64]
    num_experts: int


def pack(weight: torch.Tensor, *, is_int8: bool = False, is_int4: bool = False, is_paired: bool = False) -> Packed:
    """Pack a weight [N, M] in bfloat16 or float32, or several of one shape [B, N, M]; 8 and 4 bits from bfloat16."""
    weights_BNM = weight if weight.dim() == 3 else weight[None]
    kind = WeightKind.of(weight.dtype, is_int8=is_int8, is_int4=is_int4)
    packed = Packed.empty(*weights_BNM.shape, kind=kind, is_paired=is_paired)
    for slot, weight_NM in enumerate(weights_BNM):
        packed.put(slot, weight_NM)
    return packed


def pack_router(weight_ED: torch.Tensor) -> PackedRouter:
    """Pack a router's float32 weight."""
    num_experts, depth = weight_ED.shape
    padded = F.pad(weight_ED.float(), (0, 0, 0, -num_experts % PANEL_COLUMNS))
    return PackedRouter(padded.view(-1, PANEL_COLUMNS, depth).transpose(1, 2).contiguous(), num_experts)


class _Library:
    """The C++ operations, each looked up once: a lookup costs as much as a small operation.

    classes: the C++ classes of layers.
    """

    classes = torch.classes.batchinfer_cpu

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch.ops.batchinfer_cpu, name).default  # the one overload it has
        setattr(self, name, found)
        return found


@functools.cache
def library() -> _Library:
    """Return the loaded C++ operations and classes.

    Raises:
        BuildError: the operations cannot run here, with the reason.
    """
    reason = build.why_not()
    if reason is not None:
        raise build.BuildError(reason)
    return _Library()


def whole_pairs(x: torch.Tensor) -> torch.Tensor:
    """Pad bfloat16 rows of odd length with a zero: products take values in pairs."""
    return F.pad(x, (0, 1)) if x.shape[-1] % 2 and x.dtype is torch.bfloat16 else x
