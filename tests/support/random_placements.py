"""Random places of experts."""

from __future__ import annotations

import numpy as np

from batchinfer.parallel.placement import Placement


def random_placement(
    random: np.random.Generator, num_experts: int, num_ranks: int, num_redundant: int, *, without_share: float = 0.1
) -> Placement:
    """Experts in random order, redundant ones at random, with random shares, that many of them 0."""
    experts = np.concatenate([np.arange(num_experts), random.integers(0, num_experts, size=num_redundant)])
    random.shuffle(experts)
    shares = random.random(len(experts))
    shares[random.random(len(experts)) < without_share] = 0
    for expert in range(num_experts):
        slots = np.flatnonzero(experts == expert)
        shares[slots] = shares[slots] / shares[slots].sum() if shares[slots].any() else 1 / len(slots)
    return Placement(tuple(experts.tolist()), tuple(shares.tolist()), num_experts, num_ranks)
