"""How often each expert was asked for lately, as the ranks count."""

# L MoE layers, E experts, G ranks

import math
from collections.abc import Mapping

import numpy as np

from batchinfer.balance.expert_groups import group_loads
from batchinfer.protocol.messages import ExpertCounts
from batchinfer.records import PHASES

MEMORY = 4  # times longer than what says how much of each phase is run


class ExpertLoads:
    """Tokens per layer and expert that groups of ranks have counted; earlier ones count less and less.

    Each phase has a memory of its own, so that prefill does not make decode forgotten. Ranks for both are to have their
    experts placed for as much of each as they have run lately: what comes next is most likely more of the same.

    Args:
        groups: what a group runs ('both', 'prefill' or 'decode') -> its ranks.
        tokens: after these, the share of a phase counts half; after MEMORY times as many of a phase, its counts do.
        topk: experts per token.
    """

    def __init__(self, groups: Mapping[str, int], tokens: float, topk: int) -> None:
        self._groups, self._half_life_rows = groups, tokens * topk
        self._tokens: dict[str, np.ndarray] = {}  # by phase: [L, E]
        self._lately = dict.fromkeys(PHASES, 0.0)  # rows by phase
        self._told: dict[int, ExpertCounts] = {}  # by rank: the latest, which begin anew with each placement
        self._window: dict[str, np.ndarray] = {}  # by phase: [L, E] since `start_window`

    def take_calibration(self, tokens_LE: np.ndarray) -> None:
        """Counts of prompts; what decode asks for is taken for the same until it is counted itself."""
        self._add("prefill", tokens_LE)

    def take(self, rank: int, counts: ExpertCounts) -> None:
        """What a rank has counted since its experts are where they are; earlier messages said a part of it."""
        before = self._told.get(rank)
        self._told[rank] = counts
        for phase, tokens in counts.tokens.items():
            tokens_LE = np.array(tokens, dtype=np.float64)
            if before is not None and before.placement == counts.placement:
                tokens_LE -= np.array(before.tokens[phase])
            self._add(phase, tokens_LE)

    def ranks_died(self) -> None:
        """They count from zero when they are started again."""
        self._told.clear()

    def start_window(self) -> None:
        """From now on `window` counts."""
        self._window = {}

    def window(self) -> dict[str, np.ndarray]:
        """[L, E] by group: all tokens since `start_window`, where there were any."""
        zero = np.zeros_like(next(iter(self._window.values()), np.zeros(0)))
        counted = {phase: self._window.get(phase, zero) for phase in PHASES}
        return {group: load for group, load in group_loads(counted, self._groups).items() if load.any()}

    def of_groups(self) -> dict[str, tuple[np.ndarray, float]]:
        """For each group the load to be expected [L, E], and what chance does to it.

        The latter is how far the busiest rank would seem above the mean if only chance made it so, as a part of the
        mean: the largest of G values that vary as rows that come one by one do.
        """
        known = [phase for phase in PHASES if phase in self._tokens]
        if not known:
            return {}
        # decode is like prefill, as far as anybody knows, until some was counted
        tokens = {phase: self._tokens.get(phase, self._tokens[known[0]]) for phase in PHASES}
        per_row = {phase: tokens_LE / _rows(tokens_LE) for phase, tokens_LE in tokens.items()}
        loads = {}
        for group, num_ranks in self._groups.items():
            lately = self._lately if group == "both" else dict.fromkeys(PHASES, 1.0)
            load = group_loads({phase: per_row[phase] * lately[phase] for phase in PHASES}, [group])[group]
            phases = known if group == "both" else [group]
            weight = {phase: lately[phase] / sum(lately[name] for name in phases) for phase in phases}
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
        self._lately = {name: rows * forgotten + new_rows * (name == phase) for name, rows in self._lately.items()}


def _rows(load_LE: np.ndarray) -> float:
    """Of the layer that has most: in prefill the last one gets few."""
    return float(load_LE.sum(axis=1).max(initial=0.0))
