"""Matrix products in Triton: rows × weightᵀ with weights in bfloat16, FP8 blocks or 4 bits; dense, batched, by expert.

One kernel for all of them, so that a row has the same bits in every layout. Depth is summed in ascending order in
float32. FP8: 128 products are added by the matrix unit, scaled by row and weight, then added in float32
(DeepSeek-V3 report section 3.3.2). 4 bits are widened to bfloat16 on the way, with the bits of the widened weight.
"""

# T rows, N columns of the result (out), M depth of the sum (in), B batches, E experts, C rows of room per expert

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.block_scaled import BLOCK, BlockScaled
from batchinfer_kernels.reference.fp8 import ScaledRows
from batchinfer_kernels.reference.group_scaled import GROUP
from batchinfer_kernels.triton.four_bits import GROUP_VALUES, FourBits, depth_of, widen
from batchinfer_kernels.triton.layout import dense
from batchinfer_kernels.triton.numbers import dot, to_bfloat16
from batchinfer_kernels.triton.quantize import quantize_rows
from batchinfer_kernels.triton.tiles import RowTiles, num_warps, tile_shape

_FEW_ROWS, _DENSE_ROWS = 64, 128
_SWIZZLE = 8  # row tiles that go through the columns together, so that both operands stay in the cache

Weight = torch.Tensor | BlockScaled | FourBits


