"""Where the experts of this process's ranks are and have been, and better places for them."""

# L MoE layers, E experts

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from batchinfer.config import ClusterConfig
from batchinfer.controller.expert_proposals import Proposal, propose
from batchinfer.data.expert_tables import ExpertTables, num_nodes, read_expert_tables, write_expert_tables
from batchinfer.model.config import ModelConfig
from batchinfer.protocol.messages import ExpertSlots
from batchinfer.rundir import RunDir


@dataclass(frozen=True, eq=False)
class InForce:
    """A placement of a group of ranks, and what it was made by: 'order', 'table', 'calibration' or 'loads'."""

    made_by: str
    tables: ExpertTables


class ExpertHistory:
    """Every placement of each group of ranks in this session; the last one is in force.

    Args:
        may_keep: whether plan/experts.parquet may be written, for those who start later: the plan has none of its own.
    """

    def __init__(self, run: RunDir, cluster: ClusterConfig, model: ModelConfig, *, may_keep: bool) -> None:
        self._run, self._cluster, self._model, self._may_keep = run, cluster, model, may_keep
        self.groups = cluster.expert_groups if model.n_routed_experts else {}
        stored = read_expert_tables(run)
        self.of_role = {role: [self._first(role, stored.get(role))] for role in self.groups}
        self._nodes = dict.fromkeys(self.groups, 1)

    @property
    def is_in_order(self) -> bool:
        """Whether nothing is known of some group's loads."""
        return any(history[-1].made_by == "order" for history in self.of_role.values())

    @property
    def num_placed(self) -> int:
        """How often experts of a group were placed in this session."""
        return sum(len(history) - 1 for history in self.of_role.values())

    def current(self, role: str) -> ExpertTables:
        """The placement in force."""
        return self.of_role[role][-1].tables

    def slots(self, role: str) -> ExpertSlots | None:
        """Where the experts of ranks with this role are; None: in order."""
        history = self.of_role.get(role)
        if history is None or history[-1].made_by == "order":
            return None
        tables = history[-1].tables
        return ExpertSlots(tables.expert_of_slot.tolist(), tables.share_of_slot.tolist(), len(history) - 1)

    def ranks_loaded(self, hosts_of_role: Mapping[str, list[str]]) -> None:
        """The hosts of each group's ranks, in their order: limits for placements, unless the job says others."""
        nodes = self._cluster.nodes
        for role in self.groups:
            hosts = hosts_of_role[role] if nodes is None else self._cluster.hosts_of(role, nodes)
            self._nodes[role] = num_nodes(hosts)

    def propose(self, known: Mapping[str, tuple[np.ndarray, float]]) -> dict[str, Proposal]:
        """Better placements by role, where there are; known: the load [L, E] of each, and what chance makes of it."""
        found = {
            role: propose(
                self.current(role),
                load,
                chance=chance,
                num_nodes=self._nodes[role],
                num_router_groups=self._model.num_router_groups,
            )
            for role, (load, chance) in known.items()
        }
        return {role: proposal for role, proposal in found.items() if proposal is not None}

    def add(self, placed: Mapping[str, ExpertTables], made_by: str) -> None:
        """From now on the experts of these groups are there."""
        for role, tables in placed.items():
            self.of_role[role].append(InForce(made_by, tables))
        if placed and self._may_keep:
            write_expert_tables(self._run.experts, [self.current(role) for role in self.of_role])

    def _first(self, role: str, stored: ExpertTables | None) -> InForce:
        """What the group begins with; a table for another number of ranks or slots than there are fits none of them."""
        num_experts, num_ranks = self._model.n_routed_experts, self.groups[role]
        num_slots = num_experts + self._cluster.redundant_experts
        if stored is not None and (stored.num_ranks, stored.expert_of_slot.shape[1]) == (num_ranks, num_slots):
            return InForce("table", stored)
        layers = tuple(self._model.moe_layers)
        return InForce("order", ExpertTables.in_order(role, layers, num_experts, num_slots, num_ranks))
