"""The expert loads that groups of ranks balance, and the placement they begin with."""

# L layers, E experts, G ranks, R slots of all ranks

from collections.abc import Iterable, Mapping

import numpy as np

from batchinfer.balance.experts.placement import ExpertPlacement


def group_loads(load_of_phase: Mapping[str, np.ndarray], groups: Iterable[str]) -> dict[str, np.ndarray]:
    """What each group has to place its experts for.

    Ranks that run both phases have one set of slots, so theirs are placed for the sum of both loads.

    Args:
        load_of_phase: 'prefill' and 'decode' -> [L, E] tokens per layer and expert.
        groups: 'both', or 'prefill' and 'decode'.
    """
    return {
        group: load_of_phase["prefill"] + load_of_phase["decode"] if group == "both" else load_of_phase[group]
        for group in groups
    }


def in_order(load: np.ndarray, *, num_slots: int, num_ranks: int) -> ExpertPlacement:
    """Expert e in slot e; redundant slots repeat the experts from the first on, with even shares.

    Args:
        load: [L, E] tokens per layer and expert.
        num_slots: R, a multiple of num_ranks and at least E.
    """
    num_layers, num_experts = load.shape
    expert_R = np.arange(num_slots) % num_experts
    share_R = 1.0 / np.bincount(expert_R)[expert_R]
    load_LG = (load[:, expert_R] * share_R).reshape(num_layers, num_ranks, -1).sum(axis=2)
    return ExpertPlacement(
        expert_of_slot=np.tile(expert_R, (num_layers, 1)),
        share_of_slot=np.tile(share_R, (num_layers, 1)),
        gpu_load=load_LG,
        bound=load_LG.mean(axis=1),
    )
