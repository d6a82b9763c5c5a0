"""The indexer of DeepSeek Sparse Attention in Triton: writing its keys to pages, and the best keys of a query.

DeepSeek-V3.2-Exp report section 2.1. Queries are rotated once; then each query's heads meet the keys of its request in
the pages, tile by tile; then each query's scores are searched for the best (topk.py). A query has its own program in
all three steps, so its bits and its choice do not depend on its batch.
"""

# T tokens, H heads, I width of an index key, R rotary width, B requests, P pages, K keys of a query, X keys

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.mla import PAGE_TOKENS
from batchinfer_kernels.reference.sparse import IndexedKeys, IndexQueries, NewIndexKeys
from batchinfer_kernels.triton.numbers import dot, load_columns, to_bfloat16
from batchinfer_kernels.triton.topk import best_slots

MAX_SCORE_BYTES = 2**29  # held at once
_SEGMENT_KEYS = 2048  # of one program
_TILE_KEYS = 128


def index_cache(new: NewIndexKeys) -> None:
    """Sum the norm in float32."""
    keys_TI, norm_I, bias_I, eps, cos, sin, pages, slots_T, interleaved = new
    keys_TI = keys_TI.contiguous()
    num_tokens, width = keys_TI.shape
    pairs = cos.shape[-1]
    if num_tokens:
        _index_cache[(num_tokens,)](
            keys_TI,
            norm_I,
            bias_I,
            cos.contiguous(),
            sin.contiguous(),
            pages,
            slots_T,
            eps,
            pages.stride(1),
            WIDTH=width,
            PAIRS=pairs,
            WIDTH_TILE=triton.next_power_of_2(width),
            INTERLEAVED=interleaved,
            num_warps=1,
        )


