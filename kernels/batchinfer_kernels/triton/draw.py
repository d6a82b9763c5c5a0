"""A token of each row, drawn after temperature, top_k, top_p and min_p, in Triton and without sorting the vocabulary.

The filters keep the first tokens of a row ordered by weight: all tokens whose weight is above some number, the edge,
and the first few tokens of exactly this weight. Four kernels find and use the edge:

    weigh     the tokens' weights; in rows with a filter also how many (top_k) or how much (top_p) there is in each
              bucket of similar ones
    keep      the bucket in which a filter's limit is reached, from the largest weights on; its tokens alone are looked
              at for the edge, three bits at a time
    add up    the weights that stay, by parts of the vocabulary
    pick      the part of the drawn token, then the token

Weights are whole numbers and all sums exact, so the same tokens are kept and drawn as by `reference.draw`.
"""

# S rows of logits, V vocabulary, B buckets, P parts of the vocabulary

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.rows import WEIGHT_UNIT, check_vocabulary

_TILE = 1024
_PART = 4096

# Weights whose exponent and first six bits behind the leading one are alike share a bucket; 0 is that of weight 0.
_DROPPED = tl.constexpr(52 - 6)  # bits of a float64
_ONE = tl.constexpr(1023 << 6)  # the remaining bits of the float64 1
_BITS = tl.constexpr(39)  # in which weights of a bucket differ, in whole steps of three: 44 - 6 at most
_BUCKETS = 4096  # of which the 2**44 of the largest weight is number 44 * 64 + 1


def draw(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    min_p_S: torch.Tensor,
    uniform_S: torch.Tensor,
) -> torch.Tensor:
    """Draw without reading anything on the host; rows that are not finite get some token."""
    num_rows, width = logits_SV.shape
    check_vocabulary(width)
    device = logits_SV.device
    tokens_S = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows:
        logits_SV = logits_SV if logits_SV.stride(1) == 1 else logits_SV.contiguous()
        top_k_S, top_p_S = top_k_S.contiguous(), top_p_S.contiguous()
        weights_SV = torch.empty(num_rows, width, dtype=torch.int64, device=device)
        counts_SB, sums_SB = torch.zeros(2, num_rows, _BUCKETS, dtype=torch.int64, device=device)
        _weigh[(num_rows, triton.cdiv(width, _TILE))](
            logits_SV, logits_SV.amax(dim=-1), temperature_S.contiguous(), top_k_S, top_p_S,
            weights_SV, counts_SB, sums_SB, width, logits_SV.stride(0),
            UNIT=WEIGHT_UNIT, TILE=_TILE, BUCKETS=_BUCKETS,
        )  # fmt: skip
        edges_S, equals_S = torch.empty(2, num_rows, dtype=torch.int64, device=device)
        columns_SV = torch.empty(num_rows, width, dtype=torch.int32, device=device)
        _keep[(num_rows,)](
            weights_SV, counts_SB, sums_SB, columns_SV, top_k_S, top_p_S, min_p_S.contiguous(),
            edges_S, equals_S, width,
            UNIT=WEIGHT_UNIT, TILE=_TILE, PART=_PART, BUCKETS=_BUCKETS, num_warps=16,
        )  # fmt: skip
        num_parts = triton.cdiv(width, _PART)
        above_SP, level_SP = torch.empty(2, num_rows, num_parts, dtype=torch.int64, device=device)
        _add_up[(num_rows, num_parts)](weights_SV, edges_S, above_SP, level_SP, width, PART=_PART, num_warps=8)
        _pick[(num_rows,)](
            weights_SV, edges_S, equals_S, above_SP, level_SP, uniform_S.contiguous(), tokens_S, width, num_parts,
            PART=_PART, PARTS=triton.next_power_of_2(num_parts), num_warps=8,
        )  # fmt: skip
    return tokens_S


