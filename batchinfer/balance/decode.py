"""Assignment of requests to decode ranks: equal KV tokens and equal request counts.

Ranks decode in lock-step, and a step takes as long as the busiest rank:

    assign_decode   requests to ranks, on top of the requests that the ranks have
    admit           ready requests to free slots: answers that end at like times are spread with one assign_decode each

Running requests move where that pays (decode_moves.py). decode_loads.py records the rank of each request and calls
both.
"""

# N requests, W waiting requests, R ranks

import heapq
from dataclasses import dataclass

import numpy as np

from batchinfer.balance.request_load import ONE_PER_TOKEN, RequestLoad
from batchinfer.records import ConfigError

LEVEL = 1.0001  # busiest rank / bound: stop exchanging
EXCHANGES_PER_RANK = 50
LIKE_ENDS = 0.75  # of the longest answer: shorter ones end at another time


def decode_bound(kv_tokens: np.ndarray, *, num_ranks: int) -> float:
    """Return the fewest KV tokens that the busiest rank can have with equal request counts, on ranks without requests.

    The larger of an even share, and the largest request together with the smallest requests that share its rank.
    """
    ascending = np.sort(checked_counts(kv_tokens, num_ranks))
    num_others = max(0, len(ascending) // num_ranks - 1)
    return max(float(ascending.sum()) / num_ranks, float(ascending[-1:].sum() + ascending[:num_others].sum()))


def assign_decode(
    kv_tokens: np.ndarray,
    *,
    num_ranks: int,
    load_of_rank: np.ndarray | None = None,
    requests_of_rank: np.ndarray | None = None,
    free_slots_of_rank: np.ndarray | None = None,
    request_load: RequestLoad = ONE_PER_TOKEN,
) -> np.ndarray:
    """Give each request a rank: counts as level as the slots allow, and the busiest rank with as little as possible.

    Ranks without requests get counts that differ by at most 1. Largest request first, to the least loaded rank that has
    room (LPT with equal counts; ties go to the lowest rank). Then the busiest rank exchanges a request for a smaller
    one elsewhere, the two that even out the ranks best, until no exchange helps.

    Args:
        kv_tokens: [N] integers, KV tokens that a request's next step attends to.
        num_ranks: ranks that run decode, at least 1.
        load_of_rank: [R] the sum of `request_load` over the requests that each rank has; None: no requests.
        requests_of_rank: [R] the number of requests that each rank has; None: none.
        free_slots_of_rank: [R] requests that each rank can take; None: any number.
        request_load: the cost of a request in a step.

    Returns:
        [N] int64, the rank of each request.

    Raises:
        ConfigError: num_ranks < 1, a negative count, or more requests than slots.
    """
    kv_N = checked_counts(kv_tokens, num_ranks)
    load_R = np.zeros(num_ranks) if load_of_rank is None else np.array(load_of_rank, dtype=np.float64)
    have_R = np.zeros(num_ranks, dtype=np.int64) if requests_of_rank is None else np.asarray(requests_of_rank)
    free_R = np.full(num_ranks, len(kv_N)) if free_slots_of_rank is None else np.maximum(free_slots_of_rank, 0)
    check_lengths(ranks=load_R, requests_of_rank=have_R, free_slots_of_rank=free_R)
    if free_R.sum() < len(kv_N):
        raise ConfigError(f"{len(kv_N)} requests are more than the {free_R.sum()} free slots; give the first ones")
    goal = 0.0 if load_R.any() else LEVEL * decode_bound(request_load.of(kv_N), num_ranks=num_ranks)
    rank_N = _place(request_load.of(kv_N), load_R, _level_slots(len(kv_N), have_R, free_R))
    _exchange(request_load.of(kv_N), rank_N, load_R, goal)
    return rank_N


def checked_counts(kv_tokens: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the counts as int64; raise ConfigError unless they suit `assign_decode`."""
    if num_ranks < 1:
        raise ConfigError(f"num_ranks is {num_ranks}, but requests need at least 1 rank; use 1 or more")
    counts = np.asarray(kv_tokens).astype(np.int64)
    if (counts < 0).any():
        first = int(np.argmax(counts < 0))
        raise ConfigError(f"kv_tokens[{first}] is {counts[first]}, but a count is at least 0; correct the count")
    return counts


def check_lengths(**arrays: np.ndarray) -> None:
    """Raise ConfigError unless all arrays have as many entries as the first."""
    (first, expected), *others = [(name, len(values)) for name, values in arrays.items()]
    for name, num in others:
        if num != expected:
            raise ConfigError(f"{name} has {num} entries, but {first} has {expected}; give as many")


@dataclass(slots=True)
class _Slots:
    """Slots of ranks for new requests."""

    of_rank: list[int]  # requests that each rank takes
    may_take_more: list[bool]  # ranks that are then as full as the others, and have room
    num_more: int  # this number of these ranks take one request more: the first to need it


def _level_slots(num: int, have_R: np.ndarray, free_R: np.ndarray) -> _Slots:
    """Return slots for `num` requests that make the counts of the ranks as level as their free slots allow."""

    def taken(level: int) -> np.ndarray:
        return np.clip(level - have_R, 0, free_R)

    low, high = 0, int(have_R.max()) + num + 1  # not too many, maybe too many
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if taken(middle).sum() <= num else (low, middle)
    slots_R = taken(low)
    return _Slots(slots_R.tolist(), (taken(low + 1) > slots_R).tolist(), num - int(slots_R.sum()))


def _place(size_N: np.ndarray, load_R: np.ndarray, slots: _Slots) -> np.ndarray:
    """Return [N] ranks: the largest request first, to the least loaded rank with a slot; adds to load_R."""
    rank_N = np.empty(len(size_N), dtype=np.int64)
    least_first = [(load, rank) for rank, load in enumerate(load_R.tolist())]
    heapq.heapify(least_first)
    sizes = size_N.tolist()
    for request in np.argsort(-size_N, kind="stable").tolist():
        load, rank = heapq.heappop(least_first)
        while slots.of_rank[rank] == 0 and not (slots.num_more and slots.may_take_more[rank]):
            load, rank = heapq.heappop(least_first)  # the one before is full
        rank_N[request] = rank
        load_R[rank] += sizes[request]
        if slots.of_rank[rank]:
            slots.of_rank[rank] -= 1
            heapq.heappush(least_first, (load + sizes[request], rank))
        else:
            slots.num_more -= 1
    return rank_N


def _exchange(size_N: np.ndarray, rank_N: np.ndarray, load_R: np.ndarray, goal: float) -> None:
    """Even out the busiest rank with the idlest that has a fitting request, repeatedly; changes rank_N and load_R."""
    num_ranks = len(load_R)
    goal = max(goal, LEVEL * float(load_R.mean()))
    for _ in range(EXCHANGES_PER_RANK * num_ranks):
        busiest = int(load_R.argmax())
        if load_R[busiest] <= goal:
            return
        mine = np.flatnonzero(rank_N == busiest)
        for other in np.argsort(load_R, kind="stable").tolist() if len(mine) else []:
            theirs = np.flatnonzero(rank_N == other)
            theirs = theirs[np.argsort(size_N[theirs], kind="stable")]
            pair = best_pair(size_N[mine], size_N[theirs], load_R[busiest] - load_R[other])
            if pair is not None:
                break
        else:
            return
        given, taken = mine[pair[0]], theirs[pair[1]]
        tokens = size_N[given] - size_N[taken]
        load_R[busiest] -= tokens
        load_R[other] += tokens
        rank_N[given], rank_N[taken] = other, busiest


def best_pair(mine: np.ndarray, theirs: np.ndarray, gap: float) -> tuple[int, int] | None:
    """Return the pair whose exchange evens out two ranks best: its difference is nearest to half of the gap.

    Args:
        mine: KV tokens of the busier rank's requests.
        theirs: KV tokens of the other rank's requests, ascending.
        gap: difference of the two ranks' loads.

    Returns:
        Indices into `mine` and `theirs`; None if no exchange helps.
    """
    if len(mine) == 0 or len(theirs) == 0:
        return None
    after = np.searchsorted(theirs, mine - gap / 2)
    near = np.stack([after - 1, after], axis=1).clip(0, len(theirs) - 1)
    off = np.abs(mine[:, None] - theirs[near] - gap / 2)
    place, side = divmod(int(off.argmin()), 2)
    return (place, int(near[place, side])) if off[place, side] < gap / 2 else None


def admit(
    expected_tokens: np.ndarray,
    kv_tokens: np.ndarray,
    group_of_request: np.ndarray,
    *,
    load_of_rank: np.ndarray,
    requests_of_rank: np.ndarray,
    free_slots_of_rank: np.ndarray,
    request_load: RequestLoad = ONE_PER_TOKEN,
) -> np.ndarray:
    """Return ranks for ready requests: the longest expected answers get the slots, spread evenly.

    Long answers begin early, so that few ranks are still busy with them at the end. Answers that are expected to end at
    like times are spread over the ranks as a batch, the longest first, so that ranks stay level while answers end. Of
    answers with the same expectation, those of a prompt group end at like times.

    Args:
        expected_tokens: [W] output lengths to expect (`OutputLengths.expected`).
        kv_tokens: [W] KV tokens at once: the prompt.
        group_of_request: [W] numbers of prompt groups.
        load_of_rank, requests_of_rank, free_slots_of_rank, request_load: see `assign_decode`.

    Returns:
        [W] int64 ranks; -1: the request waits.

    Raises:
        ConfigError: arrays that should have the same length have not, or there is no rank.
    """
    num_ranks = len(load_of_rank)
    kv_W, expected_W = checked_counts(kv_tokens, num_ranks), np.asarray(expected_tokens)
    check_lengths(kv_tokens=kv_W, expected_tokens=expected_W, group_of_request=group_of_request)
    check_lengths(load_of_rank=load_of_rank, requests_of_rank=requests_of_rank, free_slots_of_rank=free_slots_of_rank)
    load_R, have_R = np.array(load_of_rank, dtype=np.float64), np.array(requests_of_rank, dtype=np.int64)
    free_R = np.maximum(free_slots_of_rank, 0)
    rank_W = np.full(len(kv_W), -1, dtype=np.int64)
    chosen = np.sort(np.argsort(-expected_W, kind="stable")[: free_R.sum()])
    alike = _like_ends(expected_W[chosen], np.asarray(group_of_request)[chosen], least=num_ranks)
    for part in (chosen[places] for places in alike):
        rank_W[part] = assign_decode(
            kv_W[part],
            num_ranks=num_ranks,
            load_of_rank=load_R,
            requests_of_rank=have_R,
            free_slots_of_rank=free_R,
            request_load=request_load,
        )
        load_R += np.bincount(rank_W[part], request_load.of(kv_W[part]), num_ranks)
        taken_R = np.bincount(rank_W[part], minlength=num_ranks)
        have_R, free_R = have_R + taken_R, free_R - taken_R
    if len(alike) > 1:  # the last batch may be small, with one large request
        rank_C = rank_W[chosen]
        _exchange(request_load.of(kv_W[chosen]), rank_C, load_R, goal=0.0)
        rank_W[chosen] = rank_C
    return rank_W


def _like_ends(expected_W: np.ndarray, group_W: np.ndarray, *, least: int) -> list[np.ndarray]:
    """Return places of requests whose answers are expected to end at like times, the longest answers first.

    Args:
        least: requests of each part: as many as ranks, since fewer cannot be spread.
    """
    order = np.lexsort((group_W, -expected_W))
    parts, first = [], 0
    expected, group = expected_W[order].tolist(), group_W[order].tolist()
    for place in range(1, len(order)):
        is_other = group[place] != group[place - 1] or expected[place] < LIKE_ENDS * expected[first]
        if is_other and place - first >= least:
            parts.append(np.sort(order[first:place]))
            first = place
    return [*parts, np.sort(order[first:])]
