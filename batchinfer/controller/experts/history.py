"""Every placement of experts in this session, per group of ranks, and proposals for better ones."""

# L MoE layers, E experts

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from batchinfer.config import ClusterConfig
from batchinfer.controller.experts.proposals import Proposal, propose
from batchinfer.data.expert_tables import ExpertTables, num_nodes, read_expert_tables, write_expert_tables
from batchinfer.model.config import ModelConfig
from batchinfer.protocol.messages import ExpertSlots
from batchinfer.rundir import RunDir


@dataclass(frozen=True, eq=False)
class ActivePlacement:
    """A placement of a group of ranks. `made_by` is 'order', 'table', 'calibration' or 'loads'."""

    made_by: str
    tables: ExpertTables


class ExpertHistory:
    """Placements of each group of ranks in this session; the last one is active.

    Args:
        may_keep: whether to write plan/experts.parquet for controllers that start later; False if the plan has its own.
    """

    def __init__(self, run: RunDir, cluster: ClusterConfig, model: ModelConfig, *, may_keep: bool) -> None:
        self._run, self._cluster, self._model, self._may_keep = run, cluster, model, may_keep
        self.groups = cluster.expert_groups if model.n_routed_experts else {}
        stored = read_expert_tables(run)
        self.of_role = {role: [self._first(role, stored.get(role))] for role in self.groups}
        self._nodes = dict.fromkeys(self.groups, 1)

    @property
    def is_in_order(self) -> bool:
        """Whether the loads of some group are unknown."""
        return any(history[-1].made_by == "order" for history in self.of_role.values())

    @property
    def num_placed(self) -> int:
        """Number of placements made in this session, over all groups."""
        return sum(len(history) - 1 for history in self.of_role.values())

    def current(self, role: str) -> ExpertTables:
        """Return the active placement of a group."""
        return self.of_role[role][-1].tables

    def slots(self, role: str) -> ExpertSlots | None:
        """Return the experts in each slot of a group's ranks; None: in order."""
        history = self.of_role.get(role)
        if history is None or history[-1].made_by == "order":
            return None
        tables = history[-1].tables
        return ExpertSlots(tables.expert_of_slot.tolist(), tables.share_of_slot.tolist(), len(history) - 1)

    def ranks_loaded(self, hosts_of_role: Mapping[str, list[str]]) -> None:
        """Take the number of hosts of each group as its limit for placements, unless the job has cluster.nodes."""
        nodes = self._cluster.nodes
        for role in self.groups:
            hosts = hosts_of_role[role] if nodes is None else self._cluster.hosts_of(role, nodes)
            self._nodes[role] = num_nodes(hosts)

    def propose(self, known: Mapping[str, tuple[np.ndarray, float]]) -> dict[str, Proposal]:
        """Return better placements by role, if any.

        Args:
            known: by role, the load [L, E] and the share of imbalance that chance explains (ExpertLoads.of_groups).
        """
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
        """Make these placements the active ones."""
        for role, tables in placed.items():
            self.of_role[role].append(ActivePlacement(made_by, tables))
        if placed and self._may_keep:
            write_expert_tables(self._run.experts, [self.current(role) for role in self.of_role])

    def _first(self, role: str, stored: ExpertTables | None) -> ActivePlacement:
        """Return the initial placement: the stored table, unless it is for another number of ranks or slots."""
        num_experts, num_ranks = self._model.n_routed_experts, self.groups[role]
        num_slots = num_experts + self._cluster.redundant_experts
        if stored is not None and (stored.num_ranks, stored.expert_of_slot.shape[1]) == (num_ranks, num_slots):
            return ActivePlacement("table", stored)
        layers = tuple(self._model.moe_layers)
        return ActivePlacement("order", ExpertTables.in_order(role, layers, num_experts, num_slots, num_ranks))
