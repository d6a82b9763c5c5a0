"""The choice of two micro-batches: the faster way in spite of noise, and the same way on all ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from batchinfer.model.fused.graph_size import DecodeBatch
from batchinfer.model.fused.graphs import DecodeGraphs
from batchinfer.parallel.spans import SpanLog
from batchinfer.rank.overlap_rule import LEAST_GAIN, UNKNOWN, OverlapRule, StepTime, is_quicker_in_pairs
from batchinfer.rank.step_vote import TRIED, Agreed, Kind, MeasuredOverlap, StepVote, agree
from batchinfer.records import COMPUTE, FLIGHT, Span

STEP_S = 0.010  # of a whole step, on a machine without noise
Seconds = Callable[[int, bool], float]  # of the step of this number, whole or in halves


class Ran:
    """Steps that a rule has chosen, of two ranks, one of which has less to do."""

    def __init__(self, *, by_size: bool = True):
        self.rule = OverlapRule(by_size=by_size)
        self.in_pairs: list[bool] = []
        self.seconds = 0.0

    def steps(self, num_steps: int, seconds: Seconds, *, hideable: float = 0.4, rows: int = 64) -> list[bool]:
        """Run some more steps; returns how they ran.

        Args:
            hideable: share of a step in which a rank waits for rows, or UNKNOWN.
        """
        for number in range(num_steps):
            way = self.rule.choose().in_pairs
            took_s = seconds(number, way)
            self.seconds += took_s
            step_us = round(1e6 * took_s)
            hideable_us = UNKNOWN if hideable == UNKNOWN else round(hideable * step_us)
            busy, idle = StepTime(rows, step_us, hideable_us), StepTime(rows // 3, round(0.99 * step_us), hideable_us)
            self.rule.note([idle, busy], in_pairs=way)
            self.in_pairs.append(way)
        return self.in_pairs[-num_steps:]


def noisy(gain: float, seed: int, *, spread: float = 0.1, spikes: float = 0.03) -> Seconds:
    """Steps that are quicker by `gain` in halves; some take three times as long for reasons of their own."""
    rng = random.Random(seed)

    def seconds(number: int, in_pairs: bool) -> float:
        other_load = 3.0 if rng.random() < spikes else 1.0
        return STEP_S / (gain if in_pairs else 1.0) * rng.lognormvariate(0.0, spread) * other_load

    return seconds


def quiet(gain: float) -> Seconds:
    return lambda number, in_pairs: STEP_S / (gain if in_pairs else 1.0)


def test_steps_are_tried_by_turns_after_one_that_warms_up():
    ran = Ran()
    assert ran.rule.choose() == (False, True)
    # the first, then pairs of neighbours: W H, H W, W H, H W; 10 % are seen by four of them, and more by two
    assert ran.steps(9, quiet(1.1)) == [False, False, True, True, False, False, True, True, False]
    assert ran.rule.choose() == (True, False)
    far = Ran()
    assert far.steps(5, quiet(1.4)) == [False, False, True, True, False]
    assert far.rule.choose() == (True, False)
    slower = Ran()
    slower.steps(5, quiet(0.7))
    assert slower.rule.choose() == (False, False)


@pytest.mark.parametrize(
    ("gains", "found"),
    [
        ([], None),
        ([2.0], None),
        ([1.3, 1.4], True),
        ([0.7, 0.6], False),
        ([1.3, 1.1], None),
        ([1.3, 0.7], None),
        ([1.1, 1.1, 1.1, 1.1], True),
        ([1.0, 1.0, 1.0, 1.0], False),  # as quick is not quicker
        ([LEAST_GAIN, LEAST_GAIN, LEAST_GAIN, LEAST_GAIN], True),
        ([9.0, 0.9, 0.9, 0.9, 0.9], None),  # one that is far off counts as one
        ([9.0, 0.9, 0.9, 0.9, 0.9, 0.9], False),
        ([1.1, 0.9] * 5, None),
        ([1.1, 0.9] * 5 + [1.1], True),
        ([1.1, 0.9] * 5 + [0.9], False),
    ],
)
def test_comparisons_decide_once_one_way_leads(gains, found):
    assert is_quicker_in_pairs(gains) is found


@pytest.mark.parametrize("gain", [0.5, 0.7, 0.8, 1.25, 1.5, 2.0])
def test_the_quicker_way_is_found_within_noise(gain):
    for seed in range(100):
        decided = Ran().steps(60, noisy(gain, seed))[-20:]
        # at most a trial of a few steps runs in these
        assert (sum(decided) > 10) == (gain > 1), seed


@pytest.mark.parametrize("gain", [0.5, 0.8, 0.97, 1.0, 1.1, 1.5])
def test_trials_cost_a_long_job_next_to_nothing(gain):
    num_steps = 3000
    for seed in range(5):
        ran = Ran()
        ran.steps(num_steps, noisy(gain, seed, spread=0.03, spikes=0.0))
        assert ran.seconds < num_steps * STEP_S / max(gain, 1.0) * 1.02


@pytest.mark.parametrize("gain", [0.5, 2.0])
def test_where_nothing_could_be_hidden_no_step_is_tried(gain):
    ran = Ran()
    assert not any(ran.steps(500, quiet(gain), hideable=0.0))
    assert not any(ran.steps(500, quiet(gain), hideable=0.04))
    assert ran.rule.choose() == (False, False)


def test_where_it_is_not_known_what_could_be_hidden_both_ways_are_tried():
    assert all(Ran().steps(40, quiet(1.5), hideable=UNKNOWN)[-20:])
    assert not any(Ran().steps(40, quiet(0.5), hideable=UNKNOWN)[-20:])


def test_a_link_that_gets_slower_or_quicker_is_noticed():
    ran = Ran()
    assert not any(ran.steps(200, quiet(0.7), hideable=0.01))
    assert sum(ran.steps(400, quiet(1.4), hideable=0.4)) > 350  # there was no trial yet: one begins at once
    assert sum(ran.steps(2000, quiet(0.7), hideable=0.1)) < 1000  # after half as many steps as have run
    assert sum(ran.steps(4000, quiet(1.4), hideable=0.4)) > 2000


def test_decode_of_few_requests_is_decided_apart_from_that_of_many():
    ran, gains = Ran(), {200: 1.5, 3: 0.6}
    for _ in range(20):
        for rows, gain in gains.items():
            ran.steps(100, quiet(gain), rows=rows)
    assert sum(ran.steps(100, quiet(gains[200]), rows=200)) > 90
    assert sum(ran.steps(100, quiet(gains[3]), rows=3)) < 10


def test_steps_that_are_not_alike_are_not_compared():
    ran = Ran(by_size=False)
    ran.steps(1, quiet(1.5), rows=1000)
    for number in range(20):  # whole and in halves by turns, always of another size
        way = ran.rule.choose().in_pairs
        ran.rule.note([StepTime(100 if number % 2 else 1000, 10_000, 5_000)], in_pairs=way)
    assert ran.rule.choose().is_trial


# --- all ranks -------------------------------------------------------------------------------------------------------


class Mesh:
    """A group of which all votes are known."""

    def __init__(self, votes: list[StepVote], rank: int):
        self.votes, self.rank, self.size = votes, rank, len(votes)

    def agree(self, values):
        assert values == self.votes[self.rank].to_ints()
        return [vote.to_ints() for vote in self.votes]


class Group:
    """Ranks that measure, each for itself, and that have graphs."""

    def __init__(self, num_ranks: int, *, has_graphs: bool = False):
        self.overlaps = [MeasuredOverlap() for _ in range(num_ranks)]
        self.graphs = [DecodeGraphs(9, lambda work: work) if has_graphs else None for _ in range(num_ranks)]

    def measure(self, *times: StepTime) -> None:
        """Each rank has measured this."""
        for overlap, time in zip(self.overlaps, times, strict=True):
            log = SpanLog(knows_waiting=time.hideable_us != UNKNOWN)
            moving, computing = Span(FLIGHT, "", 0, 0.0, time.hideable_us / 1e6), Span(COMPUTE, "", 0, 9.0, 99.0)
            log.spans += [moving, computing]
            overlap.measure(time.rows, time.step_us / 1e6, log)

    def step(self, *votes: StepVote) -> Agreed:
        """Return the step that all ranks agree on."""
        sent = [replace(vote, latest=overlap._latest) for vote, overlap in zip(votes, self.overlaps, strict=True)]
        found = {
            agree(Mesh(sent, rank), votes[rank], overlap=overlap, graphs=graphs)
            for rank, (overlap, graphs) in enumerate(zip(self.overlaps, self.graphs, strict=True))
        }
        (agreed,) = found
        return agreed


@pytest.mark.parametrize("seed", range(30))
def test_all_ranks_agree_on_every_step(seed):
    rng, num_ranks = random.Random(seed), random.Random(seed).randint(2, 5)
    group, gain, kinds = Group(num_ranks), rng.choice([0.6, 1.0, 1.5]), set()
    for _ in range(300):
        flags = [{name: rng.random() < 0.1 for name in ("prefill", "place", "calibrate")} for _ in range(num_ranks)]
        requests = [rng.randint(0, 40) for _ in range(num_ranks)]
        votes = [
            StepVote(**flag, decode=count > 0, fills_both_halves=count > 1 and rng.random() < 0.9)
            for flag, count in zip(flags, requests, strict=True)
        ]
        agreed = group.step(*votes)
        if agreed.kind in (Kind.PREFILL, Kind.DECODE):
            kinds.add((agreed.kind, agreed.in_pairs))
            times = [round(1e4 * rng.lognormvariate(0, 0.3) / (gain if agreed.in_pairs else 1)) for _ in votes]
            hideable = [rng.choice([UNKNOWN, time // 2]) for time in times]
            group.measure(*map(StepTime, requests, times, hideable))
    assert kinds == set(itertools.product((Kind.PREFILL, Kind.DECODE), (True, False)))


def test_a_step_for_one_micro_batch_runs_whole_and_teaches_nothing():
    group = Group(2)
    for _ in range(20):
        agreed = group.step(StepVote(decode=True), StepVote())
        assert not agreed.in_pairs
        group.measure(StepTime(1, 5000, 4000), StepTime(0, 5000, 4000))
    assert group.step(StepVote(decode=True, fills_both_halves=True), StepVote()) == Agreed(
        Kind.DECODE, in_pairs=False, no_graph="a rank of the group has no graphs"
    )
    assert group.overlaps[0].choose("decode", can_pair=True).is_trial


def test_prefill_and_decode_are_decided_apart():
    group, gains, ways = Group(2), {Kind.PREFILL: 1.5, Kind.DECODE: 0.7}, {}
    for number in range(80):
        prefill = StepVote(prefill=number % 2 == 0, decode=True, fills_both_halves=True)
        agreed = group.step(prefill, prefill)
        ways[agreed.kind] = agreed.in_pairs
        step_us = round(10_000 / (gains[agreed.kind] if agreed.in_pairs else 1))
        group.measure(*[StepTime(50, step_us, step_us // 3)] * 2)
    assert ways == {Kind.PREFILL: True, Kind.DECODE: False}


@pytest.mark.parametrize(("gain", "in_pairs"), [(1.5, True), (0.7, False)])
def test_no_graph_is_recorded_for_a_way_that_is_only_tried(gain, in_pairs):
    group, steps = Group(2, has_graphs=True), []
    batch = DecodeBatch(20, 2, 1, 0, 1, 1)
    for _ in range(40):
        vote = StepVote(decode=True, fills_both_halves=True, batch=batch)
        agreed = group.step(vote, vote)
        steps.append(agreed)
        for graphs in group.graphs:
            if agreed.graph is not None:
                graphs._graphs.setdefault(agreed.graph, None)
        step_us = round(10_000 / (gain if agreed.in_pairs else 1))
        group.measure(*[StepTime(20, step_us, UNKNOWN)] * 2)
    tried = [agreed for agreed in steps if agreed.graph is None]
    assert {agreed.no_graph for agreed in tried} == {TRIED}
    assert {agreed.in_pairs for agreed in tried} == {True, False}
    assert tried == steps[: len(tried)]
    assert {(agreed.in_pairs, agreed.graph.in_pairs) for agreed in steps[len(tried) :]} == {(in_pairs, in_pairs)}
    assert sum(agreed.records for agreed in steps) == 1
