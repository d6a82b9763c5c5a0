"""Sizes of the tiles of matrix products, from the shape of the weight alone; row tiles of experts, on the device."""

# E experts, C rows of room per expert

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.block_scaled import BLOCK

# Programs next to each other for one tile of columns; each goes through the row tiles in steps of this many. More row
# tiles than that keep a GPU busy for many rounds, and in the masked layout most of the room is empty.
_MAX_PROGRAMS = 64
_MANY_COLUMNS = 2048  # fewer are cut into narrower tiles, so that more programs share them
_VOCABULARY = 32768  # a weight with at least this many columns is read once per step, in wide tiles
_SHALLOW = 1024  # a short depth: two programs side by side help more than loads further ahead
_FEW_ROWS, _MANY_ROWS = 64, 128
_MAP_TILES = 128


@dataclass(frozen=True, slots=True)
class TileShape:
    """Columns and depth of a tile, and how many loads are in flight while one is multiplied."""

    columns: int
    depth: int
    stages: int


@dataclass(frozen=True, slots=True)
class RowTiles:
    """The row tiles of experts: int32, of as many entries as there can be; the first `count` are filled."""

    experts: torch.Tensor
    starts: torch.Tensor  # first row
    ends: torch.Tensor  # behind the last row of the tile's expert
    count: torch.Tensor  # [1]
    rows: int  # of a tile

    @property
    def num_programs(self) -> int:
        """Programs per tile of columns."""
        return min(len(self.experts), _MAX_PROGRAMS)


def tile_shape(num_columns: int, depth: int, *, fp8: bool) -> TileShape:
    """Return the tile for products with a weight [num_columns, depth].

    128 columns and 128 bytes of depth suit Hopper's matrix instruction (64 rows × up to 256 columns × 32 bytes of
    depth) with four stages of 32 KB in 227 KB of shared memory; with three, two programs fit side by side. FP8 tiles
    are one block of scales deep and lie within one block of columns.
    """
    columns = 128 if num_columns >= _MANY_COLUMNS else 64
    columns = min(columns, max(16, triton.next_power_of_2(num_columns)))
    if fp8:
        return TileShape(columns, BLOCK, 4)
    if num_columns >= _VOCABULARY:
        columns = 256
    return TileShape(columns, min(64, max(16, triton.next_power_of_2(depth))), 3 if depth <= _SHALLOW else 4)


def num_warps(tile_rows: int) -> int:
    """Return four warps (one matrix instruction) per 64 rows: a row gets the same instructions in either tile."""
    return 4 * max(1, tile_rows // 64)


def contiguous_tiles(num_rows_E: torch.Tensor, num_rows: int, step: int = 1) -> RowTiles:
    """Return tiles of rows sorted by expert, `num_rows` together; each expert's begin at a multiple of `step`."""
    return _row_tiles(num_rows_E, num_rows // _MANY_ROWS + min(len(num_rows_E), num_rows), 0, _MANY_ROWS, step)


def masked_tiles(num_rows_E: torch.Tensor, room: int, rows: int = _FEW_ROWS) -> RowTiles:
    """Return tiles of the filled rows of each expert's `room` rows; small ones, as decode gives an expert few rows."""
    return _row_tiles(num_rows_E, len(num_rows_E) * triton.cdiv(room, rows), room, rows)


def _row_tiles(num_rows_E: torch.Tensor, most: int, room: int, rows: int, step: int = 1) -> RowTiles:
    experts, starts, ends = torch.empty(3, most, dtype=torch.int32, device=num_rows_E.device)
    count = torch.empty(1, dtype=torch.int32, device=num_rows_E.device)
    _map_tiles[(triton.cdiv(most, _MAP_TILES),)](
        num_rows_E,
        experts,
        starts,
        ends,
        count,
        len(num_rows_E),
        most,
        room,
        STEP=step,
        ROWS=rows,
        EXPERTS=triton.next_power_of_2(len(num_rows_E)),
        TILES=_MAP_TILES,
    )
    return RowTiles(experts, starts, ends, count, rows)


@triton.jit
def _map_tiles(
    num_rows_ptr, experts_ptr, starts_ptr, ends_ptr, count_ptr, num_experts, most, room,
    STEP: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Find the expert and rows of each tile; `room` 0: experts' rows follow each other, from multiples of STEP on."""
    experts = tl.arange(0, EXPERTS)
    num_rows = tl.load(num_rows_ptr + experts, mask=experts < num_experts, other=0).to(tl.int32)
    num_tiles = (num_rows + ROWS - 1) // ROWS
    behind = tl.cumsum(num_tiles, 0)  # the tile behind the expert's last one
    total = tl.sum(num_tiles, 0)
    taken = (num_rows + STEP - 1) // STEP * STEP
    first_row = tl.cumsum(taken, 0) - taken
    first_row = tl.where(room > 0, experts * room, first_row)

    tiles = tl.program_id(0) * TILES + tl.arange(0, TILES)
    expert = tl.sum((behind[None, :] <= tiles[:, None]).to(tl.int32), 1)
    is_mine = experts[None, :] == expert[:, None]
    tile_in_expert = tiles - tl.sum(tl.where(is_mine, (behind - num_tiles)[None, :], 0), 1)
    start = tl.sum(tl.where(is_mine, first_row[None, :], 0), 1)
    end = start + tl.sum(tl.where(is_mine, num_rows[None, :], 0), 1)
    is_filled = (tiles < total) & (tiles < most)
    tl.store(experts_ptr + tiles, expert, mask=is_filled)
    tl.store(starts_ptr + tiles, start + tile_in_expert * ROWS, mask=is_filled)
    tl.store(ends_ptr + tiles, end, mask=is_filled)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, total)
