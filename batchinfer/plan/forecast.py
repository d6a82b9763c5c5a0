"""Forecast of a planned job: how evenly its work spreads over ranks, and how long it takes."""

# N requests in the order of execution, U units

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np

from batchinfer.balance.decode_loads import MOVE_STEPS
from batchinfer.balance.decode_run import Answers, DealtPrompts, DecodeSeries, PaperRanks, ReadyPrompts, Source
from batchinfer.balance.decode_series import EVEN, Balance
from batchinfer.balance.prefill_steps import max_over_mean, plan_rank_steps
from batchinfer.balance.prefix_groups import deal_prefixes, own_shared_tokens
from batchinfer.balance.prefix_order import longest_first
from batchinfer.balance.request_load import ONE_PER_TOKEN, RequestLoad
from batchinfer.config import PAGE_TOKENS, ClusterConfig
from batchinfer.plan.earlier_run import Speeds
from batchinfer.plan.prompt_groups import group_depths, group_numbers

MAX_STEPPED_UNITS = 8  # units of the sample that are cut into prefill steps
MAX_UNITS = 32  # size of the sample of units whose balance is computed, spread over the job
GOLDEN_RATIO = (5**0.5 - 1) / 2
FILLINGS = 2  # decoded units of the sample fill all decode slots this many times


@dataclass(frozen=True, slots=True)
class PrefillBalance:
    """Sum of the busiest rank's load over prefill steps, divided by the sum of the mean load."""

    tokens: float
    attention: float


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
        """[N] answer lengths for the forecast: the expected length if known, else the limit."""
        known = ~np.isnan(self.expected_tokens)
        return np.where(known, np.minimum(self.expected_tokens, self.max_tokens), self.max_tokens)


class Forecast(NamedTuple):
    """A sample of a job's steps on its ranks."""

    prefill: PrefillBalance
    decode: Balance
    decode_series: DecodeSeries | None  # None: nothing was simulated


def balances(
    work: PlannedWork, cluster: ClusterConfig, *, request_load: RequestLoad = ONE_PER_TOKEN, needs_series: bool = False
) -> Forecast:
    """Return the balance of prefill and of decode for units that are dealt to ranks as a controller does.

    Decode is simulated (balance/decode_run.py) with answers of the expected length (see `_likely_answers`); its
    balance counts KV tokens over all steps.

    Args:
        request_load: cost of a request in a decode step.
        needs_series: simulate the decode of a single rank, too, which is always even.
    """
    num_ranks = cluster.num_prefill_ranks
    if num_ranks == cluster.num_decode_ranks == 1 and not needs_series:
        return Forecast(PrefillBalance(1.0, 1.0), EVEN, None)
    outputs_N = work.answer_tokens * (cluster.mode == "colocated")
    dealt, loads = [], [np.zeros((1, num_ranks, 2))]
    for first, end in _some_units(work.unit_starts):
        order, shared = _order_of_unit(work, first, end)
        lengths, outputs = work.prompt_tokens[order], outputs_N[order]
        rank = deal_prefixes(lengths, shared, outputs, num_ranks=num_ranks)
        rank_of_part = np.zeros(end - first, dtype=np.int64)
        rank_of_part[order - first] = rank
        dealt.append((order, rank_of_part))
        if num_ranks > 1 and len(loads) <= MAX_STEPPED_UNITS:
            plans = plan_rank_steps(
                lengths,
                own_shared_tokens(shared, rank),
                rank,
                num_ranks=num_ranks,
                most_tokens=cluster.prefill_tokens,
                page_tokens=PAGE_TOKENS,
            )
            loads.append(np.stack([plan.loads() for plan in plans], axis=1))
    tokens, attention = max_over_mean(np.concatenate(loads)).tolist()
    series = None
    if dealt and (cluster.num_decode_ranks > 1 or needs_series):
        series = _decode_series(work, cluster, dealt, request_load)
    decode = EVEN if series is None or cluster.num_decode_ranks == 1 else series.kv_balance() or EVEN
    return Forecast(PrefillBalance(tokens, attention), decode, series)


