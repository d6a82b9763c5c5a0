"""A new placement close to the existing one: few weights to move.

The pools of the current placement are a start for the search, GPUs are matched to the pools whose experts they hold,
and shares.py keeps as many experts as possible on their GPU.
"""

# E experts, G GPUs, S slots per GPU, P pools, N rows and columns of a square table

import numpy as np

from batchinfer.balance.compiled import compiled
from batchinfer.balance.experts.pools import EMPTY, Pools, pools_of_slots
from batchinfer.balance.experts.search import Effort, improve, search_pools

ROUNDING = 1e-12
WARM_RUNS = 2
WARM_HOT = 3e-4
WARM_ODDS = 1.0  # only pools that are too full give experts away


def pools_near(
    load_E: np.ndarray, held_GS: np.ndarray, used_GS: np.ndarray, effort: Effort, bound: float
) -> tuple[Pools, np.ndarray]:
    """Return pools close to an existing placement, and the pool of each GPU.

    The result is the current pools, or their improvement by moves out of too full ones, provided that it is as good as
    a search from scratch; else the latter.

    Args:
        held_GS: [G, S] int64, EMPTY where a GPU holds none of these experts.
        used_GS: [G, S] bool, slots that tokens are sent to: the lines between experts and GPUs of one pool.
    """
    num_gpus, slots_per_gpu = held_GS.shape
    pools = search_pools(load_E, num_gpus, slots_per_gpu, effort, bound)
    current = pools_of_slots(load_E, np.where(used_GS, held_GS, EMPTY))
    for seed in range(WARM_RUNS):
        if current is not None and current.load > pools.load * (1.0 + ROUNDING):
            current = improve(
                load_E, slots_per_gpu, current, effort.num_trials, pools.load, seed, hot=WARM_HOT, focus_odds=WARM_ODDS
            )
    if current is not None and current.load <= pools.load * (1.0 + ROUNDING):
        pools = current
    return pools, match_gpus(pools, held_GS)


def match_gpus(pools: Pools, held_GS: np.ndarray) -> np.ndarray:
    """Return the pool of each GPU, [G] int64, so that as many held experts as possible belong to their GPU's pool."""
    pool_of_seat = np.repeat(np.arange(len(pools.num_gpus)), pools.num_gpus)
    if len(pools.num_gpus) == 1 or (held_GS == EMPTY).all():
        return pool_of_seat
    score_GP = np.zeros((len(held_GS), len(pools.num_gpus)))
    gpu, slot = np.nonzero(held_GS != EMPTY)
    np.add.at(score_GP, (gpu, pools.pool_of_expert[held_GS[gpu, slot]]), 1.0)
    return pool_of_seat[match(score_GP[:, pool_of_seat])]


def match(score_NN: np.ndarray) -> np.ndarray:
    """Return the column of each row, [N] int64, every column once, so that the sum of the scores is largest."""
    return np.asarray(_cheapest_columns(np.ascontiguousarray(score_NN.max() - score_NN)))


@compiled
def _cheapest_columns(cost_NN: np.ndarray) -> np.ndarray:
    """Return the column of each row, [N], every column once, with the smallest sum of costs.

    The Hungarian method with shortest augmenting paths, O(N^3): rows join one by one, prices keep all reduced
    costs at or above 0. Column N stands for "no column yet".
    """
    n = len(cost_NN)
    price_row, price_column = np.zeros(n), np.zeros(n + 1)
    row_of_column = np.full(n + 1, -1)
    for new_row in range(n):
        row_of_column[n] = new_row
        column = n
        slack, previous, is_done = np.full(n, np.inf), np.full(n, n), np.zeros(n + 1, np.bool_)
        while row_of_column[column] >= 0:
            is_done[column] = True
            row = row_of_column[column]
            nearest, step = -1, np.inf
            for other in range(n):
                if is_done[other]:
                    continue
                reduced = cost_NN[row, other] - price_row[row] - price_column[other]
                if reduced < slack[other]:
                    slack[other], previous[other] = reduced, column
                if slack[other] < step:
                    nearest, step = other, slack[other]
            for other in range(n + 1):
                if is_done[other]:
                    price_row[row_of_column[other]] += step
                    price_column[other] -= step
                elif other < n:
                    slack[other] -= step
            column = nearest
        while column != n:
            row_of_column[column] = row_of_column[previous[column]]
            column = previous[column]
    column_of_row = np.empty(n, np.int64)
    for column in range(n):
        column_of_row[row_of_column[column]] = column
    return column_of_row
