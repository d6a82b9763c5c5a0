"""Triton operations between the products against the reference: norm, positions, gates, order and sums of rows."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels import reference
from batchinfer_kernels.reference import rows as reference_rows
from batchinfer_kernels.reference.gating import GateRule
from batchinfer_kernels.reference.rows import NewKeys
from batchinfer_kernels.triton import draw, ops, sorting
from support.placed_rows import placed
from support.triton_device import DEVICE, TOLERANCE, needs_triton, random, relative_error

pytestmark = needs_triton

PARTS = [(0, 1), (3, 10), (36, 37), (0, 0)]  # first row, behind the last row


@pytest.mark.parametrize("width", [1, 15, 64, 1100])
def test_norm_and_activation_follow_their_formulas_and_keep_their_bits(width):
    x, up, weight = 3 * random(37, width), random(37, width, seed=1), random(width, seed=2)
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    assert relative_error(ops.rms_norm(x, weight, 1e-6), normed) < TOLERANCE["bf16"]
    active = torch.nn.functional.silu(x.double()) * up.double()
    assert relative_error(ops.silu_mul(x, up), active) < TOLERANCE["bf16"]
    beside = torch.cat([x, up], dim=-1)
    assert torch.equal(ops.silu_mul(*beside.chunk(2, dim=-1)), ops.silu_mul(x, up))
    assert torch.equal(ops.rms_norm(x[:, None], weight, 1e-6)[:, 0], ops.rms_norm(x, weight, 1e-6))
    for operation in (lambda rows: ops.rms_norm(rows, weight, 1e-6), lambda rows: ops.silu_mul(rows, rows)):
        for start, stop in PARTS:
            assert torch.equal(operation(x[start:stop]), operation(x)[start:stop])


@pytest.mark.parametrize("width", [64, 300, 1100])
def test_a_norm_that_rounds_has_the_bits_of_both_steps(width):
    wide, weight = 3 * random(37, width + 40), random(width, seed=2)
    x = wide[:, :width]  # as one product of joined weights gives it
    x[3], x[4, width // 2], x[5, 7] = 0, torch.nan, 1e4
    normed, rounded = ops.rms_norm_fp8(x, weight, 1e-6, keeps=True)
    expected = ops.rms_norm(x, weight, 1e-6)
    assert torch.equal(normed.nan_to_num(), expected.nan_to_num())
    values, scales = ops.quantize_fp8_rows(expected)
    assert torch.equal(rounded.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(rounded.scales.nan_to_num(), scales.nan_to_num())
    assert rounded.scales.stride() == scales.stride(), "the order in which deep_gemm reads them"
    none, alone = ops.rms_norm_fp8(x[6:7], weight, 1e-6)
    assert none is None
    assert torch.equal(alone.values.view(torch.uint8), values[6:7].view(torch.uint8))
    theirs, theirs_rounded = reference.rms_norm_fp8(x, weight, 1e-6, keeps=True)
    assert relative_error(normed[6:], theirs[6:].double()) < TOLERANCE["bf16"]
    assert theirs_rounded.scales.stride() == scales.stride()


def test_the_activation_of_extreme_values():
    gate = torch.tensor([[-torch.inf, -200.0, -88.9, 0.0, 88.9, 200.0, torch.inf, torch.nan]]).bfloat16().to(DEVICE)
    expected, y = reference.silu_mul(gate, torch.ones_like(gate))[0], ops.silu_mul(gate, torch.ones_like(gate))[0]
    assert torch.allclose(y[1:7], expected[1:7], atol=1e-30)
    assert torch.isnan(y[7])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "nope", "rotary", "latent"), [(1, 6, 2, 16), (20, 8, 16, 64), (3, 10, 70, 48)])
def test_positions_and_pages_are_those_of_the_reference(heads, nope, rotary, latent, interleaved):
    q, latents, norm = random(37, heads, nope + rotary), random(37, latent + rotary, seed=1), random(latent, seed=2)
    angles = random(37, rotary // 2, seed=3, dtype=torch.float32)
    slots = torch.randperm(4 * 64, generator=torch.Generator().manual_seed(4))[:37].to(DEVICE)

    def run(function, rows):
        pages = random(4, 64, latent + rotary, seed=5)
        places = angles.cos()[rows], angles.sin()[rows], pages, slots[rows]
        turned = function(q[rows].clone(), NewKeys(latents[rows], norm, 1e-6, *places, interleaved))
        return turned, pages.view(-1, latent + rotary)

    turned, pages = run(ops.rope_and_cache, slice(None))
    expected, expected_pages = run(reference_rows.rope_and_cache, slice(None))
    for ours, theirs in ((turned, expected), (pages, expected_pages)):
        # sums and fused products may differ in the last bit
        assert relative_error(ours, theirs.double()) < TOLERANCE["bf16"]
        assert (ours != theirs).float().mean() < 0.01
    others = torch.ones(256, dtype=torch.bool, device=DEVICE)
    others[slots] = False
    assert torch.equal(pages[others], random(4, 64, latent + rotary, seed=5).view(-1, latent + rotary)[others])
    for start, stop in PARTS:
        part, part_pages = run(ops.rope_and_cache, slice(start, stop))
        assert torch.equal(part, turned[start:stop])
        assert torch.equal(part_pages[slots[start:stop]], pages[slots[start:stop]])


@pytest.mark.parametrize("method", ["noaux_tc", "group_limited_greedy", "group_top2", "greedy"])
@pytest.mark.parametrize(("experts", "groups", "topk_groups", "topk"), [(16, 4, 2, 4), (160, 8, 3, 6), (6, 1, 1, 6)])
def test_the_gate_takes_the_experts_of_the_reference(experts, groups, topk_groups, topk, method):
    logits = 2 * random(37, experts, dtype=torch.float32)
    logits[3], logits[4, 1:], logits[5] = 0, logits[4, 0], logits[5].round()  # equals, also in other groups
    bias = 0.3 * random(experts, seed=1, dtype=torch.float32)
    for normalize, added in ((False, bias), (True, bias), (True, None)):
        rule = GateRule(method, topk, groups, topk_groups, normalize, scale=2.5)
        ids, weights = ops.gate(logits, added, rule)
        expected_ids, expected_weights = reference.gate(logits, added, rule)
        assert torch.equal(ids, expected_ids)
        assert torch.allclose(weights, expected_weights, rtol=1e-6)
        for start, stop in PARTS:
            part_ids, part_weights = ops.gate(logits[start:stop], added, rule)
            assert torch.equal(part_ids, ids[start:stop])
            assert torch.equal(part_weights, weights[start:stop])
    is_counted = torch.randint(2, (37,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for counted in (None, is_counted):
        ours, theirs = (torch.arange(experts, device=DEVICE) for _ in range(2))  # counts are added to these
        assert torch.equal(ops.gate(logits, None, rule, ours, counted)[0], ids)
        reference.gate(logits, None, rule, theirs, counted)
        assert torch.equal(ours, theirs)


def test_the_gate_takes_different_experts_of_nonsense():
    rule = GateRule("noaux_tc", topk=3, num_groups=2, topk_groups=1, normalize=True, scale=1.0)
    logits = torch.zeros(3, 8, device=DEVICE)
    logits[1], logits[2, 5] = torch.nan, torch.nan
    ids, weights = ops.gate(logits, None, rule)
    assert ids[[0, 2]].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert len(set(ids[1].tolist())) == 3
    assert 0 <= ids.min() <= ids.max() < 8
    assert weights.isfinite().all(-1).tolist() == [True, False, False]
    bias = torch.zeros(8, device=DEVICE)
    bias[5] = torch.nan
    assert ops.gate(torch.zeros_like(logits), bias, rule)[1].isnan().all()


@pytest.mark.parametrize(("num_tokens", "topk"), [(0, 4), (1, 1), (32, 4), (100, 3)])
@pytest.mark.parametrize("few", [4096, 0])
def test_the_order_of_experts_rows_and_their_sums_are_those_of_the_reference(num_tokens, topk, few, monkeypatch):
    monkeypatch.setattr(sorting, "_FEW", few)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (num_tokens, topk), generator=generator).to(DEVICE)  # none of the last
    found = ops.sort_by_expert(ids, 10)
    for ours, theirs in zip(found, reference_rows.sort_by_expert(ids, 10), strict=True):
        assert ours.dtype == torch.int64
        assert torch.equal(ours, theirs)
    weights = random(num_tokens, topk, dtype=torch.float32)
    place, rows = found[1], random(ids.numel(), 37)
    sums = ops.sum_per_token(rows, place, weights)
    assert torch.allclose(sums, reference_rows.sum_per_token(rows, place, weights), rtol=1e-5, atol=1e-6)
    assert torch.equal(ops.sum_per_token(placed(rows), place, weights), sums)
    hidden, shared = random(len(weights), 37, seed=1), random(len(weights), 37, seed=2)
    for added in (None, shared):
        assert torch.equal(ops.add_sums(hidden, sums, added), reference_rows.add_sums(hidden, sums, added))


@pytest.mark.parametrize("seed", range(3))
def test_places_of_experts_rows_are_those_of_the_reference(seed):
    generator = torch.Generator().manual_seed(seed)
    num_rows = torch.randint(0, 3, (5,), generator=generator) * torch.randint(0, 140, (5,), generator=generator)
    total, num_rows = int(num_rows.sum()), num_rows.to(DEVICE)
    for more in (0, 150):  # than there are
        tokens = torch.randint(0, 50, (total + more,), generator=generator).to(DEVICE)
        for tile_rows, sources in ((128, None), (128, tokens), (16, tokens)):
            given = num_rows, total + more, tile_rows, sources
            places, *ours = ops.expert_places(*given)
            expected_places, *expected = reference.expert_places(*given)
            pairs = [(places[:total], expected_places[:total]), *zip(ours, expected, strict=True)]
            for result, theirs in pairs:
                assert result.dtype == theirs.dtype
                assert torch.equal(result, theirs)


@pytest.mark.parametrize("width", [1, 33, 9000])
def test_the_largest_logit_is_the_first_among_equals(width):
    logits = torch.randint(-3, 3, (20, width), generator=torch.Generator().manual_seed(0)).float()
    logits[1, width // 2], logits[2, -1], logits[3] = torch.nan, torch.inf, -torch.inf
    tokens, is_finite = ops.argmax(logits.to(DEVICE))
    assert is_finite.tolist() == [row not in (1, 2, 3) for row in range(20)]
    assert tokens[4:].tolist() == [row.tolist().index(max(row.tolist())) for row in logits[4:]]
    assert 0 <= tokens.min() <= tokens.max() < width
    assert len(ops.argmax(logits[:0].to(DEVICE))[0]) == 0


@pytest.mark.parametrize(("width", "rounding"), [(1, 1.0), (150, 0.5), (200, 1e-9)])
def test_draws_are_those_of_the_reference_without_a_sort(width, rounding, monkeypatch):
    monkeypatch.setattr(draw, "_TILE", 32)  # several tiles, and one that is not full
    monkeypatch.setattr(draw, "_PART", 64)
    logits = (3 * random(24, width, dtype=torch.float32) / rounding).round() * rounding  # 0.5: many equals
    logits[[3, 8]], logits[4, width // 2] = 1.0, 30.0  # all equal; all but one negligible
    logits[12:18] *= torch.tensor([1e-3, 1e-2], device=DEVICE).repeat(3)[:, None]  # weights of few buckets
    row = torch.arange(24, device=DEVICE)
    top_k = (row % 3) * (1 + row % 7)  # of every third row none, and more than there are
    top_p = torch.tensor([1.0, 0.9, 0.3, 1e-9, 0.0, 2.0], device=DEVICE)[row % 6]
    min_p = torch.tensor([0.0, 0.0, 0.1, 1.0], device=DEVICE)[row % 4]
    uniform = (row / 24).double()
    uniform[row % 4 == 1] = uniform[8] = 1 - 2**-53  # the last one that stays
    settings = (0.5 + row % 4).double(), top_k, top_p.double(), min_p.double(), uniform
    drawn = ops.draw(logits, *settings)
    assert torch.equal(drawn, reference_rows.draw(logits, *settings))
    assert torch.equal(ops.draw(logits[7:8], *(values[7:8] for values in settings)), drawn[7:8])
    assert len(ops.draw(logits[:0], *(values[:0] for values in settings))) == 0


def test_a_row_that_is_not_finite_gets_some_token_and_a_vocabulary_that_is_too_large_none():
    logits = torch.zeros(3, 5, device=DEVICE)
    logits[0, 1], logits[1], logits[2, 3] = torch.nan, -torch.inf, torch.inf
    ones = torch.ones(3, dtype=torch.float64, device=DEVICE)
    tokens = ops.draw(logits, ones, torch.tensor([2, 0, 2], device=DEVICE), 0.5 * ones, 0 * ones, 0.5 * ones)
    assert 0 <= tokens.min() <= tokens.max() < 5
    with pytest.raises(ValueError, match="a vocabulary of 524288 tokens, more than 524287"):
        ops.draw(torch.zeros(1, 2**19, device=DEVICE), *[ones[:1]] * 5)
