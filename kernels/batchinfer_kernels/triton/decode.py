"""Absorbed latent attention over pages for decode, in Triton: one shared key per token, its latent the value too.

DeepSeek-V2 report section 2.1.2. The keys are those of a whole request, in its pages, or chosen ones, in lists of slots
(DeepSeek-V3.2-Exp report section 2.1): a list of all keys that a query sees gives the same bits as the pages. Keys are
cut every SPLIT_TOKENS keys, counted from the first one; each part gets its own programs and a second kernel adds the
parts up in ascending order. So parts and sums depend on the request alone. Fixed parts leave a GPU partly idle when few
short requests run.
"""

# B requests, Q query tokens per request, H heads, C latent width, R rotary width, W = C + R, P pages

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys
from batchinfer_kernels.triton.fp8_pages import Pages, as_parts, load_keys
from batchinfer_kernels.triton.numbers import dot, load_columns, to_bfloat16

SPLIT_TOKENS = 1024
# Most memory for unfinished sums; requests are worked on in pieces that keep to it.
_MAX_PART_BYTES = 2**30
_TILE_ROWS = 64
_TILE_KEYS = 32
_LOG2_E = 1.4426950408889634


def mla_decode(q_THW: torch.Tensor, keys: PagedKeys, *, latent_dim: int, scale: float) -> torch.Tensor:
    """Attend over paged latents; return zeros for a request without tokens. Softmax weights are rounded to bfloat16."""
    return _attend_paged(q_THW, keys, (keys.pages, None, None), latent_dim, scale)


def mla_decode_fp8(q_THW: torch.Tensor, keys: PagedKeys, *, latent_dim: int, scale: float) -> torch.Tensor:
    """Attend over FP8 pages; the result has the bits of `mla_decode` over the same pages widened to bfloat16."""
    return _attend_paged(q_THW, keys, as_parts(keys.pages), latent_dim, scale)


def _attend_paged(q_THW: torch.Tensor, keys: PagedKeys, pages: Pages, latent_dim: int, scale: float) -> torch.Tensor:
    _, page_table_BP, kv_tokens_B, positions_T, *_ = keys
    num_keys = page_table_BP.shape[1] * PAGE_TOKENS
    key_lists = page_table_BP.contiguous(), kv_tokens_B, positions_T.contiguous(), None
    return _attend(q_THW, pages, key_lists, len(page_table_BP), num_keys, latent_dim, scale)


def mla_sparse(
    q_THW: torch.Tensor, pages: torch.Tensor, slots_TK: torch.Tensor, *, latent_dim: int, scale: float
) -> torch.Tensor:
    """Attend over the keys in these slots; the result has the bits of `mla_decode` over the same keys."""
    key_lists = None, None, None, slots_TK.contiguous()
    return _attend(q_THW, (pages, None, None), key_lists, len(slots_TK), slots_TK.shape[1], latent_dim, scale)


