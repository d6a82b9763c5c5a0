"""Causal latent attention over pages for prefill, in Triton: keys and values per head, softmax tile by tile.

DeepSeek-V2 report section 2.1; the running softmax is that of FlashAttention (arXiv 2205.14135). Keys and values are
made from the latents by one product for as many heads at a time as fit, and for a few requests at a time: where many
share a long prefix, memory does not grow with their number. Keys come in tiles of a page from the first one on, and a
tile that a row does not see changes none of its bits: where a prompt was cut does not matter. A tile is masked only if
some row of the program does not see all of it. The keys' rotary values, the same for all heads, are gathered before:
so the loop reads known addresses, and two tiles are loading while one is worked on.
"""

# T tokens, H heads, N query/key width without position, R rotary width, A = N + R, V value width, Z = N + V
# C latent width, W = C + R, B requests, P pages, X keys (whole pages of all requests)

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys
from batchinfer_kernels.transfer import in_one_copy
from batchinfer_kernels.triton.fp8_pages import widen_rows
from batchinfer_kernels.triton.gemm import product
from batchinfer_kernels.triton.numbers import dot, load_columns, to_bfloat16

_MAX_KEY_BYTES = 2**30  # keys and values at a time
_MAX_KEYS = 2**18  # of several requests at a time: where many share a long prefix, each has all of it
_TILE_ROWS = 128
_LOG2_E = 1.4426950408889634
SCHEDULE = "triton prefill"  # its entry in a step's schedule


@dataclass(frozen=True, slots=True)
class _Work:
    """The cuts of the attention of some of a step's requests, the same in all layers."""

    slots_X: torch.Tensor  # int64, of the tokens of these requests' pages, one page behind the other
    tiles: torch.Tensor  # [tiles, 4] int64: first row, behind the request's last row, place of its first page, context


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
    rows_W, latent_dim = keys.pages.view(-1, keys.pages.shape[-1]), kv_b_HZC.shape[-1]

    def keys_of(work: _Work) -> _Keys:
        rotary_XR = rows_W[:, latent_dim:].index_select(0, work.slots_X)
        return _Keys(rows_W[:, :latent_dim], work.slots_X, rotary_XR)

    return _prefill(q_THA, keys, keys_of, kv_b_HZC, num_tokens_B, v_dim, scale)


def mla_prefill_fp8(
    q_THA: torch.Tensor,
    keys: PagedKeys,
    kv_b_HZC: torch.Tensor,
    num_tokens_B: torch.Tensor,
    *,
    v_dim: int,
    scale: float,
) -> torch.Tensor:
    """Compute mla_prefill over FP8 pages: a kernel of its own widens the rows of the step's requests first.

    The result has the bits of mla_prefill over the widened rows. All heads and many queries read each row, so widening
    costs little beside the product that makes keys and values from it.
    """
    latent_dim = kv_b_HZC.shape[-1]

    def keys_of(work: _Work) -> _Keys:
        wide_XW = widen_rows(keys.pages, work.slots_X, latent_dim)
        return _Keys(wide_XW[:, :latent_dim], None, wide_XW[:, latent_dim:].contiguous())

    return _prefill(q_THA, keys, keys_of, kv_b_HZC, num_tokens_B, v_dim, scale)


