"""Hyper-connections: products, factors and sums of streams against formulas in float64, and rows alone and together."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels import registry
from batchinfer_kernels.reference.hyper import StreamMix, StreamRule

EPS, RULE = 1e-6, StreamRule(20, 1e-6)
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-7}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_mix(mixed, scale, base, rule, count):
    """Factors in float64, by the formulas of the report."""
    before, after, past = mixed.double().split([count, count, count * count], dim=-1)
    b, a, p = base.double().split([count, count, count * count])
    scale = scale.double()
    past = torch.softmax((past * scale[2] + p).unflatten(-1, (count, count)), dim=-1) + rule.eps
    past = past / (past.sum(-2, keepdim=True) + rule.eps)
    for _ in range(rule.num_rounds - 1):
        past = past / (past.sum(-1, keepdim=True) + rule.eps)
        past = past / (past.sum(-2, keepdim=True) + rule.eps)
    return torch.sigmoid(before * scale[0] + b) + rule.eps, 2 * torch.sigmoid(after * scale[1] + a), past


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "hidden"), [(4, 64), (3, 40), (1, 32)])
def test_products_are_those_of_streams_normed_together(ops, count, hidden, dtype):
    streams, weight = 3 * random(21, count, hidden, dtype=dtype), random(count * (2 + count), count * hidden, seed=1)
    mixing = ops("pack_router")(weight)
    products = ops("stream_products")(streams, mixing, EPS)
    flat = streams.double().flatten(1)
    exact = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS) @ weight.double().T
    assert products.dtype == torch.float32
    assert (products - exact).abs().max() <= 3e-6 * exact.abs().max()
    for rows in (slice(0, 1), slice(5, 16)):
        assert torch.equal(ops("stream_products")(streams[rows], mixing, EPS), products[rows])


@pytest.mark.parametrize("rule", [RULE, StreamRule(1, 1e-6), StreamRule(3, 1e-2)])
@pytest.mark.parametrize("count", [4, 3, 1])
def test_factors_are_made_doubly_stochastic_in_rounds(ops, count, rule):
    mixed, base = 2 * random(37, count * (2 + count)), random(count * (2 + count), seed=1)
    scale = torch.tensor([0.5, 1.5, 2.0])
    mix = ops("stream_mix")(mixed, scale, base, rule)
    for ours, exact in zip(mix, exact_mix(mixed, scale, base, rule, count), strict=True):
        assert (ours - exact).abs().max() <= 2e-6
    for rows in (slice(0, 1), slice(30, 37)):
        alone = ops("stream_mix")(mixed[rows], scale, base, rule)
        assert all(torch.equal(one, both[rows]) for one, both in zip(alone, mix, strict=True))


def test_a_token_that_is_no_number_gives_none(ops):
    mixed = random(5, 24)
    mixed[2, 12] = torch.nan
    mix = ops("stream_mix")(mixed, torch.ones(3), torch.zeros(24), RULE)
    assert mix.past_TNN[2].isnan().any()
    assert mix.past_TNN[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "hidden"), [(4, 1040), (3, 40), (1, 17)])
def test_streams_are_joined_and_changed_as_written_out(ops, count, hidden, dtype):
    streams, y = random(21, count, hidden, dtype=dtype), random(21, hidden, seed=1, dtype=dtype)
    mix = StreamMix(*(random(21, *[count] * dims, seed=2 + dims).abs() for dims in (1, 1, 2)))
    joined, left = ops("join_streams")(streams, mix.before_TN), ops("leave_streams")(streams, mix, y)
    wide = streams.double()
    exact = (wide * mix.before_TN.double()[..., None]).sum(1)
    exact_left = mix.after_TN.double()[..., None] * y.double()[:, None]
    exact_left = exact_left + torch.einsum("tjk,tjd->tkd", mix.past_TNN.double(), wide)
    for ours, expected in ((joined, exact), (left, exact_left)):
        assert ours.dtype == dtype
        assert (ours - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    if ops("join_streams").name == "cpu":
        assert torch.equal(joined, registry.bind("join_streams", ["reference"])(streams, mix.before_TN))
        assert torch.equal(left, registry.bind("leave_streams", ["reference"])(streams, mix, y))
    for rows in (slice(0, 1), slice(3, 20)):
        some = StreamMix(*(each[rows] for each in mix))
        assert torch.equal(ops("join_streams")(streams[rows], some.before_TN), joined[rows])
        assert torch.equal(ops("leave_streams")(streams[rows], some, y[rows]), left[rows])
