"""Operations on rows between the products, in Triton: norm, positions and pages, sums over experts.

Rounded where the reference rounds; sums of a norm are float32.
"""

# T tokens, H heads, A query width, R rotary width, C latent width, W = C + R, D hidden, K experts per token

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.fp8 import BLOCK, ScaledRows, empty_row_scales
from batchinfer_kernels.reference.places import ExpertRows, PlacedRows
from batchinfer_kernels.reference.rows import NewKeys
from batchinfer_kernels.triton.fp8_pages import as_parts, power_scale_of, rotary_byte, tile_of
from batchinfer_kernels.triton.layout import dense
from batchinfer_kernels.triton.numbers import scale_of, scaled, to_bfloat16, to_e4m3

_BLOCK = BLOCK
_TILE_VALUES = 1024
_TILE_HEADS = 32
_PROGRAM_VALUES = 4096  # narrow rows share a program
_LATENT_VALUES = 1024  # of latents that share one: few, for a step of decode has few tokens


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        tile = triton.next_power_of_2(width)
        rows = max(1, _PROGRAM_VALUES // tile)
        _rms_norm[(triton.cdiv(len(flat), rows),)](
            flat, weight, out, len(flat), width, eps, flat.stride(0), ROWS=rows, TILE=tile, num_warps=8
        )
    return out


def rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, keeps: bool = False
) -> tuple[torch.Tensor | None, ScaledRows]:
    """Norm and round in one kernel."""
    x = dense(x)
    num_rows, width = x.shape
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device) if keeps else None
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = empty_row_scales(num_rows, triton.cdiv(width, _BLOCK), device=x.device)
    if values.numel():
        tile = max(_BLOCK, triton.next_power_of_2(width))
        rows = max(1, _PROGRAM_VALUES // tile)
        _rms_norm_fp8[(triton.cdiv(num_rows, rows),)](
            x, weight, normed, values, scales, num_rows, width, eps, x.stride(0), *scales.stride(),
            ROWS=rows, TILE=tile, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return normed, ScaledRows(values, scales)


def rope_and_cache(q_THA: torch.Tensor, new: NewKeys) -> torch.Tensor:
    """Rotate queries in place and write latents, in one kernel."""
    return _rotate_and_write(q_THA, new, new.pages, None, None)


def rope_and_cache_fp8(q_THA: torch.Tensor, new: NewKeys) -> torch.Tensor:
    """Rotate queries in place and write latents in one kernel, rounding as `fp8_pages.narrow`; sum norms in float32."""
    return _rotate_and_write(q_THA, new, *as_parts(new.pages))


def _rotate_and_write(
    q_THA: torch.Tensor,
    new: NewKeys,
    latent_pages: torch.Tensor,
    scale_pages: torch.Tensor | None,
    rotary_pages: torch.Tensor | None,
) -> torch.Tensor:
    """Rotate the queries and write the latents to pages: plain ones, or FP8 as values, scales and rotary keys."""
    latents_TW, norm_C, eps, cos, sin, _, slots_T, interleaved = new
    q_THA, latents_TW = q_THA.contiguous(), dense(latents_TW)
    num_tokens, num_heads, q_width = q_THA.shape
    latent_dim, rotary = len(norm_C), 2 * cos.shape[-1]
    if num_tokens:
        latent_tile = triton.next_power_of_2(latent_dim)
        rows = max(1, _LATENT_VALUES // latent_tile)
        heads = min(_TILE_HEADS, triton.next_power_of_2(num_heads))
        _rope_and_cache[(triton.cdiv(num_tokens, rows), 1 + triton.cdiv(num_heads, heads))](
            q_THA,
            latents_TW,
            norm_C,
            cos.contiguous(),
            sin.contiguous(),
            latent_pages,
            scale_pages,
            rotary_pages,
            slots_T,
            eps,
            num_tokens,
            num_heads,
            q_width,
            latent_pages.stride(1),
            latents_TW.stride(0),
            LATENT=latent_dim,
            PAIRS=rotary // 2,
            LATENT_TILE=latent_tile,
            PAIRS_TILE=triton.next_power_of_2(rotary // 2),
            ROWS=rows,
            HEADS=heads,
            INTERLEAVED=interleaved,
        )
    return q_THA


def sum_per_token(sorted_MD: ExpertRows, inverse_M: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Sum in one kernel, also rows at places in tiles."""
    rows, place_M = (sorted_MD.values_SD, sorted_MD.place_M) if isinstance(sorted_MD, PlacedRows) else (sorted_MD, None)
    (num_tokens, topk), width = weights_TK.shape, rows.shape[-1]
    total = torch.empty(num_tokens, width, dtype=torch.float32, device=rows.device)
    if total.numel():
        _sum_per_token[(num_tokens, triton.cdiv(width, _TILE_VALUES))](
            rows.contiguous(), inverse_M, place_M, weights_TK.contiguous(), total, width, TOPK=topk, TILE=_TILE_VALUES
        )
    return total


def add_sums(hidden_TD: torch.Tensor, sums_TD: torch.Tensor, added_TD: torch.Tensor | None) -> torch.Tensor:
    out = torch.empty(hidden_TD.shape, dtype=hidden_TD.dtype, device=hidden_TD.device)
    if out.numel():
        _add_sums[(triton.cdiv(out.numel(), _TILE_VALUES),)](
            hidden_TD.contiguous(),
            sums_TD.contiguous(),
            None if added_TD is None else added_TD.contiguous(),
            out,
            out.numel(),
            TILE=_TILE_VALUES,
        )
    return out


@triton.jit
def _normed(x, weight, is_inside, width, eps):
    """Return rows ÷ root mean square × weight, rounded as by `weighted`."""
    x32 = tl.where(is_inside, x.to(tl.float32), 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x32 * x32, 1) / width + eps)
    return weighted(x32 * scale[:, None], weight)


@triton.jit
def weighted(x32, weight):
    """Return float32 values × weight in bfloat16; they are rounded first unless the weight is in float32."""
    if weight.dtype != tl.float32:
        x32 = to_bfloat16(x32).to(tl.float32)
    return to_bfloat16(x32 * weight.to(tl.float32))


@triton.jit
def _rms_norm(
    x_ptr, weight_ptr, out_ptr, num_rows, width, eps, stride, ROWS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, TILE)[None, :]
    is_inside = (rows < num_rows) & (columns < width)
    x = tl.load(x_ptr + rows * stride + columns, mask=is_inside, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0)
    tl.store(out_ptr + rows * width + columns, _normed(x, weight, is_inside, width, eps), mask=is_inside)


@triton.jit
def _rms_norm_fp8(
    x_ptr, weight_ptr, normed_ptr, values_ptr, scales_ptr, num_rows, width, eps, stride, scale_row, scale_block,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, TILE)[None, :]
    is_inside = (rows < num_rows) & (columns < width)
    x = tl.load(x_ptr + rows * stride + columns, mask=is_inside, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0)
    normed = _normed(x, weight, is_inside, width, eps)
    if normed_ptr is not None:
        tl.store(normed_ptr + rows * width + columns, normed, mask=is_inside)
    in_blocks = tl.reshape(normed.to(tl.float32), (ROWS, TILE // BLOCK, BLOCK))
    scales = scale_of(tl.max(tl.abs(in_blocks), 2), tl.sum((in_blocks != in_blocks).to(tl.int32), 2) == 0)
    values = tl.reshape(to_e4m3(scaled(in_blocks, scales[:, :, None])), (ROWS, TILE))
    tl.store(values_ptr + rows * width + columns, values, mask=is_inside)
    blocks = tl.arange(0, TILE // BLOCK)[None, :]
    is_block = (rows < num_rows) & (blocks * BLOCK < width)
    tl.store(scales_ptr + rows * scale_row + blocks * scale_block, scales, mask=is_block)


@triton.jit
def rotated(first, second, cos, sin):
    """Rotate pairs of float32 values by their angles and round to bfloat16."""
    return to_bfloat16(first * cos - second * sin), to_bfloat16(second * cos + first * sin)


@triton.jit
def _rotate(
    from_at, to_at, cos_at, sin_at, is_row, PAIRS: tl.constexpr, PAIRS_TILE: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Rotate rows of pairs, each [M, 1] of pointers; `is_row` [M, 1]."""
    pairs = tl.arange(0, PAIRS_TILE)[None, :]
    is_pair = is_row & (pairs < PAIRS)
    cos = tl.load(cos_at + pairs, mask=is_pair, other=0.0)
    sin = tl.load(sin_at + pairs, mask=is_pair, other=0.0)
    if INTERLEAVED:  # read and written as they lie, one behind the other
        columns = tl.arange(0, 2 * PAIRS_TILE)[None, :]
        is_column = is_row & (columns < 2 * PAIRS)
        x = tl.load(from_at + columns, mask=is_column, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, (x.shape[0], PAIRS_TILE, 2)))
        first, second = rotated(first, second, cos, sin)
        tl.store(to_at + columns, tl.reshape(tl.join(first, second), (x.shape[0], 2 * PAIRS_TILE)), mask=is_column)
    else:
        first = tl.load(from_at + pairs, mask=is_pair, other=0.0).to(tl.float32)
        second = tl.load(from_at + PAIRS + pairs, mask=is_pair, other=0.0).to(tl.float32)
        first, second = rotated(first, second, cos, sin)
        tl.store(to_at + pairs, first, mask=is_pair)
        tl.store(to_at + PAIRS + pairs, second, mask=is_pair)


@triton.jit
def _rope_and_cache(
    q_ptr, latents_ptr, norm_ptr, cos_ptr, sin_ptr, pages_ptr, page_scales_ptr, page_rotary_ptr, slots_ptr, eps,
    num_tokens, num_heads, q_width, page_step, latent_stride,
    LATENT: tl.constexpr, PAIRS: tl.constexpr, LATENT_TILE: tl.constexpr, PAIRS_TILE: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Write latents and rotary keys of ROWS tokens (programs 0 of the second axis), or rotate HEADS of their heads."""
    first_token, tile = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1)
    if tile == 0:
        _cache(
            first_token, latents_ptr, norm_ptr, cos_ptr, sin_ptr, pages_ptr, page_scales_ptr, page_rotary_ptr,
            slots_ptr, eps, num_tokens, page_step, latent_stride,
            LATENT, PAIRS, LATENT_TILE, PAIRS_TILE, ROWS, INTERLEAVED,
        )  # fmt: skip
    else:
        in_tile = tl.arange(0, ROWS * HEADS)
        token, head = first_token + in_tile // HEADS, (tile - 1) * HEADS + in_tile % HEADS
        is_row = (token < num_tokens) & (head < num_heads)
        q_at = (q_ptr + (token * num_heads + head) * q_width + (q_width - 2 * PAIRS))[:, None]
        angles = (token * PAIRS)[:, None]
        _rotate(q_at, q_at, cos_ptr + angles, sin_ptr + angles, is_row[:, None], PAIRS, PAIRS_TILE, INTERLEAVED)


@triton.jit
def _cache(
    first_token, latents_ptr, norm_ptr, cos_ptr, sin_ptr, pages_ptr, page_scales_ptr, page_rotary_ptr,
    slots_ptr, eps, num_tokens, page_step, latent_stride,
    LATENT: tl.constexpr, PAIRS: tl.constexpr, LATENT_TILE: tl.constexpr, PAIRS_TILE: tl.constexpr,
    ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Write the normed latents of ROWS tokens and their rotated keys to the tokens' places in the pages."""
    token = first_token + tl.arange(0, ROWS)
    is_token = token < num_tokens
    slot_step = tl.load(slots_ptr + token, mask=is_token, other=0)[:, None] * page_step
    page_at = pages_ptr + slot_step
    latent_at = latents_ptr + token[:, None] * latent_stride

    columns = tl.arange(0, LATENT_TILE)[None, :]
    is_latent = is_token[:, None] & (columns < LATENT)
    latent = tl.load(latent_at + columns, mask=is_latent, other=0.0)
    norm = tl.load(norm_ptr + columns, mask=columns < LATENT, other=0.0)
    normed = _normed(latent, norm, is_latent, LATENT, eps)
    if page_scales_ptr is None:
        rotary_at = page_at + LATENT
    else:  # steps are in bytes
        SCALED: tl.constexpr = tile_of(LATENT_TILE)
        in_tiles = tl.reshape(normed.to(tl.float32), (ROWS, LATENT_TILE // SCALED, SCALED))
        amax = tl.max(tl.abs(in_tiles), 2)
        is_number = tl.sum((in_tiles != in_tiles).to(tl.int32), 2) == 0
        scales = tl.where(is_number, power_scale_of(amax), float("nan"))
        normed = tl.reshape(to_e4m3(scaled(in_tiles, scales[:, :, None])), (ROWS, LATENT_TILE))
        tiles = tl.arange(0, LATENT_TILE // SCALED)[None, :]
        is_tile = is_token[:, None] & (tiles * SCALED < LATENT)
        tl.store(page_scales_ptr + (slot_step + LATENT) // 4 + tiles, scales, mask=is_tile)
        rotary_at = page_rotary_ptr + (slot_step + rotary_byte(LATENT)) // 2
    tl.store(page_at + columns, normed, mask=is_latent)

    angles = (token * PAIRS)[:, None]
    _rotate(
        latent_at + LATENT, rotary_at, cos_ptr + angles, sin_ptr + angles, is_token[:, None],
        PAIRS, PAIRS_TILE, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def _sum_per_token(
    rows_ptr, inverse_ptr, place_ptr, weights_ptr, total_ptr, width, TOPK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside = columns < width
    total = tl.zeros((TILE,), tl.float32)
    for k in range(TOPK):
        row = tl.load(inverse_ptr + token * TOPK + k)
        if place_ptr is not None:
            row = tl.load(place_ptr + row)
        values = tl.load(rows_ptr + row * width + columns, mask=is_inside, other=0.0).to(tl.float32)
        total += values * tl.load(weights_ptr + token * TOPK + k)
    tl.store(total_ptr + token * width + columns, total, mask=is_inside)


@triton.jit
def _add_sums(hidden_ptr, sums_ptr, added_ptr, out_ptr, count, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_inside = at < count
    total = tl.load(sums_ptr + at, mask=is_inside, other=0.0)
    if added_ptr is not None:
        total += tl.load(added_ptr + at, mask=is_inside, other=0.0).to(tl.float32)
    hidden = tl.load(hidden_ptr + at, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, to_bfloat16(hidden + to_bfloat16(total).to(tl.float32)), mask=is_inside)
