"""Which rank decodes which request: equal KV tokens and equal request counts.

Ranks decode in lock-step, and a step takes as long as the busiest rank:

    admit           requests that are ready, as ranks have free slots
    assign_decode   the same for ranks that have nothing yet, and slots for all: requests to ranks, all at once
    propose_moves   running requests from busy to idle ranks, where that pays

decode_loads.py holds what runs where and asks these.
"""

# N requests, W waiting ones, R ranks

import heapq
from dataclasses import dataclass

import numpy as np

from batchinfer.balance.request_load import ONE_PER_TOKEN, RequestLoad
from batchinfer.records import ConfigError

LEVEL = 1.0001  # busiest rank by the bound: stop exchanging
EXCHANGES_PER_RANK = 50
START_MOVING = 1.05  # busiest rank by the mean: below, no moves
STOP_MOVING = 1.02
MUST_PAY_TIMES = 4.0  # loads also even out as requests end: a move has to bring its cost this many times over


def decode_bound(kv_tokens: np.ndarray, *, num_ranks: int) -> float:
    """With equal request counts, the busiest rank cannot have fewer KV tokens; arguments as for `assign_decode`.

    The larger of an even share, and the largest request together with the smallest that have to be beside it.
    """
    ascending = np.sort(_counts(kv_tokens, num_ranks))
    num_beside = max(0, len(ascending) // num_ranks - 1)
    return max(float(ascending.sum()) / num_ranks, float(ascending[-1:].sum() + ascending[:num_beside].sum()))


def assign_decode(kv_tokens: np.ndarray, *, num_ranks: int) -> np.ndarray:
    """Give each request a rank: counts differ by at most 1, and the busiest rank has as few KV tokens as possible.

    Largest request first, to the rank with the fewest tokens that has room (LPT with equal counts; ties go to the
    lowest rank). Then the busiest rank exchanges a request for a smaller one elsewhere, the two that even out the ranks
    best, until no exchange helps.

    Args:
        kv_tokens: [N] integers, KV tokens that a request's next step attends to.
        num_ranks: ranks that run decode, at least 1.

    Returns:
        [N] int64, the rank of each request.

    Raises:
        ConfigError: num_ranks < 1 or a negative count.
    """
    kv_N = _counts(kv_tokens, num_ranks)
    num_each, num_extra = divmod(len(kv_N), num_ranks)
    slots_R = np.full(num_ranks, num_each)
    return _place(kv_N, np.zeros(num_ranks), slots_R, num_extra, goal=LEVEL * decode_bound(kv_N, num_ranks=num_ranks))


def _counts(kv_tokens: np.ndarray, num_ranks: int) -> np.ndarray:
    """Checked int64 counts."""
    if num_ranks < 1:
        raise ConfigError(f"num_ranks is {num_ranks}, but requests need at least 1 rank; use 1 or more")
    counts = np.asarray(kv_tokens).astype(np.int64)
    if (counts < 0).any():
        first = int(np.argmax(counts < 0))
        raise ConfigError(f"kv_tokens[{first}] is {counts[first]}, but a count is at least 0; correct the count")
    return counts


def _check_lengths(**arrays: np.ndarray) -> None:
    """All arrays have as many entries as the first."""
    (first, expected), *others = [(name, len(values)) for name, values in arrays.items()]
    for name, num in others:
        if num != expected:
            raise ConfigError(f"{name} has {num} entries, but {first} has {expected}; give as many")


def _place(
    size_N: np.ndarray, load_of_rank: np.ndarray, slots_R: np.ndarray, num_extra: int = 0, *, goal: float = 0.0
) -> np.ndarray:
    """[N] ranks: largest first to the idlest rank with a slot, then exchanges between the busiest and the others.

    Args:
        load_of_rank: [R] what ranks have already; it stays where it is.
        slots_R: [R] requests that each takes.
        num_extra: ranks that take one more: the first to ask for it.
        goal: a busiest rank that is good enough.
    """
    load_R = np.array(load_of_rank, dtype=np.float64)
    free_R = slots_R.tolist()
    rank_N = np.empty(len(size_N), dtype=np.int64)
    least_first = [(load, rank) for rank, load in enumerate(load_R.tolist())]
    heapq.heapify(least_first)
    sizes = size_N.tolist()
    for request in np.argsort(-size_N, kind="stable").tolist():
        load, rank = heapq.heappop(least_first)
        while free_R[rank] == 0 and not num_extra:
            load, rank = heapq.heappop(least_first)  # the one before is full
        rank_N[request] = rank
        load_R[rank] += sizes[request]
        free_R[rank] -= 1
        if free_R[rank] < 0:
            num_extra -= 1
        else:
            heapq.heappush(least_first, (load + sizes[request], rank))
    _exchange(size_N, rank_N, load_R, goal)
    return rank_N


def _exchange(size_N: np.ndarray, rank_N: np.ndarray, load_R: np.ndarray, goal: float) -> None:
    """Even out the busiest rank with the idlest one that has a fitting request, again and again; changes rank_N."""
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
            pair = _best_pair(size_N[mine], size_N[theirs], load_R[busiest] - load_R[other])
            if pair is not None:
                break
        else:
            return
        given, taken = mine[pair[0]], theirs[pair[1]]
        tokens = size_N[given] - size_N[taken]
        load_R[busiest] -= tokens
        load_R[other] += tokens
        rank_N[given], rank_N[taken] = other, busiest


def _best_pair(mine: np.ndarray, theirs: np.ndarray, gap: float) -> tuple[int, int] | None:
    """The two whose exchange evens out loads a gap apart best: their difference is nearest to half of it.

    Args:
        mine: KV tokens of the busier rank's requests.
        theirs: those of the other, ascending.
    """
    if len(theirs) == 0:
        return None
    after = np.searchsorted(theirs, mine - gap / 2)
    near = np.stack([after - 1, after], axis=1).clip(0, len(theirs) - 1)
    off = np.abs(mine[:, None] - theirs[near] - gap / 2)
    place, side = divmod(int(off.argmin()), 2)
    return (place, int(near[place, side])) if off[place, side] < gap / 2 else None


def admit(
    expected_tokens: np.ndarray,
    kv_tokens: np.ndarray,
    *,
    load_of_rank: np.ndarray,
    free_slots_of_rank: np.ndarray,
    request_load: RequestLoad = ONE_PER_TOKEN,
) -> np.ndarray:
    """Ranks for requests that are ready: the longest expected get the slots, each the least loaded rank with one.

    Long answers that begin early do not keep a few ranks busy at the end. Those that get a slot are spread like
    `assign_decode` does it, on top of what the ranks have. Ties go to the earlier request and the lower rank.

    Args:
        expected_tokens: [W] output lengths to expect (`OutputLengths.expected`).
        kv_tokens: [W] KV tokens at once: the prompt.
        load_of_rank: [R] the sum of `request_load` over the requests there.
        free_slots_of_rank: [R] requests that each rank can take.
        request_load: what a request costs a step.

    Returns:
        [W] int64 ranks; -1: it waits.

    Raises:
        ConfigError: arrays that should have the same length have not, or there is no rank.
    """
    kv_W = _counts(kv_tokens, len(load_of_rank))
    _check_lengths(kv_tokens=kv_W, expected_tokens=expected_tokens)
    _check_lengths(load_of_rank=load_of_rank, free_slots_of_rank=free_slots_of_rank)
    free_R = np.maximum(free_slots_of_rank, 0)
    rank_W = np.full(len(kv_W), -1, dtype=np.int64)
    chosen = np.sort(np.argsort(-np.asarray(expected_tokens), kind="stable")[: free_R.sum()])
    rank_W[chosen] = _place(request_load.of(kv_W[chosen]), load_of_rank, free_R)
    return rank_W


@dataclass(frozen=True, slots=True)
class Move:
    """A running request changes its rank at a step boundary; its KV goes along."""

    request: int
    from_rank: int
    to_rank: int
    kv_tokens: int


def propose_moves(
    rank_of_request: np.ndarray,
    kv_tokens: np.ndarray,
    remaining_tokens: np.ndarray,
    *,
    max_requests_of_rank: np.ndarray,
    move_steps: float,
    request_load: RequestLoad = ONE_PER_TOKEN,
) -> list[Move]:
    """Moves that make steps so much shorter that they pay; none while the ranks are about equal.

    From the busiest rank to the idlest with a slot, the request nearest to half of what lies between them, again and
    again. Of these moves, as many of the first are proposed as bring most: what they take off the busiest rank, for as
    long as the moved requests are expected to run, less the time that the busiest link is sending.

    Args:
        rank_of_request: [N] ranks of the running requests.
        kv_tokens: [N] their KV tokens now.
        remaining_tokens: [N] tokens still to come (`OutputLengths.remaining_each`).
        max_requests_of_rank: [R] slots of each rank.
        move_steps: sending a KV token takes as long as reading it in this many steps.
        request_load: what a request costs a step.

    Raises:
        ConfigError: arrays that should have the same length have not, or there is no rank.
    """
    num_ranks = len(max_requests_of_rank)
    kv_N, rank_N = _counts(kv_tokens, num_ranks), np.array(rank_of_request, dtype=np.int64)
    _check_lengths(kv_tokens=kv_N, rank_of_request=rank_N, remaining_tokens=remaining_tokens)
    size_N = request_load.of(kv_N)
    load_R = np.bincount(rank_N, weights=size_N, minlength=num_ranks)
    free_R = np.asarray(max_requests_of_rank) - np.bincount(rank_N, minlength=num_ranks)
    load_before, mean = load_R.max(), load_R.mean()
    if load_before <= START_MOVING * mean:
        return []
    sent_R = np.zeros(num_ranks)
    moves: list[Move] = []
    best_num, best_net = 0, 0.0
    while load_R.max() > STOP_MOVING * mean:
        move = _next_move(size_N, kv_N, rank_N, load_R, free_R)
        if move is None:
            break
        moves.append(move)
        ranks = [move.from_rank, move.to_rank]
        load_R[ranks] += np.array([-1.0, 1.0]) * size_N[move.request]
        free_R[ranks] += [1, -1]
        sent_R[ranks] += move.kv_tokens
        rank_N[move.request] = -1  # it moves only once
        num_steps = np.mean([remaining_tokens[done.request] for done in moves])
        net = (load_before - load_R.max()) * num_steps - MUST_PAY_TIMES * move_steps * sent_R.max()
        if net > best_net:
            best_num, best_net = len(moves), net
    return moves[:best_num]


def _next_move(
    size_N: np.ndarray, kv_N: np.ndarray, rank_N: np.ndarray, load_R: np.ndarray, free_R: np.ndarray
) -> Move | None:
    """From the busiest rank to the idlest with a slot, what is nearest to half of the gap between them."""
    busiest, idlest = int(load_R.argmax()), int(np.where(free_R > 0, load_R, np.inf).argmin())
    gap = load_R[busiest] - load_R[idlest]
    mine = np.flatnonzero((rank_N == busiest) & (size_N < gap))
    if free_R[idlest] <= 0 or len(mine) == 0:
        return None
    request = int(mine[np.abs(size_N[mine] - gap / 2).argmin()])
    return Move(request, busiest, idlest, int(kv_N[request]))
