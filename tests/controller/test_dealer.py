"""Dealing requests to ranks, and finding the one that brings them down: pure bookkeeping, without ranks."""

from __future__ import annotations

import itertools
import random

import pytest

from batchinfer.config import SamplingConfig
from batchinfer.controller.counted_prefixes import STRETCH, CountedPrompt, counted_tokens
from batchinfer.controller.dealer import Dealer
from batchinfer.records import Request, RequestKey
from support.prompt_corpus import common

GREEDY = SamplingConfig(max_tokens=4).to_sampling()


def request(row, tokens=(1, 2, 3), cached=0, unit=0):
    return Request(RequestKey(0, row, 0), unit, list(tokens), GREEDY, 0, cached)


def rows(requests):
    return [item.key.row for item in requests]


def test_groups_with_a_common_start_stay_on_one_rank():
    # two groups of three prompts with a common start of 40 tokens; work: 46 + 6 + 6 | 46 + 6 + 6
    first, second = [1] * 40, [2] * 40
    requests = [request(i, [*first, 7, i], cached=40 if i else 0) for i in range(3)]
    requests += [request(3 + i, [*second, 7, i], cached=40 if i else 0) for i in range(3)]
    dealer = Dealer([0, 1])
    dealer.add_unit(0, requests)
    assert sorted(rows(dealer.take(rank, 9).requests) for rank in (0, 1)) == [[0, 1, 2], [3, 4, 5]]


def test_a_rank_gets_no_more_than_it_asks_for():
    dealer = Dealer([0])
    dealer.add_unit(0, [request(row, [row] * 10) for row in range(9)])
    assert len(dealer.take(0, 3).requests) == 3
    assert len(dealer.take(0, 9, num_tokens=11).requests) == 2  # the second one begins below 11 tokens
    assert len(dealer.take(0, 9).requests) == 4


def test_a_rank_without_requests_takes_over_half_of_what_another_has():
    dealer = Dealer([0, 1])
    dealer.add_unit(0, [request(row, [row] * 10) for row in range(12)])
    mine = dealer.take(0, 99).requests
    dealer.take_over(0)
    taken, left = dealer.take(0, 99).requests, dealer.take(1, 99).requests
    assert (len(mine), len(taken), len(left)) == (6, 3, 3)
    assert sorted(rows(mine + taken + left)) == list(range(12))
    dealer.take_over(0)
    assert dealer.take(0, 99).requests == []


def test_the_last_waiting_request_can_be_taken_over():
    dealer = Dealer([0, 1])
    dealer.add_unit(0, [request(0)])
    (busy,) = (rank for rank in (0, 1) if dealer._queues._waiting[rank])
    dealer.take_over(1 - busy)
    assert rows(dealer.take(1 - busy, 9).requests) == [0]


@pytest.mark.parametrize("seed", range(100))
def test_what_is_computed_is_what_the_plan_needs_and_what_is_replicated(seed):
    """Whoever takes requests over from whom: ranks compute the distinct tokens, and those that they said they would."""
    rng = random.Random(seed)
    prompts = sorted({tuple(rng.choices(range(3), k=rng.randint(1, 12))) for _ in range(60)})
    cut = rng.randrange(len(prompts) + 1)
    shared = [0, *(common(*pair) for pair in itertools.pairwise(prompts))]
    requests = [
        request(row, prompt, cached=min(shared[row], len(prompt) - 1), unit=int(row >= cut))
        for row, prompt in enumerate(prompts)
    ]
    ranks = range(rng.randint(1, 4))
    dealer, known, computed, replicated, done = Dealer(ranks), {rank: [] for rank in ranks}, 0, 0, 0
    units = [unit for unit in (requests[:cut], requests[cut:]) if unit]
    while done < len(prompts):
        rank = rng.choice(ranks)
        taken = dealer.take(rank, rng.randint(1, 9)).requests
        if not taken and rng.random() < 0.5:
            dealer.take_over(rank)
        elif not taken and units:
            after = units[1][0].cached_tokens if len(units) > 1 else 0
            dealer.add_unit(units[0][0].unit, units.pop(0), is_fresh=True, after_tokens=after)
        for item in taken:
            found = max((common(other, item.token_ids) for other in known[rank]), default=0)
            found = min(found, len(item.token_ids) - 1)
            computed += len(item.token_ids) - found
            replicated += min(item.replicated_tokens, item.shared_tokens - found)
            known[rank].append(item.token_ids)
            dealer.finish(item.unit, item.key)
            done += 1
    needed = sum(len(item.token_ids) - item.cached_tokens for item in requests)
    assert computed == needed + replicated


@pytest.mark.parametrize("num", [0, 1, STRETCH - 1, STRETCH, STRETCH + 1, 3 * STRETCH])
def test_what_prompts_share_is_counted_to_the_token(num):
    dealer = Dealer([0])
    first, second = [7] * num + [1, 2], [7] * num + [3] * STRETCH
    dealer.add_unit(0, [request(0, first), request(1, second), request(2, second)])
    assert [taken.shared_tokens for taken in dealer.take(0, 3).requests] == [0, num, len(second) - 1]


