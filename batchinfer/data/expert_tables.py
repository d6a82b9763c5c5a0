"""The placement of experts on a group of ranks with its load: the rows of plan/experts.parquet.

Written by the planner (from an earlier run's loads) or by the controller (from a calibration or its ranks' loads).
"""

# L MoE layers, E experts, R slots of all ranks of a group

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchinfer.data.parquet import read_rows, table_writer
from batchinfer.data.schemas.internal import PLAN_EXPERTS
from batchinfer.manifest import Manifest
from batchinfer.rundir import RunDir


@dataclass(frozen=True, eq=False)
class ExpertTables:
    """The expert slots of one group of ranks. Rank g has R / num_ranks slots, from slot g * R / num_ranks on.

    Args:
        phase: the group's steps: 'both', 'prefill' or 'decode'.
        layers: indices of the L decoder layers that mix experts.
        expert_of_slot: [L, R] int64.
        share_of_slot: [L, R] float64, the part of its expert's tokens that a slot gets.
        load_of_slot: [L, R] float64, expected tokens of each slot.
        bound: [L] float64, lower bound of the busiest rank's tokens.
        num_ranks: ranks of the group.
        num_nodes: number of equal parts of the ranks; all copies of an expert are in one part. 1: anywhere.
    """

    phase: str
    layers: tuple[int, ...]
    expert_of_slot: np.ndarray
    share_of_slot: np.ndarray
    load_of_slot: np.ndarray
    bound: np.ndarray
    num_ranks: int
    num_nodes: int = 1

    @classmethod
    def in_order(
        cls, phase: str, layers: tuple[int, ...], num_experts: int, num_slots: int, num_ranks: int
    ) -> ExpertTables:
        """Return the placement of expert e in slot e. Redundant slots repeat experts 0, 1, ...; the load is zero."""
        expert_R = np.arange(num_slots) % num_experts
        expert_LR = np.tile(expert_R, (len(layers), 1))
        share_LR = np.tile(1.0 / np.bincount(expert_R)[expert_R], (len(layers), 1))
        return cls(phase, layers, expert_LR, share_LR, np.zeros(share_LR.shape), np.zeros(len(layers)), num_ranks)

    def with_slots(self, expert_of_slot: np.ndarray, share_of_slot: np.ndarray, num_nodes: int) -> ExpertTables:
        """Return a placement of the same ranks with other experts in the slots and with zero load."""
        zeros = np.zeros(share_of_slot.shape)
        return replace(
            self, expert_of_slot=expert_of_slot, share_of_slot=share_of_slot, load_of_slot=zeros, num_nodes=num_nodes
        )

    def with_load(self, load: np.ndarray, bound: np.ndarray | None = None) -> ExpertTables:
        """Return the placement with the load of its slots under `load` [L, E] tokens.

        Args:
            bound: [L], the bound for this load; None keeps the present bound.
        """
        load_LR = np.take_along_axis(load.astype(np.float64), self.expert_of_slot, axis=1) * self.share_of_slot
        return replace(self, load_of_slot=load_LR, bound=self.bound if bound is None else bound)

    @property
    def load_of_rank(self) -> np.ndarray:
        """[L, num_ranks] expected tokens of each rank."""
        return np.asarray(self.load_of_slot.reshape(len(self.layers), self.num_ranks, -1).sum(axis=2))

    @property
    def max_over_mean(self) -> float:
        """Load of the busiest rank divided by the mean, both summed over layers: ranks wait for each other in each."""
        load_LG = self.load_of_rank
        total = float(load_LG.mean(axis=1).sum())
        return float(load_LG.max(axis=1).sum()) / total if total else 1.0

    @property
    def bound_over_mean(self) -> float:
        """Lower bound of `max_over_mean`."""
        mean = float(self.load_of_slot.sum()) / self.num_ranks
        return float(self.bound.sum()) / mean if mean else 1.0


def num_nodes(hosts: list[str]) -> int:
    """Return the number of hosts if each has an equal run of consecutive ranks, else 1.

    Args:
        hosts: the host of each rank.
    """
    count = len(set(hosts))
    part = len(hosts) // count
    parts = [set(hosts[start : start + part]) for start in range(0, len(hosts), part)]
    return count if len(parts) == count and all(len(found) == 1 for found in parts) else 1


def write_expert_tables(target: Path, groups: list[ExpertTables], manifest: Manifest | None = None) -> None:
    """Write plan/experts.parquet and add the file to the plan's manifest, if given."""
    with table_writer(target, PLAN_EXPERTS.schema, manifest=manifest) as writer:
        for group in groups:
            writer.write_table(rows_of(group))


def rows_of(group: ExpertTables, schema: pa.Schema = PLAN_EXPERTS.schema, **same: str | int) -> pa.Table:
    """Return one row per layer and slot.

    Args:
        same: more columns, each with one value for all rows.
    """
    num_layers, num_slots = group.expert_of_slot.shape
    slots = np.tile(np.arange(num_slots), num_layers)
    ranks = slots // (num_slots // group.num_ranks)
    columns = {
        "phase": pa.array([group.phase] * slots.size, pa.string()),
        "layer": np.repeat(np.array(group.layers, dtype=np.int32), num_slots),
        "slot": slots.astype(np.int32),
        "rank": ranks.astype(np.int32),
        "node": (ranks // (group.num_ranks // group.num_nodes)).astype(np.int32),
        "expert": group.expert_of_slot.reshape(-1).astype(np.int32),
        "share": group.share_of_slot.reshape(-1),
        "tokens": group.load_of_slot.reshape(-1),
        "bound": np.repeat(group.bound, num_slots),
    }
    columns |= {name: pa.array([value] * slots.size, schema.field(name).type) for name, value in same.items()}
    return pa.table(columns, schema=schema)


def read_expert_tables(run: RunDir) -> dict[str, ExpertTables]:
    """Return the placements of a run by phase, {} if the run has none yet."""
    if not run.experts.exists():
        return {}
    rows = read_rows(run.experts)
    groups = {}
    for phase in dict.fromkeys(row["phase"] for row in rows):
        of_phase = [row for row in rows if row["phase"] == phase]
        layers = tuple(dict.fromkeys(row["layer"] for row in of_phase))

        def column(name: str, of_phase: list[dict[str, Any]] = of_phase, num_layers: int = len(layers)) -> np.ndarray:
            return np.array([row[name] for row in of_phase]).reshape(num_layers, -1)

        groups[phase] = ExpertTables(
            phase=phase,
            layers=layers,
            expert_of_slot=column("expert").astype(np.int64),
            share_of_slot=column("share").astype(np.float64),
            load_of_slot=column("tokens").astype(np.float64),
            bound=column("bound")[:, 0].astype(np.float64),
            num_ranks=int(column("rank").max()) + 1,
            # plans of earlier versions have no column `node`
            num_nodes=max(row.get("node", 0) for row in of_phase) + 1,
        )
    return groups
