"""A token of each row, drawn after temperature, top_k, top_p and min_p, in Triton and without sorting the vocabulary.

What stays of a row ordered by weight is its first tokens: all whose weight is above some number, and the first few of
those that have just this weight. The number is found three bits at a time, from how many weights are at least as large
as each of eight candidates (top_k), or from their sum (top_p). Weights are whole numbers and all sums exact, so what is
kept and drawn is what `reference.draw` keeps and draws.
"""

# S rows of logits, V vocabulary

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.rows import WEIGHT_UNIT, check_vocabulary

_TILE = 1024
_BITS = 45  # of the largest weight, 2**44


def draw(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    min_p_S: torch.Tensor,
    uniform_S: torch.Tensor,
) -> torch.Tensor:
    """Rows that are not finite get some token; nothing is read on the host."""
    num_rows, width = logits_SV.shape
    check_vocabulary(width)
    tokens_S = torch.empty(num_rows, dtype=torch.int64, device=logits_SV.device)
    if num_rows:
        logits_SV = logits_SV if logits_SV.stride(1) == 1 else logits_SV.contiguous()
        weights_SV = torch.empty(num_rows, width, dtype=torch.int64, device=logits_SV.device)
        _weigh[(num_rows, triton.cdiv(width, _TILE))](
            logits_SV, logits_SV.amax(dim=-1), temperature_S.contiguous(), weights_SV, width, logits_SV.stride(0),
            UNIT=WEIGHT_UNIT, TILE=_TILE,
        )  # fmt: skip
        settings = (values.contiguous() for values in (top_k_S, top_p_S, min_p_S, uniform_S))
        _draw_row[(num_rows,)](
            weights_SV, *settings, tokens_S, width, UNIT=WEIGHT_UNIT, BITS=_BITS, TILE=_TILE, num_warps=8
        )
    return tokens_S


@triton.jit
def _weigh(
    logits_ptr, peaks_ptr, temperature_ptr, weights_ptr, width, stride, UNIT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Probabilities in units of the largest one's 2**-44, in float64 and rounded once, halves to even."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside = columns < width
    logits = tl.load(logits_ptr + row * stride + columns, mask=is_inside, other=0.0).to(tl.float64)
    below = logits - tl.load(peaks_ptr + row).to(tl.float64)
    sizes = tl.exp(below / tl.load(temperature_ptr + row)) * UNIT
    # adding 1.5 * 2**52 leaves no bits behind the point
    rounded = (sizes + 6755399441055744.0) - 6755399441055744.0
    weights = tl.where(rounded == rounded, rounded, 0.0).to(tl.int64)
    tl.store(weights_ptr + row * width + columns, weights, mask=is_inside)


@triton.jit
def _from(weights_at, width, least, IS_SUM: tl.constexpr, TILE: tl.constexpr):
    """Of the weights from each of `least` on: how many there are, or their sum; [8] int64."""
    found = tl.zeros((8,), tl.int64)
    for start in range(0, width, TILE):
        columns = start + tl.arange(0, TILE)
        weights = tl.load(weights_at + columns, mask=columns < width, other=-1)[:, None]
        counted = weights if IS_SUM else tl.full((TILE, 1), 1, tl.int64)
        found += tl.sum(tl.where(weights >= least[None, :], counted, 0), 0)
    return found


@triton.jit
def _last_kept(weights_at, width, limit, IS_SUM: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr):
    """The least weight above which there are fewer than `limit` weights, or less than `limit` in sum."""
    weight = limit * 0
    places = tl.arange(0, 8).to(tl.int64)
    for step in range(3, BITS + 1, 3):
        least = weight + (places << (BITS - step))
        is_below = (places > 0) & (_from(weights_at, width, least, IS_SUM, TILE) >= limit)
        weight += tl.sum(is_below.to(tl.int64), 0) << (BITS - step)
    return weight


@triton.jit
def _above(weights_at, width, weight, TILE: tl.constexpr):
    """How many weights there are above this one, and their sum."""
    counts, sums = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
    for start in range(0, width, TILE):
        columns = start + tl.arange(0, TILE)
        weights = tl.load(weights_at + columns, mask=columns < width, other=-1)
        is_above = weights > weight
        counts += is_above.to(tl.int64)
        sums += tl.where(is_above, weights, 0)
    return tl.sum(counts, 0), tl.sum(sums, 0)


@triton.jit
def _draw_row(
    weights_ptr, top_k_ptr, top_p_ptr, min_p_ptr, uniform_ptr, tokens_ptr, width,
    UNIT: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Tokens stay whose weight is above `edge`, and the first `num_equal` of those that have this weight."""
    row = tl.program_id(0).to(tl.int64)
    weights_at = weights_ptr + row * width
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    edge, num_equal = row * 0, row * 0
    if top_k > 0:
        edge = _last_kept(weights_at, width, top_k, False, BITS, TILE)
        count, _ = _above(weights_at, width, edge, TILE)
        num_equal = top_k - count
    if top_p < 1.0:
        _, total = _above(weights_at, width, edge, TILE)
        total += num_equal * edge
        limit = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)  # the first one always stays
        last = _last_kept(weights_at, width, limit, True, BITS, TILE)
        _, before = _above(weights_at, width, last, TILE)
        # each of them stays that has less than the limit before it
        num_last = tl.cdiv(limit - before, tl.maximum(last, 1))
        num_equal = tl.where(last > edge, num_last, tl.where(last == edge, tl.minimum(num_equal, num_last), num_equal))
        edge = tl.maximum(edge, last)
    below_floor = tl.ceil(tl.load(min_p_ptr + row) * UNIT).to(tl.int64) - 1
    num_equal = tl.where(below_floor >= edge, 0, num_equal)
    edge = tl.maximum(edge, below_floor)

    _, total = _above(weights_at, width, edge, TILE)
    total += num_equal * edge
    target = tl.minimum((tl.load(uniform_ptr + row) * total.to(tl.float64)).to(tl.int64), total - 1)
    token, running, equals = width - 1, row * 0, row * 0
    for start in range(0, width, TILE):
        columns = start + tl.arange(0, TILE)
        weights = tl.load(weights_at + columns, mask=columns < width, other=-1)
        is_equal = (weights == edge).to(tl.int64)
        is_kept = (weights > edge) | ((is_equal > 0) & (equals + tl.cumsum(is_equal, 0) <= num_equal))
        kept = tl.where(is_kept, weights, 0)
        is_behind = (running + tl.cumsum(kept, 0) > target) & (columns < width)
        token = tl.minimum(token, tl.min(tl.where(is_behind, columns, width - 1), 0))
        running += tl.sum(kept, 0)
        equals += tl.sum(is_equal, 0)
    tl.store(tokens_ptr + row, token.to(tl.int64))
