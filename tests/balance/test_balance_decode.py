"""Requests to decode ranks: equal KV and equal counts, at once and over a run with unknown output lengths."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.balance.decode import admit, assign_decode, decode_bound
from batchinfer.balance.decode_moves import propose_moves
from batchinfer.balance.output_lengths import OutputLengths
from batchinfer.balance.request_load import RequestLoad
from batchinfer.records import ConfigError

fuzz = settings(deadline=None, derandomize=True, max_examples=150)


def lognormal(seed, num, sigma=1.0):
    return np.maximum(1, 1000 * np.exp(sigma * np.random.default_rng(seed).standard_normal(num))).astype(np.int64)


def kv_of_rank(rank, kv, num_ranks):
    return np.bincount(rank, weights=kv, minlength=num_ranks)


# assign_decode: all at once


def test_worked_example():
    # 9 5 | 4 4 2 2 on two ranks, three requests each: 9 2 2 and 5 4 4 have 13 tokens
    rank = assign_decode(np.array([9, 5, 4, 4, 2, 2]), num_ranks=2)
    assert rank.tolist() == [0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("sigma", [0.5, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_144_ranks_with_128_requests_each_are_level(seed, sigma):
    kv = lognormal(seed, 144 * 128, sigma)
    rank = assign_decode(kv, num_ranks=144)
    assert np.bincount(rank).tolist() == [128] * 144
    assert kv_of_rank(rank, kv, 144).max() <= 1.01 * kv.sum() / 144


@pytest.mark.parametrize(("num", "num_ranks"), [(144 * 16, 144), (1000, 31), (18_500, 144), (3000, 8)])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_other_sizes_are_level_too(num, num_ranks, sigma):
    kv = lognormal(1, num, sigma)
    rank = assign_decode(kv, num_ranks=num_ranks)
    assert np.ptp(np.bincount(rank, minlength=num_ranks)) <= 1
    assert kv_of_rank(rank, kv, num_ranks).max() <= 1.002 * decode_bound(kv, num_ranks=num_ranks)


@fuzz
@given(st.lists(st.integers(0, 10_000), max_size=80), st.integers(1, 12))
def test_every_request_gets_one_rank_counts_are_equal_and_it_is_always_the_same(kv, num_ranks):
    rank = assign_decode(np.array(kv), num_ranks=num_ranks)
    assert len(rank) == len(kv)
    assert all(0 <= item < num_ranks for item in rank)
    assert np.ptp(np.bincount(rank, minlength=num_ranks)) <= 1
    assert kv_of_rank(rank, kv, num_ranks).max() >= decode_bound(np.array(kv), num_ranks=num_ranks) - 1e-6
    assert np.array_equal(rank, assign_decode(np.array(kv), num_ranks=num_ranks))


def test_agrees_with_brute_force_on_tiny_cases():
    by_best = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        num_ranks, num = int(rng.integers(1, 4)), int(rng.integers(1, 9))
        kv = rng.integers(1, [5, 100, 1000][seed % 3], num)
        plans = [np.array(plan) for plan in itertools.product(range(num_ranks), repeat=num)]
        equal = [plan for plan in plans if np.ptp(np.bincount(plan, minlength=num_ranks)) <= 1]
        best = min(kv_of_rank(plan, kv, num_ranks).max() for plan in equal)
        assert best >= decode_bound(kv, num_ranks=num_ranks) - 1e-9
        by_best.append(kv_of_rank(assign_decode(kv, num_ranks=num_ranks), kv, num_ranks).max() / best)
    assert max(by_best) <= 1.1
    assert np.mean(np.array(by_best) == 1) >= 0.95


def lpt_with_room(kv, num_ranks):
    """Largest first, to the least loaded rank that has room; counts differ by at most 1."""
    num_each, num_extra = divmod(len(kv), num_ranks)
    rank, num, load = np.zeros(len(kv), dtype=np.int64), np.zeros(num_ranks, dtype=int), np.zeros(num_ranks)
    for request in np.argsort(-kv, kind="stable"):
        has_room = num < num_each + (np.sum(num > num_each) < num_extra)
        rank[request] = best = np.where(has_room, load, np.inf).argmin()
        num[best] += 1
        load[best] += kv[request]
    return rank


@pytest.mark.parametrize("seed", range(60))
def test_never_worse_than_lpt_with_equal_counts(seed):
    # LPT without equal counts can be better: a request larger than a share would be alone there
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.integers(1, 20))
    kv = lognormal(seed, int(rng.integers(1, 200)), rng.uniform(0, 2))
    ours, theirs = (plan(kv, num_ranks=num_ranks) for plan in (assign_decode, lpt_with_room))
    assert kv_of_rank(ours, kv, num_ranks).max() <= kv_of_rank(theirs, kv, num_ranks).max()


def test_nothing_to_do_and_fewer_requests_than_ranks():
    none = np.zeros(0, dtype=np.int64)
    assert assign_decode(none, num_ranks=3).tolist() == []
    assert decode_bound(none, num_ranks=3) == 0
    assert sorted(assign_decode(np.array([5, 0, 7]), num_ranks=5).tolist()) == [0, 1, 2]
    assert assign_decode(np.array([5, 6, 7]), num_ranks=1).tolist() == [0, 0, 0]
    assert sorted(assign_decode(np.zeros(7, dtype=np.int64), num_ranks=3).tolist()) == [0, 0, 0, 1, 1, 2, 2]


# OutputLengths: what is learnt during a run


def test_output_lengths_are_learnt_by_group():
    lengths = OutputLengths()
    assert lengths.expected("chat", 512) == 512, "nothing is known: the limit"
    for num_tokens in (10, 20, 30):
        lengths.finish("chat", num_tokens)
    lengths.finish("proof", 940)
    assert lengths.expected("chat", 512) == (60 + 250) / 4, "the mean of all, 250, counts as one more"
    assert lengths.expected("proof", 512) == 512
    assert lengths.expected("proof", 2000) == (940 + 250) / 2
    assert lengths.expected("new", 2000) == 250


def test_answers_that_run_make_the_expectation_longer():
    lengths = OutputLengths()
    for num_tokens in (4, 6):
        lengths.finish("short", num_tokens)
    short, long = lengths.number("short"), lengths.number("long")
    # short: (4 + 6 + 10) tokens by 2 answers, and one of the mean of all: (10 + 10 + 25 + 25) / 2 = 35
    # long: (25 + 25) tokens by no answer, and one of the mean of all
    remaining = lengths.remaining_each(
        np.array([short, long, long]), np.array([10, 25, 25]), np.array([400, 400, 30]), np.full(3, np.nan)
    )
    assert remaining.tolist() == [10, (50 + 35) - 25, 5], "at least as long as it has run; its limit at most"


def test_what_has_run_longer_than_an_earlier_run_says_is_expected_to_run_as_long_again():
    lengths = OutputLengths()
    chat_5 = np.full(5, lengths.number("chat"))
    remaining = lengths.remaining_each(chat_5, np.array([0, 30, 60, 300, 400]), np.full(5, 400), np.full(5, 100.0))
    assert remaining.tolist() == [100, 70, 60, 100, 0]


@pytest.mark.parametrize("mean", [5, 40, 300])
def test_while_most_answers_run_the_mean_is_not_that_of_the_short_ones_that_have_ended(mean):
    rng = np.random.default_rng(mean)
    answers = rng.geometric(1 / mean, 4000)
    lengths, step = OutputLengths(), mean // 4 + 1
    for num_tokens in answers[answers <= step].tolist():
        lengths.finish("chat", num_tokens)
    running = np.full((answers > step).sum(), step)
    number = np.full(len(running), lengths.number("chat"))
    remaining = lengths.remaining_each(number, running, np.full(len(running), 10**6), np.full(len(running), np.nan))
    assert lengths.expected("chat", 10**6) < 0.5 * mean, "of those that have ended"
    assert (answers[answers > step] - step).mean() == pytest.approx(mean, rel=0.1)
    assert remaining.mean() + step == pytest.approx(mean, rel=0.15)


@pytest.mark.parametrize("seed", range(10))
def test_lengths_of_many_are_those_of_each(seed):
    rng = np.random.default_rng(seed)
    lengths = OutputLengths()
    groups, limits = rng.integers(0, 40, 60), rng.integers(1, 500, 60)
    earlier = np.where(rng.random(60) < 0.5, rng.uniform(1, 400, 60), np.nan)
    for group in groups[: rng.integers(0, 30)].tolist():
        lengths.finish(group, int(rng.integers(1, 300)))
    numbers = np.array([lengths.number(group) for group in groups.tolist()])
    each = [
        lengths.expected(group, limit, None if np.isnan(known) else known)
        for group, limit, known in zip(groups.tolist(), limits.tolist(), earlier.tolist(), strict=True)
    ]
    assert lengths.expected_each(numbers, limits, earlier) == pytest.approx(each)


@pytest.mark.parametrize("kind", ["geometric", "heavy"])
def test_learnt_means_come_close_to_the_true_ones(kind):
    rng = np.random.default_rng(0)
    lengths = OutputLengths()
    answers = {group: answer_lengths(kind, rng, np.full(2000, mean)) for group, mean in enumerate((50, 200, 400))}
    for group, nums in answers.items():
        for num_tokens in nums.tolist():
            lengths.finish(group, num_tokens)
    for group, nums in answers.items():
        assert lengths.expected(group, MAX_TOKENS) == pytest.approx(nums.mean(), rel=0.02)


# assign_decode on top of what ranks have


@pytest.mark.parametrize("seed", range(20))
def test_counts_become_as_level_as_slots_allow(seed):
    rng = np.random.default_rng(seed)
    num_ranks, have = 6, rng.integers(0, 12, 6)
    slots = rng.integers(0, 15, num_ranks)
    num = int(rng.integers(0, slots.sum() + 1))
    rank = assign_decode(
        lognormal(seed, num),
        num_ranks=num_ranks,
        load_of_rank=have * 1000.0,
        requests_of_rank=have,
        free_slots_of_rank=slots,
    )
    new = np.bincount(rank, minlength=num_ranks)
    assert (new <= slots).all()
    # one request less on the fullest rank that got any, one more on the emptiest that has room: no improvement
    assert (have + new)[new > 0].max(initial=0) <= (have + new)[new < slots].min(initial=10**9) + 1


def test_more_requests_than_slots_are_refused():
    with pytest.raises(ConfigError, match="3 requests are more than the 2 free slots"):
        assign_decode(np.ones(3), num_ranks=2, free_slots_of_rank=np.array([1, 1]))


# admit: requests that are ready


def admitted(expected, kv, *, load, slots, have=None, groups=None, **more):
    """`admit` where all else is equal: ranks have no requests, and all prompts are of one group."""
    have = np.zeros(len(load), dtype=np.int64) if have is None else np.array(have)
    groups = np.zeros(len(kv), dtype=np.int64) if groups is None else groups
    options = {"load_of_rank": np.array(load), "free_slots_of_rank": np.array(slots), "requests_of_rank": have}
    return admit(np.asarray(expected), np.asarray(kv), groups, **options, **more)


def test_the_longest_expected_get_the_slots_and_the_most_kv_goes_where_least_is():
    # one slot on rank 0 (load 50), two on rank 2 (load 10), none on rank 1; the shortest answer waits
    rank = admitted([9, 1, 8, 7], [20, 99, 60, 30], load=[50, 0, 10], slots=[1, 0, 2])
    # KV 60 goes first, to rank 2 (10 -> 70), then 30 to rank 0 (its only slot), then 20 to rank 2
    assert rank.tolist() == [2, -1, 2, 0]


def test_counts_are_level_and_kv_as_far_as_that_allows():
    assert admitted(np.ones(4), [30, 5, 5, 5], load=[0, 0], slots=[9, 9]).tolist() == [0, 1, 1, 0]
    # rank 1 has two requests already
    assert admitted(np.ones(4), [30, 5, 5, 5], load=[0, 10], slots=[9, 9], have=[0, 2]).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_ready_requests_of_a_group_that_has_nothing_yet_are_dealt_like_all_at_once(seed):
    kv = lognormal(seed, 8 * 30)
    rank = admitted(np.ones(len(kv)), kv, load=np.zeros(8), slots=np.full(8, 30))
    assert (rank == assign_decode(kv, num_ranks=8)).all()


@pytest.mark.parametrize("seed", range(20))
def test_on_top_of_what_ranks_have_they_become_level(seed):
    rng = np.random.default_rng(seed)
    kv, have = lognormal(seed, 200), rng.integers(1, 8, 8)
    load = have * 1000
    rank = admitted(np.ones(200), kv, load=load, slots=np.full(8, 200), have=have)
    loads, counts = load + kv_of_rank(rank, kv, 8), have + np.bincount(rank, minlength=8)
    assert loads.max() <= 1.001 * max(loads.mean(), load.max(), kv.max())
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_answers_that_end_at_like_times_are_on_all_ranks(seed, known):
    """Requests come group by group; at any time, ranks have like counts and KV of those that still run."""
    rng = np.random.default_rng(seed)
    num_ranks, groups = 8, np.sort(rng.integers(0, 6, 8 * 48))
    lengths = rng.permutation([20, 60, 110, 170, 240, 320])[groups]
    kv = np.maximum(1, 1000 * np.exp(rng.normal(0, 0.5, len(groups)))).astype(np.int64)
    expected = lengths if known else np.full(len(groups), 400)
    rank = admitted(expected, kv, load=np.zeros(num_ranks), slots=np.full(num_ranks, 64), groups=groups)
    for step in (0, 30, 100, 150, 200, 300):
        runs = lengths > step
        counts = np.bincount(rank[runs], minlength=num_ranks)
        assert counts.max() <= counts.mean() + 3
        kv_R = kv_of_rank(rank[runs], kv[runs], num_ranks)
        assert kv_R.max() <= 1.35 * kv_R.mean()


rank_states = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=8)
ready_requests = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 5000), st.integers(0, 3)), max_size=20)


@fuzz
@given(ready_requests, rank_states)
def test_slots_are_respected_and_used(waiting, ranks):
    expected, kv, groups = np.array(waiting, dtype=np.int64).reshape(-1, 3).T
    load, slots, have = np.array(ranks).T
    rank = admitted(expected, kv, load=load, slots=slots, have=have, groups=groups)
    assert (np.bincount(rank[rank >= 0], minlength=len(ranks)) <= slots).all()
    assert (rank >= 0).sum() == min(len(waiting), slots.sum())
    if (rank < 0).any() and (rank >= 0).any():
        assert expected[rank >= 0].min() >= expected[rank < 0].max()


# propose_moves: running requests


def state(seed, num_ranks=8, num_requests=64):
    rng = np.random.default_rng(seed)
    return rng.integers(0, num_ranks, num_requests), lognormal(seed, num_requests), rng.integers(1, 500, num_requests)


def test_worked_example_of_a_move():
    # 60 40 20 | 10: half of the gap is 55, so the 60 goes, and 60 | 70 remains
    rank, kv, remaining = np.array([0, 0, 0, 1]), np.array([60, 40, 20, 10]), np.full(4, 100)
    (move,) = propose_moves(rank, kv, remaining, max_requests_of_rank=np.array([4, 4]), move_steps=1)
    assert (move.request, move.from_rank, move.to_rank, move.kv_tokens) == (0, 0, 1, 60)


def test_a_move_that_does_not_pay_is_not_made():
    # the busiest rank has 50 tokens less to read in 98 steps, of which 0.846 / (0.08 * 29) count: it is 0.846 above the
    # mean; sending 60 costs 60 * 29: 50 * 98 * 0.365 = 1,787 > 1,740
    rank, kv = np.array([0, 0, 0, 1]), np.array([60, 40, 20, 10])
    options = {"max_requests_of_rank": np.array([4, 4])}
    assert propose_moves(rank, kv, np.full(4, 100), **options, move_steps=29)
    assert not propose_moves(rank, kv, np.full(4, 100), **options, move_steps=30)
    assert not propose_moves(rank, kv, np.full(4, 95), **options, move_steps=29)
    assert not propose_moves(rank, kv, np.full(4, 2), **options, move_steps=0), "they end before they arrive"
    assert not propose_moves(rank, kv, np.full(4, 100), **options, move_steps=1, can_move=np.arange(4) == 3)


def test_a_small_difference_lasts_a_short_time():
    # 50 less in each step on the busiest rank, 50 / 750 above the mean: with 9 steps for sending a token that lasts
    # 0.067 / (0.08 * 9) = 0.093 of 98 steps, and saves 454 tokens; sending 50 costs 450
    rank, kv = np.array([0, 0, 1]), np.array([50, 700 + 50, 700])
    slots = np.array([4, 4])
    assert propose_moves(rank, kv, np.full(3, 100), max_requests_of_rank=slots, move_steps=9)
    assert not propose_moves(rank, kv, np.full(3, 100), max_requests_of_rank=slots, move_steps=10)


def test_two_requests_change_places_where_no_slot_is_free_or_none_alone_helps():
    # 90 85 5 | 60 50: half of the gap is 35, which 85 - 50 is
    rank, kv, remaining = np.array([0, 0, 0, 1, 1]), np.array([90, 85, 5, 60, 50]), np.full(5, 1000)
    for slots in (2, 9):
        moves = propose_moves(rank, kv, remaining, max_requests_of_rank=np.full(2, slots), move_steps=1)
        assert {(move.request, move.from_rank, move.to_rank) for move in moves} == {(1, 0, 1), (4, 1, 0)}


def test_ranks_that_are_about_equal_are_left_alone():
    rank, kv = np.arange(64) % 8, np.full(64, 1000)
    kv[:8] += np.arange(8) * 50  # at most 2.2 % above the mean
    assert not propose_moves(rank, kv, np.full(64, 10_000), max_requests_of_rank=np.full(8, 64), move_steps=0)


@pytest.mark.parametrize("seed", range(40))
def test_moves_respect_slots_make_the_busiest_rank_lighter_and_come_to_an_end(seed):
    rank, kv, remaining = state(seed)
    options = {
        "max_requests_of_rank": np.full(8, 12),
        "move_steps": [0, 0.5, 5][seed % 3],
        "request_load": RequestLoad(100),
    }
    was_busiest = kv_of_rank(rank, kv + 100, 8).max()
    was_over = np.maximum(np.bincount(rank, minlength=8), 12)
    for _ in range(20):
        moves = propose_moves(rank, kv, remaining, **options)
        if not moves:
            break
        for move in moves:
            assert rank[move.request] == move.from_rank != move.to_rank
            assert move.kv_tokens == kv[move.request]
            rank[move.request] = move.to_rank
        busiest = kv_of_rank(rank, kv + 100, 8).max()
        assert busiest < was_busiest
        assert (np.bincount(rank, minlength=8) <= was_over).all()
        was_busiest = busiest
    else:
        pytest.fail("moves never end")


def test_wrong_input_is_told_in_one_sentence():
    with pytest.raises(ConfigError, match="num_ranks is 0"):
        assign_decode(np.array([1]), num_ranks=0)
    with pytest.raises(ConfigError, match=r"kv_tokens\[1\] is -3"):
        assign_decode(np.array([1, -3]), num_ranks=2)
    with pytest.raises(ConfigError, match="expected_tokens has 1 entries, but kv_tokens has 2"):
        admitted(np.ones(1), np.ones(2), load=np.zeros(1), slots=np.ones(1, dtype=int))
    with pytest.raises(ConfigError, match="free_slots_of_rank has 2 entries, but load_of_rank has 1"):
        admitted(np.ones(1), np.ones(1), load=np.zeros(1), slots=np.ones(2, dtype=int))
    with pytest.raises(ConfigError, match="remaining_tokens has 1 entries, but kv_tokens has 2"):
        propose_moves(np.zeros(2), np.ones(2), np.ones(1), max_requests_of_rank=np.ones(2), move_steps=1)


# A run: ranks decode in lock-step, the busiest one sets the time of a step, the lengths of answers are unknown.

MAX_TOKENS = 2048
NUM_RANKS, NUM_SLOTS = 32, 64
STEP_LOAD, REQUEST_LOAD, MOVE_STEPS = 20_000.0, 500.0, 50.0  # in tokens of KV read; a full rank reads about 110,000
MOVE_EVERY = 8  # steps


def answer_lengths(kind, rng, means):
    if kind == "geometric":
        lengths = rng.geometric(1 / means)
    else:
        lengths = (means * 0.35 * (1 + rng.pareto(1.3, len(means)))).astype(np.int64)
    return np.clip(lengths, 1, MAX_TOKENS)


@dataclass
class Job:
    """Requests of 12 groups, whose answers differ in mean length."""

    groups: np.ndarray
    prompts: np.ndarray
    answers: np.ndarray

    @classmethod
    def random(cls, kind, seed, num=10 * NUM_RANKS * NUM_SLOTS):
        rng = np.random.default_rng(seed)
        groups = rng.integers(0, 12, num)
        means = np.exp(rng.normal(np.log(150), 0.8, 12))
        answers = answer_lengths(kind, rng, means[groups])
        return cls(groups, np.maximum(16, 1000 * np.exp(rng.standard_normal(num))).astype(np.int64), answers)


class RoundRobin:
    """Request i belongs to rank i modulo the number of ranks, and waits there for a slot."""

    def __init__(self, job):
        num = len(job.groups)
        self.waiting = [deque(range(rank, num, NUM_RANKS)) for rank in range(NUM_RANKS)]

    def admit(self, load_R, num_R):
        return [
            (queue.popleft(), rank)
            for rank, queue in enumerate(self.waiting)
            for _ in range(min(NUM_SLOTS - num_R[rank], len(queue)))
        ]

    def finish(self, group, num_tokens):
        pass

    def move(self, rank, kv, groups, generated):
        return []


class Balanced:
    """Longest expected group first, least loaded rank first, and moves; what is expected is learnt."""

    def __init__(self, job):
        self.job, self.lengths, self.finish = job, (lengths := OutputLengths()), lengths.finish
        self.waiting = [deque(np.flatnonzero(job.groups == group).tolist()) for group in range(12)]

    def admit(self, load_R, num_R):
        by_length = sorted(range(12), key=lambda group: -self.lengths.expected(group, MAX_TOKENS))
        num_waiting = sum(map(len, self.waiting))
        queues = (self.waiting[group] for group in by_length for _ in range(len(self.waiting[group])))
        free_R = NUM_SLOTS - num_R
        ready = [queue.popleft() for queue in itertools.islice(queues, min(int(free_R.sum()), num_waiting))]
        expected = np.array([self.lengths.expected(self.job.groups[request], MAX_TOKENS) for request in ready])
        kv = self.job.prompts[ready] if ready else np.zeros(0)
        options = {"load_of_rank": load_R, "requests_of_rank": num_R, "free_slots_of_rank": free_R}
        ranks = admit(expected, kv, self.job.groups[ready], **options, request_load=RequestLoad(REQUEST_LOAD))
        return list(zip(ready, ranks.tolist(), strict=True))

    def move(self, rank, kv, groups, generated):
        numbers = np.array([self.lengths.number(group) for group in groups.tolist()])
        limits, unknown = np.full(len(groups), MAX_TOKENS), np.full(len(groups), np.nan)
        remaining = self.lengths.remaining_each(numbers, generated, limits, unknown)
        slots = np.full(NUM_RANKS, NUM_SLOTS)
        return propose_moves(
            rank,
            kv,
            remaining,
            max_requests_of_rank=slots,
            move_steps=MOVE_STEPS,
            request_load=RequestLoad(REQUEST_LOAD),
        )


@dataclass
class Outcome:
    time: float
    idle: float  # share of rank time, over the run
    tail_time: float  # from the last admission on
    tail_idle: float  # rank time in the tail that is idle
    num_moves: int


def simulate(job, policy):
    """Run a job; times in tokens of KV read."""
    policy = policy(job)
    rank, generated = np.full(len(job.groups), -1), np.zeros(len(job.groups), dtype=np.int64)
    running = np.zeros(0, dtype=np.int64)
    time = busy = tail_time = tail_busy = 0.0
    num_moves = 0
    for step in itertools.count():
        num_R = np.bincount(rank[running], minlength=NUM_RANKS)
        load_R = REQUEST_LOAD * num_R + kv_of_rank(rank[running], (job.prompts + generated)[running], NUM_RANKS)
        admitted = policy.admit(load_R, num_R)
        for request, to_rank in admitted:
            rank[request] = to_rank
        running = np.append(running, np.array([request for request, _ in admitted], dtype=np.int64))
        if not len(running):
            break
        kv = (job.prompts + generated)[running]
        step_time = 0.0
        if step % MOVE_EVERY == 0:
            sent_R = np.zeros(NUM_RANKS)
            for move in policy.move(rank[running], kv, job.groups[running], generated[running]):
                rank[running[move.request]] = move.to_rank
                sent_R[[move.from_rank, move.to_rank]] += move.kv_tokens
                num_moves += 1
            step_time = MOVE_STEPS * sent_R.max()
        num_R = np.bincount(rank[running], minlength=NUM_RANKS)
        assert num_R.max() <= NUM_SLOTS
        time_R = np.where(num_R > 0, STEP_LOAD + REQUEST_LOAD * num_R + kv_of_rank(rank[running], kv, NUM_RANKS), 0)
        step_time += time_R.max()
        time, busy = time + step_time, busy + time_R.sum()
        if not any(policy.waiting):
            tail_time, tail_busy = tail_time + step_time, tail_busy + time_R.sum()
        generated[running] += 1
        is_done = generated[running] == job.answers[running]
        for request in running[is_done].tolist():
            policy.finish(int(job.groups[request]), int(generated[request]))
        running = running[~is_done]
    assert (generated == job.answers).all()
    return Outcome(time, 1 - busy / time / NUM_RANKS, tail_time, NUM_RANKS * tail_time - tail_busy, num_moves)


@pytest.mark.parametrize("kind", ["geometric", "heavy"])
@pytest.mark.parametrize("seed", range(2))
def test_over_a_run_ranks_are_idle_at_most_half_as_long_as_with_round_robin(kind, seed):
    job = Job.random(kind, seed)
    plain, balanced = simulate(job, RoundRobin), simulate(job, Balanced)
    assert balanced.idle <= plain.idle / 2
    assert balanced.tail_idle <= plain.tail_idle * 0.6
    assert balanced.tail_time <= plain.tail_time
    assert balanced.time <= plain.time * 0.9
