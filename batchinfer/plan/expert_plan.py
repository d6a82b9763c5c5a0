"""Where experts are to be, from the tokens per expert that an earlier run counted.

A planner has a minute, so it searches longer than the engine does after a first unit.
"""

# L MoE layers, E experts

import numpy as np

from batchinfer.balance.experts import place_experts
from batchinfer.balance.experts.groups import group_loads, in_order
from batchinfer.config import ClusterConfig
from batchinfer.data.expert_tables import ExpertTables
from batchinfer.model.config import ModelConfig
from batchinfer.progress import note


def plan_experts(
    cluster: ClusterConfig, model: ModelConfig, load_of_phase: dict[str, np.ndarray]
) -> list[ExpertTables]:
    """Placements of the groups that have several ranks; says how even each is."""
    groups = cluster.expert_groups
    if not groups:
        note("one rank holds all experts: the expert loads are not used")
        return []
    num_slots = model.n_routed_experts + cluster.redundant_experts
    planned = []
    for phase, load in group_loads(load_of_phase, groups).items():
        before = in_order(load, num_slots=num_slots, num_ranks=groups[phase])
        placement = place_experts(load, num_slots=num_slots, num_gpus=groups[phase], effort="high")
        tables = ExpertTables.of(
            phase,
            tuple(model.moe_layers),
            placement.expert_of_slot,
            placement.share_of_slot,
            load,
            placement.bound,
            groups[phase],
        )
        mean = before.gpu_load.mean(axis=1).sum() or 1.0
        ranks = "" if phase == "both" else f" ({phase} ranks)"
        note(
            f"experts placed{ranks}: busiest rank {tables.max_over_mean:.3f} times the mean, "
            f"{before.gpu_load.max(axis=1).sum() / mean:.3f} in order, at best {tables.bound_over_mean:.3f}"
        )
        planned.append(tables)
    return planned
