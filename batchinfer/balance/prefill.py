"""Assignment of prompts to prefill ranks: equal new tokens and equal core-attention work per rank.

Both are balanced at once. Attention work grows with the square of the length, so long prompts decide it, and short ones
can still level the tokens: items are dealt largest first, and the search is for the weight of attention against tokens.
Loads are in units of the lower bounds, so 1.0 is a perfect rank.
"""

# N requests, I items (a request, or a prefix group that stays whole), R ranks, 2: new tokens and attention work

from dataclasses import dataclass

import numpy as np

from batchinfer.records import ConfigError

GOOD_ENOUGH = 1.003  # busiest rank: stop trying weights
LEVEL = 1.0003  # busiest rank: stop exchanging
FIRST_WEIGHT = 10.0  # of attention against tokens
FIRST_STEP = 10**0.75  # its square root next, and so on
NUM_TRIALS = 5  # weights between 0.35 and 280 are in reach
NUM_TRIALS_OF_MORE = 2
LARGEST_PER_RANK = 16  # number levelled before the small ones are dealt
SAMPLE_PER_RANK = 96  # number that may be exchanged when all are dealt
EXCHANGES_PER_RANK = 16
MAX_PAIRS = 20_000  # looked at for one exchange
LEAST_GAIN = 1e-6  # of the excess of the worst rank
MAX_STUCK_RANKS = 4
CUT_FURTHER = 1.01  # busiest rank: let cut groups onto more ranks
WORTH_CUTTING = 0.002  # off the busiest rank


@dataclass(frozen=True, slots=True)
class PrefillBounds:
    """Lower bounds on the busiest rank of any plan, for each quantity separately."""

    new_tokens: float
    attention_work: float


def attention_work(new_tokens: np.ndarray, cached_tokens: np.ndarray) -> np.ndarray:
    """Return [N] float64 (query, key) pairs: a new token attends to cached tokens and to new ones up to itself."""
    new = np.asarray(new_tokens, dtype=np.float64)
    return new * (np.asarray(cached_tokens) + (new + 1) / 2)


def prefill_bounds(
    new_tokens: np.ndarray, cached_tokens: np.ndarray, *, num_ranks: int, group_of_request: np.ndarray | None = None
) -> PrefillBounds:
    """Return lower bounds to divide a plan's busiest rank by; arguments and errors as for `assign_prefill`.

    The largest of: an even share; the largest item; and, for each k, the k + 1 smallest of the k * num_ranks + 1
    largest items, since some rank gets k + 1 of those. A group that is not cut counts as one item.
    """
    sizes_N2, group_N = _read(new_tokens, cached_tokens, num_ranks, group_of_request)
    item_N, _ = _items(sizes_N2, group_N, num_ranks)
    tokens, work = _bounds(_sum_by(item_N, sizes_N2), num_ranks)
    return PrefillBounds(float(tokens), float(work))


def assign_prefill(
    new_tokens: np.ndarray,
    cached_tokens: np.ndarray,
    *,
    num_ranks: int,
    group_of_request: np.ndarray | None = None,
    load_of_rank: np.ndarray | None = None,
) -> np.ndarray:
    """Give each request a rank so that the busiest rank has as few new tokens and as little attention work as possible.

    Largest item first, each to the rank where the sum of squared loads grows least (with one quantity this is LPT);
    the largest are levelled by exchanges before the small ones follow, and all of them once more at the end. Repeated
    with attention counting more or less, until neither quantity is worse than the other. Ties go to the lowest rank,
    and nothing is random: the same input always gives the same plan.

    A prefix group stays on one rank. A group that is more than an even share of either quantity is cut: onto as few
    ranks as its size asks for, and onto more only if one is too busy then. Balance alone decides which of its requests
    go together; give finer groups where deeper prefixes are worth keeping.

    Args:
        new_tokens: [N] integers, prompt tokens to compute.
        cached_tokens: [N] integers, prompt tokens before these whose KV is there already.
        num_ranks: ranks that run prefill, at least 1.
        group_of_request: [N] integers, any ids; None: each request for itself.
        load_of_rank: [R, 2] new tokens and attention work that ranks have already; None: nothing.

    Returns:
        [N] int64, the rank of each request.

    Raises:
        ConfigError: num_ranks < 1, a negative count, or arrays of different lengths.
    """
    sizes_N2, group_N = _read(new_tokens, cached_tokens, num_ranks, group_of_request)
    start_R2 = np.zeros((num_ranks, 2)) if load_of_rank is None else np.asarray(load_of_rank, dtype=np.float64)
    if start_R2.shape != (num_ranks, 2):
        raise ConfigError(f"load_of_rank has the shape {start_R2.shape}; give two loads for each of {num_ranks} ranks")
    return deal(sizes_N2, group_N, start_R2)


