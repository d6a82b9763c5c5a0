"""Sampling: the filters, the draws, and that nothing about a draw depends on the batch."""

import numpy as np
import pytest
import torch

from batchinfer.config import SamplingConfig
from batchinfer.model.sampling import SamplingRows, filtered_probs, sample, uniforms
from batchinfer.records import sampling_key


def rows_of(*samplings, keys=None):
    parsed = [SamplingConfig(max_tokens=1, **values).to_sampling() for values in samplings]
    return SamplingRows.of(parsed, keys or list(range(len(parsed))))


def filtered(probs, **values):
    rows = rows_of({"temperature": 1.0, **values})
    kept = filtered_probs(torch.tensor([probs]).log(), rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    return [index for index, prob in enumerate(kept[0].tolist()) if prob > 0]


PROBS = [0.1, 0.4, 0.3, 0.2]


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        # 0.4 alone does not reach 0.5, 0.4 + 0.3 does
        ({"top_p": 0.5}, [1, 2]),
        ({"top_p": 1e-9}, [1]),
        # of the two that top_k leaves, 0.4 holds 57%: enough for top_p = 0.5
        ({"top_k": 2, "top_p": 0.5}, [1]),
        # the floor is 0.45 x 0.4 = 0.18
        ({"min_p": 0.45}, [1, 2, 3]),
        ({"min_p": 1.0}, [1]),
    ],
)
def test_filters_keep_the_tokens_that_their_definition_says(values, kept):
    assert filtered(PROBS, **values) == kept


def test_top_k_keeps_exactly_k_of_equal_tokens_lowest_ids_first():
    assert filtered([0.25, 0.25, 0.25, 0.25], top_k=2) == [0, 1]


def test_greedy_takes_the_lowest_id_among_equals():
    assert sample(torch.tensor([[1.0, 3.0, 3.0]]), rows_of({}), np.array([0])).tokens == [1]


def test_draws_follow_the_distribution():
    count = 20_000
    rows = rows_of(*[{"temperature": 1.0}] * count, keys=[sampling_key(0, "row", 0, i) for i in range(count)])
    tokens = sample(torch.tensor([PROBS]).log().expand(count, -1), rows, np.zeros(count, dtype=np.int64)).tokens
    shares = np.bincount(tokens, minlength=4) / count
    # five standard deviations of a share of 0.4 over 20,000 draws
    assert np.abs(shares - PROBS).max() < 5 * np.sqrt(0.4 * 0.6 / count)


def test_a_draw_depends_on_its_key_and_position_alone():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(50, 1000, generator=generator)
    values = [{"temperature": 0.1 * (i % 9), "top_p": 1 - 0.05 * (i % 4), "top_k": 7 * (i % 3)} for i in range(50)]
    keys = [sampling_key(0, str(i), 0, 0) for i in range(50)]
    together = sample(logits, rows_of(*values, keys=keys), np.arange(50)).tokens
    for i in range(50):
        alone = sample(logits[i : i + 1], rows_of(values[i], keys=keys[i : i + 1]), np.array([i]))
        assert alone.tokens == [together[i]]


def test_uniforms_spread_evenly_and_differ_by_position():
    keys = np.array([sampling_key(0, "a", 0, 0)] * 10_000, dtype=np.uint64)
    draws = uniforms(keys, np.arange(10_000))
    assert len(np.unique(draws)) == 10_000
    assert np.abs(np.histogram(draws, bins=10, range=(0, 1))[0] - 1000).max() < 5 * np.sqrt(900)


def test_the_key_separates_every_part():
    parts = [(0, "a", 0, 0), (1, "a", 0, 0), (0, "b", 0, 0), (0, "a", 1, 0), (0, "a", 0, 1), (0, "a\x1f0", 0, 0)]
    assert len({sampling_key(*part) for part in parts}) == len(parts)


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    expected = torch.log_softmax(logits.double(), -1)[0]
    sampled = sample(logits, rows_of({"temperature": 0.3, "top_k": 1, "logprobs": 2}), np.array([0]))
    assert sampled.tokens == [2]
    assert sampled.logprobs == [pytest.approx(expected[2].item())]
    assert sampled.top_tokens == [[2, 1]]


def test_logits_that_are_not_finite_are_reported_per_row():
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0]])
    sampled = sample(logits, rows_of({}, {"temperature": 1.0}), np.zeros(2, dtype=np.int64))
    assert sampled.is_finite.tolist() == [False, True]
