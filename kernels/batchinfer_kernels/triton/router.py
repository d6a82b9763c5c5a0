"""Logits of the experts in Triton, as exact as float32 products, on matrix units that take bfloat16.

A float32 weight is the sum of three bfloat16 ones, and products of bfloat16 are exact in float32: three products with
them are one in float32. The depth is cut every 1,024 values whatever the rows, since a router has too few columns to
fill a GPU; the parts are added in ascending order.
"""

# T tokens, D hidden, E experts, P parts of the depth

import torch
import triton
import triton.language as tl

from batchinfer_kernels.triton.numbers import dot

_PART = 1024
_DEPTH = 64
_FEW_TILE, _MANY_TILE = (64, 64, 4), (128, 128, 8)  # rows, columns, warps; each row gets the same instructions in both
_MANY_ROWS = 1024  # whose larger tiles keep a GPU busy, and read less
_TILE_VALUES = 1024
NUM_TERMS = 3


def pack_router(weight_ED: torch.Tensor) -> torch.Tensor:
    """Split a float32 weight into its leading, next and last bits: [3, E, D] bfloat16 that add up to it."""
    terms, rest = [], weight_ED.float()
    for _ in range(NUM_TERMS):
        terms.append(rest.bfloat16())
        rest = rest - terms[-1].float()
    return torch.stack(terms)


def router(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Take the weight packed, [3, E, D], or plain."""
    terms_3ED = weight if weight.dim() == 3 else pack_router(weight)
    (num_rows, depth), num_experts = x.shape, terms_3ED.shape[1]
    x = x if x.stride(1) == 1 else x.contiguous()
    num_parts = triton.cdiv(depth, _PART)
    parts = torch.empty(num_parts, num_rows, num_experts, dtype=torch.float32, device=x.device)
    if parts.numel() == 0:
        return parts.sum(0)
    rows, columns, num_warps = _MANY_TILE if num_rows >= _MANY_ROWS else _FEW_TILE
    columns = min(columns, max(16, triton.next_power_of_2(num_experts)))
    _part_of_logits[(triton.cdiv(num_rows, rows), triton.cdiv(num_experts, columns), num_parts)](
        x, terms_3ED.contiguous(), parts, num_rows, num_experts, depth, x.stride(0),
        ROWS=rows, COLUMNS=columns, DEPTH=_DEPTH, PART=_PART, TERMS=NUM_TERMS, num_warps=num_warps, num_stages=3,
    )  # fmt: skip
    if num_parts == 1:
        return parts[0]
    logits_TE = torch.empty_like(parts[0])
    count = logits_TE.numel()
    _sum_parts[(triton.cdiv(count, _TILE_VALUES),)](parts, logits_TE, count, num_parts, TILE=_TILE_VALUES)
    return logits_TE


@triton.jit
def _part_of_logits(
    x_ptr, terms_ptr, parts_ptr, num_rows, num_experts, depth, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PART: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < num_rows, column < num_experts
    x_at = x_ptr + tl.where(is_row, row, 0).to(tl.int64)[:, None] * x_stride
    terms_at = terms_ptr + tl.where(is_column, column, 0)[:, None] * depth
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(part * PART, tl.minimum((part + 1) * PART, depth), DEPTH):
        steps = start + tl.arange(0, DEPTH)
        is_inside = (steps < depth)[None, :]
        x = tl.load(x_at + steps[None, :], mask=is_inside, other=0.0)
        for term in tl.static_range(TERMS):
            w_at = terms_at + term * num_experts * depth + steps[None, :]
            total = dot(x, tl.trans(tl.load(w_at, mask=is_inside, other=0.0)), total)
    at = (part.to(tl.int64) * num_rows + row)[:, None] * num_experts + column[None, :]
    tl.store(parts_ptr + at, total, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _sum_parts(parts_ptr, out_ptr, count, num_parts, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_inside = at < count
    total = tl.load(parts_ptr + at, mask=is_inside, other=0.0)
    for part in range(1, num_parts):
        total += tl.load(parts_ptr + tl.cast(part, tl.int64) * count + at, mask=is_inside, other=0.0)
    tl.store(out_ptr + at, total, mask=is_inside)
