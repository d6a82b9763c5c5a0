"""Expert loads per group of ranks, and the limits of nodes and router groups for placing experts."""

# L layers, E experts

from collections.abc import Iterable, Mapping

import numpy as np


def group_loads(load_of_phase: Mapping[str, np.ndarray], groups: Iterable[str]) -> dict[str, np.ndarray]:
    """Return the expert loads for which each group places its experts.

    Ranks that run both phases have one set of slots, so they are placed for the sum of both loads.

    Args:
        load_of_phase: 'prefill' and 'decode' -> [L, E] tokens per layer and expert.
        groups: 'both', or 'prefill' and 'decode'.
    """
    return {
        group: load_of_phase["prefill"] + load_of_phase["decode"] if group == "both" else load_of_phase[group]
        for group in groups
    }


def node_limits(num_ranks: int, num_nodes: int, num_router_groups: int) -> tuple[int, int]:
    """Return nodes and router groups for `place_experts`, so that a token's rows go to few nodes if possible.

    The rule is that of DeepSeek's EPLB: if router groups, of which a token takes a few, divide by nodes, each node gets
    whole groups with all copies of their experts; else (1, 1): copies may be anywhere.
    """
    fits = num_nodes > 1 and num_router_groups % num_nodes == 0 and num_ranks % num_nodes == 0
    return (num_nodes, num_router_groups) if fits else (1, 1)