def choose_keys(queries: IndexQueries, keys: IndexedKeys, *, topk: int, scale: float) -> torch.Tensor:
    """Multiply the scale into the weights of heads; sum scores in float32.

    Memory for scores is that of the longest request of the page table; queries are worked on in pieces that keep to a
    bound.
    """
    weights_TH, pages = queries.weights_TH.contiguous(), keys.pages
    page_table_BP, requests_T, positions_T = map(torch.Tensor.contiguous, keys[1:4])
    q_THI = rotated_queries(queries)
    num_rows = len(q_THI)
    slots_TK = torch.empty(num_rows, topk, dtype=torch.int32, device=q_THI.device)
    num_keys = page_table_BP.shape[1] * PAGE_TOKENS
    piece = min(num_rows, max(1, MAX_SCORE_BYTES // (4 * max(1, num_keys))))
    for start in range(0, num_rows, max(1, piece)):
        rows = slice(start, start + piece)
        lists = pages, page_table_BP, requests_T[rows], positions_T[rows]
        scores_TX = score_keys(q_THI[rows], weights_TH[rows], *lists, topk, scale)
        slots_TK[rows] = best_slots(scores_TX, IndexedKeys(*lists), topk=topk)
    return slots_TK


def score_keys(
    q_THI: torch.Tensor,
    weights_TH: torch.Tensor,
    pages: torch.Tensor,
    page_table_BP: torch.Tensor,
    requests_T: torch.Tensor,
    positions_T: torch.Tensor,
    topk: int,
    scale: float,
    *,
    page: int = PAGE_TOKENS,
) -> torch.Tensor:
    """Return the scores of queries that see at least `topk` keys, [T, X] float32; all tensors without gaps.

    Args:
        pages: rows of keys, `page` of them in a page.
        positions_T: of the last key that a query sees.
    """
    num_rows, num_heads, width = q_THI.shape
    num_keys = page_table_BP.shape[1] * page
    scores_TX = torch.empty(num_rows, num_keys, dtype=torch.float32, device=q_THI.device)
    _score[(triton.cdiv(num_keys, _SEGMENT_KEYS), num_rows)](
        q_THI, weights_TH, pages, page_table_BP, requests_T, positions_T, scores_TX,
        num_heads, page_table_BP.shape[1], num_keys, topk, pages.stride(-2), scale,
        WIDTH=width,
        HEADS_TILE=max(16, triton.next_power_of_2(num_heads)),
        WIDTH_TILE=max(16, triton.next_power_of_2(width)),
        KEYS=_TILE_KEYS,
        SEGMENT=_SEGMENT_KEYS,
        PAGE=page,
        num_warps=4,
        num_stages=3,
    )  # fmt: skip
    return scores_TX


def rotated_queries(queries: IndexQueries) -> torch.Tensor:
    q_THI, _, cos, sin, interleaved = queries
    q_THI = q_THI.contiguous()
    num_rows, num_heads, width = q_THI.shape
    out_THI = torch.empty_like(q_THI)
    if q_THI.numel():
        _turn[(num_rows, triton.cdiv(num_heads, 16))](
            q_THI,
            cos.contiguous(),
            sin.contiguous(),
            out_THI,
            num_heads,
            WIDTH=width,
            PAIRS=cos.shape[-1],
            HEADS=16,
            WIDTH_TILE=triton.next_power_of_2(width),
            INTERLEAVED=interleaved,
        )
    return out_THI


@triton.jit
def _partner(columns, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return for each column of a row its pair, the column of the pair's other value, and whether it is the first."""
    if INTERLEAVED:
        pair, is_first = columns // 2, columns % 2 == 0
        other = columns ^ 1
    else:
        is_first = columns < PAIRS
        pair = tl.where(is_first, columns, columns - PAIRS)
        other = tl.where(is_first, columns + PAIRS, columns - PAIRS)
    is_turned = columns < 2 * PAIRS
    return tl.where(is_turned, pair, 0), tl.where(is_turned, other, columns), is_first, is_turned


@triton.jit
def _turned(own, paired, cos, sin, is_first):
    """Return the values of rotated pairs, rounded to bfloat16."""
    return to_bfloat16(tl.where(is_first, own * cos - paired * sin, own * cos + paired * sin))


@triton.jit
def _turn(
    q_ptr, cos_ptr, sin_ptr, out_ptr, num_heads,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, WIDTH_TILE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate the first values of some heads of one query."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, WIDTH_TILE)
    pair, other, is_first, is_turned = _partner(columns, PAIRS, INTERLEAVED)
    is_inside = (heads < num_heads)[:, None] & (columns < WIDTH)[None, :]
    at = (row * num_heads + heads)[:, None] * WIDTH
    own = tl.load(q_ptr + at + columns[None, :], mask=is_inside, other=0.0)
    paired = tl.load(q_ptr + at + other[None, :], mask=is_inside & is_turned[None, :], other=0.0)
    cos = tl.load(cos_ptr + row * PAIRS + pair)[None, :]
    sin = tl.load(sin_ptr + row * PAIRS + pair)[None, :]
    turned = _turned(own.to(tl.float32), paired.to(tl.float32), cos, sin, is_first[None, :])
    tl.store(out_ptr + at + columns[None, :], tl.where(is_turned[None, :], turned, own), mask=is_inside)


@triton.jit
def _index_cache(
    keys_ptr, norm_ptr, bias_ptr, cos_ptr, sin_ptr, pages_ptr, slots_ptr, eps, page_step,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, WIDTH_TILE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Apply a layer norm, rounded to bfloat16, then rotate the first values, rounded again."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH_TILE)
    pair, other, is_first, is_turned = _partner(columns, PAIRS, INTERLEAVED)
    is_inside = columns < WIDTH
    x = tl.load(keys_ptr + row * WIDTH + columns, mask=is_inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / WIDTH
    centred = tl.where(is_inside, x - mean, 0.0)
    factor = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 0) / WIDTH + eps)
    own = _normed(keys_ptr + row * WIDTH, norm_ptr, bias_ptr, columns, is_inside, mean, factor)
    paired = _normed(keys_ptr + row * WIDTH, norm_ptr, bias_ptr, other, is_inside & is_turned, mean, factor)
    cos, sin = tl.load(cos_ptr + row * PAIRS + pair), tl.load(sin_ptr + row * PAIRS + pair)
    turned = _turned(own.to(tl.float32), paired.to(tl.float32), cos, sin, is_first)
    page_at = pages_ptr + tl.load(slots_ptr + row) * page_step
    tl.store(page_at + columns, tl.where(is_turned, turned, own), mask=is_inside)


@triton.jit
def _normed(row_ptr, norm_ptr, bias_ptr, columns, is_inside, mean, factor):
    """Return these columns of a row after its norm, in bfloat16."""
    x = tl.load(row_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    return to_bfloat16((x - mean) * factor * norm + bias)


@triton.jit
def _score(
    q_ptr, weights_ptr, pages_ptr, table_ptr, requests_ptr, positions_ptr, scores_ptr,
    num_heads, table_pages, num_scores, topk, page_step, scale,
    WIDTH: tl.constexpr, HEADS_TILE: tl.constexpr, WIDTH_TILE: tl.constexpr,
    KEYS: tl.constexpr, SEGMENT: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Score one query with one segment of its keys; skip a query that sees fewer than `topk` keys."""
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * SEGMENT
    num_keys = tl.load(positions_ptr + row).to(tl.int32) + 1
    stop = tl.where(num_keys < topk, 0, tl.minimum(num_keys, first + SEGMENT))
    if first < stop:
        heads, columns, in_tile = tl.arange(0, HEADS_TILE), tl.arange(0, WIDTH_TILE), tl.arange(0, KEYS)
        is_column = (columns < WIDTH)[None, :]
        is_head = heads < num_heads
        q_at = q_ptr + (row * num_heads + heads)[:, None] * WIDTH + columns[None, :]
        q = tl.load(q_at, mask=is_head[:, None] & is_column, other=0.0)
        weights = tl.load(weights_ptr + row * num_heads + heads, mask=is_head, other=0.0) * scale
        table_at = table_ptr + tl.load(requests_ptr + row) * table_pages
        for start in range(first, stop, KEYS):
            # behind the last key that key comes again, and is not stored
            keys = tl.minimum(start + in_tile, stop - 1)
            slots = tl.load(table_at + keys // PAGE) * PAGE + keys % PAGE
            k = load_columns(pages_ptr + slots[:, None] * page_step + columns[None, :], is_column, WIDTH == WIDTH_TILE)
            products = dot(q, tl.trans(k), tl.zeros((HEADS_TILE, KEYS), tl.float32))
            scores = tl.sum(tl.maximum(products, 0.0) * weights[:, None], 0)
            tl.store(scores_ptr + row * num_scores + start + in_tile, scores, mask=start + in_tile < stop)
