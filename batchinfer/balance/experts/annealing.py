"""Simulated annealing of pools: which experts share GPUs. The inner loop of search.py, and nothing else.

All of it is compiled, so it is one file (see compiled.py). Random numbers are its own: the same seed gives the
same pools on every machine and in every thread.
"""

# E experts, S slots per GPU, P pools, K place in a pool

import math

import numpy as np

from batchinfer.balance.compiled import compiled

COLD = 3e-5  # the temperature at the end of a run, in loads of the fullest GPU
SINK = 5e-4  # the furthest below the best load so far that the target is set
MOVE_ODDS = 0.3  # of a trial moving a GPU to another pool; the others swap two experts
NEAR_ODDS = 0.75  # of a swap being between experts of about the same load; late in a run few others are taken
NEAR = 4  # at most this many positions apart, in ascending order of load
CLOSE_ENOUGH = 1e-6  # above the bound: nothing left to gain
ROUNDING = 1e-9


@compiled
def anneal(  # noqa: PLR0915 - one loop, compiled as a whole
    ascending_E: np.ndarray,
    slots_per_gpu: int,
    first_pool_of_E: np.ndarray,
    first_gpus_of_P: np.ndarray,
    num_trials: int,
    hot: float,
    focus_odds: float,
    bound: float,
    seed: np.uint64,
) -> tuple[np.ndarray, np.ndarray]:
    """Swap experts, or move a GPU and S - 1 experts, between random pools; return the best pools met.

    A trial is taken when the load above the target, summed over the pools, falls or stays, or grows by little (by the
    temperature). When nothing is above the target any more, the target sinks.

    Args:
        ascending_E: [E] float64, loads in ascending order.
        first_pool_of_E: [E] int64, pools to start from; first_gpus_of_P: [P] int64, their GPUs.
        num_trials: of all kinds together.
        hot: the temperature at the start, in loads of the fullest GPU.
        focus_odds: of a trial starting from a pool that is over the target.
        bound: reaching it ends the search.
    """
    num_experts, block_size = len(ascending_E), slots_per_gpu - 1
    pool_of_E, gpus_of_P = first_pool_of_E.copy(), first_gpus_of_P.copy()
    best_pool_of_E, best_gpus_of_P = first_pool_of_E, first_gpus_of_P
    first = best = _fullest(ascending_E, pool_of_E, gpus_of_P)
    temperature, target, energy = hot * first, first, 0.0
    over_P = _over_target(ascending_E, pool_of_E, gpus_of_P, target)
    member_PK, size_P, place_E = _member_lists(pool_of_E, len(gpus_of_P))
    block = np.empty(block_size, np.int64)
    crowded = np.empty(num_experts, np.int64)  # experts of pools above the target, looked up now and then
    num_crowded = 0
    bits = _next_bits(seed * np.uint64(2654435761) + np.uint64(88172645463325252))
    for trial in range(num_trials):
        if energy < ROUNDING * target or trial % num_experts == 0:
            load = _fullest(ascending_E, pool_of_E, gpus_of_P)
            if load < best:
                best = load
                best_pool_of_E, best_gpus_of_P = pool_of_E.copy(), gpus_of_P.copy()
            if best <= bound * (1.0 + CLOSE_ENOUGH):
                break
            temperature = hot * first * (COLD / hot) ** (trial / num_trials)
            target = max(best - min(SINK * best, temperature), bound)
            over_P = _over_target(ascending_E, pool_of_E, gpus_of_P, target)
            energy = _energy(over_P)
            num_crowded = _list_crowded(pool_of_E, over_P, crowded)

        one, other, odds = _below(bits, 0, num_experts), _below(bits, 21, num_experts), _fraction(bits, 42)
        bits = _next_bits(bits)
        if odds < focus_odds and num_crowded > 0:
            one = crowded[_below(bits, 0, num_crowded)]
        is_move, luck = _fraction(bits, 21) < MOVE_ODDS, _fraction(bits, 42)
        bits = _next_bits(bits)
        if not is_move and _fraction(bits, 0) < NEAR_ODDS:
            step = 1 + _below(bits, 21, min(NEAR, num_experts - 1))
            other = (one + (step if _fraction(bits, 42) < 0.5 else num_experts - step)) % num_experts
        bits = _next_bits(bits)

        a, b = pool_of_E[one], pool_of_E[other]
        if a == b or (is_move and gpus_of_P[a] == 1):
            continue
        if is_move:
            shift = -target  # pool a loses the block's load and the room of a GPU
            for i in range(block_size):
                block[i] = member_PK[a, (place_E[one] + i) % size_P[a]]
                shift += ascending_E[block[i]]
        else:
            shift = ascending_E[one] - ascending_E[other]
        change = max(0.0, over_P[a] - shift) + max(0.0, over_P[b] + shift) - max(0.0, over_P[a]) - max(0.0, over_P[b])
        if change > 0.0 and change >= -temperature * math.log(luck):
            continue

        over_P[a] -= shift
        over_P[b] += shift
        energy += change
        if is_move:
            gpus_of_P[a] -= 1
            gpus_of_P[b] += 1
            _move_experts(block, b, pool_of_E, member_PK, size_P, place_E)
        else:
            _swap_experts(one, other, pool_of_E, member_PK, place_E)
    return best_pool_of_E, best_gpus_of_P


