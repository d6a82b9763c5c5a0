"""Prompts to prefill ranks: equal new tokens and equal attention work, groups kept together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.balance.prefill import assign_prefill, attention_work, prefill_bounds
from batchinfer.records import ConfigError

fuzz = settings(deadline=None, derandomize=True, max_examples=150)


def loads(rank, new, cached, num_ranks):
    """[num_ranks, 2] new tokens and attention work of each rank."""
    sizes = np.stack([new, attention_work(new, cached)])
    return np.stack([np.bincount(rank, weights=size, minlength=num_ranks) for size in sizes], axis=1)


def busiest(rank, new, cached, num_ranks, groups=None):
    """Busiest rank by the lower bound: new tokens, attention work."""
    bounds = prefill_bounds(new, cached, num_ranks=num_ranks, group_of_request=groups)
    bound = np.maximum([bounds.new_tokens, bounds.attention_work], 1e-9)
    return loads(rank, new, cached, num_ranks).max(axis=0) / bound


def prompts(seed, num, sigma=1.0, num_giants=0, most_cached=0.5):
    """Lognormal lengths around 500, some of 50,000; up to a share of each is cached."""
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, 500 * np.exp(sigma * rng.standard_normal(num))).astype(np.int64)
    lengths[rng.choice(num, num_giants, replace=False)] = 50_000
    cached = (lengths * rng.uniform(0, most_cached, num)).astype(np.int64)
    return lengths - cached, cached


def lpt(sizes, num_ranks):
    """Largest first, each to the least loaded rank."""
    load, rank = np.zeros(num_ranks), np.zeros(len(sizes), dtype=np.int64)
    for item in np.argsort(-sizes, kind="stable"):
        rank[item] = load.argmin()
        load[rank[item]] += sizes[item]
    return rank


def test_worked_example():
    # new tokens 4 4 4 4; behind 10, 0, 0, 10 cached ones: attention work 50 10 10 50
    # two of each on a rank have 8 tokens, but only one long with one short have 60 pairs to compute
    rank = assign_prefill(np.array([4, 4, 4, 4]), np.array([10, 0, 0, 10]), num_ranks=2)
    assert attention_work(np.array([4, 4]), np.array([10, 0])).tolist() == [50, 10]
    assert loads(rank, np.array([4, 4, 4, 4]), np.array([10, 0, 0, 10]), 2).tolist() == [[8, 60], [8, 60]]
    assert rank.tolist() == [0, 0, 1, 1]


def test_ranks_that_have_something_already_get_less():
    new, cached = np.full(40, 100), np.zeros(40, dtype=np.int64)
    load = np.array([[2000.0, 20 * 5050.0], [0.0, 0.0]])  # 20 of these prompts
    rank = assign_prefill(new, cached, num_ranks=2, load_of_rank=load)
    assert np.bincount(rank).tolist() == [10, 30]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_rank_that_waits_for_one_long_prompt_takes_its_part_of_the_tokens(num_ranks):
    # 5e9 pairs are more than all others have together: the tokens are even all the same
    new, load = np.random.default_rng(0).integers(10, 500, 3000), np.zeros((num_ranks, 2))
    load[0] = 100_000, 5e9
    rank = assign_prefill(new, np.zeros(3000, np.int64), num_ranks=num_ranks, load_of_rank=load)
    tokens = load[:, 0] + np.bincount(rank, new, num_ranks)
    assert tokens.max() <= 1.03 * tokens.mean()


@pytest.mark.parametrize(
    ("num", "sigma", "seed"),
    [(3000, sigma, seed) for sigma in (0.5, 1.0) for seed in range(4)] + [(20_000, 1.0, 0), (60_000, 1.0, 0)],
)
def test_a_large_unit_with_giants_is_level_in_both_quantities(num, sigma, seed):
    new, cached = prompts(seed, num, sigma, num_giants=96)
    work = attention_work(new, cached)
    tokens_R, work_R = loads(assign_prefill(new, cached, num_ranks=32), new, cached, 32).T
    assert tokens_R.max() <= 1.01 * max(new.sum() / 32, new.max())
    assert work_R.max() <= 1.02 * max(work.sum() / 32, work.max())


@pytest.mark.parametrize("most_cached", [0.0, 0.9])
@pytest.mark.parametrize("num_ranks", [1, 2, 8, 144])
def test_other_sizes_are_level_too(num_ranks, most_cached):
    new, cached = prompts(3, 100 * num_ranks, 0.5, most_cached=most_cached)
    rank = assign_prefill(new, cached, num_ranks=num_ranks)
    assert busiest(rank, new, cached, num_ranks).max() <= 1.005


def random_case(seed, most_requests, most_ranks):
    rng = np.random.default_rng(seed)
    num, num_ranks = int(rng.integers(1, most_requests)), int(rng.integers(1, most_ranks))
    new = rng.integers(0, [3, 50, 2000][seed % 3], num)
    return new, rng.integers(0, [1, 50, 3000][seed // 3 % 3], num), num_ranks


def test_agrees_with_brute_force_on_tiny_cases():
    by_best = []
    for seed in range(120):
        new, cached, num_ranks = random_case(seed, 8, 4)
        plans = itertools.product(range(num_ranks), repeat=len(new))
        best = min(busiest(np.array(plan), new, cached, num_ranks).max() for plan in plans)
        assert best >= 1 - 1e-9 or not new.any(), "no plan is below the bound"
        ours = busiest(assign_prefill(new, cached, num_ranks=num_ranks), new, cached, num_ranks).max()
        by_best.append(ours / best if new.any() else 1.0)
    assert max(by_best) <= 1.05
    assert np.mean(np.array(by_best) < 1 + 1e-9) >= 0.95


@pytest.mark.parametrize("seed", range(60))
def test_never_worse_than_the_better_of_both_lpt(seed):
    rng = np.random.default_rng(seed)
    num, num_ranks = int(rng.integers(1, 200)), int(rng.integers(1, 20))
    new = (100 * np.exp(rng.uniform(0, 2) * rng.standard_normal(num))).astype(np.int64)
    cached = rng.integers(0, [1, 50, 3000][seed % 3], num)
    ours = busiest(assign_prefill(new, cached, num_ranks=num_ranks), new, cached, num_ranks).max()
    for sizes in (new, attention_work(new, cached)):
        assert ours <= busiest(lpt(sizes, num_ranks), new, cached, num_ranks).max() * (1 + 1e-9)


requests = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000), st.integers(-2, 5)), max_size=60)


@fuzz
@given(requests, st.integers(1, 9), st.booleans())
def test_every_request_gets_one_rank_and_always_the_same(rows, num_ranks, is_grouped):
    new, cached, groups = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)) if rows else [[]] * 3
    options = {"num_ranks": num_ranks, "group_of_request": groups if is_grouped else None}
    rank = assign_prefill(new, cached, **options)
    assert len(rank) == len(rows)
    assert all(0 <= item < num_ranks for item in rank)
    assert np.array_equal(rank, assign_prefill(new, cached, **options))


@fuzz
@given(requests, st.integers(1, 9))
def test_groups_within_an_even_share_stay_whole(rows, num_ranks):
    new, cached, groups = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    rank = assign_prefill(new, cached, num_ranks=num_ranks, group_of_request=groups)
    work = attention_work(new, cached)
    for group in set(groups.tolist()):
        mine = groups == group
        is_small = new[mine].sum() * num_ranks <= new.sum() and work[mine].sum() * num_ranks <= work.sum()
        assert not is_small or len(set(rank[mine].tolist())) == 1


@pytest.mark.parametrize("seed", range(4))
def test_with_groups_the_ranks_are_as_level_as_groups_allow(seed):
    new, cached = prompts(seed, 8000, 0.7)
    groups = np.random.default_rng(seed).integers(0, 1000, 8000) * 7919  # about 8 requests each, mixed up
    rank = assign_prefill(new, cached, num_ranks=8, group_of_request=groups)
    assert all(len(set(rank[groups == group].tolist())) == 1 for group in set(groups.tolist()))
    assert busiest(rank, new, cached, 8, groups).max() <= 1.005


def test_groups_that_cannot_be_level_reach_their_bound():
    # three groups of 10 on two ranks: one rank has two of them, whatever one does
    groups = np.repeat([0, 1, 2], 10)
    new, cached = np.full(30, 100), np.full(30, 1000)
    rank = assign_prefill(new, cached, num_ranks=2, group_of_request=groups)
    assert sorted(np.bincount(rank).tolist()) == [10, 20]
    assert busiest(rank, new, cached, 2, groups).tolist() == [1.0, 1.0]


def test_a_giant_group_is_cut_into_as_few_parts_as_its_size_asks_for():
    # 24 requests of the same size on four ranks, 6 each: a group of 15 is two and a half shares, the others fill up
    groups = np.repeat([5, 6, 7], [15, 3, 6])
    new, cached = np.full(24, 100), np.full(24, 1000)
    rank = assign_prefill(new, cached, num_ranks=4, group_of_request=groups)
    assert np.bincount(rank).tolist() == [6, 6, 6, 6]
    assert [len(set(rank[groups == group].tolist())) for group in (5, 6, 7)] == [3, 1, 1]


def test_a_group_is_cut_further_only_for_balance():
    # 1.6 and three times 0.8 shares on four ranks: two parts would leave a rank with 1.2 shares
    groups = np.repeat([0, 1, 2, 3], [16, 8, 8, 8])
    new, cached = np.full(40, 100), np.full(40, 1000)
    rank = assign_prefill(new, cached, num_ranks=4, group_of_request=groups)
    assert np.bincount(rank).tolist() == [10, 10, 10, 10]
    assert [len(set(rank[groups == group].tolist())) for group in (1, 2, 3)] == [1, 1, 1]


def test_one_group_for_all_is_as_level_as_no_groups():
    new, cached = prompts(0, 3000, 1.0, num_giants=96)
    rank = assign_prefill(new, cached, num_ranks=32, group_of_request=np.full(3000, 12))
    assert busiest(rank, new, cached, 32).max() <= 1.005


def test_nothing_to_do_and_one_rank():
    none = np.zeros(0, dtype=np.int64)
    assert assign_prefill(none, none, num_ranks=3).tolist() == []
    assert assign_prefill(none, none, num_ranks=3, group_of_request=none).tolist() == []
    bounds = prefill_bounds(none, none, num_ranks=3)
    assert (bounds.new_tokens, bounds.attention_work) == (0, 0)
    assert assign_prefill(np.array([5, 6]), np.array([0, 9]), num_ranks=1).tolist() == [0, 0]
    assert assign_prefill(np.array([7]), np.array([0]), num_ranks=4).tolist() == [0]
    rank = assign_prefill(np.zeros(9, dtype=np.int64), np.full(9, 4), num_ranks=3)
    assert set(rank.tolist()) <= {0, 1, 2}


def test_bounds_of_a_plan_drawn_by_hand():
    # 3 3 3 3 on three ranks: an even share is 4, but some rank has two prompts: 6 tokens, and 2 * 3 * 2 = 12 pairs
    bounds = prefill_bounds(np.array([3, 3, 3, 3]), np.zeros(4, dtype=np.int64), num_ranks=3)
    assert (bounds.new_tokens, bounds.attention_work) == (6, 12)


@pytest.mark.parametrize(
    ("new", "cached", "options", "message"),
    [
        ([1], [0], {"num_ranks": 0}, "num_ranks is 0"),
        ([1, -2], [0, 0], {"num_ranks": 1}, r"new_tokens\[1\] is -2"),
        ([1, 2], [-7, 0], {"num_ranks": 1}, r"cached_tokens\[0\] is -7"),
        ([1, 2], [0], {"num_ranks": 1}, "cached_tokens has 1 entries for 2 requests"),
        ([1, 2], [0, 0], {"num_ranks": 1, "group_of_request": np.array([1])}, "group_of_request has 1 entries"),
    ],
)
def test_wrong_input_is_told_in_one_sentence(new, cached, options, message):
    for call in (assign_prefill, prefill_bounds):
        with pytest.raises(ConfigError, match=message):
            call(np.array(new), np.array(cached), **options)
