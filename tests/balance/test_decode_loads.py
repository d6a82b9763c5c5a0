"""The choice of a decode rank for a prompt that has run, by the ranks' known loads; the requests that move."""

from __future__ import annotations

from collections import Counter

from batchinfer.balance.decode_loads import LOOK_EVERY, DecodeLoads, DecodeRequest, decode_request
from batchinfer.balance.output_lengths import OutputLengths
from batchinfer.balance.request_load import RequestLoad
from batchinfer.config import SamplingConfig
from batchinfer.records import Request, RequestKey

GREEDY = SamplingConfig(max_tokens=8).to_sampling()


def loads(max_requests=8):
    return DecodeLoads(
        [2, 3, 4], OutputLengths(), max_requests=max_requests, request_load=RequestLoad(1.0), move_steps=4.0
    )


def request(row, num_tokens=10):
    return decode_request(Request(RequestKey(0, row, 0), 0, [1] * num_tokens, GREEDY, 0))


def ranks_of(assigned):
    return {key.row: rank for key, rank in assigned}


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


def test_loads_are_those_of_the_requests_with_the_tokens_that_they_have():
    # rank 2: 20 + 3 and 30 + 1 tokens; rank 4: 40 + 1 at its own step 0, and all ranks have run 2
    mine = loads()
    mine.start(request(0, 20), 2)
    for rank in (2, 2, 3):
        mine.step(rank)
    mine.start(request(1, 30), 2)
    mine.start(request(2, 40), 4)
    mine.start(request(3, 9), 4)
    mine.finish(request(3).key)
    kv, num, largest = mine.kv_of_rank()
    assert (kv.tolist(), num.tolist(), largest) == ([54, 0, 43], [2, 0, 1], 43)


def long(row, num_tokens, max_tokens=10_000):
    return DecodeRequest(row, num_tokens, max_tokens)


def two_ranks(max_requests=8):
    return DecodeLoads([2, 3], OutputLengths(), max_requests=max_requests, request_load=RequestLoad(), move_steps=1.0)


def step(mine, count=1):
    for rank in (2, 3):
        mine.step(rank, count)


def test_a_request_that_moves_keeps_its_tokens_and_is_load_where_it_goes():
    mine = two_ranks()
    for row, num_tokens in enumerate((60, 40, 20)):
        mine.start(long(row, num_tokens), 2)
    step(mine, 8)
    assert mine.moves() == [(0, 2)]
    assert mine.moves() == [], "one after the other"
    assert (mine.give_away(0), mine.give_away(0), mine.give_away(1)) == (3, None, None)
    mine.step(2)  # while it is on its way
    # rank 2: 40 + 20 + 2 x 10; rank 3: 60 + 9, and the step that rank 2 has reported first
    mine.add_ready(long(5, 1))
    assert mine.assign_ready() == [(5, 3)]
    mine.start(long(0, 60), 3, 9)
    kv, _, _ = mine.kv_of_rank()
    assert kv.tolist() == [80, 70]


def test_ranks_far_from_level_are_looked_at_in_every_step_and_others_now_and_then():
    for more, first_look in ((1_000, LOOK_EVERY), (3_000, 1)):  # 5 and 13 % above the mean
        mine = two_ranks()
        for row in range(4):
            mine.start(long(row, 10_000), 2 + row % 2)
        for row in (4, 5):
            mine.start(long(row, more + row), 2)
        looks = []
        for now in range(1, LOOK_EVERY + 1):
            step(mine)
            looks += [now] * len(mine.moves())
        assert looks[0] == first_look


def test_requests_under_way_count_where_they_go():
    mine = two_ranks()
    for row in range(6):
        mine.start(long(row, 100), 2)
    step(mine)
    asked = mine.moves()
    assert len(asked) == 3
    assert {mine.give_away(key) for key, _ in asked} == {3}
    for _ in range(2 * LOOK_EVERY):
        step(mine)
        assert mine.moves() == []


def test_an_answer_at_its_limit_has_ended_before_its_rank_reports_it():
    mine = two_ranks()
    mine.start(long(0, 100), 2)
    mine.start(long(1, 100), 2)
    mine.start(long(2, 300, max_tokens=4), 3)
    mine.step(2, 2)
    assert mine.moves() == []
    mine.step(2, 1)  # with rank 3, which is to report: its answer had one token at first
    assert len(mine.moves()) == 1


def test_requests_come_and_go_in_any_order():
    mine, held = loads(max_requests=500), {}
    for row in range(400):
        if row % 3 == 2:
            gone = list(held)[row // 7 % len(held)]
            mine.finish(request(gone).key)
            del held[gone]
        held[row] = row
        mine.start(request(row, row), 2 + row % 3)
    kv, num, _ = mine.kv_of_rank()
    assert num.tolist() == [sum(row % 3 == rank for row in held) for rank in range(3)]
    assert kv.tolist() == [sum(row + 1 for row in held if row % 3 == rank) for rank in range(3)]