def test_what_results_count_is_counted_by_no_request_that_goes_on():
    """The first result counts all of its prompt, the second what it does not share with the first."""
    results = [CountedPrompt([1, 2, 3, 4], 0), CountedPrompt([1, 2, 5, 6, 7], 2)]
    found = {
        (1, 2, 3, 9): 3,  # as far as the first result
        (1, 2, 5, 6, 9): 4,  # by the first up to 2, by the second from there
        (1, 9): 1,
        (8, 9): 0,
        (1, 2, 5, 6, 7): 5,
    }
    assert counted_tokens([*map(list, found)], [0] * len(found), results) == [*found.values()]
    # of a result that had found [1, 2] counted by a request without one, nothing before that is counted
    assert counted_tokens([[1, 2, 5, 9], [1, 2, 5, 9]], [0, 2], results[1:]) == [0, 3]
    assert counted_tokens([[1, 2, 5, 9]], [1], []) == [1]


@pytest.mark.parametrize("seed", range(60))
def test_prompt_tokens_are_counted_once_whatever_is_killed(seed):
    """Sessions with results for some requests, each of which may lose its ranks; the last one ends."""
    rng = random.Random(seed)
    prompts = sorted({tuple(rng.choices(range(3), k=rng.randint(1, 12))) for _ in range(60)})
    shared = [0, *(common(*pair) for pair in itertools.pairwise(prompts))]
    cut = rng.randrange(1, len(prompts))
    requests = [
        request(row, prompt, cached=min(shared[row], len(prompt) - 1), unit=int(row >= cut))
        for row, prompt in enumerate(prompts)
    ]
    ranks, counted_from = range(rng.randint(1, 3)), {}
    for num_rounds in (*(rng.randrange(1, 30) for _ in range(rng.randint(1, 3))), 10**6):
        dealer = Dealer(ranks, with_store=True)
        for unit in (requests[:cut], requests[cut:]):
            missing = [item for item in unit if item.key not in counted_from]
            results = [CountedPrompt(unit[0].token_ids[: unit[0].cached_tokens], 0)]
            results += [CountedPrompt(item.token_ids, counted_from[item.key]) for item in unit if item not in missing]
            if missing:
                dealer.add_unit(missing[0].unit, missing, is_fresh=missing == unit, results=results)
        for _ in range(num_rounds):
            for rank in ranks:
                dealer.take(rank, rng.randint(1, 5))
            for item in rng.sample([*dealer._running.values()], rng.randint(0, dealer.num_running)):
                counted_from[item.key] = item.counted_tokens
                dealer.finish(item.unit, item.key, item.counted_tokens)
            if not dealer.num_unfinished:
                break
            if rng.random() < 0.1 and not dealer.is_isolating:
                dealer.ranks_died()
    needed = sum(len(item.token_ids) - item.cached_tokens for item in requests)
    counted = sum(len(item.token_ids) - counted_from[item.key] for item in requests)
    # of a prompt that is dealt first, what is counted behind a gap counts again
    assert needed <= counted <= 1.02 * needed


def test_what_a_cut_makes_both_sides_compute_is_counted_once():
    # rank 0: [1 2 3 4]   rank 1: shares 1 2 3 with its neighbour and has nothing of its own yet
    dealer = Dealer([0, 1])
    dealer.add_unit(0, [request(0, (1, 2, 3, 4)), request(1, (1, 2, 3, 5), cached=3)])
    (first,), (second,) = dealer.take(0, 9).requests, dealer.take(1, 9).requests
    assert (first.replicated_tokens, second.replicated_tokens) == (0, 3)
    # the next unit goes on where the plan's order was cut: rank 0 has 1 2 of it already, rank 1 the 3 as well
    dealer.add_unit(1, [request(2, (1, 2, 3, 6), cached=3, unit=1), request(3, (1, 2, 9), cached=2, unit=1)])
    (third,), (fourth,) = dealer.take(0, 9).requests, dealer.take(1, 9).requests
    assert (third.replicated_tokens, fourth.replicated_tokens) == (0, 0)


def test_after_a_death_everything_runs_again_in_order():
    dealer = Dealer([0])
    dealer.add_unit(0, [request(row) for row in range(5)])
    taken = dealer.take(0, 3).requests
    dealer.finish(0, taken[1].key)
    assert dealer.ranks_died() is None
    assert rows(dealer.take(0, 9).requests) == [0, 2, 3, 4]


def test_one_request_alone_has_to_bring_the_ranks_down_twice():
    dealer = Dealer([0])
    dealer.add_unit(0, [request(0)])
    for _ in range(3):  # two deaths make it a suspect, then one alone
        dealer.take(0, 1)
        assert dealer.ranks_died() is None
    dealer.take(0, 1)
    given_up = dealer.ranks_died()
    dealer.finish(0, given_up.key)
    assert dealer.num_unfinished == 0


def test_deaths_while_nothing_runs_count_for_nobody():
    dealer = Dealer([0])
    dealer.add_unit(0, [request(0)])
    for _ in range(20):
        assert dealer.ranks_died() is None
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
        if units and not dealer.is_isolating and not any(map(dealer.has_waiting, ranks)):
            dealer.add_unit(units[0][0].unit, units.pop(0))
        running |= {item.key.row: item for rank in ranks for item in dealer.take(rank, rng.randint(1, 6)).requests}
        assert running, "there is always something to do"
        is_accident = num_accidents > 0 and len(running) > 1 and rng.random() < 0.2
        num_accidents -= is_accident
        for row in [row for row in running if row not in poison and rng.random() < 0.5]:
            item = running.pop(row)
            dealer.finish(item.unit, item.key)
            finished.add(row)
        if is_accident or running.keys() & poison:
            item = dealer.ranks_died()
            if item is not None:
                dealer.finish(item.unit, item.key)
                given_up.add(item.key.row)
            running.clear()
    assert given_up == poison
    assert finished == set(range(40)) - poison