def _prefill(
    q_THA: torch.Tensor,
    keys: PagedKeys,
    keys_of: Callable[[_Work], _Keys],
    kv_b_HZC: torch.Tensor,
    num_tokens_B: torch.Tensor,
    v_dim: int,
    scale: float,
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
        schedule[SCHEDULE] = num_tokens_B, _cut(keys.page_table_BP, num_tokens_B, keys.kv_tokens_B, q_THA.device)
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
            _attend(q_THA, kv_XHZ, rotary_XR, work.tiles, keys.positions_T, out_THV, first, scale)
    return out_THV


def _cut(
    page_table_BP: torch.Tensor, num_tokens_B: torch.Tensor, context_tokens_B: torch.Tensor, device: torch.device
) -> list[_Work]:
    """Cut the work of all requests into batches of a few, on the host, which knows the lengths."""
    pieces: list[tuple[list[int], list[tuple[int, ...]]]] = []
    start = 0
    for request, (num_tokens, context) in enumerate(zip(num_tokens_B.tolist(), context_tokens_B.tolist(), strict=True)):
        num_pages = triton.cdiv(context, PAGE_TOKENS)
        stop = start + num_tokens
        if num_tokens:
            if not pieces or (len(pieces[-1][0]) + num_pages) * PAGE_TOKENS > _MAX_KEYS:
                pieces.append(([], []))
            places, tiles = pieces[-1]
            tiles += [(row, stop, len(places), context) for row in range(start, stop, _TILE_ROWS)]
            places += [request * page_table_BP.shape[1] + page for page in range(num_pages)]
        start = stop
    for _, tiles in pieces:  # the ones with most keys first, so that no long one starts late
        tiles.sort(key=lambda tile: min(tile[0] + _TILE_ROWS, tile[1]) - tile[1] + tile[3], reverse=True)
    on_host = [torch.tensor(values, dtype=torch.int64) for piece in pieces for values in piece]
    on_device = in_one_copy(on_host, device)
    works = []
    for places_X, tiles_N4 in zip(on_device[::2], on_device[1::2], strict=True):
        page_ids = page_table_BP.flatten().index_select(0, places_X)
        slots_X = (page_ids[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=device)).flatten()
        works.append(_Work(slots_X, tiles_N4))
    return works


def _attend(
    q_THA: torch.Tensor,
    kv_XHZ: torch.Tensor,
    rotary_XR: torch.Tensor,
    tiles: torch.Tensor,
    positions_T: torch.Tensor,
    out_THV: torch.Tensor,
    first_head: int,
    scale: float,
) -> None:
    """Attend with heads [first_head, first_head + heads of kv_XHZ) and write to their part of `out_THV`."""
    (_, num_heads, q_dim), v_dim, rotary = q_THA.shape, out_THV.shape[-1], rotary_XR.shape[-1]
    nope = q_dim - rotary
    _attend_tile[(len(tiles), kv_XHZ.shape[1])](
        q_THA,
        kv_XHZ,
        rotary_XR,
        tiles,
        positions_T,
        out_THV,
        first_head,
        num_heads,
        kv_XHZ.shape[1],
        scale * _LOG2_E,
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
def _attend_tile(
    q_ptr, kv_ptr, rotary_ptr, tiles_ptr, positions_ptr, out_ptr,
    first_head, num_heads, heads_at_once, scale,
    NOPE: tl.constexpr, ROTARY: tl.constexpr, VALUE: tl.constexpr,
    NOPE_TILE: tl.constexpr, ROTARY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
    ROWS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Attend with one head of ROWS queries of one request to all keys that they see; scores in powers of two."""
    tile_at = tiles_ptr + tl.program_id(0) * 4
    start, end = tl.load(tile_at).to(tl.int32), tl.load(tile_at + 1).to(tl.int32)
    first_row, context = tl.load(tile_at + 2).to(tl.int32) * PAGE, tl.load(tile_at + 3).to(tl.int32)
    head = tl.program_id(1)
    row = start + tl.arange(0, ROWS)
    is_row = row < end
    row = tl.where(is_row, row, start).to(tl.int64)  # rows outside repeat the first one and are not stored
    positions = tl.load(positions_ptr + row).to(tl.int32)
    stop = tl.minimum(tl.max(positions, 0) + 1, context)

    width: tl.constexpr = NOPE + ROTARY
    nope, rotary, value = tl.arange(0, NOPE_TILE), tl.arange(0, ROTARY_TILE), tl.arange(0, VALUE_TILE)
    is_nope, is_rotary, is_value = (nope < NOPE)[None, :], (rotary < ROTARY)[None, :], (value < VALUE)[None, :]
    q_at = q_ptr + (row * num_heads + first_head + head)[:, None] * width
    q_nope = load_columns(q_at + nope[None, :], is_nope, NOPE == NOPE_TILE)
    q_rotary = load_columns(q_at + NOPE + rotary[None, :], is_rotary, ROTARY == ROTARY_TILE)

    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, VALUE_TILE), tl.float32)
    # pages that all rows see whole need no mask; on the diagonal and at the end of the context keys are hidden
    num_seen = tl.minimum(tl.min(positions, 0) + 1, context)
    first_masked = num_seen // PAGE * PAGE
    for first_key in range(0, first_masked, PAGE):
        peak, total, sums = _attend_page(
            kv_ptr, rotary_ptr, q_nope, q_rotary, positions, peak, total, sums,
            first_key, first_row, context, head, heads_at_once, scale,
            NOPE, ROTARY, VALUE, NOPE_TILE, ROTARY_TILE, VALUE_TILE, ROWS, PAGE, False,
        )  # fmt: skip
    for first_key in range(first_masked, stop, PAGE):
        peak, total, sums = _attend_page(
            kv_ptr, rotary_ptr, q_nope, q_rotary, positions, peak, total, sums,
            first_key, first_row, context, head, heads_at_once, scale,
            NOPE, ROTARY, VALUE, NOPE_TILE, ROTARY_TILE, VALUE_TILE, ROWS, PAGE, True,
        )  # fmt: skip

    out_at = out_ptr + (row * num_heads + first_head + head)[:, None] * VALUE + value[None, :]
    tl.store(out_at, to_bfloat16(sums / total[:, None]), mask=is_row[:, None] & is_value)


@triton.jit
def _attend_page(
    kv_ptr, rotary_ptr, q_nope, q_rotary, positions, peak, total, sums,
    first_key, first_row, context, head, heads_at_once, scale,
    NOPE: tl.constexpr, ROTARY: tl.constexpr, VALUE: tl.constexpr,
    NOPE_TILE: tl.constexpr, ROTARY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
    ROWS: tl.constexpr, PAGE: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Extend the running softmax by one page; a row that sees all of it has the same bits with and without the mask.

    Positions in memory are 64 bits wide up to the page, 32 within it.
    """
    nope, rotary, value = tl.arange(0, NOPE_TILE), tl.arange(0, ROTARY_TILE), tl.arange(0, VALUE_TILE)
    is_nope, is_rotary, is_value = (nope < NOPE)[None, :], (rotary < ROTARY)[None, :], (value < VALUE)[None, :]
    page_row = (first_row + first_key).to(tl.int64)
    in_page = tl.arange(0, PAGE)
    token = in_page
    if IS_MASKED:
        # values behind the last token may be anything, even infinite: there that token comes again, unseen
        token = tl.minimum(in_page, context - 1 - first_key)
    kv_at = kv_ptr + (page_row * heads_at_once + head) * (NOPE + VALUE)
    rotary_at = rotary_ptr + page_row * ROTARY + token[:, None] * ROTARY + rotary[None, :]
    key_at = kv_at + token[:, None] * (heads_at_once * (NOPE + VALUE))
    k_nope = load_columns(key_at + nope[None, :], is_nope, NOPE == NOPE_TILE)
    k_rotary = load_columns(rotary_at, is_rotary, ROTARY == ROTARY_TILE)
    v = load_columns(key_at + NOPE + value[None, :], is_value, VALUE == VALUE_TILE)
    scores = dot(q_nope, tl.trans(k_nope), tl.zeros((ROWS, PAGE), tl.float32))
    scores = dot(q_rotary, tl.trans(k_rotary), scores)
    if IS_MASKED:
        keys = first_key + in_page
        is_seen = (keys < context)[None, :] & (keys[None, :] <= positions[:, None])
        scores = tl.where(is_seen, scores, -float("inf"))
    # A number from the first page on: every row sees key 0. Scaled once per row; where no key is higher, sums do not
    # shrink at all.
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -new_peak[:, None]))
    shrink = tl.exp2(peak - new_peak)
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    return new_peak, total, dot(to_bfloat16(weights), v, sums * shrink[:, None])
