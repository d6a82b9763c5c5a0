"""When and where the experts of this process's ranks are placed.

A plan that knows the loads has the placement (plan/experts.parquet). Without one the ranks begin with the experts in
order, count tokens during the first unit, and place their experts by that, once; the table stays for whoever starts
later. Outputs do not depend on it.
"""

# L MoE layers, E experts

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from batchinfer.config import ClusterConfig
from batchinfer.data.expert_tables import ExpertTables, read_expert_tables, write_expert_tables
from batchinfer.progress import note
from batchinfer.protocol.messages import ExpertSlots
from batchinfer.rundir import RunDir

PHASES = ("prefill", "decode")


class ExpertPlacer:
    """The placements of this process's groups of ranks, by role.

    Args:
        num_experts: routed experts per layer; 0 for a model without.
    """

    def __init__(self, run: RunDir, cluster: ClusterConfig, num_experts: int) -> None:
        self._run = run
        self._num_slots = num_experts + cluster.redundant_experts
        self._num_ranks = cluster.num_ranks
        self._groups = cluster.expert_groups if num_experts else {}
        stored = read_expert_tables(run)
        # another number of ranks than the plan had: then it fits none of them
        self._tables = {role: tables for role, tables in stored.items() if self._fits(role, tables)}
        self._layers: tuple[int, ...] = ()
        self._is_first_unit_done = False
        self._counts: dict[int, dict[str, np.ndarray]] | None = None  # by rank, while they are being asked for
        self._placing: Future[dict[str, ExpertTables]] | None = None

    def set_layers(self, layers: list[int]) -> None:
        """The decoder layers that mix experts."""
        self._layers = tuple(layers)

    def slots(self, role: str) -> ExpertSlots | None:
        """Where the experts of ranks with this role are; None: in order."""
        tables = self._tables.get(role)
        return None if tables is None else _slots(tables)

    def unit_done(self) -> None:
        """A unit is complete: what the ranks have counted says enough."""
        self._is_first_unit_done = True

    def should_count(self) -> bool:
        """Whether the ranks are to be asked for their counts now; True once."""
        if not self._groups or self._tables or not self._is_first_unit_done or self._counts is not None:
            return False
        self._counts = {}
        return True

    def add_counts(self, rank: int, tokens: dict[str, list[list[int]]]) -> None:
        """Tokens per phase, layer and expert of one rank; when all have come, placing begins in another thread."""
        if self._counts is None or self._placing is not None:
            return
        self._counts[rank] = {phase: np.array(counts, dtype=np.int64) for phase, counts in tokens.items()}
        if len(self._counts) == self._num_ranks:
            load_of_phase = {
                phase: np.sum([counts[phase] for counts in self._counts.values()], axis=0) for phase in PHASES
            }
            thread = ThreadPoolExecutor(1, "place experts")
            self._placing = thread.submit(self._place, load_of_phase)
            thread.shutdown(wait=False)

    def ranks_died(self) -> None:
        """Counts on their way are lost: ask again."""
        if self._placing is None:
            self._counts = None

    def take_placed(self) -> dict[str, ExpertSlots]:
        """Where ranks are to move their experts now, by role; each is named once."""
        if self._placing is None or not self._placing.done():
            return {}
        self._tables, self._placing = self._placing.result(), None
        if not self._run.experts.exists():
            write_expert_tables(self._run.experts, list(self._tables.values()))
        return {role: _slots(tables) for role, tables in self._tables.items()}

    def _place(self, load_of_phase: dict[str, np.ndarray]) -> dict[str, ExpertTables]:
        # numba takes its time to load: one rank alone does without it
        from batchinfer.balance.experts import place_experts
        from batchinfer.balance.experts.groups import group_loads, in_order

        placed = {}
        for role, load in group_loads(load_of_phase, self._groups).items():
            num_ranks = self._groups[role]
            before = in_order(load, num_slots=self._num_slots, num_ranks=num_ranks)
            placement = place_experts(load, num_slots=self._num_slots, num_gpus=num_ranks, previous=before)
            placed[role] = ExpertTables.of(
                role, self._layers, placement.expert_of_slot, placement.share_of_slot, load, placement.bound, num_ranks
            )
            mean = before.gpu_load.mean(axis=1).sum() or 1.0
            note(
                f"experts placed by the loads of the first unit: busiest rank {placed[role].max_over_mean:.3f} times "
                f"the mean, {before.gpu_load.max(axis=1).sum() / mean:.3f} before"
            )
        return placed

    def _fits(self, role: str, tables: ExpertTables) -> bool:
        return self._groups.get(role) == tables.num_ranks and tables.expert_of_slot.shape[1] == self._num_slots


def _slots(tables: ExpertTables) -> ExpertSlots:
    return ExpertSlots(tables.expert_of_slot.tolist(), tables.share_of_slot.tolist())
