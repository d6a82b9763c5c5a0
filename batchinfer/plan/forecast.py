"""How even the ranks' work can be, and how long a planned job takes."""

# N requests in the order of execution, U units

from dataclasses import dataclass
from math import ceil

import numpy as np

from batchinfer.balance.decode import assign_decode, decode_bound
from batchinfer.balance.prefill import prefill_bounds
from batchinfer.balance.prefix_groups import deal_prefixes, own_shared_tokens
from batchinfer.config import ClusterConfig
from batchinfer.plan.earlier_run import Speeds

MAX_UNITS = 32  # dealt out to look at their balance, spread over the job


@dataclass(frozen=True, slots=True)
class PlannedWork:
    """The requests of a plan as columns."""

    unit_starts: np.ndarray  # [U + 1] int64, first request of each unit, and N
    prompt_tokens: np.ndarray  # [N] int64
    shared_tokens: np.ndarray  # [N] int64, shared with the request before it
    max_tokens: np.ndarray  # [N] int64
    expected_tokens: np.ndarray  # [N] float, answer lengths; NaN where nothing is known

    @property
    def answer_tokens(self) -> np.ndarray:
        """[N] answer lengths to reckon with: what is expected, or the limit."""
        known = ~np.isnan(self.expected_tokens)
        return np.where(known, np.minimum(self.expected_tokens, self.max_tokens), self.max_tokens)


@dataclass(frozen=True, slots=True)
class Balance:
    """Work of the busiest rank by the mean, and what no plan could go below."""

    max_over_mean: float
    bound: float


def balances(work: PlannedWork, cluster: ClusterConfig) -> tuple[Balance, Balance]:
    """(prefill, decode) when each unit is dealt out like the engine does it, before anything moves.

    Prefill: tokens that a rank runs, with its answers if it decodes. Decode: KV tokens in the middle of all answers.
    """
    prefill, decode = _Sums(), _Sums()
    is_colocated = cluster.mode == "colocated"
    for first, end in _some_units(work.unit_starts):
        part = slice(first, end)
        lengths, shared, answers = work.prompt_tokens[part], work.shared_tokens[part], work.answer_tokens[part]
        outputs = answers * is_colocated
        rank = deal_prefixes(lengths, shared, outputs, num_ranks=cluster.num_prefill_ranks)
        least = lengths - shared + np.ceil(outputs).astype(np.int64)
        prefill.add(
            np.bincount(rank, lengths - own_shared_tokens(shared, rank) + outputs, minlength=cluster.num_prefill_ranks),
            float(least.sum()),
            prefill_bounds(least, shared, num_ranks=cluster.num_prefill_ranks).new_tokens,
        )
        kv_tokens = (lengths + answers / 2).astype(np.int64)
        if is_colocated:
            kv_bound = prefill_bounds(kv_tokens, 0 * kv_tokens, num_ranks=cluster.num_decode_ranks).new_tokens
        else:
            kv_tokens = kv_tokens[: cluster.num_decode_ranks * cluster.decode_requests]
            rank = assign_decode(kv_tokens, num_ranks=cluster.num_decode_ranks)
            kv_bound = decode_bound(kv_tokens, num_ranks=cluster.num_decode_ranks)
        decode.add(
            np.bincount(rank, kv_tokens, minlength=cluster.num_decode_ranks),
            float(kv_tokens.sum()),
            kv_bound,
        )
    return prefill.balance(), decode.balance()


def work_seconds(work: PlannedWork, cluster: ClusterConfig, speeds: Speeds) -> float | None:
    """Seconds that a group of ranks needs from the start of the command to its last step, planning left out.

    None when tokens are to be decoded and the speed of that is not known.
    """
    new_tokens = int((work.prompt_tokens - work.shared_tokens).sum())
    # prefill gives the first token of every answer
    decoded = float(np.maximum(work.answer_tokens - 1, 0).sum())
    prefill_s = new_tokens / (cluster.num_prefill_ranks * speeds.prefill_tokens_per_s)
    if decoded and speeds.decode_tokens_per_s is None:
        return None
    decode_s = decoded / (cluster.num_decode_ranks * (speeds.decode_tokens_per_s or 1.0))
    busy_s = prefill_s + decode_s if cluster.mode == "colocated" else max(prefill_s, decode_s)
    return speeds.startup_s + max(busy_s * speeds.seconds_per_busy_second, speeds.longest_answer_s)


def nodes_to_finish(
    work_s: float, deadline_s: float, *, least_s: float, num_units: int, num_ranks: int, gpus_per_node: int
) -> int | None:
    """Nodes for as many groups of ranks as are done in time, each with whole units.

    Args:
        work_s: of one group.
        least_s: what no number of groups goes below.
        num_ranks: of a group.

    Returns:
        None when no number of groups is done in time.
    """
    num_groups = ceil(work_s / deadline_s)
    if num_groups > max(num_units, 1) or least_s > deadline_s:
        return None
    return ceil(num_groups * num_ranks / gpus_per_node)


@dataclass(slots=True)
class _Sums:
    """Loads of units, added up."""

    busiest: float = 0.0
    mean: float = 0.0
    bound: float = 0.0

    def add(self, load_of_rank: np.ndarray, least: float, bound: float) -> None:
        """Add a unit: loads of its ranks, what all of them have to do at least, and the busiest one's bound."""
        self.busiest += float(load_of_rank.max())
        self.mean += least / len(load_of_rank)
        self.bound += bound

    def balance(self) -> Balance:
        return Balance(self.busiest / self.mean, self.bound / self.mean) if self.mean else Balance(1.0, 1.0)


def _some_units(unit_starts: np.ndarray) -> list[tuple[int, int]]:
    num_units = len(unit_starts) - 1
    if num_units == 0:
        return []
    chosen = np.unique(np.linspace(0, num_units - 1, min(num_units, MAX_UNITS)).astype(np.int64))
    return [(int(unit_starts[unit]), int(unit_starts[unit + 1])) for unit in chosen]
