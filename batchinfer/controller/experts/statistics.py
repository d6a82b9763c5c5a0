"""Statistics of experts on disk: tokens routed, rows computed, and the placements."""

# L MoE layers, E experts, G ranks of a group

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from batchinfer.controller.experts.history import ExpertHistory
from batchinfer.data.expert_tables import rows_of
from batchinfer.data.parquet import table_writer
from batchinfer.data.schemas.statistics import STATS_EXPERT_ROWS, STATS_EXPERTS, STATS_PLACEMENTS
from batchinfer.protocol.messages import ExpertCounts
from batchinfer.records import PHASES
from batchinfer.rundir import RunDir

Key = tuple[int, int]  # rank and placement


class ExpertStatistics:
    """The counts of one session, by rank and placement.

    Args:
        ranks_of_role: of this process's ranks, in the order of their groups.
        layers: the decoder layers that mix experts, in the order of the counts.
    """

    def __init__(
        self, run: RunDir, session: str, history: ExpertHistory, ranks_of_role: dict[str, list[int]], layers: list[int]
    ) -> None:
        self._run, self._session, self._history = run, session, history
        self._ranks_of_role, self._layers = ranks_of_role, layers
        # counts of earlier starts of the ranks, and of the current one; by phase: tokens [L, E], rows [L]
        self._earlier: dict[Key, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
        self._current: dict[Key, dict[str, tuple[np.ndarray, np.ndarray]]] = {}

    def take(self, rank: int, counts: ExpertCounts) -> None:
        """Take the counts of a rank since its last placement."""
        if self._layers:
            self._current[rank, counts.placement] = {
                phase: (np.array(counts.tokens[phase]), np.array(counts.rows[phase])) for phase in PHASES
            }

    def ranks_ended(self) -> None:
        """Keep the counts so far, since restarted ranks count from zero."""
        self._earlier, self._current = self._counted(), {}

    def write(self) -> None:
        """Publish the tables of this session."""
        counted = self._counted()
        if not counted:
            return
        self._publish("experts", STATS_EXPERTS.schema, self._token_tables(counted))
        self._publish("expert_rows", STATS_EXPERT_ROWS.schema, self._row_tables(counted))
        if self._history.groups:
            self._publish("placements", STATS_PLACEMENTS.schema, self._placement_tables())

    def _counted(self) -> dict[Key, dict[str, tuple[np.ndarray, np.ndarray]]]:
        counted = dict(self._earlier)
        for key, current in self._current.items():
            before = counted.get(key)
            counted[key] = (
                current
                if before is None
                else {
                    phase: (before[phase][0] + current[phase][0], before[phase][1] + current[phase][1])
                    for phase in PHASES
                }
            )
        return counted

    def _publish(self, table: str, schema: pa.Schema, parts: Iterable[pa.Table]) -> None:
        with table_writer(self._run.session_stats(table, self._session), schema) as writer:
            writer.write_table(pa.concat_tables(parts))

    def _token_tables(self, counted: dict[Key, Any]) -> Iterable[pa.Table]:
        for (rank, placement), of_phase in sorted(counted.items()):
            for phase, (tokens_LE, _) in of_phase.items():
                layers, experts = np.indices(tokens_LE.shape)
                columns = {
                    "layer": np.array(self._layers)[layers].ravel(),
                    "expert": experts.ravel(),
                    "tokens": tokens_LE.ravel(),
                }
                same: dict[str, str | int] = {"rank": rank, "placement": placement, "phase": phase}
                yield self._table(STATS_EXPERTS.schema, columns, **same)

    def _row_tables(self, counted: dict[Key, Any]) -> Iterable[pa.Table]:
        """Yield the measured rows of each rank, next to the rows that its placement promised."""
        for role, ranks in self._ranks_of_role.items():
            phases = PHASES if role == "both" else (role,)
            placements = sorted({placement for rank, placement in counted if rank in ranks})
            for placement, phase in itertools.product(placements, phases):
                of_rank = {rank: counted[rank, placement][phase] for rank in ranks if (rank, placement) in counted}
                promised_LG = self._promised(role, placement, sum(tokens_LE for tokens_LE, _ in of_rank.values()))
                for rank, (_, rows_L) in of_rank.items():
                    promised_L = promised_LG[:, ranks.index(rank)] if promised_LG is not None else [None] * len(rows_L)
                    columns = {"layer": np.array(self._layers), "rows": rows_L, "promised_rows": promised_L}
                    same: dict[str, str | int] = {"rank": rank, "placement": placement, "phase": phase}
                    yield self._table(STATS_EXPERT_ROWS.schema, columns, **same)

    def _promised(self, role: str, placement: int, tokens_LE: Any) -> np.ndarray | None:
        """Return the promised rows [L, G] of a group's ranks; None: one rank has all experts."""
        history = self._history.of_role.get(role)
        return None if history is None else history[placement].tables.with_load(tokens_LE).load_of_rank

    def _placement_tables(self) -> Iterable[pa.Table]:
        for history in self._history.of_role.values():
            for number, in_force in enumerate(history):
                same: dict[str, str | int] = {
                    "session": self._session,
                    "placement": number,
                    "made_by": in_force.made_by,
                }
                yield rows_of(in_force.tables, STATS_PLACEMENTS.schema, **same)

    def _table(self, schema: pa.Schema, columns: dict[str, Any], **same: str | int) -> pa.Table:
        same |= {"session": self._session}
        num_rows = len(columns["layer"])
        repeated = {name: pa.array([value] * num_rows, schema.field(name).type) for name, value in same.items()}
        return pa.table({**columns, **repeated}, schema=schema)