def _attend(
    q_THW: torch.Tensor,
    pages: Pages,
    key_lists: tuple[torch.Tensor | None, ...],
    num_requests: int,
    most_keys: int,
    latent_dim: int,
    scale: float,
) -> torch.Tensor:
    """Attend with each request's queries to its keys: by page table, lengths and positions, or by slots.

    Args:
        pages: in bfloat16, without the other two; in FP8 the same pages as values, as scales and as rotary keys.
    """
    num_rows, num_heads, width = q_THW.shape
    out_THC = torch.empty(num_rows, num_heads, latent_dim, dtype=q_THW.dtype, device=q_THW.device)
    if out_THC.numel() == 0:
        return out_THC
    q_THW = q_THW.contiguous()
    rows_per_request = num_rows // num_requests * num_heads
    num_parts = triton.cdiv(most_keys, SPLIT_TOKENS)
    list_length = most_keys if key_lists[0] is None else key_lists[0].shape[1]
    piece = max(1, _MAX_PART_BYTES // (rows_per_request * num_parts * (latent_dim + 2) * 4))
    piece = min(piece, num_requests)
    sums = torch.empty(piece * rows_per_request, num_parts, latent_dim, dtype=torch.float32, device=q_THW.device)
    peaks, totals = torch.empty(2, piece * rows_per_request, num_parts, dtype=torch.float32, device=q_THW.device)
    tile_rows = min(_TILE_ROWS, max(16, triton.next_power_of_2(rows_per_request)))
    for start in range(0, num_requests, piece):
        count = min(piece, num_requests - start)
        _attend_part[(triton.cdiv(rows_per_request, tile_rows), num_parts, count)](
            q_THW, *pages, *key_lists, sums, peaks, totals,
            start, rows_per_request, num_heads, list_length, num_parts, pages[0].stride(1), scale * _LOG2_E,
            LATENT=latent_dim,
            ROTARY=width - latent_dim,
            LATENT_TILE=max(16, triton.next_power_of_2(latent_dim)),
            ROTARY_TILE=max(16, triton.next_power_of_2(width - latent_dim)),
            ROWS=tile_rows,
            KEYS=_TILE_KEYS,
            PAGE=PAGE_TOKENS,
            SPLIT=SPLIT_TOKENS,
            num_warps=8,
            num_stages=2,
        )  # fmt: skip
        _add_parts[(count * rows_per_request,)](
            sums, peaks, totals, *key_lists[1:], out_THC,
            start, rows_per_request, num_heads, list_length, num_parts,
            LATENT=latent_dim,
            LATENT_TILE=triton.next_power_of_2(latent_dim),
            SPLIT=SPLIT_TOKENS,
        )  # fmt: skip
    return out_THC


@triton.jit
def _num_chosen(slots_ptr, request, list_length):
    """Return the number of keys that a query attends to: those of its list, 0 for an empty list."""
    return tl.where(tl.load(slots_ptr + request * list_length) < 0, 0, list_length).to(tl.int64)


@triton.jit
def _attend_part(
    q_ptr, pages_ptr, page_scales_ptr, page_rotary_ptr, table_ptr, kv_tokens_ptr, positions_ptr, slots_ptr,
    sums_ptr, peaks_ptr, totals_ptr,
    first_request, rows_per_request, num_heads, list_length, num_parts, page_step, scale,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, LATENT_TILE: tl.constexpr, ROTARY_TILE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute the unfinished softmax of some rows of one request over one part of its keys; scores in powers of two."""
    part, local = tl.program_id(1), tl.program_id(2)
    request = (first_request + local).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows_per_request
    row = tl.where(is_row, row, 0)  # rows outside repeat the first one and are not stored
    if slots_ptr is not None:
        positions = tl.zeros((ROWS,), tl.int64) + list_length - 1  # of a list each query sees the whole
        num_seen = _num_chosen(slots_ptr, request, list_length)
    else:
        positions = tl.load(positions_ptr + request * (rows_per_request // num_heads) + row // num_heads)
        num_seen = tl.minimum(tl.load(kv_tokens_ptr + request), tl.max(positions, 0) + 1)
    positions, stop = positions.to(tl.int32), tl.minimum(num_seen, (part + 1) * SPLIT).to(tl.int32)  # int64 spills
    if stop > part * SPLIT:
        width: tl.constexpr = LATENT + ROTARY
        latent, rotary, in_tile = tl.arange(0, LATENT_TILE), tl.arange(0, ROTARY_TILE), tl.arange(0, KEYS)
        is_latent, is_rotary = latent < LATENT, rotary < ROTARY
        q_at = q_ptr + (request * rows_per_request + row)[:, None] * width
        q_latent = load_columns(q_at + latent[None, :], is_latent[None, :], LATENT == LATENT_TILE)
        q_rotary = load_columns(q_at + LATENT + rotary[None, :], is_rotary[None, :], ROTARY == ROTARY_TILE)
        peak = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, LATENT_TILE), tl.float32)
        for start in range(part * SPLIT, stop, KEYS):
            keys = start + in_tile
            # values behind the last key may be anything, even infinite: there that key comes again, unseen
            place = tl.minimum(in_tile, stop - 1 - start)
            if slots_ptr is not None:
                slots = tl.load(slots_ptr + request * list_length + start + place).to(tl.int64)
            else:
                slots = tl.load(table_ptr + request * list_length + start // PAGE).to(tl.int64) * PAGE
                slots = slots + start % PAGE + place
            k_latent, k_rotary = load_keys(
                pages_ptr, page_scales_ptr, page_rotary_ptr, slots, page_step,
                LATENT, ROTARY, LATENT_TILE, ROTARY_TILE, KEYS,
            )  # fmt: skip
            scores = dot(q_latent, tl.trans(k_latent), tl.zeros((ROWS, KEYS), tl.float32))
            scores = dot(q_rotary, tl.trans(k_rotary), scores) * scale
            is_seen = (keys < stop)[None, :] & (keys[None, :] <= positions[:, None])
            scores = tl.where(is_seen, scores, -float("inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            # a row that has seen no key yet has no peak
            base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(peak - base)
            total = total * shrink + tl.sum(weights, 1)
            sums = dot(to_bfloat16(weights), k_latent, sums * shrink[:, None])
            peak = new_peak

        at = (local.to(tl.int64) * rows_per_request + row) * num_parts + part
        tl.store(peaks_ptr + at, peak, mask=is_row)
        tl.store(totals_ptr + at, total, mask=is_row)
        tl.store(sums_ptr + at[:, None] * LATENT + latent[None, :], sums, mask=is_row[:, None] & is_latent[None, :])


@triton.jit
def _add_parts(
    sums_ptr, peaks_ptr, totals_ptr, kv_tokens_ptr, positions_ptr, slots_ptr, out_ptr,
    first_request, rows_per_request, num_heads, list_length, num_parts,
    LATENT: tl.constexpr, LATENT_TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Add up one row's softmax from the parts that hold a key it sees."""
    row = tl.program_id(0).to(tl.int64)
    request = first_request + row // rows_per_request
    if slots_ptr is not None:
        seen = _num_chosen(slots_ptr, request, list_length)
    else:
        query = request * (rows_per_request // num_heads) + row % rows_per_request // num_heads
        seen = tl.minimum(tl.load(kv_tokens_ptr + request), tl.load(positions_ptr + query) + 1)
    latent = tl.arange(0, LATENT_TILE)
    is_latent = latent < LATENT
    peak = -float("inf")
    total = 0.0
    sums = tl.zeros((LATENT_TILE,), tl.float32)
    for part in range(tl.cdiv(seen, SPLIT)):
        at = row * num_parts + part
        part_peak = tl.load(peaks_ptr + at)
        new_peak = tl.maximum(peak, part_peak)
        shrink, weight = tl.exp2(peak - new_peak), tl.exp2(part_peak - new_peak)
        total = total * shrink + tl.load(totals_ptr + at) * weight
        part_sums = tl.load(sums_ptr + at * LATENT + latent, mask=is_latent, other=0.0)
        sums = sums * shrink + part_sums * weight
        peak = new_peak
    out = sums / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + (first_request * rows_per_request + row) * LATENT + latent, to_bfloat16(out), mask=is_latent)
