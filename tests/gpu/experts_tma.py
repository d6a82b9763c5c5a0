"""SwiGLU of experts with few rows, in the masked layout: tensor descriptors read the tiles, a program takes many.

A variant of batchinfer_kernels.triton.experts that no GPU has run; `tests/gpu/check.py` times both. With few rows per
expert a decode step's time is that of reading the weights. So the copy engine keeps several tiles of weights in flight,
as many programs as run at once go through the tiles of all experts, and the first product ends with the activation and
the rounding to FP8: its result goes to memory once, at half the width. Sums have the order of gemm.py, given by the
weight's shape.
"""

# E experts, C rows of room per expert, M = E * C rows, D hidden, F intermediate, K depth, N columns of one weight

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from batchinfer_kernels.reference.block_scaled import BLOCK, BlockScaled
from batchinfer_kernels.triton.gemm import row_scale_steps, scale_strides, values_of
from batchinfer_kernels.triton.numbers import dot, to_bfloat16
from batchinfer_kernels.triton.quantize import ROW_BLOCK, dequantize_fp8_block, new_scales, quantize_rows
from batchinfer_kernels.triton.silu import active_of, round_block
from batchinfer_kernels.triton.tiles import RowTiles, masked_tiles

Weight = torch.Tensor | BlockScaled

_DEPTH_BYTES = 128  # the widest row of a tile that the copy engine writes in the matrix unit's order
_ALIGNMENT = 16  # bytes between rows must be a multiple of this
_PROGRAMS_WITHOUT_GPU = 3  # few, so that a program in the interpreter has several tiles


@dataclass(frozen=True, slots=True)
class _Form:
    """Columns of each of a program's two tiles of weights, tiles in flight, warps, programs on a multiprocessor."""

    columns: int
    stages: int
    warps: int
    programs: int


_FEW_ROWS, _MANY_ROWS = 64, 128  # of a tile
# Of both products, by rows of a tile and whether weights are in FP8. A stage takes 128 bytes per row and column of its
# tiles; a multiprocessor has 227 KB. In FP8 a program of the first product has a whole block of scales of the second;
# 128 rows x 256 columns are what the registers hold, for the second product in FP8 not quite.
_FORMS = {
    (_FEW_ROWS, True): (_Form(columns=128, stages=5, warps=8, programs=1), _Form(64, 4, 4, 2)),
    (_FEW_ROWS, False): (_Form(64, 4, 4, 2), _Form(64, 4, 4, 2)),
    (_MANY_ROWS, True): (_Form(128, 4, 8, 1), _Form(64, 6, 8, 1)),
    (_MANY_ROWS, False): (_Form(128, 4, 8, 1), _Form(128, 4, 8, 1)),
}


def why_not(gate_up_EFD: Weight, down_EDF: Weight) -> str | None:
    """Return why the kernel does not take these weights, or None."""
    values = values_of(gate_up_EFD), values_of(down_EDF)
    if {type(gate_up_EFD), type(down_EDF)} not in ({torch.Tensor}, {BlockScaled}):
        return "the weights of experts are not both in bfloat16 or both in FP8 blocks"
    if values[1].shape[-1] % BLOCK:
        return f"the width of experts is {values[1].shape[-1]}, not a multiple of {BLOCK}"
    if any(one.shape[-1] * one.element_size() % _ALIGNMENT for one in values):
        return f"rows of weights are not multiples of {_ALIGNMENT} bytes"
    if not all(one.is_contiguous() for one in values):
        return "the weights of experts have gaps in memory"
    return None


