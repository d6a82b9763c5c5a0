"""Pieces of the job's prompts, from all groups of them, and not many."""

from __future__ import annotations

import pytest

from batchinfer.config import SamplingConfig
from batchinfer.controller.experts.calibration import PIECE_TOKENS, num_calibration_tokens, prompt_pieces, spread
from batchinfer.records import Request, RequestKey

GREEDY = SamplingConfig(max_tokens=8).to_sampling()


def requests(groups):
    """Prompts of groups of these sizes: 30 common tokens, then 20 of their own, which name group and row."""
    found = []
    for group, size in enumerate(groups):
        for row in range(size):
            tokens = [1000 * group + 999] * 30 + [1000 * group + row] * 20
            key = RequestKey(0, len(found), 0)
            found.append(Request(key, 0, tokens, GREEDY, 0, cached_tokens=30 if row else 0, prompt_group=group))
    return found


@pytest.mark.parametrize(
    ("job_tokens", "num_tokens"),
    [(1_000, 62), (8_000, 256), (100_000, 1_000), (10**9, 2_048), (10, 0)],
)
def test_a_calibration_is_short_beside_the_job(job_tokens, num_tokens):
    assert num_calibration_tokens(job_tokens) == num_tokens


@pytest.mark.parametrize("groups", [[40], [40, 1, 40, 3], [5] * 8, [300, 2, 2, 2, 2, 2]])
def test_every_prompt_group_is_in_it_and_large_ones_have_most(groups):
    pieces = prompt_pieces(requests(groups), 256)
    assert 0 < sum(map(len, pieces)) <= 256
    assert all(len(piece) == PIECE_TOKENS for piece in pieces)
    of_group = [sum(piece[-1] // 1000 == group for piece in pieces) for group in range(len(groups))]
    assert min(of_group) >= 1
    if max(groups) > 2 * min(groups):
        assert of_group.index(max(of_group)) == groups.index(max(groups))


def test_without_tokens_there_are_no_pieces():
    assert prompt_pieces(requests([4]), 15) == []
    assert prompt_pieces([], 256) == []


def test_numbers_are_spread_evenly():
    assert spread(3, 5) == [0, 1, 2]
    assert spread(100, 4) == [12, 37, 62, 87]
