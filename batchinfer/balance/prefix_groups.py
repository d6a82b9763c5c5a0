"""Assignment of a work unit's prompts to ranks: equal work, and shared prefixes on one rank.

A branch of the prefix tree that is more than a rank's share is cut where its children part: each rank that gets a child
then computes the prefix above (`own_shared_tokens` returns the remaining sharing). Finer cuts balance better and share
less, so several are dealt out (prefill.py), and one long stretch of the tree to each rank, which shares most; the deal
whose busiest rank has the least work is taken.
"""

# N requests in the order in which they run, R ranks, Q quantities, the first two: new tokens and attention work

from collections.abc import Iterable
from itertools import accumulate, pairwise

import numpy as np

from batchinfer.balance.prefill import attention_work, deal
from batchinfer.records import ConfigError

LARGEST_GROUPS = (1.0, 0.5, 0.25, 0.125)  # of a rank's share: groups that are kept whole
SMALLEST_PIECE = 0.25  # of the largest group: neighbours below a cut are kept together up to this
ROUNDING = 1e-9
NUM_HALVINGS = 30
GOOD_ENOUGH, GOOD_ENOUGH_WITH_DECODE = 1.02, 1.04  # busiest rank by the mean: cut no finer


def deal_prefixes(
    num_tokens: np.ndarray,
    shared_tokens: np.ndarray,
    output_tokens: np.ndarray,
    *,
    num_ranks: int,
    load_of_rank: np.ndarray | None = None,
) -> np.ndarray:
    """Give each request a rank, prefix groups kept together as far as balance allows.

    Balanced are prefill tokens, their attention work, and, where the same ranks decode, tokens to generate and the
    attention work of these: prefill steps and decode steps both wait for their busiest rank.

    Args:
        num_tokens: [N] integers, prompt lengths.
        shared_tokens: [N] integers, tokens shared with the request before it; below the prompt's length.
        output_tokens: [N] tokens that the same rank is expected to generate; 0 where others decode.
        num_ranks: at least 1.
        load_of_rank: [R, 4] loads that ranks have already, as `request_sizes`; None: nothing.

    Returns:
        [N] int64 ranks.

    Raises:
        ConfigError: arrays of different lengths, or no rank.
    """
    if not len(num_tokens) == len(shared_tokens) == len(output_tokens):
        raise ConfigError(
            f"{len(num_tokens)} prompt lengths, {len(shared_tokens)} shared and {len(output_tokens)} output lengths; "
            "give one of each for every request"
        )
    if num_ranks == 1 or len(num_tokens) == 0:
        return np.zeros(len(num_tokens), dtype=np.int64)
    num_used = 4 if np.any(output_tokens) else 2
    start_RQ = np.zeros((num_ranks, num_used)) if load_of_rank is None else load_of_rank[:, :num_used]
    sizes_NQ = request_sizes(num_tokens, shared_tokens, output_tokens)[:, :num_used]
    unit_Q = np.maximum(_least_busiest(sizes_NQ, start_RQ), 1.0)
    best_N, best_peak = np.zeros(0, dtype=np.int64), np.inf
    for largest in (*LARGEST_GROUPS, None):
        if largest is None:
            rank_N = _stretches(shared_tokens, sizes_NQ / unit_Q, start_RQ / unit_Q, unit_Q)
        else:
            rank_N = deal(sizes_NQ, cut_groups(shared_tokens, sizes_NQ / unit_Q, largest=largest), start_RQ)
        real_NQ = request_sizes(num_tokens, own_shared_tokens(shared_tokens, rank_N), output_tokens)[:, :num_used]
        loads_RQ = start_RQ + np.stack([np.bincount(rank_N, size_N, num_ranks) for size_N in real_NQ.T], axis=1)
        peak = float((loads_RQ / unit_Q).max())
        if peak < best_peak:
            best_N, best_peak = rank_N, peak
        if best_peak <= (GOOD_ENOUGH if num_used == 2 else GOOD_ENOUGH_WITH_DECODE):
            break
    return best_N


def request_sizes(num_tokens: np.ndarray, shared_tokens: np.ndarray, output_tokens: np.ndarray) -> np.ndarray:
    """Return new prompt tokens and their attention work, output tokens and their attention work, [N, 4]."""
    new_N, output_N = np.asarray(num_tokens) - shared_tokens, np.asarray(output_tokens, dtype=np.float64)
    works = attention_work(new_N, shared_tokens), attention_work(output_N, num_tokens)
    return np.stack([new_N, works[0], output_N, works[1]], axis=1)


