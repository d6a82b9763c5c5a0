"""silu(gate) × up in Triton, alone or together with the rounding to FP8 that a block-scaled product needs next.

silu is rounded to bfloat16 before it is multiplied, as in the reference.
"""

# T rows, F width, M rows of experts, E experts, C rows of room per expert

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.pointwise import SWIGLU, Activation
from batchinfer_kernels.triton.gemm import row_scale_steps
from batchinfer_kernels.triton.layout import dense
from batchinfer_kernels.triton.numbers import scale_of, scaled, to_bfloat16, to_e4m3
from batchinfer_kernels.triton.quantize import ROW_BLOCK, new_scales
from batchinfer_kernels.triton.tiles import RowTiles, masked_tiles

_TILE_VALUES = 4096
_TILE_ROWS = 16


def silu_mul(gate: torch.Tensor, up: torch.Tensor, activation: Activation = SWIGLU) -> torch.Tensor:
    gate, up = dense(gate), dense(up)
    num_rows, width = gate.shape
    out = torch.empty(num_rows, width, dtype=gate.dtype, device=gate.device)
    if out.numel():
        columns = min(_TILE_VALUES, triton.next_power_of_2(width))
        rows = _TILE_VALUES // columns
        _silu_mul[(triton.cdiv(num_rows, rows), triton.cdiv(width, columns))](
            gate, up, out, num_rows, width, gate.stride(0), up.stride(0), *activation,
            IS_PLAIN=activation == SWIGLU, ROWS=rows, COLUMNS=columns,
        )  # fmt: skip
    return out


