"""Slots of requests with drafts: the states that they keep, and the rows that the layer runs for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchinfer.model.sampling import SamplingRows
from batchinfer.model.transformer import Transformer
from batchinfer.rank import draft_states
from batchinfer.rank.draft_states import CONTEXT, DraftStates
from batchinfer.rank.sequence import Sequence
from batchinfer.records import Request, RequestKey, RequestTimes, Sampling
from support.paths import RANDOM_MODEL


@pytest.fixture(scope="module")
def model():
    return Transformer.load(RANDOM_MODEL, dtype=torch.float32, mtp=True)


def sequence(row: int) -> Sequence:
    sampling = Sampling(max_tokens=9, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, n=1, seed=0, stop=(),
                        stop_token_ids=(), ignore_eos=False, logprobs=None)  # fmt: skip
    request = Request(RequestKey(0, row, 0), 0, [1], sampling, sampling_key=row)
    return Sequence(request=request, pages=[], num_computed=1, times=RequestTimes(), stream=None)


class Kept:
    """States and tokens whose values identify their request and place."""

    def __init__(self, model: Transformer, num_requests: int) -> None:
        self.model, self.states = model, DraftStates(model)
        self.sequences = [sequence(row) for row in range(num_requests)]

    def keep(self, rows: list[int], starts: list[int], counts: list[int]) -> None:
        places = [(row, place) for row, start, count in zip(rows, starts, counts, strict=True)
                  for place in range(start, start + count)]  # fmt: skip
        states = torch.tensor([[1000.0 * row + place] for row, place in places])
        self.states.keep(
            [self.sequences[row] for row in rows],
            np.array(starts) + np.array(counts),
            np.array(counts),
            states.expand(-1, self.model.config.hidden_size).contiguous(),
            np.array([1000 * row + place + 1 for row, place in places]),
        )

    def rows(self, rows: list[int], num_guesses: int) -> list[tuple[int, int, int, int]]:
        """(place of the text by the state, token, position, place in the pages) of the rows with a state."""
        zeros, count = np.zeros(len(rows)), len(rows)
        sampling = SamplingRows(zeros, np.zeros(count, int), zeros, zeros, np.zeros(count, np.uint64), zeros)
        given = self.states.next_input([self.sequences[row] for row in rows], sampling, np.zeros(count), num_guesses)
        num = len(given.tokens)
        assert len(given.positions) == num + (num_guesses - 1) * count
        assert len(set(given.slots.tolist())) == len(given.slots), "each row has a slot of its own"
        pages = given.page_table[torch.arange(len(given.places)), given.places // 64]
        assert torch.equal(given.slots, pages * 64 + given.places % 64)
        newest = given.states[given.last_rows, 0] % 1000
        for guess in range(num_guesses - 1):
            further = slice(num + guess * count, num + (guess + 1) * count)
            assert given.positions[further].tolist() == (newest + 1 + guess).tolist()
            last_places = given.places[given.last_rows]
            assert given.places[further].tolist() == (last_places + 1 + guess).tolist()
        columns = given.states[:, 0].int(), given.tokens, given.positions[:num], given.places[:num]
        return list(zip(*(column.tolist() for column in columns), strict=True))


def test_places_run_once_and_a_request_begins_with_what_is_known(model):
    kept = Kept(model, 2)
    # request 0 is known from place 7 on, request 1 from 100 on
    kept.keep([0, 1], [7, 100], [3, 1])
    assert kept.rows([0, 1], 2) == [
        (7, 8, 7, 0), (8, 9, 8, 1), (9, 10, 9, 2),
        (1100, 1101, 100, 0),
    ]  # fmt: skip
    kept.keep([1, 0], [101, 10], [2, 1])
    assert kept.rows([0, 1], 3) == [(10, 11, 10, 3), (1101, 1102, 101, 1), (1102, 1103, 102, 2)]


def test_after_a_gap_a_request_begins_anew(model):
    kept = Kept(model, 1)
    kept.keep([0], [0], [5])
    kept.rows([0], 1)
    kept.keep([0], [9], [2])
    assert [row[2:] for row in kept.rows([0], 1)] == [(9, 0), (10, 1)]


def test_what_waited_too_long_to_be_kept_begins_with_the_latest(model):
    kept = Kept(model, 1)
    kept.keep([0], [0], [5])
    kept.rows([0], 1)
    for place in range(5, 5 + CONTEXT):
        kept.keep([0], [place], [1])
    # all places since are kept, so the keys go on
    assert [row[2:] for row in kept.rows([0], 1)] == [(place, place) for place in range(5, 5 + CONTEXT)]
    for place in range(5 + CONTEXT, 6 + 2 * CONTEXT):
        kept.keep([0], [place], [1])
    first = 6 + CONTEXT
    assert [row[2:] for row in kept.rows([0], 1)] == [(first + i, i) for i in range(CONTEXT)]


def test_full_pages_begin_anew_with_the_latest_places(model, monkeypatch):
    monkeypatch.setattr(draft_states, "_PAGES", 1)
    kept = Kept(model, 1)
    most = 0
    for place in range(200):
        kept.keep([0], [place], [1])
        rows = kept.rows([0], 4)
        assert len(rows) in (1, CONTEXT)
        assert rows[-1][2] == place
        most = max(most, rows[-1][3] + 3)
    assert most == 63


def test_a_slot_goes_on_to_another_request_which_finds_nothing_of_the_first(model):
    kept = Kept(model, draft_states.MOST_REQUESTS + 1)
    rows = list(range(draft_states.MOST_REQUESTS))
    kept.keep(rows, [3] * len(rows), [2] * len(rows))
    assert kept.states.are_known(kept.sequences, np.full(len(kept.sequences), 5)).tolist() == [True] * 64 + [False]
    kept.states.drop(kept.sequences[:1])
    last = draft_states.MOST_REQUESTS
    kept.keep([last], [4], [1])
    assert kept.rows([last], 1) == [(1000 * last + 4, 1000 * last + 5, 4, 0)]
    assert not kept.states.are_known(kept.sequences[:1], np.array([5]))[0]
