"""Branches of the prefix tree in the order of their longest answers: the same tokens are computed, long ones first."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.balance.prefix_order import longest_first, whole_first
from batchinfer.records import ConfigError
from support.prompt_corpus import common

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), min_size=1, max_size=40, unique=True)


def shared(prompts):
    return np.array([0, *(common(*pair) for pair in itertools.pairwise(prompts))])


def test_worked_example():
    # a tree of two branches: aa {x: 3, y: 9}, ab {x: 5}; and one separate prompt, b: 7
    prompts = ["aax", "aay", "abx", "b"]
    order = longest_first(shared(prompts), np.array([3, 9, 5, 7]))
    assert [prompts[place] for place in order] == ["aay", "aax", "abx", "b"]
    # what ran before ended in the branch ab…: stay there first, although aay is longer
    order = longest_first(shared(prompts[::-1]), np.array([7, 5, 9, 3]), before_tokens=0)
    assert [prompts[::-1][place] for place in order] == ["aay", "aax", "abx", "b"]
    order = longest_first(shared(["abx", "aax", "aay", "b"]), np.array([5, 3, 9, 7]), before_tokens=2)
    assert [["abx", "aax", "aay", "b"][place] for place in order] == ["abx", "aay", "aax", "b"]


@settings(deadline=None)
@given(PROMPTS, st.data())
def test_a_walk_through_the_tree_with_the_longest_child_first(prompts, data):
    prompts = sorted(prompts)
    expected = np.array(data.draw(st.lists(st.integers(0, 50), min_size=len(prompts), max_size=len(prompts))))
    order = longest_first(shared(prompts), expected).tolist()
    assert sorted(order) == list(range(len(prompts)))
    ordered = [prompts[place] for place in order]
    assert shared(ordered).sum() == shared(prompts).sum()  # as many tokens are computed
    # the branches below each prefix, one after the other, the one with the longest answer first
    for length in range(8):
        for prefix in {prompt[:length] for prompt in prompts if len(prompt) > length}:
            places = [place for place in order if prompts[place][:length] == prefix and len(prompts[place]) > length]
            next_tokens = {place: prompts[place][length] for place in places}
            branches = [list(group) for _, group in itertools.groupby(places, next_tokens.__getitem__)]
            assert len(branches) == len({prompts[place][length] for place in places})
            if len(branches) > 1 and prefix not in prompts:
                longest = [max(expected[branch]) for branch in branches]
                assert longest == sorted(longest, reverse=True)


@settings(deadline=None)
@given(PROMPTS, st.integers(0, 8), st.integers(0, 8), st.data())
def test_what_units_share_stays_at_their_ends(prompts, before, after, data):
    prompts = sorted(prompts)
    before, after = min(before, len(prompts[0])), min(after, len(prompts[-1]))
    expected = np.array(data.draw(st.lists(st.integers(0, 50), min_size=len(prompts), max_size=len(prompts))))
    order = longest_first(shared(prompts), expected, before_tokens=before, after_tokens=after)
    first, last = prompts[order[0]], prompts[order[-1]]
    assert common(first, prompts[0]) >= before
    if common(prompts[0], prompts[-1]) < max(before, 1):  # one branch cannot be first and last
        assert common(last, prompts[-1]) >= after


def test_a_prompt_that_runs_whole_comes_before_those_that_find_it():
    # a tree of two branches, aa {x, y} and ab {x}; aay runs whole and has the shortest answer
    prompts = ["aax", "aay", "abx"]
    order = longest_first(shared(prompts), np.array([9, 1, 5]), most_cached_tokens=np.array([2, 0, 2]))
    assert [prompts[place] for place in order] == ["aay", "aax", "abx"]
    # from the second token below the common one on it would find nothing anyway: the longest answers first
    order = longest_first(shared(prompts), np.array([1, 2, 5]), most_cached_tokens=np.array([2, 1, 2]))
    assert [prompts[place] for place in order] == ["abx", "aay", "aax"]


@settings(deadline=None)
@given(PROMPTS, st.data())
def test_no_order_computes_fewer_tokens_when_some_prompts_run_whole(prompts, data):
    prompts = sorted(prompts)
    most = np.array([data.draw(st.sampled_from([0, len(prompt) // 2, len(prompt) - 1])) for prompt in prompts])
    expected = np.array(data.draw(st.lists(st.integers(0, 50), min_size=len(prompts), max_size=len(prompts))))
    # each token of the tree runs once, or for each prompt that must run it
    runs = Counter()
    for prompt, most_cached in zip(prompts, most.tolist(), strict=True):
        runs.update({prompt[: end + 1]: int(end >= most_cached) for end in range(len(prompt))})
    least = sum(max(1, number) for number in runs.values())
    order, found = whole_first(shared(prompts), most)
    assert found.tolist() == shared([prompts[place] for place in order]).tolist()
    by_length = longest_first(shared(prompts), expected, most_cached_tokens=most)
    for ordered in (order, by_length):
        cached = np.minimum(shared([prompts[place] for place in ordered]), most[ordered])
        assert sum(map(len, prompts)) - cached.sum() == least


def test_equal_lengths_keep_the_plans_order():
    assert longest_first(np.array([0, 2, 1, 4]), np.full(4, 8.0)).tolist() == [0, 1, 2, 3]
    assert longest_first(np.zeros(0), np.zeros(0)).tolist() == []


def test_a_very_deep_tree_does_not_overflow():
    num = 20_000
    order = longest_first(np.arange(num), np.arange(num))
    assert order[0] == num - 1


def test_arrays_that_do_not_match_are_refused():
    with pytest.raises(ConfigError, match="expected_tokens has 2 entries for 3 requests"):
        longest_first(np.zeros(3), np.zeros(2))
