"""Recent load of each expert, from the ranks' counts."""

# L MoE layers, E experts, G ranks

import math
from collections.abc import Mapping

import numpy as np

from batchinfer.balance.expert_groups import group_loads
from batchinfer.protocol.messages import ExpertCounts
from batchinfer.records import PHASES

MEMORY = 4  # counts of a phase fade this many times slower than the share of the phases


class ExpertLoads:
    """Tokens per layer and expert of groups of ranks, in which earlier counts fade.

    Counts of the two phases fade apart, so that much prefill does not erase decode. For ranks that run both, the phases
    are weighted by how much of each ran recently, which is the best guess of what comes next.

    Args:
        groups: number of ranks by the group's role ('both', 'prefill' or 'decode').
        tokens: half-life of a phase's share; the half-life of its counts is MEMORY times as long.
        topk: experts per token.
    """

    def __init__(self, groups: Mapping[str, int], tokens: float, topk: int) -> None:
        self._groups, self._half_life_rows = groups, tokens * topk
        self._tokens: dict[str, np.ndarray] = {}  # by phase: [L, E]
        self._recent_rows = dict.fromkeys(PHASES, 0.0)  # rows by phase
        self._last_counts: dict[int, ExpertCounts] = {}  # by rank: the latest counts, from zero at each placement
        self._window: dict[str, np.ndarray] = {}  # by phase: [L, E] since `start_window`

    def take_calibration(self, tokens_LE: np.ndarray) -> None:
        """Add counts of prompts; decode is assumed to have the same load until it is counted."""
        self._add("prefill", tokens_LE)

    def take(self, rank: int, counts: ExpertCounts) -> None:
        """Add the counts of a rank, less those of its earlier messages since the same placement."""
        before = self._last_counts.get(rank)
        self._last_counts[rank] = counts
        for phase, tokens in counts.tokens.items():
            tokens_LE = np.array(tokens, dtype=np.float64)
            if before is not None and before.placement == counts.placement:
                tokens_LE -= np.array(before.tokens[phase])
            self._add(phase, tokens_LE)

    def ranks_died(self) -> None:
        """Forget the ranks' last counts, since restarted ranks count from zero."""
        self._last_counts.clear()

    def start_window(self) -> None:
        """Start the counts that `window` returns."""
        self._window = {}

    def window(self) -> dict[str, np.ndarray]:
        """Return the tokens [L, E] by group since `start_window`, without groups that have none."""
        zero = np.zeros_like(next(iter(self._window.values()), np.zeros(0)))
        counted = {phase: self._window.get(phase, zero) for phase in PHASES}
        return {group: load for group, load in group_loads(counted, self._groups).items() if load.any()}

    def of_groups(self) -> dict[str, tuple[np.ndarray, float]]:
        """Return the expected load [L, E] of each group, and the imbalance that chance alone would show.

        The latter is the excess of the busiest rank over the mean, as a share of the mean: the expected maximum of G
        rank loads whose rows arrive independently.
        """
        known = [phase for phase in PHASES if phase in self._tokens]
        if not known:
            return {}
        # a phase without counts is assumed to have the load of the other
        tokens = {phase: self._tokens.get(phase, self._tokens[known[0]]) for phase in PHASES}
        per_row = {phase: tokens_LE / _rows(tokens_LE) for phase, tokens_LE in tokens.items()}
        loads = {}
        for group, num_ranks in self._groups.items():
            recent_rows = self._recent_rows if group == "both" else dict.fromkeys(PHASES, 1.0)
            load = group_loads({phase: per_row[phase] * recent_rows[phase] for phase in PHASES}, [group])[group]
            phases = known if group == "both" else [group]
            num_rows = sum(recent_rows[phase] for phase in phases)
            weight = {phase: recent_rows[phase] / num_rows for phase in phases}
            rows = 1.0 / sum(weight[phase] ** 2 / _rows(tokens[phase]) for phase in phases)
            loads[group] = load, math.sqrt(2.0 * math.log(num_ranks) * num_ranks / rows)
        return loads

    def _add(self, phase: str, tokens_LE: np.ndarray) -> None:
        new_rows = _rows(tokens_LE)
        if not new_rows:
            return
        self._window[phase] = self._window.get(phase, 0.0) + tokens_LE
        forgotten = 0.5 ** (new_rows / self._half_life_rows)
        self._tokens[phase] = self._tokens.get(phase, 0.0) * forgotten ** (1 / MEMORY) + tokens_LE
        self._recent_rows = {
            name: rows * forgotten + new_rows * (name == phase) for name, rows in self._recent_rows.items()
        }


def _rows(load_LE: np.ndarray) -> float:
    """Return the rows of the layer that has most; in prefill the last layer gets few."""
    return float(load_LE.sum(axis=1).max(initial=0.0))
