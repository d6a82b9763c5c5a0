"""Sampling: the filters, the draws, and that nothing about a draw depends on the batch."""

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from batchinfer.config import SamplingConfig
from batchinfer.model.config import MAX_VOCABULARY
from batchinfer.model.sampling import SamplingRows, sample, uniforms
from batchinfer.records import sampling_key
from batchinfer_kernels.reference import rows as reference_rows


def rows_of(*samplings, keys=None):
    parsed = [SamplingConfig(max_tokens=1, **values).to_sampling() for values in samplings]
    return SamplingRows.of(parsed, keys or list(range(len(parsed))))


def kept(logits, **values):
    """Ids of the tokens that the filters leave."""
    rows = rows_of({"temperature": 1.0, **values})
    filters = (torch.from_numpy(column) for column in (rows.temperature, rows.top_k, rows.top_p, rows.min_p))
    return torch.nonzero(reference_rows.kept_weights(logits, *filters)[0])[:, 0].tolist()


def filtered(probs, **values):
    return kept(torch.tensor([probs]).log(), **values)


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


@pytest.mark.parametrize("seed", range(20))
def test_filters_keep_what_those_of_transformers_keep(seed):
    draw = np.random.default_rng(seed)
    logits = torch.from_numpy(draw.normal(scale=2, size=(1, 500)).astype(np.float32))
    for _ in range(20):
        values = {
            "temperature": draw.choice([0.7, 1.0, 2.5]),
            "top_k": int(draw.choice([0, 1, 7, 50, 500])),
            "top_p": draw.choice([0.05, 0.5, 0.95, 1.0]),
            "min_p": draw.choice([0.0, 0.001, 0.1, 1.0]),
        }
        theirs = TemperatureLogitsWarper(float(values["temperature"]))(None, logits)
        if values["top_k"]:
            theirs = TopKLogitsWarper(values["top_k"])(None, theirs)
        theirs = TopPLogitsWarper(float(values["top_p"]))(None, theirs)
        theirs = MinPLogitsWarper(float(values["min_p"]))(None, theirs)
        assert kept(logits, **values) == torch.nonzero(theirs[0] > -torch.inf)[:, 0].tolist(), values


def test_a_vocabulary_whose_weights_might_not_be_added_up_is_refused():
    logits = torch.zeros(1, reference_rows.MAX_TOKENS + 1)
    with pytest.raises(ValueError, match="a vocabulary of 524288 tokens, more than 524287"):
        sample(logits, rows_of({"temperature": 1.0}), np.array([0]))
    assert MAX_VOCABULARY == reference_rows.MAX_TOKENS  # no model has more
    # as many as there may be, all alike: the very last one is drawn at the very end
    ones = torch.ones(1, dtype=torch.float64)
    last = reference_rows.draw(logits[:, 1:], ones, torch.tensor([0]), ones, 0 * ones, ones - 2**-53)
    assert last.tolist() == [reference_rows.MAX_TOKENS - 1]


def test_greedy_takes_the_lowest_id_among_equals():
    assert sample(torch.tensor([[1.0, 3.0, 3.0]]), rows_of({}), np.array([0])).tokens == [1]


def test_draws_follow_the_distribution():
    count = 20_000
    rows = rows_of(*[{"temperature": 1.0}] * count, keys=[sampling_key(0, "row", 0, i) for i in range(count)])
    tokens = sample(torch.tensor([PROBS]).log().expand(count, -1), rows, np.zeros(count, dtype=np.int64)).tokens
    shares = np.bincount(tokens, minlength=4) / count
    # five standard deviations of a share of 0.4 over 20,000 draws
    assert np.abs(shares - PROBS).max() < 5 * np.sqrt(0.4 * 0.6 / count)


@pytest.mark.parametrize("values", [{}, {"top_k": 40}, {"top_p": 0.8, "min_p": 0.02}])
def test_even_uniforms_draw_each_token_as_often_as_its_probability_says(values):
    logits, count = torch.randn(1, 200, generator=torch.Generator().manual_seed(3)), 5000
    stay = kept(logits, temperature=0.7, **values)
    expected = torch.zeros(200, dtype=torch.float64)
    expected[stay] = torch.softmax(logits[0, stay].double() / 0.7, dim=0)
    rows = rows_of({"temperature": 0.7, **values})
    settings = (
        torch.from_numpy(column).expand(count) for column in (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    )
    even = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = reference_rows.draw(logits.expand(count, -1), *settings, even)
    # the number of evenly spaced points in an interval, give or take one
    assert (torch.bincount(tokens, minlength=200) - count * expected).abs().max() <= 1 + 1e-6


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
    assert sampled.top_tokens.tolist() == [[2, 1]]


def test_logits_that_are_not_finite_are_reported_per_row():
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0]])
    sampled = sample(logits, rows_of({}, {"temperature": 1.0}), np.zeros(2, dtype=np.int64))
    assert sampled.is_finite.tolist() == [False, True]