def silu_mul_blocks(
    gate_up_ECF: torch.Tensor, num_rows_E: torch.Tensor | None = None, *, fp8: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    gate_up_ECF = gate_up_ECF.contiguous()
    num_experts, room, double = gate_up_ECF.shape
    dtype = torch.float8_e4m3fn if fp8 else gate_up_ECF.dtype
    out = torch.empty(num_experts, room, double // 2, dtype=dtype, device=gate_up_ECF.device)
    scales = None
    if fp8:
        num_blocks = triton.cdiv(double // 2, ROW_BLOCK)
        scales = new_scales(num_experts, room, num_blocks, device=out.device, by_column=True)
    if out.numel() and num_rows_E is None:
        grid = (triton.cdiv(num_experts * room, _TILE_ROWS), triton.cdiv(double // 2, ROW_BLOCK))
        _silu_mul_rows[grid](
            gate_up_ECF, out, scales, num_experts * room, room, double // 2, *row_scale_steps(scales), *SWIGLU,
            IS_PLAIN=True, ROWS=_TILE_ROWS, BLOCK=ROW_BLOCK,
        )  # fmt: skip
    elif num_rows_E is not None and out.numel():
        silu_mul_tiles(gate_up_ECF.flatten(0, 1), out.flatten(0, 1), scales, masked_tiles(num_rows_E, room))
    return out, scales


def silu_mul_tiles(
    gate_up: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    tiles: RowTiles,
    activation: Activation = SWIGLU,
) -> None:
    """Compute silu(gate) × up for the rows of experts, gate before up in [M, 2 * F]; skip all other rows.

    Args:
        out: [M, F] bfloat16, or float8_e4m3fn with `scales`.
        scales: [M, ceil(F / 128)] or [E, C, ceil(F / 128)] float32, written.
    """
    width = out.shape[1]
    _silu_mul_tiles[(tiles.num_programs, triton.cdiv(width, ROW_BLOCK))](
        gate_up,
        out,
        scales,
        tiles.experts,
        tiles.starts,
        tiles.ends,
        tiles.count,
        width,
        *row_scale_steps(scales),
        *activation,
        IS_PLAIN=activation == SWIGLU,
        TILE_ROWS=tiles.rows,
        ROWS=min(tiles.rows, _TILE_ROWS),
        BLOCK=ROW_BLOCK,
    )


@triton.jit
def active_of(gate, up, limit, alpha, shift, cubic, IS_PLAIN: tl.constexpr):
    """Return the activation of bfloat16 values, in float32 but with the bits of bfloat16."""
    gate32, up32 = gate.to(tl.float32), up.to(tl.float32)
    inner = gate32
    if not IS_PLAIN:  # a limit passes what is no number on
        gate32 = tl.where(gate32 > limit, limit, gate32)
        up32 = tl.where(up32 > limit, limit, tl.where(up32 < -limit, -limit, up32)) + shift
        inner = gate32 * alpha
        inner = tl.where(cubic != 0.0, inner * (1.0 + cubic * gate32 * gate32), inner)
    silu = to_bfloat16(gate32 / (1.0 + tl.exp(-inner))).to(tl.float32)
    return to_bfloat16(silu * up32).to(tl.float32)


@triton.jit
def _silu_mul(
    gate_ptr, up_ptr, out_ptr, num_rows, width, gate_stride, up_stride, limit, alpha, shift, cubic,
    IS_PLAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_inside = (rows < num_rows) & (columns < width)
    gate = tl.load(gate_ptr + rows * gate_stride + columns, mask=is_inside, other=0.0)
    up = tl.load(up_ptr + rows * up_stride + columns, mask=is_inside, other=0.0)
    active = active_of(gate, up, limit, alpha, shift, cubic, IS_PLAIN)
    tl.store(out_ptr + rows * width + columns, to_bfloat16(active), mask=is_inside)


@triton.jit
def _silu_mul_tiles(
    gate_up_ptr, out_ptr, scales_ptr, experts_ptr, starts_ptr, ends_ptr, count_ptr,
    width, scale_expert, scale_row, scale_block, limit, alpha, shift, cubic,
    IS_PLAIN: tl.constexpr, TILE_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < width
    for tile in range(tl.program_id(0), tl.load(count_ptr), tl.num_programs(0)):
        start = tl.load(starts_ptr + tile)
        scales_at = scales_ptr
        if scales_ptr is not None:
            scales_at += tl.load(experts_ptr + tile).to(tl.int64) * scale_expert + block * scale_block
        end = tl.minimum(start + TILE_ROWS, tl.load(ends_ptr + tile))
        for first in range(start, end, ROWS):
            rows = (first + tl.arange(0, ROWS)).to(tl.int64)
            active = _activate(
                gate_up_ptr, out_ptr, rows, rows < end, columns, is_column, width, limit, alpha, shift,
                cubic, IS_PLAIN, scales_ptr is None,
            )  # fmt: skip
            if scales_ptr is not None:
                round_block(active, out_ptr, scales_at + rows * scale_row, rows, rows < end, columns, is_column, width)


@triton.jit
def _silu_mul_rows(
    gate_up_ptr, out_ptr, scales_ptr, num_rows, room, width, scale_expert, scale_row, scale_block,
    limit, alpha, shift, cubic,
    IS_PLAIN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row, is_column = rows < num_rows, columns < width
    active = _activate(
        gate_up_ptr, out_ptr, rows, is_row, columns, is_column, width, limit, alpha, shift, cubic,
        IS_PLAIN, scales_ptr is None,
    )  # fmt: skip
    if scales_ptr is not None:
        scales_at = scales_ptr + rows // room * scale_expert + rows * scale_row + block * scale_block
        round_block(active, out_ptr, scales_at, rows, is_row, columns, is_column, width)


@triton.jit
def _activate(
    gate_up_ptr, out_ptr, rows, is_row, columns, is_column, width, limit, alpha, shift, cubic,
    IS_PLAIN: tl.constexpr, IS_STORED: tl.constexpr,
):  # fmt: skip
    """Compute silu(gate) × up of some rows and columns; store it in bfloat16 if no rounding to FP8 follows."""
    is_inside = is_row[:, None] & is_column[None, :]
    gate_at = gate_up_ptr + rows[:, None] * (2 * width) + columns[None, :]
    gate = tl.load(gate_at, mask=is_inside, other=0.0)
    up = tl.load(gate_at + width, mask=is_inside, other=0.0)
    active = active_of(gate, up, limit, alpha, shift, cubic, IS_PLAIN)
    if IS_STORED:
        tl.store(out_ptr + rows[:, None] * width + columns[None, :], to_bfloat16(active), mask=is_inside)
    return active


@triton.jit
def round_block(active, out_ptr, scales_at, rows, is_row, columns, is_column, width):
    """Round a block of columns of some rows to FP8 and store it with its scales."""
    scales = scale_of(tl.max(tl.abs(active), 1), tl.sum((active != active).to(tl.int32), 1) == 0)
    out_at = out_ptr + rows[:, None] * width + columns[None, :]
    tl.store(out_at, to_e4m3(scaled(active, scales[:, None])), mask=is_row[:, None] & is_column[None, :])
    tl.store(scales_at, scales, mask=is_row)
