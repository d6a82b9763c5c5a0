"""The slots of a query's best keys, in Triton: found exactly, by radix selection, without sorting.

Scores become whole numbers of the same order. Four passes over a query's scores each find eight more bits of the K-th
largest number: they count the values of these bits among the numbers that begin with the bits found so far. A fifth
pass takes all larger numbers, and the first ones of those equal to the K-th, in the order of positions. Counts are
whole numbers: nothing depends on the order in which they are added.
"""

# T queries, X scores of each, K keys of a query

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.mla import PAGE_TOKENS
from batchinfer_kernels.reference.sparse import NO_SLOT, IndexedKeys

_TILE = 1024
_EMPTY = tl.constexpr(NO_SLOT)


def best_slots(scores_TX: torch.Tensor, keys: IndexedKeys, *, topk: int) -> torch.Tensor:
    return best_rows(scores_TX, keys.positions_T, keys.page_table_BP, keys.requests_T, topk)


def best_rows(
    scores_TX: torch.Tensor,
    positions_T: torch.Tensor,
    page_table_BP: torch.Tensor,
    requests_T: torch.Tensor,
    topk: int,
    *,
    page: int = PAGE_TOKENS,
) -> torch.Tensor:
    """Return the rows of the best keys, [T, K] int32, as `best_slots` for pages of `page` rows."""
    num_rows = len(positions_T)
    slots_TK = torch.empty(num_rows, topk, dtype=torch.int32, device=scores_TX.device)
    if num_rows:
        _best_slots[(num_rows,)](
            scores_TX, positions_T.contiguous(), page_table_BP.contiguous(), requests_T.contiguous(), slots_TK,
            scores_TX.stride(0), page_table_BP.shape[1], topk,
            TILE=_TILE,
            PAGE=page,
            num_warps=8,
        )  # fmt: skip
    return slots_TK


@triton.jit
def _number_of(score):
    """Map scores to numbers of the same order; both zeros have one number."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(score == 0.0, 0, bits)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True)) ^ 0x80000000


@triton.jit
def _best_slots(
    scores_ptr, positions_ptr, table_ptr, requests_ptr, slots_ptr, score_stride, table_pages, topk,
    TILE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    num_keys = tl.load(positions_ptr + row).to(tl.int32) + 1
    scores_at = scores_ptr + row * score_stride
    slots_at = slots_ptr + row * topk
    in_tile = tl.arange(0, TILE)
    if num_keys < topk:
        for start in range(0, topk, TILE):
            empty = tl.zeros((TILE,), tl.int32) + _EMPTY
            tl.store(slots_at + start + in_tile, empty, mask=start + in_tile < topk)
    else:
        least, num_equal = _nth_largest(scores_at, num_keys, topk, TILE)
        table_at = table_ptr + tl.load(requests_ptr + row) * table_pages
        num_taken, num_met = 0, 0
        for start in range(0, num_keys, TILE):
            keys = start + in_tile
            is_key = keys < num_keys
            numbers = _number_of(tl.load(scores_at + keys, mask=is_key, other=0.0))
            is_equal = is_key & (numbers == least)
            order = num_met + tl.cumsum(is_equal.to(tl.int32), 0)
            is_taken = (is_key & (numbers > least)) | (is_equal & (order <= num_equal))
            place = num_taken + tl.cumsum(is_taken.to(tl.int32), 0) - 1
            pages = tl.load(table_at + keys // PAGE, mask=is_taken, other=0)
            tl.store(slots_at + place, (pages * PAGE + keys % PAGE).to(tl.int32), mask=is_taken)
            num_met += tl.sum(is_equal.to(tl.int32), 0)
            num_taken += tl.sum(is_taken.to(tl.int32), 0)


@triton.jit
def _nth_largest(scores_at, num_keys, nth, TILE: tl.constexpr):
    """Return the number of the `nth` largest score, and how many scores equal to it are among the `nth` largest."""
    found, left = tl.zeros((1,), tl.uint32), nth
    for step in tl.static_range(4):
        found, left = _next_digit(scores_at, num_keys, found, left, 24 - 8 * step, TILE)
    return found, left


@triton.jit
def _next_digit(scores_at, num_keys, found, left, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Return `found` with eight more bits of the `left`-th largest number, and how many are left then."""
    in_tile, digits = tl.arange(0, TILE), tl.arange(0, 256)
    counts = tl.zeros((256,), tl.int32)
    for start in range(0, num_keys, TILE):
        is_key = start + in_tile < num_keys
        numbers = _number_of(tl.load(scores_at + start + in_tile, mask=is_key, other=0.0))
        if SHIFT < 24:
            is_key = is_key & ((numbers ^ found) >> (SHIFT + 8) == 0)
        counts += tl.histogram(((numbers >> SHIFT) & 0xFF).to(tl.int32), 256, mask=is_key)
    num_above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # with a larger digit
    digit = tl.max(tl.where(num_above + counts >= left, digits, 0), 0)
    left -= tl.sum(tl.where(digits > digit, counts, 0), 0)
    return found | (digit.to(tl.uint32) << SHIFT), left
