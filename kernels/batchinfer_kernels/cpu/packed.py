"""Weights in the order in which the C++ tiles read them; made once when a model is loaded.

Products with a packed weight give the bits of products with the plain one, which is packed anew for every call. In 8
bits (`is_int8`) every block of 128 × 128 values has a scale of its own, as in the FP8 checkpoints (DeepSeek-V3 report
section 3.3.2), and products round their input to 8 bits with a scale per 128 values of a row.
"""

# B weights, N columns of the result (out), M depth of the sum (in), P panels of 64 columns

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from batchinfer_kernels.cpu import build

PANEL_COLUMNS = 64
_OPERATIONS = (
    "packed_bytes",
    "pack",
    "linear",
    "batched_linear",
    "router",
    "mlp",
    "grouped_mlp",
    "masked_mlp",
    "mla_decode",
    "mla_prefill",
    "rope_and_cache",
    "gate",
    "sort_by_expert",
    "sum_per_token",
    "add_sums",
    "rms_norm",
    "silu_mul",
    "argmax",
)
_CLASSES = ("Attention", "Mixture", "Stack")


@dataclass(frozen=True, slots=True)
class Packed:
    """B weights [N, M]; with `is_paired` the upper half of the columns stands beside the lower half."""

    data: torch.Tensor  # [B, bytes] uint8
    num_columns: int  # N
    depth: int  # M, even
    is_int8: bool = False
    is_paired: bool = False

    @classmethod
    def empty(
        cls,
        count: int,
        num_columns: int,
        depth: int,
        *,
        is_int8: bool = False,
        is_paired: bool = False,
        memory: Callable[[int], torch.Tensor] | None = None,
    ) -> Packed:
        """Room for `count` weights [num_columns, depth].

        Args:
            memory: gives so many bytes, [bytes] uint8.
        """
        depth += depth % 2
        num_bytes = library().packed_bytes(num_columns, depth, is_int8, is_paired)
        total = count * num_bytes
        data = torch.empty(total, dtype=torch.uint8) if memory is None else memory(total)
        return cls(data.view(count, num_bytes), num_columns, depth, is_int8, is_paired)

    def put(self, place: int, *parts_NM: torch.Tensor) -> None:
        """Pack a weight, in one part or in equal parts above each other, into place `place`."""
        parts = [_even(part).contiguous() for part in parts_NM]
        library().pack(self.data[place], parts, self.is_int8, self.is_paired)


@dataclass(frozen=True, slots=True)
class PackedRouter:
    """A router's weight [E, D] in float32."""

    data_PDN: torch.Tensor  # [P, D, 64]
    num_experts: int


def pack(weight: torch.Tensor, *, is_int8: bool = False, is_paired: bool = False) -> Packed:
    """Pack a bfloat16 weight [N, M], or several of one shape [B, N, M]; rows of odd length get a zero behind them."""
    weights_BNM = weight if weight.dim() == 3 else weight[None]
    packed = Packed.empty(*weights_BNM.shape, is_int8=is_int8, is_paired=is_paired)
    for place, weight_NM in enumerate(weights_BNM):
        packed.put(place, weight_NM)
    return packed


def pack_router(weight_ED: torch.Tensor) -> PackedRouter:
    """Pack a router's float32 weight."""
    num_experts, depth = weight_ED.shape
    padded = F.pad(weight_ED.float(), (0, 0, 0, -num_experts % PANEL_COLUMNS))
    return PackedRouter(padded.view(-1, PANEL_COLUMNS, depth).transpose(1, 2).contiguous(), num_experts)


@functools.cache
def library() -> Any:
    """The loaded C++ operations and classes.

    An operation is the one overload it has: looking for it costs as much as a small operation.

    Raises:
        BuildError: they cannot run here, with the reason.
    """
    reason = build.why_not()
    if reason is not None:
        raise build.BuildError(reason)
    operations = {name: getattr(torch.ops.batchinfer_cpu, name).default for name in _OPERATIONS}
    return SimpleNamespace(**operations, **{name: getattr(torch.classes.batchinfer_cpu, name) for name in _CLASSES})


def _even(weight: torch.Tensor) -> torch.Tensor:
    """With a zero behind rows of odd length."""
    return F.pad(weight, (0, 1)) if weight.shape[-1] % 2 else weight
