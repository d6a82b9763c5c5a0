"""Prompts are cut into even steps as far as a rank has KV pages for them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from batchinfer.balance.output_lengths import OutputLengths
from batchinfer.config import PAGE_TOKENS, SamplingConfig
from batchinfer.controller.rank_queues import RankQueues
from batchinfer.controller.waiting_pieces import RankRoom
from batchinfer.records import Request, RequestKey

ANSWER = 1 + PAGE_TOKENS  # one page beside the prompt: nobody attends to the last token
PROMPT_PAGES = 4
NUM_PROMPTS = 60
RUNNING = 5  # requests that decode at once


def make_queues(num_pages: int | None, *, with_decode: bool = True) -> RankQueues:
    """Two ranks with 30 prompts each: groups of six behind a common page."""
    sampling = SamplingConfig(max_tokens=ANSWER).to_sampling()
    queues = RankQueues([0, 1], OutputLengths(), RankRoom(300, RUNNING if with_decode else None))
    prompts = [
        [group] * PAGE_TOKENS + [1000 + group * 6 + i] * (PROMPT_PAGES - 1) * PAGE_TOKENS
        for group in range(NUM_PROMPTS // 6)
        for i in range(6)
    ]
    requests = [
        Request(RequestKey(0, row, 0), 0, tokens, sampling, 0, PAGE_TOKENS if row % 6 else 0)
        for row, tokens in enumerate(prompts)
    ]
    queues.add(requests)
    if num_pages is not None:
        queues.keep_to_pages(num_pages)
    return queues


def taken_by(queues: RankQueues, rank: int):
    taken = queues.take(rank, 10**6)
    return taken.requests, taken.pieces


@pytest.mark.parametrize("num_pages", [None, 10**6, 100, 60, 30, 8, 5])
def test_every_token_waits_once_and_in_order_whatever_room_there_is(num_pages):
    queues, rows = make_queues(num_pages), []
    for rank in (0, 1):
        requests, pieces = taken_by(queues, rank)
        rows += [request.key.row for request in requests]
        computed: dict[RequestKey, int] = {}
        for piece in pieces:
            assert piece.begins == (piece.key not in computed)
            assert piece.end - piece.num_tokens == computed.get(piece.key, piece.end - piece.num_tokens)
            computed[piece.key] = piece.end
        assert computed == {request.key: len(request.token_ids) for request in requests}
    assert sorted(rows) == list(range(NUM_PROMPTS))


def test_with_room_for_all_prompts_steps_are_even():
    queues = make_queues(10**6)
    assert not queues.has_uneven_steps
    _, pieces = taken_by(queues, 0)
    ends = np.flatnonzero([piece.ends_step for piece in pieces])
    steps = np.add.reduceat([piece.num_tokens for piece in pieces], [0, *(ends[:-1] + 1)])
    assert steps.max() <= 1.1 * steps.mean() <= 330
    assert any(not piece.begins for piece in pieces), "no prompt was cut"


@pytest.mark.parametrize("with_decode", [True, False])
def test_with_room_for_one_prompt_they_run_one_after_the_other(with_decode):
    queues = make_queues(PROMPT_PAGES + with_decode, with_decode=with_decode)
    assert queues.has_uneven_steps
    for rank in (0, 1):
        requests, pieces = taken_by(queues, rank)
        assert all(piece.begins and not piece.ends_step for piece in pieces)
        rows = [request.key.row for request in requests]
        groups = [row // 6 for row in rows]
        assert len(list(itertools.groupby(groups))) == len(set(groups)), "a group was left and entered again"


@pytest.mark.parametrize("num_pages", [None, 10**6, 5])
def test_prompts_of_a_lone_rank_run_whole_in_the_order_of_the_prefix_tree_whatever_room_there_is(num_pages):
    sampling = SamplingConfig(max_tokens=ANSWER).to_sampling()
    requests = [Request(RequestKey(0, row, 0), 0, [row // 6, *range(900)], sampling, row) for row in range(18)]
    queues = RankQueues([0], OutputLengths(), RankRoom(300, RUNNING, num_pages))
    queues.add(requests)
    taken, pieces = taken_by(queues, 0)
    assert not queues.has_uneven_steps, "no rank waits for another"
    assert [request.key.row for request in taken] == list(range(18))
    assert all(piece.begins and piece.end == 901 and not piece.ends_step for piece in pieces)


def test_what_ranks_may_decode_at_once_counts_as_taken():
    needed = (RUNNING + 1) * (PROMPT_PAGES + 1)  # with one prompt under way
    assert make_queues(needed - 3).has_uneven_steps
    assert not make_queues(2 * needed).has_uneven_steps


def test_the_smallest_number_of_pages_counts():
    queues = make_queues(5)
    queues.keep_to_pages(10**6)
    assert all(not piece.ends_step for piece in taken_by(queues, 0)[1])


def test_pages_that_become_known_late_leave_prompts_that_have_begun():
    queues = make_queues(10**6)
    taken = queues.take(0, 99, 250)
    before, first = taken.requests, taken.pieces
    assert before
    queues.keep_to_pages(5)
    requests, pieces = taken_by(queues, 0)
    tokens = {request.key: 0 for request in (*before, *requests)}
    for piece in (*first, *pieces):
        tokens[piece.key] = piece.end
    assert set(tokens.values()) == {PROMPT_PAGES * PAGE_TOKENS}
    assert not {request.key for request in before} & {request.key for request in requests}
