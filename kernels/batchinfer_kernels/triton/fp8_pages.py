"""Rows of FP8 pages in Triton: their scales, and reading them as bfloat16; see `reference.fp8_pages` for the layout.

A kernel gets the same pages three times: as E4M3 values, as float32 scales and as bfloat16 rotary keys. Steps between
rows are in bytes.
"""

# X rows, W latent and rotary width

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.fp8_pages import TILE, rotary_start
from batchinfer_kernels.triton.numbers import FP8_MAX, FP8_MIN_AMAX, load_columns

Pages = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
_ROWS = 16


def as_parts(pages: torch.Tensor) -> Pages:
    """View the pages as values, as scales and as rotary keys."""
    return pages.view(torch.float8_e4m3fn), pages.view(torch.float32), pages.view(torch.bfloat16)


def widen_rows(pages: torch.Tensor, slots_X: torch.Tensor, latent_dim: int) -> torch.Tensor:
    """Return the rows of FP8 pages in these slots, [X, W] bfloat16."""
    start = rotary_start(latent_dim)
    rotary = (pages.shape[-1] - start) // 2
    out_XW = torch.empty(len(slots_X), latent_dim + rotary, dtype=torch.bfloat16, device=pages.device)
    _widen_rows[(triton.cdiv(len(slots_X), _ROWS),)](
        *as_parts(pages),
        slots_X,
        out_XW,
        len(slots_X),
        pages.stride(1),
        LATENT=latent_dim,
        ROTARY=rotary,
        LATENT_TILE=triton.next_power_of_2(latent_dim),
        ROTARY_TILE=triton.next_power_of_2(max(1, rotary)),
        ROWS=_ROWS,
    )
    return out_XW


@triton.jit
def _widen_rows(
    pages_ptr, scales_ptr, rotary_ptr, slots_ptr, out_ptr, num_rows, page_step,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, LATENT_TILE: tl.constexpr, ROTARY_TILE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    SCALED: tl.constexpr = tile_of(LATENT_TILE)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = (row < num_rows)[:, None]
    at = tl.load(slots_ptr + row, mask=row < num_rows, other=0)[:, None] * page_step  # bytes
    latent, rotary, tiles = tl.arange(0, LATENT_TILE), tl.arange(0, ROTARY_TILE), tl.arange(0, LATENT_TILE // SCALED)
    is_latent, is_rotary = is_row & (latent < LATENT)[None, :], is_row & (rotary < ROTARY)[None, :]
    is_tile = is_row & (tiles * SCALED < LATENT)[None, :]
    values = tl.load(pages_ptr + at + latent[None, :], mask=is_latent, other=0.0)
    scales = tl.load(scales_ptr + (at + LATENT) // 4 + tiles[None, :], mask=is_tile, other=0.0)
    keys = tl.load(rotary_ptr + (at + rotary_byte(LATENT)) // 2 + rotary[None, :], mask=is_rotary, other=0.0)
    out_at = out_ptr + row[:, None] * (LATENT + ROTARY)
    tl.store(out_at + latent[None, :], widened(values, scales, ROWS, LATENT_TILE, SCALED), mask=is_latent)
    tl.store(out_at + LATENT + rotary[None, :], keys, mask=is_rotary)


@triton.constexpr_function
def tile_of(LATENT_TILE):
    """Return how many values of a latent share a scale in a tile of this width."""
    return min(TILE, LATENT_TILE)


@triton.constexpr_function
def rotary_byte(LATENT):
    """Return the byte of a row at which its rotary key begins."""
    return LATENT + 4 * ((LATENT + TILE - 1) // TILE)


@triton.jit
def power_scale_of(amax):
    """Return a tile's scale: the smallest power of two that takes `amax` to 448 at most; see the reference."""
    least = tl.maximum(tl.div_rn(amax, FP8_MAX), FP8_MIN_AMAX)
    # up to the next power of two: the exponent, and one more where there is a mantissa
    bits = least.to(tl.int32, bitcast=True)
    scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def widened(values, scales, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Return E4M3 values [ROWS, WIDTH] times scales [ROWS, WIDTH / TILE], powers of two: bfloat16, without rounding."""
    in_tiles = tl.reshape(values.to(tl.float32), (ROWS, WIDTH // TILE, TILE)) * scales[:, :, None]
    return tl.reshape(in_tiles, (ROWS, WIDTH)).to(tl.bfloat16)


@triton.jit
def load_keys(
    pages_ptr, scales_ptr, rotary_ptr, slots, page_step,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, LATENT_TILE: tl.constexpr, ROTARY_TILE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Load latents [KEYS, LATENT_TILE] and rotary keys of these slots in bfloat16; without scales pages are plain."""
    latent, rotary = tl.arange(0, LATENT_TILE), tl.arange(0, ROTARY_TILE)
    key_at = pages_ptr + slots[:, None] * page_step
    k_latent = load_columns(key_at + latent[None, :], (latent < LATENT)[None, :], LATENT == LATENT_TILE)
    if scales_ptr is None:
        rotary_at = key_at + LATENT
    else:
        SCALED: tl.constexpr = tile_of(LATENT_TILE)
        tiles = tl.arange(0, LATENT_TILE // SCALED)
        scales_at = scales_ptr + (slots[:, None] * page_step + LATENT) // 4 + tiles[None, :]
        scales = load_columns(scales_at, (tiles * SCALED < LATENT)[None, :], LATENT == LATENT_TILE)
        k_latent = widened(k_latent, scales, KEYS, LATENT_TILE, SCALED)
        rotary_at = rotary_ptr + (slots[:, None] * page_step + rotary_byte(LATENT)) // 2
    return k_latent, load_columns(rotary_at + rotary[None, :], (rotary < ROTARY)[None, :], ROTARY == ROTARY_TILE)
