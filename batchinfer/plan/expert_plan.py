"""Placement of experts by the tokens per expert that an earlier run counted.

A planner has a minute, so it searches longer than a controller.
"""

# L MoE layers, E experts

import numpy as np

from batchinfer.balance.expert_groups import group_loads, node_limits
from batchinfer.balance.experts import place_robustly
from batchinfer.config import ClusterConfig
from batchinfer.data.expert_tables import ExpertTables, num_nodes
from batchinfer.host_info import task_nodes
from batchinfer.model.config import ModelConfig
from batchinfer.progress import note


def plan_experts(
    cluster: ClusterConfig, model: ModelConfig, load_of_phase: dict[str, np.ndarray]
) -> list[ExpertTables]:
    """Return the placements for groups of several ranks, and report the balance of each."""
    groups = cluster.expert_groups
    if not groups:
        note("one rank holds all experts: the expert loads are not used")
        return []
    num_slots, layers = model.n_routed_experts + cluster.redundant_experts, tuple(model.moe_layers)
    planned = []
    for phase, load in group_loads(load_of_phase, groups).items():
        num_ranks = groups[phase]
        before = ExpertTables.in_order(phase, layers, model.n_routed_experts, num_slots, num_ranks).with_load(load)
        hosts = cluster.hosts_of(phase, cluster.nodes or task_nodes())
        nodes, num_groups = node_limits(num_ranks, num_nodes(hosts), model.num_router_groups)
        placement = place_robustly(
            load, num_slots=num_slots, num_gpus=num_ranks, num_nodes=nodes, num_groups=num_groups, effort="high"
        )
        tables = before.with_slots(placement.expert_of_slot, placement.share_of_slot, num_nodes=nodes)
        tables = tables.with_load(load, placement.bound)
        ranks = "" if phase == "both" else f" ({phase} ranks)"
        where = f", copies of an expert on one of {nodes} nodes" if nodes > 1 else ""
        note(
            f"experts placed{ranks}: busiest rank {tables.max_over_mean:.3f} times the mean, "
            f"{before.max_over_mean:.3f} in order, at best {tables.bound_over_mean:.3f}{where}"
        )
        planned.append(tables)
    return planned
