"""Attention to a window and to compressed entries in Triton (DeepSeek-V4 report section 2.3).

Every query has its own programs, which go through its lists of keys in tiles, counted from the first one of a list; so
its bits depend on its own keys alone. A tile of which it has no key changes none of its bits. A token that completes an
entry has a program that pools it; another kernel then writes the parts that wait for later entries.
"""

# T tokens, H heads, C width of a key, A width of a head, R rotary width, K keys of a query, L parts of a key
# M tokens of an entry, V width of a token's part, I width of an index key, E entries of a page

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.compressed import NO_ROW, EntryKeys, KeyRows, NewEntries
from batchinfer_kernels.triton.indexer import MAX_SCORE_BYTES, score_keys
from batchinfer_kernels.triton.layout import dense
from batchinfer_kernels.triton.numbers import dot, load_columns, to_bfloat16
from batchinfer_kernels.triton.rows import rotated
from batchinfer_kernels.triton.topk import best_rows

_TILE_HEADS = 16
_TILE_ROWS, _TILE_KEYS = 64, 32
_LOG2_E = 1.4426950408889634
_NONE = tl.constexpr(NO_ROW)


def rotate_heads(
    x_TW: torch.Tensor, num_heads: int, norm_A: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Norm and rotate in one kernel; sum squares in float32."""
    x_TW = dense(x_TW)
    num_rows, width = len(x_TW), x_TW.shape[1] // num_heads
    out_THA = torch.empty(num_rows, num_heads, width, dtype=x_TW.dtype, device=x_TW.device)
    if out_THA.numel():
        _rotate_heads[(num_rows, triton.cdiv(num_heads, _TILE_HEADS))](
            x_TW, norm_A, cos.contiguous(), sin.contiguous(), out_THA, eps, num_heads, x_TW.stride(0),
            WIDTH=width, PAIRS=cos.shape[-1], WIDTH_TILE=triton.next_power_of_2(width), HEADS=_TILE_HEADS,
        )  # fmt: skip
    return out_THA


def pool_entries(new: NewEntries) -> None:
    """Compute the softmax over gates in float32."""
    values, gates, bias, norm, eps, cos, sin, positions, requests, starts, slots, waiting, pages, page_table = new
    num_rows, raw = values.shape
    if num_rows == 0:
        return
    num_tokens, width, piece = len(bias), len(norm), min(len(norm), pages.shape[1])
    parts = values.contiguous(), gates.contiguous(), bias.contiguous(), waiting
    lists = positions.contiguous(), requests.contiguous(), starts.contiguous(), slots.contiguous()
    _pool_entries[(num_rows,)](
        *parts, norm.contiguous(), cos.contiguous(), sin.contiguous(), *lists, page_table.contiguous(), pages,
        eps, waiting.shape[1], page_table.shape[1], pages.shape[1],
        TOKENS=num_tokens,
        OVERLAPS=raw > width,
        WIDTH=width,
        PAIRS=cos.shape[-1],
        WIDTH_TILE=triton.next_power_of_2(width),
        PIECE=piece,
    )  # fmt: skip
    _keep_parts[(num_rows,)](
        *parts, *lists, waiting.shape[1], TOKENS=num_tokens, RAW=raw, RAW_TILE=triton.next_power_of_2(raw)
    )


def choose_entries(
    q_THI: torch.Tensor, weights_TH: torch.Tensor, keys: EntryKeys, *, topk: int, scale: float
) -> torch.Tensor:
    """Multiply the scale into the weights of heads; sum scores in float32."""
    q_THI, weights_TH, pages = q_THI.contiguous(), weights_TH.contiguous(), keys.pages
    page_table, requests, visible = map(torch.Tensor.contiguous, keys[1:])
    per_page = pages.shape[1] // q_THI.shape[2]
    num_entries = page_table.shape[1] * per_page
    numbers_K = torch.arange(min(topk, num_entries), device=pages.device)
    rows_TK = page_table[:, numbers_K // per_page][requests] * per_page + numbers_K % per_page
    rows_TK = rows_TK.masked_fill(numbers_K >= visible[:, None], NO_ROW)  # of queries that see no more than these
    if num_entries <= topk:
        return rows_TK
    piece = max(1, MAX_SCORE_BYTES // (4 * num_entries))
    for start in range(0, len(q_THI), piece):
        some = slice(start, start + piece)
        lists = pages.view(-1, q_THI.shape[2]), page_table, requests[some], visible[some] - 1
        scores_TE = score_keys(q_THI[some], weights_TH[some], *lists, topk, scale, page=per_page)
        best_TK = best_rows(scores_TE, visible[some] - 1, page_table, requests[some], topk, page=per_page)
        rows_TK[some] = torch.where((visible[some] > topk)[:, None], best_TK.long(), rows_TK[some])
    return rows_TK


def attend_entries(
    q_THC: torch.Tensor,
    window: KeyRows,
    entries: KeyRows | None,
    sinks_H: torch.Tensor,
    scale: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Round softmax weights to bfloat16 before they meet the values."""
    num_rows, num_heads, width = q_THC.shape
    out_THC = torch.empty(q_THC.shape, dtype=q_THC.dtype, device=q_THC.device)
    if out_THC.numel() == 0:
        return out_THC
    has_entries = entries is not None and entries.ids_TKL.shape[1] > 0
    ids = window.ids_TKL.contiguous(), entries.ids_TKL.contiguous() if entries is not None and has_entries else None
    tile_rows = min(_TILE_ROWS, max(16, triton.next_power_of_2(num_heads)))
    _attend_entries[(num_rows, triton.cdiv(num_heads, tile_rows))](
        q_THC.contiguous(), window.rows, ids[0], entries.rows if entries is not None and has_entries else None, ids[1],
        sinks_H.contiguous(), cos.contiguous(), sin.contiguous(), out_THC,
        num_heads, ids[0].shape[1], 0 if ids[1] is None else ids[1].shape[1], scale * _LOG2_E, _LOG2_E,
        PARTS=1 if ids[1] is None else ids[1].shape[2],
        WIDTH=width,
        PAIRS=cos.shape[-1],
        WIDTH_TILE=max(16, triton.next_power_of_2(width)),
        ROWS=tile_rows,
        KEYS=_TILE_KEYS,
        num_warps=8,
        num_stages=2,
    )  # fmt: skip
    return out_THC


@triton.jit
def _split(x, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Return the first and the second values of the pairs of each row."""
    return tl.split(tl.reshape(x, (ROWS, PAIRS, 2)))


@triton.jit
def _angles_of_pairs(cos_ptr, sin_ptr, row, pair, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Return cos and sin of each pair of a row, 1 and 0 of those that are not turned."""
    at = pair - (WIDTH // 2 - PAIRS)
    is_turned = (at >= 0) & (at < PAIRS)
    at = tl.where(is_turned, at, 0)
    cos = tl.load(cos_ptr + row * PAIRS + at, mask=is_turned, other=1.0)
    return cos, tl.load(sin_ptr + row * PAIRS + at, mask=is_turned, other=0.0)


@triton.jit
def _rotate_heads(
    x_ptr, norm_ptr, cos_ptr, sin_ptr, out_ptr, eps, num_heads, x_stride,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, WIDTH_TILE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, WIDTH_TILE // 2)
    is_pair = pair < WIDTH // 2
    is_inside = (head < num_heads)[:, None] & is_pair[None, :]
    x_at = x_ptr + row * x_stride + head[:, None] * WIDTH + 2 * pair[None, :]
    first = tl.load(x_at, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(x_at + 1, mask=is_inside, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        factor = (1.0 / tl.sqrt_rn(tl.sum(first * first + second * second, 1) / WIDTH + eps))[:, None]
        weight = tl.load(norm_ptr + 2 * pair, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        other_weight = tl.load(norm_ptr + 2 * pair + 1, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        first = to_bfloat16(to_bfloat16(first * factor).to(tl.float32) * weight).to(tl.float32)
        second = to_bfloat16(to_bfloat16(second * factor).to(tl.float32) * other_weight).to(tl.float32)
    cos, sin = _angles_of_pairs(cos_ptr, sin_ptr, row, pair, WIDTH, PAIRS)
    first, second = rotated(first, second, cos[None, :], sin[None, :])
    out_at = out_ptr + (row * num_heads + head[:, None]) * WIDTH + 2 * pair[None, :]
    tl.store(out_at, first, mask=is_inside)
    tl.store(out_at + 1, second, mask=is_inside)


@triton.jit
def _part_of(
    values_ptr, gates_ptr, bias_ptr, waiting_ptr, row, start, slot, last, position, begin, column, is_column, ring,
    TOKENS: tl.constexpr, OVERLAPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return a token's values and gates for an entry that begins at `begin`: of this step, or of the state."""
    RAW: tl.constexpr = 2 * WIDTH if OVERLAPS else WIDTH
    own = row - (last - position)
    is_own = own >= start
    offset = tl.where((position >= begin) & OVERLAPS, WIDTH, 0) + column
    own_at = tl.where(is_own, own, row) * RAW + offset
    held_at = waiting_ptr + (slot * ring + position % ring) * 2 * RAW + offset
    value = tl.load(values_ptr + own_at, mask=is_column & is_own, other=0.0)
    gate = tl.load(gates_ptr + own_at, mask=is_column & is_own, other=0.0)
    gate += tl.load(bias_ptr + position % TOKENS * RAW + offset, mask=is_column & is_own, other=0.0)
    value += tl.load(held_at, mask=is_column & (is_own == 0), other=0.0)
    gate += tl.load(held_at + RAW, mask=is_column & (is_own == 0), other=0.0)
    return value, gate


@triton.jit
def _pool_entries(
    values_ptr, gates_ptr, bias_ptr, waiting_ptr, norm_ptr, cos_ptr, sin_ptr,
    positions_ptr, requests_ptr, starts_ptr, slots_ptr, table_ptr, pages_ptr, eps, ring, table_pages, page_values,
    TOKENS: tl.constexpr, OVERLAPS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, WIDTH_TILE: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Pool, norm, rotate and write the entry that one token completes, if it does."""
    row = tl.program_id(0).to(tl.int64)
    last = tl.load(positions_ptr + row)
    if last % TOKENS == TOKENS - 1:
        request = tl.load(requests_ptr + row)
        start, slot = tl.load(starts_ptr + request), tl.load(slots_ptr + request)
        column = tl.arange(0, WIDTH_TILE)
        is_column = column < WIDTH
        begin = last + 1 - TOKENS
        first = tl.maximum(begin - TOKENS, 0) if OVERLAPS else begin
        peak = tl.full((WIDTH_TILE,), -float("inf"), tl.float32)
        total, summed = tl.zeros((WIDTH_TILE,), tl.float32), tl.zeros((WIDTH_TILE,), tl.float32)
        for position in range(first, last + 1):
            value, gate = _part_of(
                values_ptr, gates_ptr, bias_ptr, waiting_ptr, row, start, slot, last, position, begin, column,
                is_column, ring, TOKENS, OVERLAPS, WIDTH,
            )  # fmt: skip
            new_peak = tl.maximum(peak, gate)
            shrink, weight = tl.exp(peak - new_peak), tl.exp(gate - new_peak)
            total, summed = total * shrink + weight, summed * shrink + weight * value
            peak = new_peak
        entry = tl.where(is_column, summed / total, 0.0)
        entry = entry / tl.sqrt_rn(tl.sum(entry * entry, 0) / WIDTH + eps)
        entry = entry * tl.load(norm_ptr + column, mask=is_column, other=0.0)
        pair = tl.arange(0, WIDTH_TILE // 2)
        even, odd = _split(entry, 1, WIDTH_TILE // 2)
        cos, sin = _angles_of_pairs(cos_ptr, sin_ptr, row, pair, WIDTH, PAIRS)
        even, odd = rotated(even, odd, cos[None, :], sin[None, :])
        place = last // TOKENS * (WIDTH // PIECE) + 2 * pair // PIECE
        per_page = page_values // PIECE
        is_pair = pair < WIDTH // 2
        page = tl.load(table_ptr + request * table_pages + place // per_page, mask=is_pair, other=0)
        at = (page * page_values + place % per_page * PIECE + 2 * pair % PIECE)[None, :]
        tl.store(pages_ptr + at, even, mask=is_pair[None, :])
        tl.store(pages_ptr + at + 1, odd, mask=is_pair[None, :])


@triton.jit
def _keep_parts(
    values_ptr, gates_ptr, bias_ptr, waiting_ptr, positions_ptr, requests_ptr, starts_ptr, slots_ptr, ring,
    TOKENS: tl.constexpr, RAW: tl.constexpr, RAW_TILE: tl.constexpr,
):  # fmt: skip
    """Write one token's part to its request's state, if no later token of the step takes its place."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(requests_ptr + row)
    if row >= tl.load(starts_ptr + request + 1) - ring:
        position = tl.load(positions_ptr + row)
        column = tl.arange(0, RAW_TILE)
        is_column = column < RAW
        held_at = waiting_ptr + (tl.load(slots_ptr + request) * ring + position % ring) * 2 * RAW + column
        gate = tl.load(gates_ptr + row * RAW + column, mask=is_column, other=0.0)
        gate += tl.load(bias_ptr + position % TOKENS * RAW + column, mask=is_column, other=0.0)
        tl.store(held_at, tl.load(values_ptr + row * RAW + column, mask=is_column, other=0.0), mask=is_column)
        tl.store(held_at + RAW, gate, mask=is_column)


@triton.jit
def _attend_list(
    q, keys_ptr, ids_at, num_keys, scale, peak, total, sums,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_TILE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Extend the running softmax of a query's heads by the keys of one list."""
    column, in_tile = tl.arange(0, WIDTH_TILE), tl.arange(0, KEYS)
    PART: tl.constexpr = WIDTH // PARTS
    is_column = column < WIDTH
    for start in range(0, num_keys, KEYS):
        is_listed = start + in_tile < num_keys
        first = tl.load(ids_at + (start + in_tile) * PARTS, mask=is_listed, other=_NONE)
        is_key = first != _NONE
        is_inside = is_key[:, None] & is_column[None, :]
        if PARTS == 1:
            key_at = first[:, None] * WIDTH + column[None, :]
        else:
            part_at = ids_at + (start + in_tile)[:, None] * PARTS + (column // PART)[None, :]
            key_at = tl.load(part_at, mask=is_inside, other=0) * PART + (column % PART)[None, :]
        k = tl.load(keys_ptr + key_at, mask=is_inside, other=0.0)
        scores = dot(q, tl.trans(k), tl.zeros((ROWS, KEYS), tl.float32)) * scale
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - new_peak[:, None]), tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        sums = dot(to_bfloat16(weights), k, sums * shrink[:, None])
        peak = new_peak
    return peak, total, sums


@triton.jit
def _attend_entries(
    q_ptr, window_ptr, window_ids_ptr, entries_ptr, entry_ids_ptr, sinks_ptr, cos_ptr, sin_ptr, out_ptr,
    num_heads, num_window, num_entries, scale, sink_scale,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, WIDTH_TILE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Attend with some heads of one query; its sinks are where the running softmax begins."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_head = head < num_heads
    head = tl.where(is_head, head, 0)  # heads outside repeat the first one and are not stored
    column = tl.arange(0, WIDTH_TILE)
    q_at = q_ptr + (query * num_heads + head)[:, None] * WIDTH
    q = load_columns(q_at + column[None, :], (column < WIDTH)[None, :], WIDTH == WIDTH_TILE)
    peak = tl.load(sinks_ptr + head) * sink_scale
    total, sums = tl.full((ROWS,), 1.0, tl.float32), tl.zeros((ROWS, WIDTH_TILE), tl.float32)
    peak, total, sums = _attend_list(
        q, window_ptr, window_ids_ptr + query * num_window, num_window, scale, peak, total, sums,
        1, WIDTH, WIDTH_TILE, ROWS, KEYS,
    )  # fmt: skip
    if entries_ptr is not None:
        peak, total, sums = _attend_list(
            q, entries_ptr, entry_ids_ptr + query * num_entries * PARTS, num_entries, scale, peak, total, sums,
            PARTS, WIDTH, WIDTH_TILE, ROWS, KEYS,
        )  # fmt: skip
    pair = tl.arange(0, WIDTH_TILE // 2)
    out = to_bfloat16(sums / total[:, None]).to(tl.float32)
    even, odd = _split(out, ROWS, WIDTH_TILE // 2)
    cos, sin = _angles_of_pairs(cos_ptr, sin_ptr, query, pair, WIDTH, PAIRS)
    even, odd = rotated(even, odd, cos[None, :], -sin[None, :])
    out_at = out_ptr + (query * num_heads + head)[:, None] * WIDTH + 2 * pair[None, :]
    is_inside = is_head[:, None] & (pair < WIDTH // 2)[None, :]
    tl.store(out_at, even, mask=is_inside)
    tl.store(out_at + 1, odd, mask=is_inside)