@compiled
def _over_target(load_E: np.ndarray, pool_of_E: np.ndarray, gpus_of_P: np.ndarray, target: float) -> np.ndarray:
    """Return the load of each pool above `target` per GPU, negative if below; [P]."""
    over_P = np.empty(len(gpus_of_P))
    for pool in range(len(gpus_of_P)):
        over_P[pool] = -target * gpus_of_P[pool]
    for expert in range(len(load_E)):
        over_P[pool_of_E[expert]] += load_E[expert]
    return over_P


@compiled
def _fullest(load_E: np.ndarray, pool_of_E: np.ndarray, gpus_of_P: np.ndarray) -> float:
    load_P = _over_target(load_E, pool_of_E, gpus_of_P, 0.0)
    fullest = 0.0
    for pool in range(len(gpus_of_P)):
        fullest = max(fullest, load_P[pool] / gpus_of_P[pool])
    return fullest


@compiled
def _energy(over_P: np.ndarray) -> float:
    energy = 0.0
    for over in over_P:
        energy += max(0.0, over)
    return energy


@compiled
def _list_crowded(pool_of_E: np.ndarray, over_P: np.ndarray, crowded: np.ndarray) -> int:
    """Write the experts of pools above the target to the front of `crowded`; return their number."""
    num_crowded = 0
    for expert in range(len(pool_of_E)):
        if over_P[pool_of_E[expert]] > 0.0:
            crowded[num_crowded] = expert
            num_crowded += 1
    return num_crowded


@compiled
def _member_lists(pool_of_E: np.ndarray, num_pools: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the members of each pool: pool p has member_PK[p, : size_P[p]]; expert e is at place_E[e] of its pool."""
    member_PK = np.empty((num_pools, len(pool_of_E)), np.int64)
    size_P = np.zeros(num_pools, np.int64)
    place_E = np.empty(len(pool_of_E), np.int64)
    for expert, pool in enumerate(pool_of_E):
        place_E[expert] = size_P[pool]
        member_PK[pool, size_P[pool]] = expert
        size_P[pool] += 1
    return member_PK, size_P, place_E


@compiled
def _swap_experts(one: int, other: int, pool_of_E: np.ndarray, member_PK: np.ndarray, place_E: np.ndarray) -> None:
    member_PK[pool_of_E[one], place_E[one]] = other
    member_PK[pool_of_E[other], place_E[other]] = one
    place_E[one], place_E[other] = place_E[other], place_E[one]
    pool_of_E[one], pool_of_E[other] = pool_of_E[other], pool_of_E[one]


@compiled
def _move_experts(
    block: np.ndarray, to: int, pool_of_E: np.ndarray, member_PK: np.ndarray, size_P: np.ndarray, place_E: np.ndarray
) -> None:
    for expert in block:
        pool = pool_of_E[expert]
        size_P[pool] -= 1
        last = member_PK[pool, size_P[pool]]  # takes the place that becomes free
        member_PK[pool, place_E[expert]] = last
        place_E[last] = place_E[expert]
        member_PK[to, size_P[to]] = expert
        place_E[expert] = size_P[to]
        size_P[to] += 1
        pool_of_E[expert] = to


@compiled
def _next_bits(bits: np.uint64) -> np.uint64:
    """Return 64 random bits from the last ones (xorshift, Marsaglia 2003)."""
    bits ^= bits << np.uint64(13)
    bits ^= bits >> np.uint64(7)
    return bits ^ (bits << np.uint64(17))


@compiled
def _below(bits: np.uint64, first: int, end: int) -> int:
    """Return a number from 0 to end - 1 made of 21 of the bits."""
    return int(np.int64((((bits >> np.uint64(first)) & np.uint64(0x1FFFFF)) * np.uint64(end)) >> np.uint64(21)))


@compiled
def _fraction(bits: np.uint64, first: int) -> float:
    """Return a number above 0 and below 1 made of 21 of the bits."""
    return (np.float64((bits >> np.uint64(first)) & np.uint64(0x1FFFFF)) + 0.5) / 2097152.0
