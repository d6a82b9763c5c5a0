"""Hyper-connections against transformers, and the bits of a token's streams alone and among others."""

from dataclasses import replace

import pytest
import torch

from batchinfer.model.ops import Ops
from batchinfer.model.residual import StreamEnds, StreamResidual
from batchinfer.model.weights import StreamWeights
from batchinfer_kernels.reference.hyper import StreamRule
from support.compressed_models import random_model

RULE, EPS = StreamRule(20, 1e-6), 1e-6


@pytest.fixture(scope="module")
def model():
    return random_model().model


@pytest.fixture(scope="module")
def ops():
    return Ops.select()


def streams(count: int) -> torch.Tensor:
    return torch.randn(count, 4, 32, generator=torch.Generator().manual_seed(count))


def residual_of(ops, theirs, rule=RULE):
    weights = StreamWeights(ops.pack_router(theirs.fn.data), theirs.scale.data, theirs.base.data)
    return StreamResidual(ops, weights, rule, EPS)


def around(ours, state, y):
    x, past = ours.enter(state)
    return x, ours.leave(past, ours.base(past) + y)


def test_a_sublayer_reads_and_changes_the_streams_as_in_transformers(ops, model):
    theirs, state, y = model.layers[1].ffn_hc, streams(37), torch.randn(37, 32)
    x, after = around(residual_of(ops, theirs), state, y)
    with torch.no_grad():
        post, comb, wanted = theirs(state[None])
    assert torch.allclose(x, wanted[0], atol=1e-5)
    wanted_after = post[0, :, :, None] * y[:, None] + torch.einsum("tjk,tjd->tkd", comb[0], state)
    assert torch.allclose(after, wanted_after, atol=1e-5)


def test_streams_begin_alike_and_are_joined_as_in_transformers(ops, model):
    theirs, state = model.hc_head, streams(37)
    weights = StreamWeights(ops.pack_router(theirs.hc_fn.data), theirs.hc_scale.data, theirs.hc_base.data)
    ends = StreamEnds(ops, weights, RULE, EPS, 4)
    with torch.no_grad():
        assert torch.allclose(ends.close(state), theirs(state[None])[0], atol=1e-5)
    row = torch.randn(1, 32)
    assert torch.equal(ends.open(row)[0], row.expand(4, 32))


@pytest.mark.parametrize("rule", [StreamRule(19, 1e-6), StreamRule(20, 1e-3)])
def test_the_number_of_rounds_and_the_small_number_count(ops, model, rule):
    ours, state = residual_of(ops, model.layers[1].ffn_hc), streams(37)
    x, (_, mix) = ours.enter(state)
    other_x, (_, other) = replace(ours, rule=rule).enter(state)
    assert not torch.equal(mix.past_TNN, other.past_TNN)
    assert torch.equal(x, other_x) == (rule.eps == RULE.eps)


def test_a_token_has_the_same_bits_among_any_others(ops, model):
    ours, state, y = residual_of(ops, model.layers[2].attn_hc), streams(70), torch.randn(70, 32)
    together = around(ours, state, y)
    for rows in (slice(0, 1), slice(3, 20), slice(69, 70)):
        alone = around(ours, state[rows], y[rows])
        assert all(torch.equal(one, both[rows]) for one, both in zip(alone, together, strict=True))


def test_some_tokens_are_taken_by_row(ops, model):
    ours, state, rows = residual_of(ops, model.layers[2].attn_hc), streams(9), torch.tensor([7, 2])
    y = torch.randn(9, 32)
    taken = ours.leave(ours.take(ops, ours.enter(state)[1], rows), y[rows])
    assert torch.equal(taken, around(ours, state, y)[1][rows])
