"""Grouped-query attention over pages in Triton: norms and positions of heads, prefill and decode.

The query heads of a key head are rows of one product, at one token after the other; the running softmax is that of
FlashAttention (arXiv 2205.14135). Keys come page by page from the first one on that some row of a program sees, and a
page that a row does not see changes none of its bits. Decode is cut every SPLIT_TOKENS keys, counted from the first
one, and a second kernel adds the parts up in ascending order. So a row depends on its own tokens alone.
"""

# T tokens, H query heads, KV key heads, G = H / KV query heads per key head, A head width, R rotary width
# B requests, Q query tokens per request, P pages

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference import fp8_pages
from batchinfer_kernels.reference.gqa import GqaForm, NewHeads, held_width, new_width
from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys
from batchinfer_kernels.transfer import in_one_copy
from batchinfer_kernels.triton.layout import dense
from batchinfer_kernels.triton.numbers import dot, load_columns, to_bfloat16
from batchinfer_kernels.triton.rows import rms_norm, weighted

SPLIT_TOKENS = 1024
SCHEDULE = "triton gqa prefill"  # its entry in a step's schedule
_MAX_PART_BYTES = 2**30  # for unfinished sums; requests are worked on in pieces that keep to it
_PREFILL_ROWS, _DECODE_ROWS = 128, 64
_TILE_HEADS = 16
_LOG2_E = 1.4426950408889634