def linear(
    x: torch.Tensor | ScaledRows,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    float32_out: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute x · weightᵀ (+ bias) (+ residual) in bfloat16; with `float32_out` in float32, the sums unrounded."""
    values, scales = values_of(weight), None
    dtype = torch.float32 if float32_out else torch.bfloat16
    out = torch.empty(len(x), values.shape[0], dtype=dtype, device=values.device)
    if isinstance(x, ScaledRows):
        assert isinstance(weight, BlockScaled), "rows are rounded for weights in FP8 blocks alone"
        scales, x = x.scales, x.values
    elif isinstance(weight, BlockScaled):
        x, scales = quantize_rows(dense(x), by_column=True)
    elif isinstance(weight, torch.Tensor):
        weight = dense(weight)
    return product(dense(x), weight, scales, out=out, bias=bias, residual=residual)


def batched_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply each batch by its weight; without `out`, a row's results for all batches lie one after another."""
    if out is None:
        out = torch.empty(x.shape[1], x.shape[0], weight.shape[1], dtype=x.dtype, device=x.device).transpose(0, 1)
    return product(dense(x), dense(weight), out=out)


def values_of(weight: Weight) -> torch.Tensor:
    """Return the tensor of a weight's values, without its scales."""
    return weight if isinstance(weight, torch.Tensor) else weight.values


def product(
    x: torch.Tensor,
    weight: Weight,
    scales: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    tiles: RowTiles | None = None,
    rows: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute x · weightᵀ (+ bias) (+ residual), each sum rounded to bfloat16; only a float32 `out` is not rounded.

    Args:
        x: [T, M] or [B, T, M] bfloat16 or float8_e4m3fn, the last dim without gaps.
        weight: [N, M], or [B, N, M] with batches of x or one weight per expert; the last dim without gaps.
        scales: [T, ceil(M / 128)] float32, of FP8 rows; [E, C, ceil(M / 128)] of rows in blocks with C rows of room.
        out: [T, N] or [B, T, N], the last dim without gaps; with `tiles` only their rows are written.
        tiles: the experts' row tiles.
        rows: [T] int64, the row of x behind each row of the result.
        bias: [N] bfloat16, or [E, N] with `tiles`.
        residual: [T, N] bfloat16.

    Returns:
        `out`.
    """
    values = values_of(weight)
    num_columns, depth = values.shape[-2:]
    if is_packed := isinstance(weight, FourBits):
        depth = depth_of(weight, x.shape[-1])
    if x.shape[-1] != depth:
        raise RuntimeError(f"x is {x.shape[-1]} wide, weight {depth}")
    assert x.stride(-1) == values.stride(-1) == out.stride(-1) == 1 or out.numel() == 0, "last dims must have no gaps"
    if out.numel() == 0:
        return out
    shape = tile_shape(num_columns, max(depth, GROUP) if is_packed else depth, fp8=scales is not None)
    num_rows = out.shape[-2]
    tile_rows = tiles.rows if tiles else _FEW_ROWS if num_rows <= _FEW_ROWS else _DENSE_ROWS
    column_tiles = triton.cdiv(num_columns, shape.columns)
    row_programs = tiles.num_programs if tiles else triton.cdiv(num_rows, tile_rows)
    is_batched = x.dim() == 3
    _product[(column_tiles * row_programs, len(x) if is_batched else 1)](
        x,
        scales,
        rows,
        values,
        None if isinstance(weight, torch.Tensor) else weight.scales,
        out,
        bias,
        residual,
        *(tiles.experts, tiles.starts, tiles.ends, tiles.count) if tiles else (None, None, None, None),
        num_rows,
        num_columns,
        depth,
        x.stride(-2),
        out.stride(-2),
        0 if residual is None else residual.stride(0),
        0 if bias is None or bias.dim() == 1 else bias.stride(0),
        values.stride(-2),
        x.stride(0) if is_batched else 0,
        out.stride(0) if is_batched else 0,
        values.stride(0) if values.dim() == 3 else 0,
        *row_scale_steps(scales),
        *scale_strides(weight),
        row_programs,
        ROWS=tile_rows,
        COLUMNS=shape.columns,
        DEPTH=shape.depth,
        IS_EVEN=depth % shape.depth == 0,
        SCALE_BLOCK=BLOCK,
        SWIZZLE=_SWIZZLE,
        num_warps=num_warps(tile_rows),
        num_stages=shape.stages,
    )
    return out


def row_scale_steps(scales: torch.Tensor | None) -> tuple[int, int, int]:
    """Return the steps between the scales of two experts, beyond those of their C rows, of two rows and of two blocks.

    Row e * C + c of expert e has its scales at (e * C + c) * row step + e * expert step, in any memory order.
    """
    if scales is None:
        return 0, 0, 0
    if scales.dim() == 2:
        return 0, scales.stride(0), scales.stride(1)
    expert, row, block = scales.stride()
    return expert - scales.shape[1] * row, row, block


def scale_strides(weight: Weight) -> tuple[int, int]:
    """Return the steps between the scales of two weights and of two blocks of columns, in 4 bits of two columns."""
    if isinstance(weight, torch.Tensor):
        return 0, 0
    scales = weight.scales
    assert scales.stride(-1) == 1 or scales.shape[-1] == 1, "scales along the depth must be without gaps"
    return scales.stride(0) if scales.dim() == 3 else 0, scales.stride(-2)


@triton.jit
def _product(
    x_ptr, scales_ptr, rows_ptr, w_ptr, w_scales_ptr, out_ptr, bias_ptr, residual_ptr,
    experts_ptr, starts_ptr, ends_ptr, count_ptr,
    num_rows, num_columns, depth,
    x_stride, out_stride, residual_stride, bias_expert, w_stride,
    x_batch, out_batch, w_batch,
    scale_expert, scale_row, scale_block, w_scale_batch, w_scale_row,
    row_programs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IS_EVEN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, SWIZZLE: tl.constexpr,
):  # fmt: skip
    pid, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    if count_ptr is not None:
        column_tile = pid % column_tiles
        for tile in range(pid // column_tiles, tl.load(count_ptr), row_programs):
            _tile(
                x_ptr, scales_ptr, rows_ptr, w_ptr, w_scales_ptr, out_ptr, bias_ptr, residual_ptr,
                batch, tl.load(experts_ptr + tile).to(tl.int64), tl.load(starts_ptr + tile), tl.load(ends_ptr + tile),
                column_tile, num_columns, depth,
                x_stride, out_stride, residual_stride, bias_expert, w_stride,
                x_batch, out_batch, w_batch,
                scale_expert, scale_row, scale_block, w_scale_batch, w_scale_row,
                ROWS, COLUMNS, DEPTH, IS_EVEN, SCALE_BLOCK,
            )  # fmt: skip
    else:
        in_group = pid % (SWIZZLE * column_tiles)
        first_tile = pid // (SWIZZLE * column_tiles) * SWIZZLE
        group_tiles = tl.minimum(row_programs - first_tile, SWIZZLE)
        _tile(
            x_ptr, scales_ptr, rows_ptr, w_ptr, w_scales_ptr, out_ptr, bias_ptr, residual_ptr,
            batch, batch, (first_tile + in_group % group_tiles) * ROWS, num_rows,
            in_group // group_tiles, num_columns, depth,
            x_stride, out_stride, residual_stride, bias_expert, w_stride,
            x_batch, out_batch, w_batch,
            scale_expert, scale_row, scale_block, w_scale_batch, w_scale_row,
            ROWS, COLUMNS, DEPTH, IS_EVEN, SCALE_BLOCK,
        )  # fmt: skip


@triton.jit
def _tile(  # noqa: PLR0915  (one kernel for all forms of weights)
    x_ptr, scales_ptr, rows_ptr, w_ptr, w_scales_ptr, out_ptr, bias_ptr, residual_ptr,
    batch, expert, start, end,
    column_tile, num_columns, depth,
    x_stride, out_stride, residual_stride, bias_expert, w_stride,
    x_batch, out_batch, w_batch,
    scale_expert, scale_row, scale_block, w_scale_batch, w_scale_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IS_EVEN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply rows [start, start + ROWS) before `end` by one tile of columns of the weight `expert`."""
    row = start + tl.arange(0, ROWS)
    is_row = row < end
    row = tl.where(is_row, row, start).to(tl.int64)  # rows and columns outside repeat one inside and are not stored
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    w_row = tl.where(is_column, column, 0).to(tl.int64)
    x_row = row
    if rows_ptr is not None:
        x_row = tl.load(rows_ptr + row)
    steps = tl.arange(0, DEPTH)
    x_at = x_ptr + batch * x_batch + x_row[:, None] * x_stride + steps[None, :]
    IS_PACKED: tl.constexpr = w_ptr.dtype.element_ty == tl.uint8  # two values of 4 bits in each
    W_DEPTH: tl.constexpr = DEPTH // 2 if IS_PACKED else DEPTH
    w_steps = tl.arange(0, W_DEPTH)
    w_at = w_ptr + expert * w_batch + w_row[:, None] * w_stride + w_steps[None, :]
    if IS_PACKED:
        groups = tl.arange(0, DEPTH // GROUP_VALUES)
        w_scales_at = w_scales_ptr + expert * w_scale_batch + w_row[:, None] * w_scale_row + groups[None, :]
        w_scales = tl.load(w_scales_at, mask=(groups * GROUP_VALUES < depth)[None, :], other=0)
    if scales_ptr is not None:
        scales_at = scales_ptr + expert * scale_expert + x_row * scale_row
        w_scales_at = w_scales_ptr + expert * w_scale_batch + column_tile * COLUMNS // SCALE_BLOCK * w_scale_row

    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(tl.cdiv(depth, DEPTH)):
        if IS_EVEN:
            x, w = tl.load(x_at), tl.load(w_at)
        else:
            left = depth - step * DEPTH
            x = tl.load(x_at, mask=(steps < left)[None, :], other=0.0)
            if IS_PACKED:
                w = tl.load(w_at, mask=(2 * w_steps < left)[None, :], other=0)
            else:
                w = tl.load(w_at, mask=(w_steps < left)[None, :], other=0.0)
        if IS_PACKED:
            w = widen(w, w_scales, COLUMNS, DEPTH // GROUP_VALUES)
            # a step's bytes are too few for a copy in the background, so they are loaded a step ahead
            w_scales_at += DEPTH // GROUP_VALUES
            is_next = (groups * GROUP_VALUES < depth - (step + 1) * DEPTH)[None, :]
            w_scales = tl.load(w_scales_at, mask=is_next, other=0)
        if scales_ptr is not None:
            part = tl.dot(x, tl.trans(w))
            total += part * (tl.load(scales_at + step * scale_block) * tl.load(w_scales_at + step))[:, None]
        else:
            total = dot(x, tl.trans(w), total)
        x_at += DEPTH
        w_at += W_DEPTH

    is_stored = is_row[:, None] & is_column[None, :]
    out_at = out_ptr + batch * out_batch + row[:, None] * out_stride + column[None, :]
    if out_ptr.dtype.element_ty == tl.float32 and bias_ptr is None and residual_ptr is None:
        tl.store(out_at, total, mask=is_stored)
    else:
        y = to_bfloat16(total)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert * bias_expert + w_row)
            y = to_bfloat16(y.to(tl.float32) + bias.to(tl.float32)[None, :])
        if residual_ptr is not None:
            residual = tl.load(
                residual_ptr + row[:, None] * residual_stride + column[None, :], mask=is_stored, other=0.0
            )
            y = to_bfloat16(residual.to(tl.float32) + y.to(tl.float32))
        tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=is_stored)
