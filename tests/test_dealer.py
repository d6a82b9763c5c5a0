"""Dealing requests to ranks, and finding the one that brings them down: pure bookkeeping, without ranks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.config import SamplingConfig
from batchinfer.engine.dealer import Dealer, cut_evenly
from batchinfer.records import Request, RequestKey

GREEDY = SamplingConfig(max_tokens=4).to_sampling()


def request(row, tokens=(1, 2, 3), cached=0, unit=0):
    return Request(RequestKey(0, row, 0), unit, list(tokens), GREEDY, 0, cached)


def rows(requests):
    return [item.key.row for item in requests]


def test_worked_example_of_a_cut():
    # two groups of three prompts with a common start of 40 tokens; work: 46 + 6 + 6 | 46 + 6 + 6
    first, second = [1] * 40, [2] * 40
    requests = [request(i, [*first, 7, i], cached=40 if i else 0) for i in range(3)]
    requests += [request(3 + i, [*second, 7, i], cached=40 if i else 0) for i in range(3)]
    assert [rows(part) for part in cut_evenly(requests, 2)] == [[0, 1, 2], [3, 4, 5]]


@given(st.lists(st.tuples(st.integers(1, 400), st.floats(0, 1)), max_size=60), st.integers(1, 8))
def test_a_cut_keeps_order_and_balances_up_to_one_request(sizes, num_parts):
    requests = [
        request(row, [0] * size, cached=int(share * (size - 1)) if row else 0)
        for row, (size, share) in enumerate(sizes)
    ]
    parts = cut_evenly(requests, num_parts)
    assert len(parts) == num_parts
    assert [row for part in parts for row in rows(part)] == list(range(len(requests)))
    work = [[len(r.token_ids) - r.cached_tokens + 4 for r in part] for part in parts]
    total = sum(map(sum, work))
    largest = max((item for part in work for item in part), default=0)
    # each end of a part is off by an eighth of a share, or by one request
    assert all(sum(part) <= total / num_parts * 1.25 + 2 * largest for part in work)


def test_what_a_cut_makes_both_sides_compute_is_counted_once():
    # rank 0: [1 2 3 4]   rank 1: shares 1 2 3 with its neighbour and has nothing of its own yet
    dealer = Dealer([0, 1])
    dealer.add_unit(0, [request(0, (1, 2, 3, 4)), request(1, (1, 2, 3, 5), cached=3)])
    (first,), (second,) = dealer.take(0, 9), dealer.take(1, 9)
    assert (first.replicated_tokens, second.replicated_tokens) == (0, 3)
    # the next unit goes on where the plan's order was cut: rank 0 has 1 2 of it already, rank 1 the 3 as well
    dealer.add_unit(1, [request(2, (1, 2, 3, 6), cached=3, unit=1), request(3, (1, 2, 9), cached=2, unit=1)])
    (third,), (fourth,) = dealer.take(0, 9), dealer.take(1, 9)
    assert (third.replicated_tokens, fourth.replicated_tokens) == (0, 0)


def test_after_a_death_everything_runs_again_in_order():
    dealer = Dealer([0])
    dealer.add_unit(0, [request(row) for row in range(5)])
    taken = dealer.take(0, 3)
    dealer.finish(0, taken[1].key)
    assert dealer.ranks_died() == []
    assert rows(dealer.take(0, 9)) == [0, 2, 3, 4]


def test_one_request_alone_has_to_bring_the_ranks_down_twice():
    dealer = Dealer([0])
    dealer.add_unit(0, [request(0)])
    for _ in range(3):  # two deaths make it a suspect, then one alone
        dealer.take(0, 1)
        assert dealer.ranks_died() == []
    dealer.take(0, 1)
    (given_up,) = dealer.ranks_died()
    dealer.finish(0, given_up.key)
    assert dealer.num_unfinished == 0


def test_deaths_while_nothing_runs_count_for_nobody():
    dealer = Dealer([0])
    dealer.add_unit(0, [request(0)])
    for _ in range(20):
        assert dealer.ranks_died() == []
    assert not dealer.is_isolating


@pytest.mark.parametrize("seed", range(200))
def test_only_poison_is_given_up_whatever_else_dies(seed):
    """Some requests kill the ranks as soon as they run; ranks also die of other causes, but not beside one alone."""
    rng = random.Random(seed)
    ranks = range(rng.randint(1, 4))
    poison = {rng.randrange(40) for _ in range(rng.randint(0, 3))}
    num_accidents = rng.randint(0, 4)
    units = [[request(unit * 10 + row, unit=unit) for row in range(10)] for unit in range(4)]
    dealer, running, finished, given_up = Dealer(ranks), {}, set(), set()
    for _ in range(5000):
        if not units and not dealer.num_unfinished:
            break
        if units and not dealer.is_isolating and not dealer.num_waiting:
            dealer.add_unit(units[0][0].unit, units.pop(0))
        running |= {item.key.row: item for rank in ranks for item in dealer.take(rank, rng.randint(1, 6))}
        assert running, "there is always something to do"
        is_accident = num_accidents > 0 and len(running) > 1 and rng.random() < 0.2
        num_accidents -= is_accident
        for row in [row for row in running if row not in poison and rng.random() < 0.5]:
            item = running.pop(row)
            dealer.finish(item.unit, item.key)
            finished.add(row)
        if is_accident or running.keys() & poison:
            for item in dealer.ranks_died():
                dealer.finish(item.unit, item.key)
                given_up.add(item.key.row)
            running.clear()
    assert given_up == poison
    assert finished == set(range(40)) - poison