def deal(sizes_NQ: np.ndarray, group_N: np.ndarray, start_RQ: np.ndarray) -> np.ndarray:
    """Give each request a rank as `assign_prefill` does, by any number of quantities.

    Args:
        sizes_NQ: [N, Q] of each request; the second quantity is attention work.
        group_N: [N] prefix groups numbered from 0.
        start_RQ: [R, Q] loads that ranks have already.
    """
    num_ranks = len(start_RQ)
    item_N, cut_groups = _items(sizes_NQ, group_N, num_ranks)
    items_IQ = _sum_by(item_N, sizes_NQ)
    even_Q = (sizes_NQ.sum(axis=0) + start_RQ.sum(axis=0)) / num_ranks
    bounds_Q = np.maximum.reduce([_bounds(items_IQ, num_ranks), even_Q, start_RQ.max(axis=0)])
    unit_Q = np.where(bounds_Q > 0, bounds_Q, 1.0)
    if len(cut_groups):
        return _pack_cutting(sizes_NQ / unit_Q, group_N, cut_groups, start_RQ / unit_Q)
    return _pack(items_IQ / unit_Q, start_RQ / unit_Q)[item_N]


def _read(
    new_tokens: np.ndarray, cached_tokens: np.ndarray, num_ranks: int, group_of_request: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Check the arguments; return [N, 2] sizes, and [N] groups numbered from 0."""
    if num_ranks < 1:
        raise ConfigError(f"num_ranks is {num_ranks}, but requests need at least 1 rank; use 1 or more")
    new_N, cached_N = np.asarray(new_tokens), np.asarray(cached_tokens)
    group_N = np.arange(len(new_N)) if group_of_request is None else np.asarray(group_of_request)
    for name, values in (("cached_tokens", cached_N), ("group_of_request", group_N)):
        if len(values) != len(new_N):
            raise ConfigError(f"{name} has {len(values)} entries for {len(new_N)} requests; give one for each")
    for name, counts in (("new_tokens", new_N), ("cached_tokens", cached_N)):
        if (counts < 0).any():
            first = int(np.argmax(counts < 0))
            raise ConfigError(f"{name}[{first}] is {counts[first]}, but a count is at least 0; correct the count")
    sizes_N2 = np.stack([new_N.astype(np.float64), attention_work(new_N, cached_N)], axis=1)
    return sizes_N2, np.unique(group_N, return_inverse=True)[1]


def _items(sizes_N2: np.ndarray, group_N: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the item of each request, [N], and the groups too large for one item, whose requests are items."""
    share_2 = sizes_N2.sum(axis=0) / num_ranks
    is_cut_G = (_sum_by(group_N, sizes_N2) > share_2 * (1 + 1e-9)).any(axis=1) & (np.bincount(group_N) > 1)
    item_N = np.where(is_cut_G[group_N], len(is_cut_G) + np.arange(len(group_N)), group_N)
    return np.unique(item_N, return_inverse=True)[1], np.flatnonzero(is_cut_G)


def _bounds(items_I2: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return lower bounds of the busiest rank, [2]."""
    sums = np.concatenate([np.zeros((1, items_I2.shape[1])), np.cumsum(-np.sort(-items_I2, axis=0), axis=0)])
    k = np.arange(1, (len(items_I2) - 1) // num_ranks + 1)
    crowded = sums[k * num_ranks + 1] - sums[k * num_ranks - k]
    return np.max([sums[-1] / num_ranks, items_I2.max(axis=0, initial=0), crowded.max(axis=0, initial=0)], axis=0)


def _sum_by(index_N: np.ndarray, sizes_N2: np.ndarray, num: int = 0) -> np.ndarray:
    """Add up sizes by index, [num, 2]; num is at least the number of indices."""
    return np.stack([np.bincount(index_N, weights=size_N, minlength=num) for size_N in sizes_N2.T], axis=1)


def _pack_cutting(sizes_N2: np.ndarray, group_N: np.ndarray, cut_groups: np.ndarray, load_R2: np.ndarray) -> np.ndarray:
    """Return ranks, [N], when some groups are too large: packing their parts decides which ranks they may use.

    A part is an even share, the last one the remainder. The requests are then dealt onto these ranks, together with the
    groups that stay whole; while one is too busy, the cut groups on it may use 1, 2, 4, ... more of the idlest.
    """
    num_ranks = len(load_R2)
    is_cut_N = np.isin(group_N, cut_groups)
    whole_N = np.unique(group_N[~is_cut_N], return_inverse=True)[1]
    cut_N = np.searchsorted(cut_groups, group_N[is_cut_N])
    whole_I2 = _sum_by(whole_N, sizes_N2[~is_cut_N])
    parts_P2, group_P = _parts(sizes_N2[is_cut_N], cut_N, sizes_N2.sum(axis=0) / num_ranks)
    rank_I = _pack(np.concatenate([whole_I2, parts_P2]), load_R2)
    rank_N = np.empty(len(group_N), dtype=np.int64)
    rank_N[~is_cut_N] = rank_I[whole_N]
    start_R2 = load_R2 + _sum_by(rank_I[: len(whole_I2)], whole_I2, num_ranks)
    may_use_GR = np.zeros((len(cut_groups), num_ranks), dtype=bool)
    may_use_GR[group_P, rank_I[len(whole_I2) :]] = True
    best_peak, num_more = np.inf, 1
    while True:
        rank_N[is_cut_N] = _pack(sizes_N2[is_cut_N], start_R2, may_use_GR[cut_N])
        peak_R = (load_R2 + _sum_by(rank_N, sizes_N2, num_ranks)).max(axis=1)
        if peak_R.max() < best_peak - WORTH_CUTTING:
            best_N, best_peak = rank_N.copy(), peak_R.max()
        busiest_groups = np.unique(cut_N[rank_N[is_cut_N] == peak_R.argmax()])
        idlest_first = np.argsort(peak_R, kind="stable")
        not_used = idlest_first[~may_use_GR[busiest_groups].all(axis=0)[idlest_first]]
        if best_peak <= CUT_FURTHER or len(not_used) == 0:
            return best_N
        may_use_GR[np.ix_(busiest_groups, not_used[:num_more])] = True
        num_more *= 2


def _parts(sizes_N2: np.ndarray, group_N: np.ndarray, share_2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return parts of groups, [P, 2], and the group of each part, [P].

    A part is an even share (in the larger quantity), or the largest request if that is more; the last part of a group
    is the remainder.
    """
    shares_N = (sizes_N2 / np.where(share_2 > 0, share_2, 1.0)).max(axis=1)
    sizes_G2 = _sum_by(group_N, sizes_N2)
    shares_G = (sizes_G2 / np.where(share_2 > 0, share_2, 1.0)).max(axis=1)
    full_G = np.ones(len(sizes_G2))
    np.maximum.at(full_G, group_N, shares_N)
    num_parts_G = np.ceil(shares_G / full_G - 1e-9).astype(np.int64)
    group_P = np.repeat(np.arange(len(sizes_G2)), num_parts_G)
    place_P = np.arange(len(group_P)) - np.repeat(np.cumsum(num_parts_G) - num_parts_G, num_parts_G)
    shares_P = np.minimum(full_G[group_P], shares_G[group_P] - place_P * full_G[group_P])
    return sizes_G2[group_P] * (shares_P / shares_G[group_P])[:, None], group_P


def _pack(items_I2: np.ndarray, start_R2: np.ndarray, allowed_IR: np.ndarray | None = None) -> np.ndarray:
    """Return ranks, [I]: the best deal over some weights of attention against tokens, levelled.

    Args:
        start_R2: loads that the ranks have already.
        allowed_IR: ranks that each item may use; None: any.
    """
    num_ranks = len(start_R2)
    if allowed_IR is None:
        allowed_IR = np.ones((len(items_I2), num_ranks), dtype=bool)
    order_I = np.argsort(-items_I2.max(axis=1), kind="stable")
    items_I2, allowed_IR = items_I2[order_I], allowed_IR[order_I]
    weight, step, best_peak = FIRST_WEIGHT, FIRST_STEP, np.inf
    # more than two quantities: the others decide as often as attention does, and its weight does little
    for _ in range(NUM_TRIALS if items_I2.shape[1] == 2 else NUM_TRIALS_OF_MORE):
        rank_I = _deal(items_I2, start_R2, allowed_IR, weight)
        tokens, work, *others = (start_R2 + _sum_by(rank_I, items_I2, num_ranks)).max(axis=0)
        tokens = max(tokens, *others, 0.0)
        if max(tokens, work) < best_peak:
            best_I, best_peak = rank_I, max(tokens, work)
        if best_peak <= GOOD_ENOUGH:
            break
        weight *= step if work > tokens else 1 / step
        step **= 0.5
    rank_I, loads_R2 = best_I.copy(), start_R2 + _sum_by(best_I, items_I2, num_ranks)
    sample = _sample(rank_I)
    rank_I[sample] = level(items_I2[sample], rank_I[sample], loads_R2, allowed_IR[sample], floor=1.0)
    return (rank_I if loads_R2.max() < best_peak else best_I)[np.argsort(order_I)]


def _deal(items_I2: np.ndarray, start_R2: np.ndarray, allowed_IR: np.ndarray, weight: float) -> np.ndarray:
    """Return ranks of items in descending order, [I]: the largest first, levelled before the others follow."""
    weights = np.ones(items_I2.shape[1])
    weights[1] = weight
    items_I2, loads_R2 = items_I2 * weights, start_R2 * weights
    num_largest = LARGEST_PER_RANK * len(start_R2)
    large_I2, large_IR = items_I2[:num_largest], allowed_IR[:num_largest]
    rank_of_large = level(large_I2, place(large_I2, loads_R2, large_IR), loads_R2, large_IR, floor=0.0)
    return np.concatenate([rank_of_large, place(items_I2[num_largest:], loads_R2, allowed_IR[num_largest:])])


def place(items_I2: np.ndarray, loads_R2: np.ndarray, allowed_IR: np.ndarray) -> np.ndarray:
    """Return a rank for each item, [I], where the sum of squared loads grows least; add the items to `loads_R2`.

    The sum grows by (l + s)^2 - l^2 = 2 l s + s^2 for a load l and a size s.
    """
    rank_I = np.zeros(len(items_I2), dtype=np.int64)
    for item, (size_2, allowed_R) in enumerate(zip(items_I2, allowed_IR, strict=True)):
        rank_I[item] = rank = np.where(allowed_R, loads_R2 @ size_2, np.inf).argmin()
        loads_R2[rank] += size_2
    return rank_I


def _sample(rank_I: np.ndarray) -> np.ndarray:
    """Return items to exchange, at most SAMPLE_PER_RANK of each rank, spread over its items in order."""
    by_rank = np.argsort(rank_I, kind="stable")
    num_R = np.bincount(rank_I)
    place_I = np.arange(len(rank_I)) - np.repeat(np.cumsum(num_R) - num_R, num_R)
    stride_I = np.repeat(-(-num_R // SAMPLE_PER_RANK), num_R)
    return np.sort(by_rank[place_I % np.maximum(stride_I, 1) == 0])


def level(
    items_I2: np.ndarray, rank_I: np.ndarray, loads_R2: np.ndarray, allowed_IR: np.ndarray, floor: float
) -> np.ndarray:
    """Return ranks after exchanges of items that reduce the ranks' loads above a floor, [I]; update loads_R2.

    The worst rank gives an item (or nothing) for an item (or nothing) of another. A rank that finds no such exchange is
    stuck until another rank has made one. The function ends when a few ranks are stuck, or none is above LEVEL.
    """
    num_ranks, nothing = len(loads_R2), len(items_I2)  # nothing: one more item, without size, on rank -1
    items_I2 = np.append(items_I2, np.zeros((1, items_I2.shape[1])), axis=0)
    rank_I = np.append(rank_I, -1)
    limits_IR = None if allowed_IR.all() else np.append(allowed_IR, np.ones((1, num_ranks), dtype=bool), axis=0)
    is_stuck_R = np.zeros(num_ranks, dtype=bool)
    for _ in range(EXCHANGES_PER_RANK * (num_ranks - 1)):
        excess_R = np.where(is_stuck_R, 0.0, _excess(loads_R2 - floor).sum(axis=1))
        worst = int(excess_R.argmax())
        if excess_R[worst] <= _excess(np.array(LEVEL - 1.0)) or is_stuck_R.sum() >= MAX_STUCK_RANKS:
            break
        given, taken, other, gain = _best_exchange(worst, items_I2, rank_I, loads_R2 - floor, limits_IR)
        if gain <= LEAST_GAIN * excess_R[worst]:
            is_stuck_R[worst] = True
            continue
        loads_R2[worst] -= items_I2[given] - items_I2[taken]
        loads_R2[other] += items_I2[given] - items_I2[taken]
        rank_I[given], rank_I[taken] = other, worst
        is_stuck_R[:] = False
    return rank_I[:nothing]


def _best_exchange(
    worst: int, items_I2: np.ndarray, rank_I: np.ndarray, above_R2: np.ndarray, limits_IR: np.ndarray | None
) -> tuple[int, int, int, float]:
    """Return the item that the worst rank gives, the item it takes, the other rank, and the reduction of the excess.

    Candidates are the ranks with the least of the worst rank's largest quantity, as many as MAX_PAIRS allows.
    """
    num_ranks, nothing = len(above_R2), len(items_I2) - 1
    given_G = np.append(np.flatnonzero(rank_I == worst), nothing)
    num_others = max(2, MAX_PAIRS * num_ranks // (len(given_G) * len(items_I2)))
    others = np.argsort(above_R2[:, above_R2[worst].argmax()], kind="stable")[:num_others]
    others = others[others != worst]
    taken_T = np.flatnonzero(np.isin(rank_I, others))
    rank_T = np.append(rank_I[taken_T], others)
    taken_T = np.append(taken_T, np.full(len(others), nothing))
    change_GT = np.zeros((len(given_G), len(taken_T)))
    for size_I, above_R in zip(items_I2.T, above_R2.T, strict=True):
        size_G1, size_T, above_T = size_I[given_G][:, None], size_I[taken_T], above_R[rank_T]
        change_GT += _excess((above_R[worst] - size_G1) + size_T)
        change_GT += _excess((above_T - size_T) + size_G1)
        change_GT -= _excess(above_R[worst]) + _excess(above_T)
    if limits_IR is not None:
        change_GT[~(limits_IR[given_G][:, rank_T] & limits_IR[taken_T, worst])] = 0.0
    given, taken = divmod(int(change_GT.argmin()), len(taken_T))
    return int(given_G[given]), int(taken_T[taken]), int(rank_T[taken]), -float(change_GT[given, taken])


def _excess(above: np.ndarray) -> np.ndarray:
    """Return the load above the floor, to the fourth power: the busiest ranks count most."""
    excess = np.maximum(above, 0.0)
    excess *= excess
    excess *= excess
    return excess
