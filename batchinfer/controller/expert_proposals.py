"""Whether the experts of a group of ranks should be elsewhere, and whether moving them pays."""

# L MoE layers, E experts, G ranks

from dataclasses import dataclass

import numpy as np

from batchinfer.data.expert_tables import ExpertTables

# Experts are placed again when the busiest rank has this part of the mean more than promised, beyond chance.
START = 0.02
EXPERT_TIME = 0.3  # of a step, assumed: that the busiest rank's experts take
BYTES_PER_S = 1e9  # at which a rank takes in other experts, until it has been measured
MUST_PAY_TIMES = 2.0  # what moving costs


@dataclass(frozen=True, eq=False)
class Proposal:
    """Where the experts of a group should be.

    before: busiest rank of the current placement by the mean, under the same loads.
    gain: of the mean, what the busiest rank gets less, beyond chance.
    """

    tables: ExpertTables
    before: float
    gain: float


def load_balancer() -> None:
    """Have the balancer's machine code at hand, which takes its time; a process of one rank does without it."""
    from batchinfer.balance.experts import place_robustly

    place_robustly(np.ones((1, 2)), num_slots=2, num_gpus=2)


def propose(
    current: ExpertTables, load: np.ndarray, *, chance: float, num_nodes: int, num_router_groups: int
) -> Proposal | None:
    """A placement for a load [L, E]; None: the current one is about as good as it promised, or as any.

    Args:
        chance: see ExpertLoads.of_groups.
        num_nodes: hosts that the group is spread over.
        num_router_groups: of the model; 1: its router knows no groups.
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
    """What moving experts takes the ranks, who all wait for it.

    Args:
        expert_bytes: of one expert of one layer.
    """

    def __init__(self, expert_bytes: int) -> None:
        self._expert_bytes = expert_bytes
        self._bytes_per_s = BYTES_PER_S
        self._moving_bytes = 0
        self._slowest_s = 0.0

    def pays(self, current: ExpertTables, proposal: Proposal, left_s: float) -> bool:
        """Whether the gain over the time that is left is more than moving costs."""
        cost_s = self._bytes(current, proposal.tables) / self._bytes_per_s
        return proposal.gain * EXPERT_TIME * left_s > MUST_PAY_TIMES * cost_s

    def start(self, current: ExpertTables, tables: ExpertTables) -> None:
        """The ranks begin to move."""
        self._moving_bytes, self._slowest_s = self._bytes(current, tables), 0.0

    def moved(self, seconds: float) -> None:
        """A rank is done; the slowest says how long it takes."""
        self._slowest_s = max(self._slowest_s, seconds)
        if self._moving_bytes and self._slowest_s:
            self._bytes_per_s = self._moving_bytes / self._slowest_s

    def _bytes(self, before: ExpertTables, after: ExpertTables) -> int:
        """Of the rank that gets most other experts."""
        is_other_LR = before.expert_of_slot != after.expert_of_slot
        num_of_rank = is_other_LR.reshape(len(before.layers), before.num_ranks, -1).sum(axis=(0, 2))
        return int(num_of_rank.max()) * self._expert_bytes