def masked_mlp(
    x_ECD: torch.Tensor,
    num_rows_E: torch.Tensor,
    gate_up_EFD: Weight,
    down_EDF: Weight,
    scales: torch.Tensor | None = None,
    *,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """Return what experts.masked_mlp returns, for SwiGLU without biases.

    Args:
        expected_rows: more than 64 rows per expert are taken in larger tiles; bits do not change.

    Raises:
        ValueError: the weights have a form or a width that the kernel does not take.
    """
    reason = why_not(gate_up_EFD, down_EDF)
    if reason is not None:
        raise ValueError(reason)
    x_ECD = x_ECD.contiguous()
    num_experts, room, hidden = x_ECD.shape
    out = torch.empty(num_experts * room, hidden, dtype=torch.bfloat16, device=x_ECD.device)
    if out.numel() == 0:
        return out.view(num_experts, room, hidden)
    x, width, active_scales = x_ECD.flatten(0, 1), values_of(down_EDF).shape[-1], None
    is_fp8 = isinstance(gate_up_EFD, BlockScaled)
    if is_fp8 and scales is None:
        x_ECD, scales = quantize_rows(x_ECD, num_rows_E, by_column=True)
        x = x_ECD.flatten(0, 1)
    elif scales is not None and not is_fp8:
        x, scales = dequantize_fp8_block(x, scales.flatten(0, 1), torch.bfloat16, (1, ROW_BLOCK)), None
    tile_rows = _FEW_ROWS if (expected_rows or 1) <= _FEW_ROWS else _MANY_ROWS
    gate_up_form, down_form = _FORMS[tile_rows, is_fp8]
    tiles = masked_tiles(num_rows_E, room, tile_rows)
    active = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    if is_fp8:
        active_scales = new_scales(num_experts, room, width // ROW_BLOCK, device=x.device, by_column=True)
    _product(gate_up_form, x, scales, gate_up_EFD, active, active_scales, tiles, room, is_gate_up=True)
    _product(down_form, active, active_scales, down_EDF, out, None, tiles, room, is_gate_up=False)
    return out.view(num_experts, room, hidden)


def _product(
    form: _Form,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    weight: Weight,
    out: torch.Tensor,
    out_scales: torch.Tensor | None,
    tiles: RowTiles,
    room: int,
    *,
    is_gate_up: bool,
) -> None:
    """Write x · weightᵀ, or silu(x · gateᵀ) × (x · upᵀ) with gate before up in `weight`, for the rows of `tiles`."""
    values, num_columns = values_of(weight), out.shape[-1]
    depth = _DEPTH_BYTES // x.element_size()
    _tiles_of_experts[(_num_programs(x.device, form),)](
        TensorDescriptor.from_tensor(x, [tiles.rows, depth]),
        TensorDescriptor.from_tensor(values.flatten(0, 1), [form.columns, depth]),
        scales,
        None if isinstance(weight, torch.Tensor) else weight.scales,
        out,
        out_scales,
        tiles.experts,
        tiles.starts,
        tiles.ends,
        tiles.count,
        room,
        num_columns,
        x.shape[-1],
        *row_scale_steps(scales),
        *row_scale_steps(out_scales),
        *scale_strides(weight),
        ROWS=tiles.rows,
        COLUMNS=form.columns,
        DEPTH=depth,
        BLOCK=ROW_BLOCK,
        IS_GATE_UP=is_gate_up,
        num_warps=form.warps,
        num_stages=form.stages,
    )


def _num_programs(device: torch.device, form: _Form) -> int:
    """Return the number of programs that run at the same time."""
    if device.type != "cuda":
        return _PROGRAMS_WITHOUT_GPU
    return form.programs * torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _tiles_of_experts(
    x_tiles, w_tiles, scales_ptr, w_scales_ptr, out_ptr, out_scales_ptr,
    experts_ptr, starts_ptr, ends_ptr, count_ptr, room, num_columns, depth,
    scale_expert, scale_row, scale_block, out_scale_expert, out_scale_row, out_scale_block,
    w_scale_expert, w_scale_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, IS_GATE_UP: tl.constexpr,
):  # fmt: skip
    """Multiply row tiles by two tiles of weights at once: gate and up of the same columns, or neighbours."""
    WIDTH: tl.constexpr = COLUMNS if IS_GATE_UP else 2 * COLUMNS
    column_tiles = tl.cdiv(num_columns, WIDTH)
    for item in range(tl.program_id(0), tl.load(count_ptr) * column_tiles, tl.num_programs(0)):
        expert, start, end, column_tile = _place(item, column_tiles, experts_ptr, starts_ptr, ends_ptr, room, ROWS)
        first_column = column_tile * WIDTH
        if IS_GATE_UP:
            w_row, further = expert * (2 * num_columns) + first_column, num_columns
        else:  # a neighbour that begins behind the last column is not stored, but its scale is read
            w_row, further = expert * num_columns + first_column, COLUMNS
            further = tl.where(first_column + COLUMNS < num_columns, further, 0)
        scales_at, w_scales_at = scales_ptr, w_scales_ptr
        if scales_ptr is not None:
            row = tl.arange(0, ROWS)
            row = tl.where(row < end - start, row, 0)
            scales_at += expert.to(tl.int64) * scale_expert + start.to(tl.int64) * scale_row + row * scale_row
            w_scales_at += expert.to(tl.int64) * w_scale_expert + first_column // BLOCK * w_scale_row
        first, second = _sums(
            x_tiles, w_tiles, start, w_row, further, depth,
            scales_at, scale_block, w_scales_at, further // BLOCK * w_scale_row,
            ROWS, COLUMNS, DEPTH,
        )  # fmt: skip

        first, second = to_bfloat16(first), to_bfloat16(second)
        row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)  # within the tile, to save registers
        is_row, is_column = row < end - start, column < num_columns - first_column
        out_at = out_ptr + start.to(tl.int64) * num_columns + first_column
        if IS_GATE_UP:
            active = active_of(first, second, 0.0, 0.0, 0.0, 0.0, True)
            if out_scales_ptr is not None:
                scales_out = out_scales_ptr + expert.to(tl.int64) * out_scale_expert + column_tile * out_scale_block
                scales_out += start.to(tl.int64) * out_scale_row + row * out_scale_row
                round_block(active, out_at, scales_out, row, is_row, column, is_column, num_columns)
            else:
                _store(to_bfloat16(active), out_at, row, is_row, column, is_column, num_columns)
        else:
            _store(first, out_at, row, is_row, column, is_column, num_columns)
            is_column = column + COLUMNS < num_columns - first_column
            _store(second, out_at + COLUMNS, row, is_row, column, is_column, num_columns)


@triton.jit
def _store(y, out_at, row, is_row, column, is_column, num_columns):
    at = out_at + (row * num_columns)[:, None] + column[None, :]
    tl.store(at, y, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _place(item, column_tiles, experts_ptr, starts_ptr, ends_ptr, room, ROWS: tl.constexpr):
    """Return the expert, first row, end of the expert's rows and tile of columns of a work item.

    Items go expert by expert through the tiles of columns, and for each through the expert's row tiles: programs that
    run at the same time share tiles of weights.
    """
    tile = item // column_tiles
    expert, start, end = tl.load(experts_ptr + tile), tl.load(starts_ptr + tile), tl.load(ends_ptr + tile)
    first = expert * room
    row_tiles = tl.cdiv(end - first, ROWS)
    in_expert = item - (tile - (start - first) // ROWS) * column_tiles
    return expert, first + in_expert % row_tiles * ROWS, end, in_expert // row_tiles


@triton.jit
def _sums(
    x_tiles, w_tiles, start, w_row, further, depth, scales_at, scale_block, w_scales_at, scales_further,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return the float32 sums with the tile of weights from `w_row` on and with that `further` rows behind it.

    Reads behind the depth give zeros. Scales are loaded a step before their use.
    """
    first = tl.zeros((ROWS, COLUMNS), tl.float32)
    second = tl.zeros((ROWS, COLUMNS), tl.float32)
    steps = tl.cdiv(depth, DEPTH)
    if scales_at is not None:
        row_scale = tl.load(scales_at)
        first_scale, second_scale = tl.load(w_scales_at), tl.load(w_scales_at + scales_further)
    for step in range(steps):
        x = x_tiles.load([start, step * DEPTH])
        w = tl.trans(w_tiles.load([w_row, step * DEPTH]))
        w_further = tl.trans(w_tiles.load([w_row + further, step * DEPTH]))
        if scales_at is None:
            first = dot(x, w, first)
            second = dot(x, w_further, second)
        else:
            scale, scale_further = row_scale * first_scale, row_scale * second_scale
            behind = tl.minimum(step + 1, steps - 1)
            row_scale, first_scale = tl.load(scales_at + behind * scale_block), tl.load(w_scales_at + behind)
            second_scale = tl.load(w_scales_at + scales_further + behind)
            first += tl.dot(x, w) * scale[:, None]
            second += tl.dot(x, w_further) * scale_further[:, None]
    return first, second