def _order_of_unit(work: PlannedWork, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return [n] a unit's requests in the order of dealing, and [n] the tokens shared with the request before."""
    part = slice(first, end)
    order = longest_first(
        work.shared_tokens[part],
        work.answer_tokens[part],
        before_tokens=int(work.shared_tokens[first]),
        after_tokens=int(work.shared_tokens[end]) if end < len(work.shared_tokens) else 0,
    )
    shared = work.shared_tokens[part]
    # the common prefix of two prompts is the shortest common prefix of neighbours between them
    lows, highs = np.minimum(order[:-1], order[1:]), np.maximum(order[:-1], order[1:])
    common = [int(shared[low + 1 : high + 1].min()) for low, high in zip(lows.tolist(), highs.tolist(), strict=True)]
    return first + order, np.array([0, *common], dtype=np.int64)


def _decode_series(
    work: PlannedWork, cluster: ClusterConfig, dealt: list[tuple[np.ndarray, np.ndarray]], request_load: RequestLoad
) -> DecodeSeries:
    """Return the loads of the decode ranks in a simulated run through some of the units.

    Args:
        dealt: of each unit: [n] the requests in the order of dealing, and [n] the rank of each request, in plan order.
    """
    per_unit = max(1.0, float(np.mean([len(order) for order, _ in dealt])))
    num_units = ceil(FILLINGS * cluster.num_decode_ranks * cluster.decode_requests / per_unit)
    chosen = [dealt[place] for place in _spread(len(dealt), num_units)]
    requests = np.concatenate([np.sort(order) for order, _ in chosen])
    groups, outputs = _likely_answers(work)
    columns = (work.prompt_tokens, outputs, work.max_tokens, work.expected_tokens, groups)
    answers = Answers(*(column[requests] for column in columns))
    source: Source = ReadyPrompts(len(requests))
    if cluster.mode == "colocated":
        units, num_before = [], 0
        for order, rank in chosen:
            places = order - order.min()
            by_rank = places[np.argsort(rank[places], kind="stable")]
            ends = np.cumsum(np.bincount(rank, minlength=cluster.num_decode_ranks))[:-1]
            units.append([queue.tolist() for queue in np.split(num_before + by_rank, ends)])
            num_before += len(order)
        source = DealtPrompts(units, (work.prompt_tokens - work.shared_tokens + work.answer_tokens)[requests])
    ranks = PaperRanks(
        answers,
        cluster.num_decode_ranks,
        max_requests=cluster.decode_requests,
        request_load=request_load,
        move_steps=MOVE_STEPS,
    )
    return ranks.run(source)


def _likely_answers(work: PlannedWork) -> tuple[np.ndarray, np.ndarray]:
    """Return prompt groups and answer lengths of a simulated run ([N] int64 each).

    If no length is known, answers of a prompt group have the same length, which is spread evenly over (0, limit] from
    group to group. A prompt without a group counts as a group.
    """
    depths = group_depths(work.shared_tokens)
    groups = group_numbers(depths, work.shared_tokens)
    drawn_with = np.where(depths > 0, groups, len(groups) + np.arange(len(groups)))
    limits = work.max_tokens * (1 - drawn_with * GOLDEN_RATIO % 1.0)  # neighbours end at times far apart
    outputs = np.where(np.isnan(work.expected_tokens), limits, work.answer_tokens)
    return groups, np.maximum(1, np.ceil(outputs)).astype(np.int64)


def work_seconds(work: PlannedWork, cluster: ClusterConfig, speeds: Speeds) -> float | None:
    """Return the seconds from the start of the command to the last step on one group of ranks, without planning.

    Return None if tokens are to be decoded and the speed of decode is not known.
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
    """Return the nodes for the number of groups of ranks that finish within `deadline_s`; None if no number does.

    Args:
        work_s: seconds of one group for the whole job.
        least_s: lower bound of seconds for any number of groups.
        num_units: units of the job, of which each group takes at least one.
        num_ranks: ranks of a group.
    """
    num_groups = ceil(work_s / deadline_s)
    if num_groups > max(num_units, 1) or least_s > deadline_s:
        return None
    return ceil(num_groups * num_ranks / gpus_per_node)


def _some_units(unit_starts: np.ndarray) -> list[tuple[int, int]]:
    chosen = _spread(len(unit_starts) - 1, MAX_UNITS)
    return [(int(unit_starts[unit]), int(unit_starts[unit + 1])) for unit in chosen]


def _spread(num: int, most: int) -> list[int]:
    """Return at most `most` of the numbers 0 .. num - 1, evenly spread."""
    return [] if num == 0 else np.unique(np.linspace(0, num - 1, min(num, most)).astype(np.int64)).tolist()
