"""Queries and keys of an indexer in FP8, in Triton: Hadamard transform and rounding of rows at any address.

The transform is a product with a matrix of 1 and -1, whose columns are made from the bits of their numbers.
"""

# N rows, M of these rows, I width, a power of two

import torch
import triton
import triton.language as tl

from batchinfer_kernels.triton.numbers import FP8_MAX, FP8_MIN_AMAX, dot, scaled, to_bfloat16, to_e4m3

_TILE_ROWS = 64


def hadamard_fp8(x_NI: torch.Tensor, rows_M: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate rows by a Hadamard matrix, summing in float32, and return them in FP8 with their scales.

    Args:
        x_NI: rows of index keys or queries.
        rows_M: numbers of the rows to take; None: all.

    Returns:
        Values [M, I] in e4m3 and scales [M].
    """
    width = x_NI.shape[-1]
    num_rows = len(x_NI) if rows_M is None else len(rows_M)
    values_MI = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=x_NI.device)
    scales_M = torch.empty(num_rows, dtype=torch.float32, device=x_NI.device)
    if num_rows:
        _hadamard_fp8[(triton.cdiv(num_rows, _TILE_ROWS),)](
            x_NI,
            rows_M,
            values_MI,
            scales_M,
            num_rows,
            x_NI.stride(0),
            width**-0.5,
            WIDTH=width,
            ROWS=_TILE_ROWS,
            num_warps=4,
        )
    return values_MI, scales_M


@triton.jit
def _hadamard_fp8(
    x_ptr, rows_ptr, values_ptr, scales_ptr, num_rows, stride, factor, WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    place = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = place < num_rows
    rows = place
    if rows_ptr is not None:
        rows = tl.load(rows_ptr + place, mask=is_row, other=0)
    columns, depth = tl.arange(0, WIDTH), tl.arange(0, WIDTH)
    x = tl.load(x_ptr + rows[:, None] * stride + columns[None, :], mask=is_row[:, None], other=0.0)
    shared = depth[:, None] & columns[None, :]
    for step in tl.static_range(4):  # the parity of ones of up to 16 bits comes down into the last one
        shared = shared ^ (shared >> (8 >> step))
    signs = (1 - 2 * (shared & 1)).to(tl.float32).to(tl.bfloat16)
    turned = to_bfloat16(dot(x, signs, tl.zeros((ROWS, WIDTH), tl.float32)) * factor).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(turned), 1), FP8_MIN_AMAX)
    # up to the next power of two: the exponent, and one more where there is a mantissa
    bits = (amax * (1.0 / FP8_MAX)).to(tl.int32, bitcast=True)
    scales = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    values = to_e4m3(scaled(turned, scales[:, None]))
    tl.store(values_ptr + place[:, None] * WIDTH + columns[None, :], values, mask=is_row[:, None])
    tl.store(scales_ptr + place, scales, mask=is_row)
