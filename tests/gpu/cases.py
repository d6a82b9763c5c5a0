"""Cases for check.py: operands of one shape, the expected result, and a function that runs a part of the rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from published import Published

from batchinfer_kernels import sdpa
from batchinfer_kernels.hopper import fp8_pages
from batchinfer_kernels.hopper import ops as hopper
from batchinfer_kernels.reference.block_scaled import BlockScaled, to_blocks
from batchinfer_kernels.reference.fp4 import Fp4Scaled
from batchinfer_kernels.reference.group_scaled import GROUP, GroupScaled, to_groups
from batchinfer_kernels.registry import Operation

Function = Callable[..., torch.Tensor]
Weight = torch.Tensor | BlockScaled | GroupScaled | Fp4Scaled
ALL = slice(None)


def rows_of(result: torch.Tensor, rows: slice) -> torch.Tensor:
    """The rows of a result that has one per row of the operands."""
    return result[rows]


@dataclass(frozen=True)
class Work:
    """One operation on operands that lie on the device.

    Args:
        run: calls an implementation on some of the rows (or requests, or groups) and gives their results.
        expected: what must come out for all rows.
        measure: how `exact.error` compares both.
        parts: rows to run alone: they must keep their bits.
        flops, num_bytes: of all rows; bytes that must be read and written at least once.
        take: these rows out of the result of all.
        timed: the call that is timed; None: `run` on all rows.
        is_fp8: its products are in FP8.
    """

    run: Callable[[Function, slice], torch.Tensor]
    expected: Callable[[], torch.Tensor]
    measure: str
    parts: tuple[slice, ...]
    flops: float
    num_bytes: float
    take: Callable[[torch.Tensor, slice], torch.Tensor] = rows_of
    timed: Callable[[Function], object] | None = None
    is_fp8: bool = False


@dataclass(frozen=True)
class Case:
    """One row of the table: an operation at a shape; `make` puts the operands onto the device.

    Args:
        names: candidates that have this operation for these operands.
    """

    op: str
    shape: str
    make: Callable[[torch.device], Work]
    names: tuple[str, ...] = ("triton",)
    published: Published | None = None


@dataclass(frozen=True)
class Dims:
    """DeepSeek-V3's widths (config.json of the release), or tiny ones for the rehearsal."""

    hidden: int = 7168
    expert: int = 2048
    dense: int = 18432
    heads: int = 128
    nope: int = 128
    rotary: int = 64
    value: int = 128
    latent: int = 512
    experts: int = 256
    vocabulary: int = 129280
    topk: int = 8
    groups: int = 8
    topk_groups: int = 4

    @property
    def width(self) -> int:
        """The width of a token in the pages."""
        return self.latent + self.rotary


TINY = Dims(
    hidden=256, expert=128, dense=128, heads=2, nope=16, value=16, experts=16, vocabulary=300, topk=4, groups=4,
    topk_groups=2,
)  # fmt: skip
SCALE = 0.1352  # of DeepSeek-V3's attention scores


def parts_of(num_rows: int) -> tuple[slice, ...]:
    """The first row, some in the middle, the last one."""
    middle = num_rows // 3
    return slice(0, 1), slice(middle, max(middle + 1, min(num_rows, middle + 100))), slice(num_rows - 1, num_rows)


def normal(*shape: int, device: torch.device, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def weight(*shape: int, device: torch.device, fp8: bool, seed: int = 1) -> torch.Tensor | BlockScaled:
    """Weights that keep the size of what they multiply."""
    plain = torch.empty(*shape, dtype=torch.bfloat16, device=device)
    for place, one in enumerate(plain if len(shape) == 3 else [plain]):
        one.copy_(normal(*shape[-2:], device=device, seed=seed + place) / shape[-1] ** 0.5)
    return to_blocks(plain) if fp8 else plain


def expert_weight(*shape: int, device: torch.device, form: str, seed: int = 1) -> Weight:
    """Weights of experts [E, N, K] in "bf16", "fp8", "int4" or "fp4" that keep the size of what they multiply."""
    if form == "fp4":  # every value as often, so 2.9 on average
        packed = torch.empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(*shape[:-1], shape[-1] // GROUP, dtype=torch.uint8, device=device)
        exponent = 127 - round(math.log2(2.9 * shape[-1] ** 0.5))
        for place in range(shape[0]):
            generator = torch.Generator(device).manual_seed(seed + place)
            packed[place].random_(0, 256, generator=generator)
            scales[place].random_(exponent - 1, exponent + 2, generator=generator)
        return Fp4Scaled(packed, scales)
    plain = weight(*shape, device=device, fp8=form == "fp8", seed=seed)
    return to_groups(plain) if form == "int4" and isinstance(plain, torch.Tensor) else plain


def bytes_of(*tensors: Weight | None) -> int:
    """Bytes of these tensors."""
    total = 0
    for tensor in tensors:
        if isinstance(tensor, BlockScaled | GroupScaled | Fp4Scaled):
            total += bytes_of(tensor.values, tensor.scales)
        elif tensor is not None:
            total += math.prod(tensor.shape) * tensor.element_size()
    return total


def may_differ_in_company(function: Function) -> bool:
    """Return whether rows may depend on their batch: flash_mla and PyTorch split sums by it, all others must not."""
    differing = (hopper.mla_decode, fp8_pages.mla_decode_fp8, sdpa.mla_prefill)
    return isinstance(function, Operation) and function.implementation in differing
