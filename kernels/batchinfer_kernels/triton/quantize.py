"""FP8 E4M3 with a scale per block of rows or weights, in Triton, with the bits of `reference.quantize_fp8_block`."""

# T rows, N rows of a weight, M columns, J blocks of columns, E experts, C rows of room per expert

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.fp8 import empty_row_scales
from batchinfer_kernels.triton.layout import dense
from batchinfer_kernels.triton.numbers import scale_of, scaled, to_bfloat16, to_e4m3

ROW_BLOCK = 128
_TILE_ROWS = 16
_TILE_VALUES = 1024


def quantize_fp8_block(
    weight: torch.Tensor, block: tuple[int, int] = (ROW_BLOCK, ROW_BLOCK)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight with a scale per block; the bits are those of the reference on the CPU."""
    return quantize_rows(dense(weight)) if block == (1, ROW_BLOCK) else _quantize_blocks(weight, block)


def quantize_fp8_rows(x: torch.Tensor, num_rows_E: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows with a scale per 128 values; the bits are those of the reference on the CPU."""
    return quantize_rows(dense(x) if x.dim() == 2 else x.contiguous(), num_rows_E, by_column=True)


def quantize_rows(
    x: torch.Tensor, num_rows_E: torch.Tensor | None = None, *, by_column: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows [T, M], or [E, C, M], to E4M3 with a scale per 128 values.

    Args:
        x: float, its last dim without gaps; [E, C, M] without any.
        num_rows_E: [E] integer, the rows of each expert; the others are neither read nor written. None: all.
        by_column: keep the scales of a column of blocks together in memory, which products read faster; see
            `reference.quantize_fp8_rows`.

    Returns:
        float8_e4m3fn in the shape of x, and scales [T, ceil(M / 128)] or [E, C, …] float32.
    """
    width = x.shape[-1]
    num_experts, room = x.shape[:-1] if x.dim() == 3 else (1, len(x))
    num_blocks = triton.cdiv(width, ROW_BLOCK)
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = new_scales(*x.shape[:-1], num_blocks, device=x.device, by_column=by_column)
    if x.numel():
        grid = (triton.cdiv(room, _TILE_ROWS), num_blocks, num_experts)
        _quantize_rows[grid](
            x,
            values,
            scales,
            num_rows_E,
            room,
            width,
            x.stride(-2),
            scales.stride(0) if x.dim() == 3 else 0,
            *scales.stride()[-2:],
            BLOCK=ROW_BLOCK,
            ROWS=_TILE_ROWS,
        )
    return values, scales


def new_scales(*shape: int, device: torch.device, by_column: bool) -> torch.Tensor:
    """Allocate scales [(E,) T, J] of rows."""
    if by_column:
        return empty_row_scales(*shape, device=device)
    return torch.empty(*shape, dtype=torch.float32, device=device)


def _quantize_blocks(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, width = weight.shape
    grid = (triton.cdiv(num_rows, block[0]), triton.cdiv(width, block[1]))
    values = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(grid, dtype=torch.float32, device=weight.device)
    if weight.numel():
        _quantize_block[grid](
            weight,
            values,
            scales,
            num_rows,
            width,
            *weight.stride(),
            *block,
            ROWS=triton.next_power_of_2(block[0]),
            COLUMNS=triton.next_power_of_2(block[1]),
            num_warps=8,
        )
    return values, scales


def dequantize_fp8_block(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block: tuple[int, int] = (ROW_BLOCK, ROW_BLOCK)
) -> torch.Tensor:
    """Dequantize to bfloat16 or float32."""
    num_rows, width = weight.shape
    out = torch.empty(num_rows, width, dtype=dtype, device=weight.device)
    if weight.numel():
        _dequantize[(num_rows, triton.cdiv(width, _TILE_VALUES))](
            weight, scale, out, width, *weight.stride(), *scale.stride(), *block, TILE=_TILE_VALUES
        )
    return out


@triton.jit
def _quantize_rows(
    x_ptr, values_ptr, scales_ptr, num_rows_ptr, room, width, x_stride, scale_expert, scale_row, scale_block,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first, block, expert = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2).to(tl.int64)
    stop = room
    if num_rows_ptr is not None:
        stop = tl.load(num_rows_ptr + expert).to(tl.int32)
    if first < stop:
        in_block = first + tl.arange(0, ROWS)
        rows = expert * room + in_block
        columns = block * BLOCK + tl.arange(0, BLOCK)
        is_inside = (in_block < stop)[:, None] & (columns < width)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=is_inside, other=0.0).to(tl.float32)
        scales = scale_of(tl.max(tl.abs(x), 1), tl.sum((x != x).to(tl.int32), 1) == 0)
        values = to_e4m3(scaled(x, scales[:, None]))
        tl.store(values_ptr + rows[:, None] * width + columns[None, :], values, mask=is_inside)
        scales_at = scales_ptr + expert * scale_expert + in_block.to(tl.int64) * scale_row + block * scale_block
        tl.store(scales_at, scales, mask=in_block < stop)


@triton.jit
def _quantize_block(
    w_ptr, values_ptr, scales_ptr, num_rows, width, row_stride, column_stride, block_rows, block_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block_row, block_column = tl.program_id(0), tl.program_id(1)
    in_rows, in_columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    rows = (block_row * block_rows + in_rows).to(tl.int64)
    columns = (block_column * block_columns + in_columns).to(tl.int64)
    is_row = (in_rows < block_rows) & (rows < num_rows)
    is_column = (in_columns < block_columns) & (columns < width)
    is_inside = is_row[:, None] & is_column[None, :]
    pointers = w_ptr + rows[:, None] * row_stride + columns[None, :] * column_stride
    w = tl.load(pointers, mask=is_inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.max(tl.abs(w), 1), 0)
    scale = scale_of(amax, tl.sum(tl.sum((w != w).to(tl.int32), 1), 0) == 0)
    tl.store(values_ptr + rows[:, None] * width + columns[None, :], to_e4m3(scaled(w, scale)), mask=is_inside)
    tl.store(scales_ptr + block_row * tl.num_programs(1) + block_column, scale)


@triton.jit
def _dequantize(
    values_ptr, scales_ptr, out_ptr, width, row_stride, column_stride, scale_row_stride, scale_stride,
    block_rows, block_columns, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    is_inside = columns < width
    values = tl.load(values_ptr + row * row_stride + columns * column_stride, mask=is_inside, other=0.0)
    at = row // block_rows * scale_row_stride + columns // block_columns * scale_stride
    y = values.to(tl.float32) * tl.load(scales_ptr + at, mask=is_inside, other=0.0)
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(out_ptr + row * width + columns, to_bfloat16(y), mask=is_inside)
    else:
        tl.store(out_ptr + row * width + columns, y, mask=is_inside)
