"""Pools: experts that share GPUs. How the placement of experts reduces to pools, and why.

Draw experts and GPUs as dots and every slot as a line between the two: the connected parts are called pools. A pool
of m GPUs with S slots each holds at most k = (S - 1) * m + 1 experts (it takes k + m - 1 lines to connect k + m dots),
and if its load is at most m * t then its experts can be cut into shares so that no GPU carries more than t
(shares.py does it). So a placement is as good as its pools: with the best shares, its fullest GPU carries the
largest (load / GPUs) of a pool.

Joining a pool that has slots to spare with another one never increases that maximum. It is therefore enough to look at
D = E - (S - 1) * G pools of exactly (S - 1) * m + 1 experts, or at one pool when D <= 1, which reaches the mean load.

    S = 2, G = 3, E = 5, D = 2     GPU 0 [a b]   GPU 1 [b c]     pool {a, b, c} on 2 GPUs, b is split
                                   GPU 2 [d e]                   pool {d, e} on 1 GPU

This is splittable bin packing with cardinality constraints (Chung, Graham, Mao and Varghese 2006).
"""

# E experts, G GPUs, S slots per GPU, P pools

from dataclasses import dataclass

import numpy as np

EMPTY = -1  # no expert


@dataclass(frozen=True, eq=False)
class Pools:
    """A division of experts and GPUs.

    Args:
        pool_of_expert: [E] int64.
        num_gpus: [P] int64, each at least 1.
        load: of a GPU of the fullest pool.
    """

    pool_of_expert: np.ndarray
    num_gpus: np.ndarray
    load: float


def make_pools(load_E: np.ndarray, pool_of_E: np.ndarray, gpus_of_P: np.ndarray) -> Pools:
    """Return pools with the load that they reach."""
    load_P = np.bincount(pool_of_E, load_E, minlength=len(gpus_of_P))
    return Pools(pool_of_E, gpus_of_P, float((load_P / gpus_of_P).max()))


def pools_of_slots(load_E: np.ndarray, expert_GS: np.ndarray) -> Pools | None:
    """Return the pools of a placement, for any shares; None if an expert has no slot. EMPTY slots connect nothing.

    Connected parts with slots to spare are joined to others, so that each pool has (S - 1) * m + 1 experts, or one pool
    with fewer remains.
    """
    num_gpus, slots_per_gpu = expert_GS.shape
    num_experts = len(load_E)
    if len(np.unique(expert_GS[expert_GS != EMPTY])) < num_experts:
        return None
    part_of_G, part_of_E = _connected_parts(expert_GS, num_experts)
    names, part = np.unique(np.concatenate([part_of_G, part_of_E]), return_inverse=True)
    part_of_G, part_of_E = part[:num_gpus], part[num_gpus:]
    gpus_of_P = np.bincount(part_of_G, minlength=len(names))
    surplus_P = np.bincount(part_of_E, minlength=len(names)) - (slots_per_gpu - 1) * gpus_of_P
    if slots_per_gpu > 1:
        load_P = np.bincount(part_of_E, load_E, minlength=len(names))
        pool_of_P = _join_parts(surplus_P, load_P / np.maximum(gpus_of_P, 1))
        part_of_E, part_of_G = pool_of_P[part_of_E], pool_of_P[part_of_G]
    return make_pools(load_E, part_of_E, np.bincount(part_of_G))


def _connected_parts(held_GS: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return labels of GPUs, [G], and experts, [E], equal where a chain of shared experts connects them."""
    part_of_G = np.arange(len(held_GS))
    while True:
        part_of_E = np.full(num_experts + 1, len(held_GS))  # the last one stands for EMPTY
        np.minimum.at(part_of_E, held_GS, part_of_G[:, None])
        part_of_E[EMPTY] = len(held_GS)
        lower = np.minimum(part_of_G, part_of_E[held_GS].min(axis=1))
        if np.array_equal(lower, part_of_G):
            return part_of_G, part_of_E[:num_experts]
        part_of_G = lower


def _join_parts(surplus_P: np.ndarray, level_P: np.ndarray) -> np.ndarray:
    """Return a new number for each part, [P], joining the parts with slots to spare.

    All of these become one part, together with as many of the fullest others as their slots have room for.
    """
    pool_of_P = np.arange(len(surplus_P))
    lacking = np.flatnonzero(surplus_P < 1)
    if len(lacking) > 0:
        others = np.flatnonzero(surplus_P == 1)
        fullest = others[np.argsort(-level_P[others], kind="stable")]
        num_taken = 1 - int(surplus_P[lacking].sum())
        pool_of_P[lacking] = pool_of_P[fullest[:num_taken]] = len(surplus_P)
    return np.unique(pool_of_P, return_inverse=True)[1]
