"""The search for pools of experts that share GPUs (pools.py), seeded and in a fixed number of trials.

A start is built directly, then annealing runs from it, cooler and hotter ones in turn: with a few hot experts either
kind gets stuck now and then. The published greedy placement is a start, too, if nothing found is as good, so that the
result is never worse.
"""

# E experts, G GPUs, S slots per GPU, P pools

from dataclasses import dataclass

import numpy as np

from batchinfer.balance.compiled import compiled
from batchinfer.balance.experts.annealing import CLOSE_ENOUGH, anneal
from batchinfer.balance.experts.bounds import replica_counts
from batchinfer.balance.experts.pools import Pools, make_pools, pools_of_slots

HOT = (0.25, 2.5)  # temperatures at the start of every other run, in loads of the fullest GPU per expert
FOCUS_ODDS = 0.3  # of a trial starting from a pool that is over the target
MIN_EXPERTS = 64  # fewer get as many trials


@dataclass(frozen=True)
class Effort:
    """The length of a search."""

    num_runs: int
    num_trials: int  # of a run, per expert


EFFORTS = {"default": Effort(2, 500), "high": Effort(6, 6000)}


def search_pools(load_E: np.ndarray, num_gpus: int, slots_per_gpu: int, effort: Effort, bound: float) -> Pools:
    """Divide experts and GPUs into pools so that the fullest is as light as possible.

    Args:
        load_E: [E] float64, at least 0; at most num_gpus * slots_per_gpu of them.
        bound: a lower bound for any division; reaching it ends the search.
    """
    num_pools = len(load_E) - (slots_per_gpu - 1) * num_gpus
    if num_pools <= 1:
        return make_pools(load_E, np.zeros(len(load_E), np.int64), np.array([num_gpus]))
    descending = np.argsort(-load_E, kind="stable")
    first = make_pools(load_E, *_first_pools(load_E, descending, num_gpus, num_pools))
    if slots_per_gpu == 1:
        return first
    best = first
    for run in range(effort.num_runs):
        hot = HOT[run % len(HOT)] / len(load_E)
        best = min(best, improve(load_E, slots_per_gpu, first, effort.num_trials, bound, run, hot=hot), key=_load)
    num_slots_E = replica_counts(load_E, num_gpus * slots_per_gpu, num_gpus * slots_per_gpu)
    descending = np.argsort(-load_E / num_slots_E, kind="stable")
    expert_GS, load_G = _published_slots(load_E, num_slots_E, descending, num_gpus, slots_per_gpu)
    if load_G.max() < best.load:
        greedy = pools_of_slots(load_E, expert_GS) or first
        best = min(
            best,
            improve(load_E, slots_per_gpu, greedy, effort.num_trials, bound, effort.num_runs, hot=HOT[0] / len(load_E)),
            key=_load,
        )
    return best


def improve(
    load_E: np.ndarray,
    slots_per_gpu: int,
    pools: Pools,
    trials_per_expert: int,
    bound: float,
    seed: int,
    *,
    hot: float,
    focus_odds: float = FOCUS_ODDS,
) -> Pools:
    """Run annealing once from the given pools; the result is never worse, and reaching `bound` ends the run."""
    if pools.load <= bound * (1.0 + CLOSE_ENOUGH) or slots_per_gpu == 1 or len(pools.num_gpus) == 1:
        return pools
    num_trials = trials_per_expert * max(len(load_E), MIN_EXPERTS)
    ascending = np.argsort(load_E, kind="stable")
    first = pools.pool_of_expert[ascending], pools.num_gpus
    pool_of_E = np.empty(len(load_E), np.int64)
    pool_of_E[ascending], gpus_of_P = anneal(
        load_E[ascending], slots_per_gpu, *first, num_trials, hot, focus_odds, bound, np.uint64(seed)
    )
    return min(pools, make_pools(load_E, pool_of_E, gpus_of_P), key=_load)


def _load(pools: Pools) -> float:
    return pools.load


@compiled
def _first_pools(
    load_E: np.ndarray, descending: np.ndarray, num_gpus: int, num_pools: int
) -> tuple[np.ndarray, np.ndarray]:
    """Build a start: a heavy expert per pool, GPUs by its load, then light experts to the pools with most room."""
    slots_per_gpu = 1 + (len(load_E) - num_pools) // num_gpus
    pool_of_E = np.empty(len(load_E), np.int64)
    load_P, gpus_of_P = np.empty(num_pools), np.ones(num_pools, np.int64)
    for pool in range(num_pools):
        pool_of_E[descending[pool]] = pool
        load_P[pool] = load_E[descending[pool]]
    for _ in range(num_gpus - num_pools):
        fullest = 0
        for pool in range(num_pools):
            if load_P[pool] / gpus_of_P[pool] > load_P[fullest] / gpus_of_P[fullest]:
                fullest = pool
        gpus_of_P[fullest] += 1

    vacant_P = (slots_per_gpu - 1) * gpus_of_P
    for expert in descending[num_pools:]:
        best, best_load = -1, np.inf
        for pool in range(num_pools):
            load = (load_P[pool] + load_E[expert]) / gpus_of_P[pool]
            if vacant_P[pool] > 0 and load < best_load:
                best, best_load = pool, load
        pool_of_E[expert] = best
        load_P[best] += load_E[expert]
        vacant_P[best] -= 1
    return pool_of_E, gpus_of_P


@compiled
def _published_slots(
    load_E: np.ndarray, num_slots_E: np.ndarray, descending: np.ndarray, num_gpus: int, slots_per_gpu: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return experts per slot, [G, S], as DeepSeek's EPLB places them without groups, and each GPU's load, [G].

    The copies, heaviest first, each to the lightest GPU with a slot left (github.com/deepseek-ai/EPLB); shares are
    even.
    """
    expert_GS, used_G = np.empty((num_gpus, slots_per_gpu), np.int64), np.zeros(num_gpus, np.int64)
    load_G = np.zeros(num_gpus)
    for expert in descending:
        for _ in range(num_slots_E[expert]):
            lightest = -1
            for gpu in range(num_gpus):
                if used_G[gpu] < slots_per_gpu and (lightest < 0 or load_G[gpu] < load_G[lightest]):
                    lightest = gpu
            expert_GS[lightest, used_G[lightest]] = expert
            load_G[lightest] += load_E[expert] / num_slots_E[expert]
            used_G[lightest] += 1
    return expert_GS, load_G
