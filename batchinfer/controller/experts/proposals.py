"""Better placements of a group's experts, and the cost of moving to them."""

# L MoE layers, E experts, G ranks

from dataclasses import dataclass

import numpy as np

from batchinfer.data.expert_tables import ExpertTables

# Experts are placed again when the busiest rank exceeds its promised load by this share of the mean, beyond chance.
START = 0.02
EXPERT_TIME = 0.3  # assumed share of a step that the busiest rank's experts take
BYTES_PER_S = 1e9  # assumed speed of moving experts to a rank, until it is measured
MUST_PAY_TIMES = 2.0  # the gain must be this multiple of the cost


@dataclass(frozen=True, eq=False)
class Proposal:
    """A better placement of a group's experts.

    before: load of the busiest rank over the mean in the current placement, under the same loads.
    gain: reduction of that ratio, beyond chance.
    """

    tables: ExpertTables
    before: float
    gain: float


def compile_balancer() -> None:
    """Compile the balancer ahead of its first use, which takes seconds; a process of one rank never needs it."""
    from batchinfer.balance.experts import place_robustly

    place_robustly(np.ones((1, 2)), num_slots=2, num_gpus=2)


def propose(
    current: ExpertTables, load: np.ndarray, *, chance: float, num_nodes: int, num_router_groups: int
) -> Proposal | None:
    """Return a placement for a load [L, E], or None if the current one keeps its promise or none is better.

    Args:
        chance: see ExpertLoads.of_groups.
        num_nodes: hosts of the group's ranks.
        num_router_groups: expert groups of the model's router; 1: none.
    """
    before = current.with_load(load).max_over_mean
    if before - current.max_over_mean - chance < START:
        return None
    from batchinfer.balance.expert_groups import node_limits
    from batchinfer.balance.experts import ExpertPlacement, place_robustly

    num_nodes, num_router_groups = node_limits(current.num_ranks, num_nodes, num_router_groups)
    placement = place_robustly(
        load,
        num_slots=current.expert_of_slot.shape[1],
        num_gpus=current.num_ranks,
        num_nodes=num_nodes,
        num_groups=num_router_groups,
        previous=ExpertPlacement(current.expert_of_slot, current.share_of_slot, current.load_of_rank, current.bound),
    )
    tables = current.with_slots(placement.expert_of_slot, placement.share_of_slot, num_nodes=num_nodes)
    tables = tables.with_load(load, placement.bound)
    gain = before - tables.max_over_mean - chance
    return Proposal(tables, before, gain) if gain >= START else None


class MoveCosts:
    """Time that all ranks wait while experts move, measured by earlier moves.

    Args:
        expert_bytes: size of one expert of one layer.
    """

    def __init__(self, expert_bytes: int) -> None:
        self._expert_bytes = expert_bytes
        self._bytes_per_s = BYTES_PER_S
        self._moving_bytes = 0
        self._slowest_s = 0.0

    def pays(self, current: ExpertTables, proposal: Proposal, left_s: float) -> bool:
        """Return whether the gain over the time left exceeds the cost of moving."""
        cost_s = self._bytes(current, proposal.tables) / self._bytes_per_s
        return proposal.gain * EXPERT_TIME * left_s > MUST_PAY_TIMES * cost_s

    def start(self, current: ExpertTables, tables: ExpertTables) -> None:
        """Begin to measure a move."""
        self._moving_bytes, self._slowest_s = self._bytes(current, tables), 0.0

    def moved(self, seconds: float) -> None:
        """Note the seconds of a rank's move; the slowest rank decides the speed."""
        self._slowest_s = max(self._slowest_s, seconds)
        if self._moving_bytes and self._slowest_s:
            self._bytes_per_s = self._moving_bytes / self._slowest_s

    def _bytes(self, before: ExpertTables, after: ExpertTables) -> int:
        """Return the bytes of the rank that receives the most experts."""
        is_other_LR = before.expert_of_slot != after.expert_of_slot
        num_of_rank = is_other_LR.reshape(len(before.layers), before.num_ranks, -1).sum(axis=(0, 2))
        return int(num_of_rank.max()) * self._expert_bytes
