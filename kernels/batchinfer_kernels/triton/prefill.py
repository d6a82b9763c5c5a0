"""Causal latent attention over pages for prefill, in Triton: keys and values per head, softmax tile by tile.

DeepSeek-V2 report section 2.1; the running softmax is that of FlashAttention (arXiv 2205.14135). Keys and values are
made from the latents by one product for as many heads at a time as fit, and for a few requests at a time. Where many
share a long prefix, its keys are made once, and short requests share a program (prefill_cut.py). Keys come in tiles of
a page from the first one on, and a tile that a row does not see changes none of its bits: where a prompt was cut, and
what is shared, does not matter. A tile is masked only if some row of the program does not see all of it. The keys'
rotary values, the same for all heads, are gathered before: so the loop reads known addresses, and two tiles are loading
while one is worked on.
"""

# T tokens, H heads, N query/key width without position, R rotary width, A = N + R, V value width, Z = N + V
# C latent width, W = C + R, B requests, P pages, X keys (whole pages of all requests)

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys
from batchinfer_kernels.triton.fp8_pages import widen_rows
from batchinfer_kernels.triton.gemm import product
from batchinfer_kernels.triton.numbers import dot, load_columns, to_bfloat16
from batchinfer_kernels.triton.prefill_cut import Work, cut

_MAX_KEY_BYTES = 2**30  # keys and values at a time
_MAX_KEYS = 2**18  # of several requests at a time: where many share a long prefix, each has all of it
_TILE_ROWS = 128
LOG2_E = 1.4426950408889634
SCHEDULE = "triton prefill"  # its entry in a step's schedule


class _Keys(NamedTuple):
    """Rows of latents, the rows of them that are keys (None: all), and the keys' rotary values [X, R]."""

    latents: torch.Tensor
    rows_X: torch.Tensor | None
    rotary_XR: torch.Tensor


def mla_prefill(
    q_THA: torch.Tensor,
    keys: PagedKeys,
    kv_b_HZC: torch.Tensor,
    num_tokens_B: torch.Tensor,
    *,
    v_dim: int,
    scale: float,
) -> torch.Tensor:
    """Round softmax weights to bfloat16 before they meet the values.

    The chunks are cut into tiles once per `schedule`, which belongs to one step (and micro-batch).
    """
    return attend_with(_attend, PAGE_TOKENS, q_THA, keys, kv_b_HZC, num_tokens_B, v_dim, scale)


def attend_with(
    attend: Callable[..., None],
    tile_keys: int,
    q_THA: torch.Tensor,
    keys: PagedKeys,
    kv_b_HZC: torch.Tensor,
    num_tokens_B: torch.Tensor,
    v_dim: int,
    scale: float,
) -> torch.Tensor:
    """Compute mla_prefill with a kernel of the signature of `_attend` that takes keys in tiles of `tile_keys`."""
    rows_W, latent_dim = keys.pages.view(-1, keys.pages.shape[-1]), kv_b_HZC.shape[-1]

    def keys_of(work: Work) -> _Keys:
        rotary_XR = rows_W[:, latent_dim:].index_select(0, work.slots_X)
        return _Keys(rows_W[:, :latent_dim], work.slots_X, rotary_XR)

    return _prefill(q_THA, keys, keys_of, kv_b_HZC, num_tokens_B, v_dim, scale, attend, tile_keys)


def mla_prefill_fp8(
    q_THA: torch.Tensor,
    keys: PagedKeys,
    kv_b_HZC: torch.Tensor,
    num_tokens_B: torch.Tensor,
    *,
    v_dim: int,
    scale: float,
) -> torch.Tensor:
    """Compute mla_prefill over FP8 pages: a separate kernel first widens the rows of the step's requests.

    The result has the bits of mla_prefill over the widened rows. All heads and many queries read each row, so widening
    costs little compared with the product that makes keys and values from it.
    """
    latent_dim = kv_b_HZC.shape[-1]

    def keys_of(work: Work) -> _Keys:
        wide_XW = widen_rows(keys.pages, work.slots_X, latent_dim)
        return _Keys(wide_XW[:, :latent_dim], None, wide_XW[:, latent_dim:].contiguous())

    return _prefill(q_THA, keys, keys_of, kv_b_HZC, num_tokens_B, v_dim, scale, _attend, PAGE_TOKENS)


