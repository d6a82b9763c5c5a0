"""Which rank runs which prompt of a work unit: equal work, and shared prefixes on one rank.

A branch of the prefix tree that is more than a rank's share is cut where its children part: what they share above is
then computed by each rank that gets one (`own_shared_tokens` says what is left of sharing). Finer cuts balance better
and share less, so several are dealt out (prefill.py), and one long stretch of the tree to each rank, which shares most;
the deal whose busiest rank has least to do is taken.
"""

# N requests in the order in which they run, R ranks, 2: new tokens and attention work

from collections.abc import Iterable
from itertools import accumulate, pairwise

import numpy as np

from batchinfer.balance.prefill import assign_prefill, attention_work
from batchinfer.records import ConfigError

LARGEST_GROUPS = (1.0, 0.5, 0.25, 0.125)  # of a rank's share: groups that are kept whole
SMALLEST_PIECE = 0.25  # of the largest group: neighbours below a cut are kept together up to this
ROUNDING = 1e-9
NUM_HALVINGS = 30
GOOD_ENOUGH = 1.02  # busiest rank by the mean: cut no finer


def deal_prefixes(
    num_tokens: np.ndarray,
    shared_tokens: np.ndarray,
    output_tokens: np.ndarray,
    *,
    num_ranks: int,
    load_of_rank: np.ndarray | None = None,
) -> np.ndarray:
    """Give each request a rank, prefix groups kept together as far as balance allows.

    A token to generate counts like a token of the prompt: both run through all layers and attend to what is before.

    Args:
        num_tokens: [N] integers, prompt lengths.
        shared_tokens: [N] integers, tokens shared with the request before it; below the prompt's length.
        output_tokens: [N] tokens that the same rank is expected to generate; 0 where others decode.
        num_ranks: at least 1.
        load_of_rank: [R, 2] new tokens and attention work that ranks have already; None: nothing.

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
    start_R2 = np.zeros((num_ranks, 2)) if load_of_rank is None else np.asarray(load_of_rank, dtype=np.float64)
    if num_ranks == 1 or len(num_tokens) == 0:
        return np.zeros(len(num_tokens), dtype=np.int64)
    new_N = num_tokens - shared_tokens + np.ceil(output_tokens).astype(np.int64)
    sizes_N2 = np.stack([new_N, attention_work(new_N, shared_tokens)], axis=1)
    unit_2 = np.maximum(_least_busiest(sizes_N2, start_R2), 1.0)
    best_N, best_peak = np.zeros(0, dtype=np.int64), np.inf
    for largest in (*LARGEST_GROUPS, None):
        if largest is None:
            rank_N = _stretches(shared_tokens, sizes_N2 / unit_2, start_R2 / unit_2, unit_2)
        else:
            group_N = cut_groups(shared_tokens, sizes_N2 / unit_2, largest=largest)
            rank_N = assign_prefill(
                new_N, shared_tokens, num_ranks=num_ranks, group_of_request=group_N, load_of_rank=start_R2
            )
        own_N = own_shared_tokens(shared_tokens, rank_N)
        really_N = new_N + shared_tokens - own_N
        loads_R2 = start_R2 + np.stack(
            [
                np.bincount(rank_N, weights=size_N, minlength=num_ranks)
                for size_N in (really_N, attention_work(really_N, own_N))
            ],
            axis=1,
        )
        peak = float((loads_R2 / unit_2).max())
        if peak < best_peak:
            best_N, best_peak = rank_N, peak
        if best_peak <= GOOD_ENOUGH:
            break
    return best_N


def cut_groups(shared_tokens: np.ndarray, sizes: np.ndarray, *, largest: float) -> np.ndarray:
    """Prefix groups of at most a size: consecutive requests, the deepest branches left whole.

    A stretch that is too large is cut at all places where its neighbours share least; of the pieces, neighbours that
    are small stay together, since they share what is above the cut.

    Args:
        shared_tokens: [N] integers, tokens shared with the request before it.
        sizes: [N, 2] of each request, in the unit of `largest`; a group is as large as the larger of its two sums.

    Returns:
        [N] int64 group numbers, rising. A single request may be larger than `largest`.
    """
    before = np.concatenate([np.zeros((1, 2)), np.cumsum(sizes, axis=0)])

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
            if size(piece_start, next_cut) > largest * SMALLEST_PIECE:
                pieces.append((piece_start, cut))
                piece_start = cut
        pieces.append((piece_start, end))
        left += pieces[::-1]
    is_start = np.zeros(len(sizes), dtype=np.int64)
    is_start[starts] = 1
    return np.cumsum(is_start) - 1


def _least_busiest(sizes_N2: np.ndarray, start_R2: np.ndarray) -> np.ndarray:
    """[2] what some rank has in any case; measured by less, one quantity could hide how the other is spread."""
    even_2 = (sizes_N2.sum(axis=0) + start_R2.sum(axis=0)) / len(start_R2)
    return np.maximum.reduce([even_2, sizes_N2.max(axis=0), start_R2.max(axis=0)])


def _stretches(shared_tokens: np.ndarray, sizes_N2: np.ndarray, start_R2: np.ndarray, unit_2: np.ndarray) -> np.ndarray:
    """[N] ranks: one stretch of neighbours for each, the busiest as small as possible; sizes in units of `unit_2`.

    A stretch also has to compute what its first request shares with the one before.
    """
    shared = np.asarray(shared_tokens, dtype=np.float64)
    again_N2 = np.stack([shared, shared * (shared + 1) / 2], axis=1) / unit_2
    before = np.concatenate([np.zeros((1, 2)), np.cumsum(sizes_N2, axis=0)])
    num_requests = len(shared)

    def starts_below(limit: float) -> list[int]:
        """Where the ranks' stretches begin when none is above the limit, as far as the requests reach."""
        starts = [0]
        for load_2 in start_R2:
            first = starts[-1]
            if first == num_requests:
                break
            room_2 = limit - load_2 - (again_N2[first] if first else 0.0) + before[first]
            ends = [int(np.searchsorted(before[:, i], room_2[i], side="right")) - 1 for i in range(2)]
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
    """[N] tokens that a prompt shares with the request before it on the same rank; 0 for a rank's first.

    Two prompts share the least of what the neighbours between them share. The first of a rank may share more with what
    the rank ran before; the caller knows.
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
    """How many of a rank's waiting requests it keeps when one without any takes over the later half, by work.

    Args:
        work: of each, in their order. The only one left goes, too: its rank has not asked for it yet.
    """
    before = [0.0, *accumulate(work)]
    return min(sum(done < before[-1] / 2 for done in before[:-1]), len(before) - 2)
