"""Which decode rank gets a prompt that has run, as the controller knows the ranks' loads."""

from __future__ import annotations

from collections import Counter

from batchinfer.balance.decode import OutputLengths
from batchinfer.config import SamplingConfig
from batchinfer.controller.decode_loads import DecodeLoads
from batchinfer.records import Request, RequestKey

GREEDY = SamplingConfig(max_tokens=8).to_sampling()


def loads(max_requests=8):
    return DecodeLoads([2, 3, 4], OutputLengths(), max_requests=max_requests, request_load=1.0, move_steps=4.0)


def request(row, num_tokens=10):
    return Request(RequestKey(0, row, 0), 0, [1] * num_tokens, GREEDY, 0)


def ranks_of(assigned):
    return {request.key.row: rank for request, rank in assigned}


def test_equal_prompts_spread_over_all_decode_ranks():
    mine = loads()
    for row in range(9):
        mine.add_ready(request(row))
    assert Counter(ranks_of(mine.assign_ready()).values()) == {2: 3, 3: 3, 4: 3}
    assert mine.assign_ready() == []


def test_what_is_on_its_way_or_running_is_load():
    mine = loads()
    mine.add_ready(request(0, 50))
    assert ranks_of(mine.assign_ready()) == {0: 2}  # on its way
    mine.start(request(1, 30), 3)  # running
    for row in (2, 3):
        mine.add_ready(request(row))
    assert ranks_of(mine.assign_ready()) == {2: 4, 3: 4}


def test_slots_taken_are_not_given_again():
    mine = loads(max_requests=1)  # and one more may wait there
    for row in range(9):
        mine.add_ready(request(row))
    assert Counter(ranks_of(mine.assign_ready()).values()) == {2: 2, 3: 2, 4: 2}
    assert mine.assign_ready() == []
    mine.start(request(0), 2)
    mine.finish(request(0).key)
    assert list(ranks_of(mine.assign_ready()).values()) == [2]