def cut_groups(
    shared_tokens: np.ndarray, sizes: np.ndarray, *, largest: float, smallest: float | None = None
) -> np.ndarray:
    """Cut requests into prefix groups of at most a size: consecutive requests, the deepest branches left whole.

    A stretch that is too large is cut at all places where its neighbours share least. Of the pieces, small neighbours
    stay together, since they share the prefix above the cut.

    Args:
        shared_tokens: [N] integers, tokens shared with the request before it.
        sizes: [N, Q] of each request, in the unit of `largest`; a group is as large as the largest of its sums.
        smallest: neighbours below a cut stay together up to this size; None: a quarter of `largest`.

    Returns:
        [N] int64 group numbers, rising. A single request may be larger than `largest`.
    """
    before = np.concatenate([np.zeros((1, sizes.shape[1])), np.cumsum(sizes, axis=0)])
    smallest = largest * SMALLEST_PIECE if smallest is None else smallest

    def size(first: int, end: int) -> float:
        return float((before[end] - before[first]).max())

    starts = []
    left = [(0, len(sizes))]
    while left:
        first, end = left.pop()
        if end - first <= 1 or size(first, end) <= largest * (1 + ROUNDING):
            starts.append(first)
            continue
        inner = np.asarray(shared_tokens[first + 1 : end])
        cuts = [first, *(first + 1 + np.flatnonzero(inner == inner.min())).tolist(), end]
        pieces = []
        piece_start = first
        for cut, next_cut in pairwise(cuts[1:]):
            if size(piece_start, next_cut) > smallest:
                pieces.append((piece_start, cut))
                piece_start = cut
        pieces.append((piece_start, end))
        left += pieces[::-1]
    is_start = np.zeros(len(sizes), dtype=np.int64)
    is_start[starts] = 1
    return np.cumsum(is_start) - 1


def _least_busiest(sizes_N2: np.ndarray, start_R2: np.ndarray) -> np.ndarray:
    """Return the least load that some rank must have, [Q].

    Measured by a smaller unit, one quantity could hide how the other is spread.
    """
    even_2 = (sizes_N2.sum(axis=0) + start_R2.sum(axis=0)) / len(start_R2)
    return np.maximum.reduce([even_2, sizes_N2.max(axis=0), start_R2.max(axis=0)])


def _stretches(shared_tokens: np.ndarray, sizes_N2: np.ndarray, start_R2: np.ndarray, unit_2: np.ndarray) -> np.ndarray:
    """Return ranks, [N]: one stretch of neighbours each, the busiest as small as possible; sizes in units of `unit_2`.

    A stretch also has to compute the tokens that its first request shares with the one before.
    """
    shared = np.asarray(shared_tokens, dtype=np.float64)
    again_N2 = np.zeros(sizes_N2.shape)
    again_N2[:, 0], again_N2[:, 1] = shared / unit_2[0], shared * (shared + 1) / 2 / unit_2[1]
    before = np.concatenate([np.zeros((1, sizes_N2.shape[1])), np.cumsum(sizes_N2, axis=0)])
    num_requests = len(shared)

    def starts_below(limit: float) -> list[int]:
        """Return the starts of the ranks' stretches with no rank above the limit, as far as the requests reach."""
        starts = [0]
        for load_2 in start_R2:
            first = starts[-1]
            if first == num_requests:
                break
            room_2 = limit - load_2 - (again_N2[first] if first else 0.0) + before[first]
            ends = [int(np.searchsorted(before[:, i], room_2[i], side="right")) - 1 for i in range(len(room_2))]
            starts.append(max(first, min(ends)))
        return starts

    low, high = 0.0, float((before[-1] + start_R2.max(axis=0) + again_N2.max(axis=0)).max()) * (1 + ROUNDING) + 1.0
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if starts_below(middle)[-1] == num_requests else (middle, high)
    starts = starts_below(high)
    rank_N = np.zeros(num_requests, dtype=np.int64)
    for rank, (first, end) in enumerate(pairwise(starts)):
        rank_N[first:end] = rank
    return rank_N


def own_shared_tokens(shared_tokens: np.ndarray, rank_of_request: np.ndarray) -> np.ndarray:
    """Return tokens that a prompt shares with the request before it on the same rank, [N]; 0 for a rank's first.

    Two prompts share the least of the tokens that the neighbours between them share. The first prompt of a rank may
    share more with the rank's earlier prompts, which only the caller knows.
    """
    own = np.zeros(len(shared_tokens), dtype=np.int64)
    for rank in np.unique(rank_of_request):
        places = np.flatnonzero(rank_of_request == rank)
        if len(places) > 1:
            padded = np.append(shared_tokens, 0)
            # stretches from behind one place up to the next one
            bounds = np.stack([places[:-1] + 1, places[1:] + 1], axis=1).ravel()
            own[places[1:]] = np.minimum.reduceat(padded, bounds)[::2]
    return own


def num_kept(work: Iterable[float]) -> int:
    """Return how many waiting requests a rank keeps when an idle rank takes over the later half, by work.

    Args:
        work: of each, in their order. A single remaining request is taken over, too: its rank has not begun it.
    """
    before = [0.0, *accumulate(work)]
    return min(sum(done < before[-1] / 2 for done in before[:-1]), len(before) - 2)
