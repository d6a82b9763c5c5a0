"""Where the experts of a group of ranks are, as plan/experts.parquet holds it, and how often each was asked for.

Written by the planner (from an earlier run's loads) or by the engine (from the first unit's).
"""

# L MoE layers, E experts, R slots of all ranks of a group

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchinfer.data.parquet import read_rows, table_writer
from batchinfer.data.schemas import PLAN_EXPERTS
from batchinfer.manifest import Manifest
from batchinfer.rundir import RunDir


@dataclass(frozen=True, eq=False)
class ExpertTables:
    """The slots of one group of ranks; slots of rank g are g * R / num_ranks and the ones behind it.

    Args:
        phase: 'both', 'prefill' or 'decode': what the group runs.
        layers: L decoder layers that mix experts.
        expert_of_slot: [L, R] int64.
        share_of_slot: [L, R] float64, the part of its expert's tokens that a slot gets.
        load_of_slot: [L, R] float64, tokens that were expected there when this was made.
        bound: [L] float64, tokens that the busiest rank cannot go below.
        num_ranks: of the group.
    """

    phase: str
    layers: tuple[int, ...]
    expert_of_slot: np.ndarray
    share_of_slot: np.ndarray
    load_of_slot: np.ndarray
    bound: np.ndarray
    num_ranks: int

    @classmethod
    def of(
        cls,
        phase: str,
        layers: tuple[int, ...],
        expert_of_slot: np.ndarray,
        share_of_slot: np.ndarray,
        load: np.ndarray,
        bound: np.ndarray,
        num_ranks: int,
    ) -> ExpertTables:
        """Tables for a load [L, E]."""
        load_of_slot = np.take_along_axis(load, expert_of_slot, axis=1) * share_of_slot
        return cls(phase, layers, expert_of_slot, share_of_slot, load_of_slot, bound, num_ranks)

    @property
    def max_over_mean(self) -> float:
        """Busiest rank by the mean, layer by layer, weighted by load: ranks wait for each other in every layer."""
        load_LG = self.load_of_slot.reshape(len(self.layers), self.num_ranks, -1).sum(axis=2)
        total = float(load_LG.mean(axis=1).sum())
        return float(load_LG.max(axis=1).sum()) / total if total else 1.0

    @property
    def bound_over_mean(self) -> float:
        """What `max_over_mean` cannot go below."""
        mean = float(self.load_of_slot.sum()) / self.num_ranks
        return float(self.bound.sum()) / mean if mean else 1.0


def write_expert_tables(target: Path, groups: list[ExpertTables], manifest: Manifest | None = None) -> None:
    """Publish plan/experts.parquet; a plan's manifest vouches for it."""
    with table_writer(target, PLAN_EXPERTS.schema, manifest=manifest) as writer:
        for group in groups:
            num_layers, num_slots = group.expert_of_slot.shape
            slots = np.tile(np.arange(num_slots), num_layers)
            columns = {
                "phase": pa.array([group.phase] * slots.size, pa.string()),
                "layer": np.repeat(np.array(group.layers, dtype=np.int32), num_slots),
                "slot": slots.astype(np.int32),
                "rank": (slots // (num_slots // group.num_ranks)).astype(np.int32),
                "expert": group.expert_of_slot.reshape(-1).astype(np.int32),
                "share": group.share_of_slot.reshape(-1),
                "tokens": group.load_of_slot.reshape(-1),
                "bound": np.repeat(group.bound, num_slots),
            }
            writer.write_table(pa.table(columns, schema=PLAN_EXPERTS.schema))


def read_expert_tables(run: RunDir) -> dict[str, ExpertTables]:
    """The placements of a run by phase; empty when it has none yet."""
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
        )
    return groups