@triton.jit
def _weigh(
    logits_ptr, peaks_ptr, temperature_ptr, top_k_ptr, top_p_ptr, weights_ptr, counts_ptr, sums_ptr, width, stride,
    UNIT: tl.constexpr, TILE: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Compute probabilities in units of the largest one's 2**-44, in float64, rounded once, halves to even."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside = columns < width
    logits = tl.load(logits_ptr + row * stride + columns, mask=is_inside, other=0.0).to(tl.float64)
    below = logits - tl.load(peaks_ptr + row).to(tl.float64)
    sizes = tl.exp(below / tl.load(temperature_ptr + row)) * UNIT
    # adding 1.5 * 2**52 leaves no bits behind the point
    rounded = (sizes + 6755399441055744.0) - 6755399441055744.0
    rounded = tl.where(rounded == rounded, rounded, 0.0)
    weights = rounded.to(tl.int64)
    tl.store(weights_ptr + row * width + columns, weights, mask=is_inside)

    is_inside = is_inside & (weights > 0)
    buckets = row * BUCKETS + tl.where(weights > 0, (rounded.to(tl.int64, bitcast=True) >> _DROPPED) - _ONE + 1, 0)
    if tl.load(top_k_ptr + row) > 0:
        tl.atomic_add(counts_ptr + buckets, tl.full((TILE,), 1, tl.int64), mask=is_inside, sem="relaxed")
    if tl.load(top_p_ptr + row) < 1.0:
        tl.atomic_add(sums_ptr + buckets, weights, mask=is_inside, sem="relaxed")


@triton.jit
def _least_of(bucket):
    """Return the smallest weight of a bucket; 1 for the bucket of weight 0."""
    return tl.ceil(((bucket - 1 + _ONE) << _DROPPED).to(tl.float64, bitcast=True)).to(tl.int64)


@triton.jit
def _gather(weights_at, columns_at, width, least, end, PART: tl.constexpr):
    """Store the columns of the weights in [least, end) one after another; return their number."""
    length = 0
    tl.debug_barrier()  # all threads have read the previous gathering
    for start in range(0, width, PART):
        columns = start + tl.arange(0, PART)
        weights = tl.load(weights_at + columns, mask=columns < width, other=0)
        is_inside = (weights >= least) & (weights < end)
        num_inside = tl.sum(is_inside.to(tl.int32), 0)
        if num_inside > 0:
            places = length + tl.cumsum(is_inside.to(tl.int32), 0) - 1
            tl.store(columns_at + places, columns, mask=is_inside)
        length += num_inside
    tl.debug_barrier()
    return length


@triton.jit
def _gathered(weights_at, columns_at, start, length, TILE: tl.constexpr):
    """Return a tile of the gathered weights, padded with -1."""
    places = start + tl.arange(0, TILE)
    columns = tl.load(columns_at + places, mask=places < length, other=0)
    return tl.load(weights_at + columns, mask=places < length, other=-1)


@triton.jit
def _from(weights_at, columns_at, length, least, IS_SUM: tl.constexpr, TILE: tl.constexpr):
    """Return [8] int64, for each of 8 bounds `least` the number or sum of the gathered weights from this bound on."""
    found = tl.zeros((8,), tl.int64)
    for start in range(0, length, TILE):
        weights = _gathered(weights_at, columns_at, start, length, TILE)[:, None]
        counted = weights if IS_SUM else tl.full((TILE, 1), 1, tl.int64)
        found += tl.sum(tl.where(weights >= least[None, :], counted, 0), 0)
    return found


@triton.jit
def _last_kept(
    weights_at, columns_at, measures_at, width, limit,
    IS_SUM: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Return the least weight above which there are fewer than `limit` weights, or less than `limit` in sum; 0: all.

    Also return its bucket and how many weights of the bucket were gathered.
    """
    buckets = tl.arange(0, BUCKETS).to(tl.int64)
    measures = tl.load(measures_at + buckets)
    above = tl.sum(measures, 0) - tl.cumsum(measures, 0)  # of larger buckets
    bucket = tl.max(tl.where(above + measures >= limit, buckets, 0), 0)
    limit -= tl.sum(tl.where(buckets > bucket, measures, 0), 0)
    weight = _least_of(bucket)
    length = _gather(weights_at, columns_at, width, weight, _least_of(bucket + 1), PART)
    digits = tl.arange(0, 8).to(tl.int64)
    for step in range(3, _BITS + 1, 3):
        least = weight + (digits << (_BITS - step))
        is_below = (digits > 0) & (_from(weights_at, columns_at, length, least, IS_SUM, TILE) >= limit)
        weight += tl.sum(is_below.to(tl.int64), 0) << (_BITS - step)
    return tl.where(bucket > 0, weight, 0), bucket, length


@triton.jit
def _above(
    weights_at, columns_at, measures_at, bucket, length, weight,
    IS_SUM: tl.constexpr, TILE: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Count or sum the weights above this weight of a gathered bucket."""
    buckets = tl.arange(0, BUCKETS)
    found = tl.sum(tl.where(buckets > bucket, tl.load(measures_at + buckets), 0), 0)
    for start in range(0, length, TILE):
        weights = _gathered(weights_at, columns_at, start, length, TILE)
        counted = weights if IS_SUM else tl.full((TILE,), 1, tl.int64)
        found += tl.sum(tl.where(weights > weight, counted, 0), 0)
    return found


@triton.jit
def _keep(
    weights_ptr, counts_ptr, sums_ptr, columns_ptr, top_k_ptr, top_p_ptr, min_p_ptr, edges_ptr, equals_ptr, width,
    UNIT: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Find `edge` and `num_equal`; tokens above the edge are kept, and the first `num_equal` tokens level with it."""
    row = tl.program_id(0).to(tl.int64)
    weights_at, columns_at = weights_ptr + row * width, columns_ptr + row * width
    counts_at, sums_at = counts_ptr + row * BUCKETS, sums_ptr + row * BUCKETS
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    edge, num_equal = row * 0, row * 0
    total = tl.sum(tl.load(sums_at + tl.arange(0, BUCKETS)), 0)  # 0 where no top_p asks for it
    if top_k > 0:
        edge, bucket, length = _last_kept(weights_at, columns_at, counts_at, width, top_k, False, TILE, PART, BUCKETS)
        num_equal = top_k - _above(weights_at, columns_at, counts_at, bucket, length, edge, False, TILE, BUCKETS)
        total = _above(weights_at, columns_at, sums_at, bucket, length, edge, True, TILE, BUCKETS) + num_equal * edge
    if top_p < 1.0:
        limit = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)  # the first one always stays
        last, bucket, length = _last_kept(weights_at, columns_at, sums_at, width, limit, True, TILE, PART, BUCKETS)
        before = _above(weights_at, columns_at, sums_at, bucket, length, last, True, TILE, BUCKETS)
        # a token of this weight stays if the sum before it is below the limit
        num_last = tl.cdiv(limit - before, tl.maximum(last, 1))
        num_equal = tl.where(last > edge, num_last, tl.where(last == edge, tl.minimum(num_equal, num_last), num_equal))
        edge = tl.maximum(edge, last)
    below_floor = tl.ceil(tl.load(min_p_ptr + row) * UNIT).to(tl.int64) - 1
    num_equal = tl.where(below_floor >= edge, 0, num_equal)
    tl.store(edges_ptr + row, tl.maximum(edge, below_floor))
    tl.store(equals_ptr + row, num_equal)


@triton.jit
def _add_up(weights_ptr, edges_ptr, above_ptr, level_ptr, width, PART: tl.constexpr):
    """Sum one part's weights above the edge, and count those level with it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * PART + tl.arange(0, PART)
    weights = tl.load(weights_ptr + row * width + columns, mask=columns < width, other=-2)
    edge = tl.load(edges_ptr + row)
    at = row * tl.num_programs(1) + part
    tl.store(above_ptr + at, tl.sum(tl.where(weights > edge, weights, 0), 0))
    tl.store(level_ptr + at, tl.sum((weights == edge).to(tl.int64), 0))


@triton.jit
def _pick(
    weights_ptr, edges_ptr, equals_ptr, above_ptr, level_ptr, uniform_ptr, tokens_ptr, width, num_parts,
    PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Pick the first token up to which the kept weights are more than a share of their sum."""
    row = tl.program_id(0).to(tl.int64)
    edge, num_equal = tl.load(edges_ptr + row), tl.load(equals_ptr + row)
    parts = tl.arange(0, PARTS)
    above = tl.load(above_ptr + row * num_parts + parts, mask=parts < num_parts, other=0)
    level = tl.load(level_ptr + row * num_parts + parts, mask=parts < num_parts, other=0)
    num_kept = tl.minimum(tl.maximum(num_equal - (tl.cumsum(level, 0) - level), 0), level)
    sums = above + num_kept * edge
    total = tl.sum(sums, 0)
    target = tl.minimum((tl.load(uniform_ptr + row) * total.to(tl.float64)).to(tl.int64), total - 1)
    is_behind = (tl.cumsum(sums, 0) > target) & (parts < num_parts)
    part = tl.min(tl.where(is_behind, parts, num_parts - 1), 0)

    columns = part * PART + tl.arange(0, PART)
    weights = tl.load(weights_ptr + row * width + columns, mask=columns < width, other=-2)
    is_equal = (weights == edge).to(tl.int64)
    earlier = tl.cumsum(is_equal, 0) + tl.sum(tl.where(parts < part, level, 0), 0)
    is_kept = (weights > edge) | ((is_equal > 0) & (earlier <= num_equal))
    running = tl.cumsum(tl.where(is_kept, weights, 0), 0) + tl.sum(tl.where(parts < part, sums, 0), 0)
    token = tl.min(tl.where((running > target) & (columns < width), columns, width - 1), 0)
    tl.store(tokens_ptr + row, token.to(tl.int64))