def gqa_rope_and_cache(qkv_TW: torch.Tensor, new: NewHeads) -> torch.Tensor:
    """Norm, rotate and write in one kernel; norms of whole rows come before."""
    num_heads, num_kv_heads, norm_q, norm_k, eps, cos, sin, pages, slots_T = new
    qkv_TW = dense(qkv_TW)
    num_tokens, num_all = len(qkv_TW), num_heads + 2 * num_kv_heads
    head_dim, rotary = qkv_TW.shape[-1] // num_all, 2 * cos.shape[-1]
    sections = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    norms = [norm_q, norm_k]
    for place, norm in enumerate(norms):
        if norm is not None and len(norm) != head_dim:
            parts = list(qkv_TW.split(sections, dim=-1))
            parts[place] = rms_norm(parts[place], norm, eps)
            qkv_TW, norms[place] = torch.cat(parts, dim=-1), None
    q_THA = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv_TW.dtype, device=qkv_TW.device)
    if num_tokens:
        _place_heads[(num_tokens, triton.cdiv(num_all, _TILE_HEADS))](
            qkv_TW, *norms, cos.contiguous(), sin.contiguous(), q_THA, pages, slots_T,
            eps, num_heads, num_kv_heads, qkv_TW.stride(0), pages.stride(1),
            HEAD=head_dim,
            PAIRS=rotary // 2,
            PAIRS_TILE=triton.next_power_of_2(max(1, rotary // 2)),
            REST_TILE=triton.next_power_of_2(max(1, head_dim - rotary)),
            HEADS=_TILE_HEADS,
        )  # fmt: skip
    return q_THA


def gqa_prefill(q_THA: torch.Tensor, keys: PagedKeys, num_tokens_B: torch.Tensor, form: GqaForm) -> torch.Tensor:
    """Round softmax weights to bfloat16 before they meet the values.

    The chunks are cut into tiles once per `schedule`, which belongs to one step (and micro-batch).
    """
    num_heads, head_dim = q_THA.shape[1:]
    out_THA = torch.empty(q_THA.shape, dtype=q_THA.dtype, device=q_THA.device)
    if out_THA.numel() == 0:
        return out_THA
    group = num_heads // form.num_kv_heads
    schedule = {} if keys.schedule is None else keys.schedule
    if SCHEDULE not in schedule:
        schedule[SCHEDULE] = num_tokens_B, _cut(num_tokens_B, keys.kv_tokens_B, group, q_THA.device)
    source, tiles_N5 = schedule[SCHEDULE]
    assert source is num_tokens_B, "a schedule serves one step: another one has other chunks"
    page_table_BP = keys.page_table_BP.contiguous()
    _prefill_tile[(len(tiles_N5), form.num_kv_heads)](
        q_THA.contiguous(), keys.pages, page_table_BP, tiles_N5, keys.positions_T, form.sinks_H, out_THA,
        num_heads, group, form.num_kv_heads, page_table_BP.shape[1], keys.pages.stride(1), form.window_or_0,
        form.scale * _LOG2_E, _LOG2_E,
        HEAD=head_dim,
        HEAD_TILE=max(16, triton.next_power_of_2(head_dim)),
        ROWS=_PREFILL_ROWS,
        PAGE=PAGE_TOKENS,
        num_warps=8,
        num_stages=2,
    )  # fmt: skip
    return out_THA


def _cut(num_tokens_B: torch.Tensor, context_tokens_B: torch.Tensor, group: int, device: torch.device) -> torch.Tensor:
    """Cut chunks into tiles on the host: [tiles, 5] of first token, request, first row, rows, context."""
    tiles, start = [], 0
    for request, (num_tokens, context) in enumerate(zip(num_tokens_B.tolist(), context_tokens_B.tolist(), strict=True)):
        for row in range(0, num_tokens * group, _PREFILL_ROWS):
            rows = min(_PREFILL_ROWS, num_tokens * group - row)
            tiles.append((start, request, row, rows, context, context - num_tokens + (row + rows - 1) // group))
        start += num_tokens
    tiles.sort(key=lambda tile: tile[-1], reverse=True)  # those with most keys first, so that no long one starts late
    (tiles_N,) = in_one_copy([torch.tensor([tile[:-1] for tile in tiles], dtype=torch.int64).flatten()], device)
    return tiles_N.view(-1, 5)


def gqa_decode(q_THA: torch.Tensor, keys: PagedKeys, form: GqaForm) -> torch.Tensor:
    """Give zeros for a request without tokens; round softmax weights to bfloat16 before they meet the values."""
    pages, page_table_BP, kv_tokens_B, positions_T, *_ = keys
    num_rows, num_heads, head_dim = q_THA.shape
    out_THA = torch.empty(q_THA.shape, dtype=q_THA.dtype, device=q_THA.device)
    if out_THA.numel() == 0:
        return out_THA
    q_THA, page_table_BP, positions_T = q_THA.contiguous(), page_table_BP.contiguous(), positions_T.contiguous()
    num_requests, num_pages = page_table_BP.shape
    num_queries, group = num_rows // num_requests, num_heads // form.num_kv_heads
    num_parts = triton.cdiv(num_pages * PAGE_TOKENS, SPLIT_TOKENS)
    rows_each = num_queries * num_heads
    piece = min(num_requests, max(1, _MAX_PART_BYTES // (rows_each * num_parts * (head_dim + 2) * 4)))
    sums = torch.empty(piece * rows_each, num_parts, head_dim, dtype=torch.float32, device=q_THA.device)
    peaks, totals = torch.empty(2, piece * rows_each, num_parts, dtype=torch.float32, device=q_THA.device)
    tile_rows = min(_DECODE_ROWS, max(16, triton.next_power_of_2(num_queries * group)))
    row_tiles = triton.cdiv(num_queries * group, tile_rows)
    for start in range(0, num_requests, piece):
        count = min(piece, num_requests - start)
        _decode_part[(row_tiles * form.num_kv_heads, num_parts, count)](
            q_THA, pages, page_table_BP, kv_tokens_B, positions_T, sums, peaks, totals,
            start, num_queries, num_heads, group, form.num_kv_heads, num_pages, num_parts, pages.stride(1),
            form.window_or_0, form.scale * _LOG2_E,
            HEAD=head_dim,
            HEAD_TILE=max(16, triton.next_power_of_2(head_dim)),
            ROWS=tile_rows,
            PAGE=PAGE_TOKENS,
            SPLIT=SPLIT_TOKENS,
            num_warps=4,
            num_stages=2,
        )  # fmt: skip
        _add_parts[(count * rows_each,)](
            sums, peaks, totals, kv_tokens_B, positions_T, form.sinks_H, out_THA,
            start, num_queries, num_heads, num_parts, form.window_or_0, _LOG2_E,
            HEAD=head_dim,
            HEAD_TILE=triton.next_power_of_2(head_dim),
            SPLIT=SPLIT_TOKENS,
        )  # fmt: skip
    return out_THA


def gqa_rope_and_cache_fp8(qkv_TW: torch.Tensor, new: NewHeads) -> torch.Tensor:
    return fp8_pages.cache_via_bfloat16(gqa_rope_and_cache, qkv_TW, new, new_width(qkv_TW, new), 0)


def gqa_prefill_fp8(q_THA: torch.Tensor, keys: PagedKeys, num_tokens_B: torch.Tensor, form: GqaForm) -> torch.Tensor:
    """Widen the step's pages in PyTorch first."""
    return gqa_prefill(q_THA, fp8_pages.widen_pages(keys, held_width(q_THA, form)), num_tokens_B, form)


def gqa_decode_fp8(q_THA: torch.Tensor, keys: PagedKeys, form: GqaForm) -> torch.Tensor:
    """Widen the step's pages in PyTorch first, of some requests at a time."""
    return fp8_pages.decode_via_bfloat16(gqa_decode, q_THA, keys, held_width(q_THA, form), form)


@triton.jit
def _normed_part(x, factor, norm_at, columns, is_column, is_normed):
    """Return a part of each head times its factor and the norm's weights, rounded; unchanged without a norm."""
    normed = weighted(x * factor, tl.load(norm_at + columns, mask=is_column, other=0.0)).to(tl.float32)
    return tl.where(is_normed, normed, x)


@triton.jit
def _normed_heads(first, second, rest, norm_ptr, eps, is_normed, pairs, others, is_pair, is_other, HEAD, PAIRS):
    """Norm the heads of these rows, each in three parts: the two halves that are rotated, and the rest."""
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
    factor = (1.0 / tl.sqrt_rn(squares / HEAD + eps))[:, None]
    return (
        _normed_part(first, factor, norm_ptr, pairs, is_pair, is_normed),
        _normed_part(second, factor, norm_ptr + PAIRS, pairs, is_pair, is_normed),
        _normed_part(rest, factor, norm_ptr + 2 * PAIRS, others, is_other, is_normed),
    )


@triton.jit
def _place_heads(
    x_ptr, norm_q_ptr, norm_k_ptr, cos_ptr, sin_ptr, q_ptr, pages_ptr, slots_ptr,
    eps, num_heads, num_kv_heads, x_stride, page_step,
    HEAD: tl.constexpr, PAIRS: tl.constexpr, PAIRS_TILE: tl.constexpr, REST_TILE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    is_head, is_query, is_value = (
        head < num_heads + 2 * num_kv_heads,
        head < num_heads,
        head >= num_heads + num_kv_heads,
    )
    pairs, others = tl.arange(0, PAIRS_TILE)[None, :], tl.arange(0, REST_TILE)[None, :]
    is_pair, is_other = pairs < PAIRS, others < HEAD - 2 * PAIRS
    x_at = x_ptr + token * x_stride + head * HEAD
    first = tl.load(x_at + pairs, mask=is_head & is_pair, other=0.0).to(tl.float32)
    second = tl.load(x_at + PAIRS + pairs, mask=is_head & is_pair, other=0.0).to(tl.float32)
    rest = tl.load(x_at + 2 * PAIRS + others, mask=is_head & is_other, other=0.0).to(tl.float32)
    if norm_q_ptr is not None:
        first, second, rest = _normed_heads(
            first, second, rest, norm_q_ptr, eps, is_query, pairs, others, is_pair, is_other, HEAD, PAIRS
        )
    if norm_k_ptr is not None:
        is_key = (is_query | is_value) == 0
        first, second, rest = _normed_heads(
            first, second, rest, norm_k_ptr, eps, is_key, pairs, others, is_pair, is_other, HEAD, PAIRS
        )
    cos = tl.load(cos_ptr + token * PAIRS + pairs, mask=is_pair, other=0.0)
    sin = tl.load(sin_ptr + token * PAIRS + pairs, mask=is_pair, other=0.0)
    turned_first = to_bfloat16(tl.where(is_value, first, first * cos - second * sin))
    turned_second = to_bfloat16(tl.where(is_value, second, second * cos + first * sin))
    rest = to_bfloat16(rest)
    # values are behind keys in a page, as in the rows
    slot = tl.load(slots_ptr + token).to(tl.int64)
    q_at = q_ptr + (token * num_heads + head) * HEAD
    held_at = pages_ptr + slot * page_step + (head - num_heads) * HEAD
    is_held = is_head & (is_query == 0)
    for_pairs, for_others = is_query & is_pair, is_query & is_other
    tl.store(q_at + pairs, turned_first, mask=for_pairs)
    tl.store(q_at + PAIRS + pairs, turned_second, mask=for_pairs)
    tl.store(q_at + 2 * PAIRS + others, rest, mask=for_others)
    tl.store(held_at + pairs, turned_first, mask=is_held & is_pair)
    tl.store(held_at + PAIRS + pairs, turned_second, mask=is_held & is_pair)
    tl.store(held_at + 2 * PAIRS + others, rest, mask=is_held & is_other)


@triton.jit
def _first_page(positions, window, PAGE: tl.constexpr):
    """Return the first key of the first page of which some of these positions sees a key."""
    first = tl.where(window > 0, tl.maximum(tl.min(positions, 0) - window + 1, 0), 0)
    return first // PAGE * PAGE


@triton.jit
def _attend_keys(
    q, pages_ptr, table_at, page_step, head_at, num_kv_heads, positions, begin, stop, window, scale, peak, total,
    HEAD: tl.constexpr, HEAD_TILE: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Extend the running softmax of some rows by the keys from `begin`, a whole page's first one, to `stop`."""
    column, in_page = tl.arange(0, HEAD_TILE), tl.arange(0, PAGE)
    is_column = (column < HEAD)[None, :]
    sums = tl.zeros((ROWS, HEAD_TILE), tl.float32)
    for start in range(begin, stop, PAGE):
        keys = start + in_page
        # values behind the last key may be anything, even infinite: there that key comes again, unseen
        token = tl.minimum(in_page, stop - 1 - start)
        slots = tl.load(table_at + start // PAGE).to(tl.int64) * PAGE + token
        key_at = pages_ptr + slots[:, None] * page_step + head_at * HEAD + column[None, :]
        k = load_columns(key_at, is_column, HEAD == HEAD_TILE)
        v = load_columns(key_at + num_kv_heads * HEAD, is_column, HEAD == HEAD_TILE)
        scores = dot(q, tl.trans(k), tl.zeros((ROWS, PAGE), tl.float32)) * scale
        is_seen = (keys < stop)[None, :] & (keys[None, :] <= positions[:, None])
        is_seen = is_seen & ((window <= 0) | (keys[None, :] > positions[:, None] - window))
        scores = tl.where(is_seen, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # a row that has seen no key yet has no peak
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        sums = dot(to_bfloat16(weights), v, sums * shrink[:, None])
        peak = new_peak
    return peak, total, sums


@triton.jit
def _prefill_tile(
    q_ptr, pages_ptr, table_ptr, tiles_ptr, positions_ptr, sinks_ptr, out_ptr,
    num_heads, group, num_kv_heads, table_pages, page_step, window, scale, sink_scale,
    HEAD: tl.constexpr, HEAD_TILE: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Attend with ROWS rows of a chunk, tokens by query heads of one key head, to all keys that they see."""
    tile_at = tiles_ptr + tl.program_id(0) * 5
    first_token, request, first_row = tl.load(tile_at), tl.load(tile_at + 1), tl.load(tile_at + 2)
    num_rows, context = tl.load(tile_at + 3), tl.load(tile_at + 4)
    key_head = tl.program_id(1)
    place = tl.arange(0, ROWS)
    is_row = place < num_rows
    row = first_row + tl.where(is_row, place, 0)  # rows outside repeat the first one and are not stored
    token, head = first_token + row // group, key_head * group + row % group
    positions = tl.load(positions_ptr + token).to(tl.int32)
    stop = tl.minimum(tl.max(positions, 0) + 1, context.to(tl.int32))
    column = tl.arange(0, HEAD_TILE)
    is_column = (column < HEAD)[None, :]
    at = (token * num_heads + head)[:, None] * HEAD + column[None, :]
    q = load_columns(q_ptr + at, is_column, HEAD == HEAD_TILE)
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sinks_ptr is not None:
        peak = tl.load(sinks_ptr + head) * sink_scale
        total = total + 1.0
    peak, total, sums = _attend_keys(
        q, pages_ptr, table_ptr + request * table_pages, page_step, key_head, num_kv_heads, positions,
        _first_page(positions, window, PAGE), stop, window, scale, peak, total, HEAD, HEAD_TILE, ROWS, PAGE,
    )  # fmt: skip
    tl.store(out_ptr + at, to_bfloat16(sums / total[:, None]), mask=is_row[:, None] & is_column)


@triton.jit
def _decode_part(
    q_ptr, pages_ptr, table_ptr, kv_tokens_ptr, positions_ptr, sums_ptr, peaks_ptr, totals_ptr,
    first_request, num_queries, num_heads, group, num_kv_heads, table_pages, num_parts, page_step, window, scale,
    HEAD: tl.constexpr, HEAD_TILE: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute the unfinished softmax of some rows of a request at a key head over one part of its keys."""
    part, local = tl.program_id(1), tl.program_id(2)
    request = (first_request + local).to(tl.int64)
    key_head = tl.program_id(0) % num_kv_heads
    row = tl.program_id(0) // num_kv_heads * ROWS + tl.arange(0, ROWS)
    is_row = row < num_queries * group
    row = tl.where(is_row, row, 0)  # rows outside repeat the first one and are not stored
    query, head = row // group, key_head * group + row % group
    positions = tl.load(positions_ptr + request * num_queries + query).to(tl.int32)
    num_seen = tl.minimum(tl.load(kv_tokens_ptr + request).to(tl.int32), tl.max(positions, 0) + 1)
    begin = tl.maximum(_first_page(positions, window, PAGE), part * SPLIT)
    stop = tl.minimum(num_seen, (part + 1) * SPLIT)
    if stop > begin:
        column = tl.arange(0, HEAD_TILE)
        is_column = (column < HEAD)[None, :]
        own = query * num_heads + head  # of the request
        q_at = q_ptr + (request * num_queries * num_heads + own)[:, None] * HEAD + column[None, :]
        q = load_columns(q_at, is_column, HEAD == HEAD_TILE)
        peak = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        peak, total, sums = _attend_keys(
            q, pages_ptr, table_ptr + request * table_pages, page_step, key_head, num_kv_heads, positions,
            begin, stop, window, scale, peak, total, HEAD, HEAD_TILE, ROWS, PAGE,
        )  # fmt: skip
        at = (local.to(tl.int64) * num_queries * num_heads + own) * num_parts + part
        tl.store(peaks_ptr + at, peak, mask=is_row)
        tl.store(totals_ptr + at, total, mask=is_row)
        tl.store(sums_ptr + at[:, None] * HEAD + column[None, :], sums, mask=is_row[:, None] & is_column)


@triton.jit
def _add_parts(
    sums_ptr, peaks_ptr, totals_ptr, kv_tokens_ptr, positions_ptr, sinks_ptr, out_ptr,
    first_request, num_queries, num_heads, num_parts, window, sink_scale,
    HEAD: tl.constexpr, HEAD_TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Add up one row's softmax from the parts that hold a key it sees, and its sink."""
    row = tl.program_id(0).to(tl.int64)
    request = first_request + row // (num_queries * num_heads)
    position = tl.load(positions_ptr + first_request * num_queries + row // num_heads)
    seen = tl.minimum(tl.load(kv_tokens_ptr + request), position + 1)
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    column = tl.arange(0, HEAD_TILE)
    is_column = column < HEAD
    peak = -float("inf")
    total = 0.0
    if sinks_ptr is not None:
        peak = tl.load(sinks_ptr + row % num_heads) * sink_scale
        total = 1.0
    sums = tl.zeros((HEAD_TILE,), tl.float32)
    for part in range(first // SPLIT, tl.cdiv(seen, SPLIT)):
        at = row * num_parts + part
        part_peak = tl.load(peaks_ptr + at)
        new_peak = tl.maximum(peak, part_peak)
        shrink, weight = tl.exp2(peak - new_peak), tl.exp2(part_peak - new_peak)
        total = total * shrink + tl.load(totals_ptr + at) * weight
        sums = sums * shrink + tl.load(sums_ptr + at * HEAD + column, mask=is_column, other=0.0) * weight
        peak = new_peak
    out = sums / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out_ptr + (first_request * num_queries * num_heads + row) * HEAD + column, to_bfloat16(out), mask=is_column
    )