def _prefill(
    q_THA: torch.Tensor,
    keys: PagedKeys,
    keys_of: Callable[[Work], _Keys],
    kv_b_HZC: torch.Tensor,
    num_tokens_B: torch.Tensor,
    v_dim: int,
    scale: float,
    attend: Callable[..., None],
    tile_keys: int,
) -> torch.Tensor:
    """Attend for a few requests at a time, and of these a few heads, so that memory is bounded."""
    num_tokens, num_heads, _ = q_THA.shape
    out_THV = torch.empty(num_tokens, num_heads, v_dim, dtype=q_THA.dtype, device=q_THA.device)
    if out_THV.numel() == 0:
        return out_THV
    assert scale > 0, "the largest score is looked for before scores are scaled"
    q_THA, kv_b_HZC = q_THA.contiguous(), kv_b_HZC.contiguous()
    schedule = {} if keys.schedule is None else keys.schedule
    if SCHEDULE not in schedule:
        works = cut(
            keys.page_table_BP,
            num_tokens_B,
            keys.kv_tokens_B,
            keys.shared_pages_B,
            tile_rows=_TILE_ROWS,
            tile_keys=tile_keys,
            max_keys=_MAX_KEYS,
        )
        schedule[SCHEDULE] = num_tokens_B, works
    source, works = schedule[SCHEDULE]
    assert source is num_tokens_B, "a schedule serves one step: another one has other chunks"
    z_dim = kv_b_HZC.shape[1]
    for work in works:
        latents, rows, rotary_XR = keys_of(work)
        heads_at_once = max(1, _MAX_KEY_BYTES // (len(rotary_XR) * z_dim * 2))
        for first in range(0, num_heads, heads_at_once):
            kv_b = kv_b_HZC[first : first + heads_at_once]
            kv_XHZ = torch.empty(len(rotary_XR), len(kv_b), z_dim, dtype=q_THA.dtype, device=q_THA.device)
            product(latents, kv_b.flatten(0, 1), out=kv_XHZ.flatten(1), rows=rows)
            attend(q_THA, kv_XHZ, rotary_XR, work, keys.positions_T, out_THV, first, scale)
    return out_THV


def _attend(
    q_THA: torch.Tensor,
    kv_XHZ: torch.Tensor,
    rotary_XR: torch.Tensor,
    work: Work,
    positions_T: torch.Tensor,
    out_THV: torch.Tensor,
    first_head: int,
    scale: float,
) -> None:
    """Attend with heads [first_head, first_head + heads of kv_XHZ) and write to their part of `out_THV`."""
    (_, num_heads, q_dim), v_dim, rotary = q_THA.shape, out_THV.shape[-1], rotary_XR.shape[-1]
    nope = q_dim - rotary
    _attend_tile[(len(work.tiles_N5), kv_XHZ.shape[1])](
        q_THA,
        kv_XHZ,
        rotary_XR,
        work.tiles_N5,
        work.own_key_T,
        positions_T,
        out_THV,
        first_head,
        num_heads,
        kv_XHZ.shape[1],
        scale * LOG2_E,
        NOPE=nope,
        ROTARY=rotary,
        VALUE=v_dim,
        NOPE_TILE=max(16, triton.next_power_of_2(nope)),
        ROTARY_TILE=max(16, triton.next_power_of_2(rotary)),
        VALUE_TILE=max(16, triton.next_power_of_2(v_dim)),
        ROWS=_TILE_ROWS,
        PAGE=PAGE_TOKENS,
        num_warps=8,
        num_stages=3,
    )


@triton.jit
def rows_of_tile(tiles_ptr, own_key_ptr, positions_ptr, ROWS: tl.constexpr):
    """Return a program's rows and the keys that they see; key k of a program is numbered across prefix and own keys.

    Returns:
        row, is_row: [ROWS]; rows outside repeat the first one and are not stored.
        low, high: [ROWS], the first and last own key that a row sees; it sees all keys of the prefix.
        prefix: number of keys of the prefix, which the first `unmasked` keys, seen by all rows, contain.
        stop: behind the last key that a row sees.
        prefix_key, own_key: what to add to k for its made key, in the prefix and behind it.
    """
    tile_at = tiles_ptr + tl.program_id(0) * 5
    start, end = tl.load(tile_at).to(tl.int32), tl.load(tile_at + 1).to(tl.int32)
    prefix_key, prefix = tl.load(tile_at + 2).to(tl.int32), tl.load(tile_at + 3).to(tl.int32)
    own_key = tl.load(tile_at + 4).to(tl.int32) - prefix
    row = start + tl.arange(0, ROWS)
    is_row = row < end
    row = tl.where(is_row, row, start).to(tl.int64)
    low = tl.load(own_key_ptr + row).to(tl.int32) - own_key
    high = low - prefix + tl.load(positions_ptr + row).to(tl.int32)
    return row, is_row, low, high, prefix, tl.max(high, 0) + 1, prefix_key, own_key


@triton.jit
def num_unmasked(low, high, prefix, KEYS: tl.constexpr):
    """Return the number of first keys, in whole tiles, that all rows see; own keys only of a single request."""
    return tl.where(tl.max(low, 0) == prefix, (tl.min(high, 0) + 1) // KEYS * KEYS, prefix)


@triton.jit
def _attend_tile(
    q_ptr, kv_ptr, rotary_ptr, tiles_ptr, own_key_ptr, positions_ptr, out_ptr,
    first_head, num_heads, heads_at_once, scale,
    NOPE: tl.constexpr, ROTARY: tl.constexpr, VALUE: tl.constexpr,
    NOPE_TILE: tl.constexpr, ROTARY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
    ROWS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Attend with one head of ROWS queries of a run to all keys that they see; scores in powers of two."""
    row, is_row, low, high, prefix, stop, prefix_key, own_key = rows_of_tile(
        tiles_ptr, own_key_ptr, positions_ptr, ROWS
    )
    first_masked = num_unmasked(low, high, prefix, PAGE)
    head = tl.program_id(1)

    width: tl.constexpr = NOPE + ROTARY
    nope, rotary, value = tl.arange(0, NOPE_TILE), tl.arange(0, ROTARY_TILE), tl.arange(0, VALUE_TILE)
    is_nope, is_rotary, is_value = (nope < NOPE)[None, :], (rotary < ROTARY)[None, :], (value < VALUE)[None, :]
    q_at = q_ptr + (row * num_heads + first_head + head)[:, None] * width
    q_nope = load_columns(q_at + nope[None, :], is_nope, NOPE == NOPE_TILE)
    q_rotary = load_columns(q_at + NOPE + rotary[None, :], is_rotary, ROTARY == ROTARY_TILE)

    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, VALUE_TILE), tl.float32)
    for first_key in range(0, first_masked, PAGE):
        peak, total, sums = _attend_page(
            kv_ptr, rotary_ptr, q_nope, q_rotary, low, high, peak, total, sums,
            first_key, first_key + tl.where(first_key < prefix, prefix_key, own_key), head, heads_at_once, scale,
            NOPE, ROTARY, VALUE, NOPE_TILE, ROTARY_TILE, VALUE_TILE, ROWS, PAGE, False,
        )  # fmt: skip
    for first_key in range(first_masked, stop, PAGE):
        peak, total, sums = _attend_page(
            kv_ptr, rotary_ptr, q_nope, q_rotary, low, high, peak, total, sums,
            first_key, first_key + own_key, head, heads_at_once, scale,
            NOPE, ROTARY, VALUE, NOPE_TILE, ROTARY_TILE, VALUE_TILE, ROWS, PAGE, True,
        )  # fmt: skip

    out_at = out_ptr + (row * num_heads + first_head + head)[:, None] * VALUE + value[None, :]
    tl.store(out_at, to_bfloat16(sums / total[:, None]), mask=is_row[:, None] & is_value)


@triton.jit
def hide(scores, first_key, low, high, KEYS: tl.constexpr):
    """Return the scores of own keys from `first_key` on, minus infinity where a row does not see the key."""
    keys = (first_key + tl.arange(0, KEYS))[None, :]
    return tl.where((keys >= low[:, None]) & (keys <= high[:, None]), scores, -float("inf"))


@triton.jit
def weigh(scores, peak, total, scale, IS_MASKED: tl.constexpr):
    """Extend the running softmax by a tile of scores.

    Scaled once per row; where no score is higher, sums do not shrink. A row that has seen no key yet has no peak.

    Returns:
        the new peak and total, the tile's weights in float32, the factor on the sums so far.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    base = new_peak
    if IS_MASKED:
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    weights = tl.exp2(tl.fma(scores, scale, -base[:, None]))
    shrink = tl.exp2(peak - base)
    return new_peak, tl.fma(total, shrink, tl.sum(weights, 1)), weights, shrink


@triton.jit
def _attend_page(
    kv_ptr, rotary_ptr, q_nope, q_rotary, low, high, peak, total, sums,
    first_key, made_key, head, heads_at_once, scale,
    NOPE: tl.constexpr, ROTARY: tl.constexpr, VALUE: tl.constexpr,
    NOPE_TILE: tl.constexpr, ROTARY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
    ROWS: tl.constexpr, PAGE: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Extend the running softmax by one page; a row that sees all of it has the same bits with and without the mask.

    Positions in memory are 64 bits wide up to the page, 32 within it.
    """
    nope, rotary, value = tl.arange(0, NOPE_TILE), tl.arange(0, ROTARY_TILE), tl.arange(0, VALUE_TILE)
    is_nope, is_rotary, is_value = (nope < NOPE)[None, :], (rotary < ROTARY)[None, :], (value < VALUE)[None, :]
    page_row = made_key.to(tl.int64)
    token = tl.arange(0, PAGE)
    kv_at = kv_ptr + (page_row * heads_at_once + head) * (NOPE + VALUE)
    rotary_at = rotary_ptr + page_row * ROTARY + token[:, None] * ROTARY + rotary[None, :]
    key_at = kv_at + token[:, None] * (heads_at_once * (NOPE + VALUE))
    k_nope = load_columns(key_at + nope[None, :], is_nope, NOPE == NOPE_TILE)
    k_rotary = load_columns(rotary_at, is_rotary, ROTARY == ROTARY_TILE)
    v = load_columns(key_at + NOPE + value[None, :], is_value, VALUE == VALUE_TILE)
    scores = dot(q_nope, tl.trans(k_nope), tl.zeros((ROWS, PAGE), tl.float32))
    scores = dot(q_rotary, tl.trans(k_rotary), scores)
    if IS_MASKED:
        scores = hide(scores, first_key, low, high, PAGE)
    peak, total, weights, shrink = weigh(scores, peak, total, scale, IS_MASKED)
    return peak, total, dot(to_bfloat16(weights), v, sums * shrink[:, None])
