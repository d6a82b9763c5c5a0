"""The C++ operations between the products: positions, pages, gates, the order of experts' rows; and 8-bit products."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchinfer_kernels import reference, registry
from batchinfer_kernels.cpu import build, ops
from batchinfer_kernels.reference import rows as reference_rows
from batchinfer_kernels.reference.gating import GateRule
from batchinfer_kernels.reference.mla import PagedKeys
from batchinfer_kernels.reference.rows import NewKeys
from support.placed_rows import placed
from support.random_tensors import random

REASON = build.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no C++ operations on this machine: {REASON}")

PARTS = [(1, 0, 70), (2, 0, 1), (1, 3, 10), (2, 64, 70), (2, 0, 0)]  # threads, first row, behind the last row


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request):
    return request.param


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "nope", "rotary", "latent"), [(1, 6, 2, 16), (4, 32, 16, 64), (3, 10, 70, 48), (2, 7, 6, 5)]
)
def test_positions_and_pages_are_those_of_the_reference(heads, nope, rotary, latent, interleaved, dtype, threads):
    q, latents = random(70, heads, nope + rotary, dtype=dtype), random(70, latent + rotary, seed=1, dtype=dtype)
    norm = random(latent, seed=2, dtype=dtype)
    angles = torch.randn(70, rotary // 2, generator=torch.Generator().manual_seed(3))
    slots = torch.randperm(4 * 64, generator=torch.Generator().manual_seed(4))[:70]

    def run(function, rows):
        pages = random(4, 64, latent + rotary, seed=5, dtype=dtype)
        places = angles.cos()[rows], angles.sin()[rows], pages, slots[rows]
        turned = function(q[rows].clone(), NewKeys(latents[rows], norm, 1e-6, *places, interleaved))
        return turned, pages.view(-1, latent + rotary)

    threads(2)
    turned, pages = run(ops.rope_and_cache, slice(None))
    expected, expected_pages = run(reference_rows.rope_and_cache, slice(None))
    assert torch.equal(turned, expected)
    assert torch.equal(pages[:, latent:], expected_pages[:, latent:])
    # the norm sums in another order: now and then the last bit differs
    off = (pages.float() - expected_pages.float()).abs()
    if dtype is torch.float32:
        assert (off <= 1e-6 * expected_pages.abs()).all()
    else:
        assert (off <= 2**-7 * expected_pages.float().abs()).all()
        assert (off > 0).float().mean() < 0.01
    others = torch.ones(256, dtype=torch.bool)
    others[slots] = False
    before = random(4, 64, latent + rotary, seed=5, dtype=dtype).view(-1, latent + rotary)
    assert torch.equal(pages[others], before[others])
    for num_threads, start, stop in PARTS:
        threads(num_threads)
        part, part_pages = run(ops.rope_and_cache, slice(start, stop))
        assert torch.equal(part, turned[start:stop])
        assert torch.equal(part_pages[slots[start:stop]], pages[slots[start:stop]])


@pytest.mark.parametrize("method", ["noaux_tc", "greedy", "group_limited_greedy", "group_top2"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("experts", "groups", "topk_groups", "topk"), [(16, 4, 2, 4), (256, 8, 4, 8), (6, 1, 1, 6)])
def test_the_gate_takes_the_experts_of_the_reference(experts, groups, topk_groups, topk, has_bias, method, threads):
    logits = 2 * random(70, experts).float()
    bias = 0.3 * random(experts, seed=1).float() if has_bias else None
    for normalize in (False, True):
        rule = GateRule(method, topk, groups, topk_groups, normalize, scale=2.5)
        threads(2)
        ids, weights = ops.gate(logits, bias, rule)
        expected_ids, expected_weights = reference.gate(logits, bias, rule)
        # the scores' last bits differ: experts of equal scores may come in another order
        assert torch.equal(ids.sort(-1).values, expected_ids.sort(-1).values)
        assert torch.allclose(weights.sort(-1).values, expected_weights.sort(-1).values, rtol=1e-6)
        for num_threads, start, stop in PARTS:
            threads(num_threads)
            part_ids, part_weights = ops.gate(logits[start:stop], bias, rule)
            assert torch.equal(part_ids, ids[start:stop])
            assert torch.equal(part_weights, weights[start:stop])


def test_the_gate_takes_the_first_of_equals_and_different_experts_of_nonsense():
    rule = GateRule("noaux_tc", topk=3, num_groups=2, topk_groups=1, normalize=True, scale=1.0)
    logits = torch.zeros(3, 8)
    logits[1] = torch.nan
    logits[2, 5] = torch.nan
    ids, weights = ops.gate(logits, None, rule)
    assert ids[0].tolist() == [0, 1, 2]
    assert len(set(ids[1].tolist())) == 3
    assert ids[2].tolist() == [0, 1, 2]
    assert weights.isfinite().all(-1).tolist() == [True, False, False]


@pytest.mark.parametrize("gate", [ops.gate, reference.gate], ids=["cpu", "reference"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_bias_that_is_no_number_does_not_leave_an_expert_out_or_in_unseen(gate, number):
    bias = torch.zeros(20)
    bias[17] = number
    for groups in (1, 2):
        rule = GateRule("noaux_tc", topk=3, num_groups=groups, topk_groups=1, normalize=True, scale=1.0)
        assert gate(random(4, 20).float(), bias, rule)[1].isnan().all()


@pytest.mark.parametrize(("hidden", "experts"), [(33, 5), (256, 64), (1024, 130)])
def test_router_logits_are_those_of_float32(hidden, experts, dtype, threads):
    x, weight = random(70, hidden, dtype=dtype), random(experts, hidden, seed=1).float() / hidden**0.5
    threads(2)
    logits = ops.router(x, weight)
    assert torch.equal(ops.router(x, ops.pack_router(weight)), logits)
    exact = x.double() @ weight.double().T
    terms = x.double().abs() @ weight.double().abs().T
    assert logits.dtype == torch.float32
    assert ((logits - exact).abs() <= 1e-6 * terms).all()
    for num_threads, start, stop in PARTS:
        threads(num_threads)
        assert torch.equal(ops.router(x[start:stop], weight), logits[start:stop])


def test_the_order_of_experts_rows_and_their_sums_are_those_of_the_reference(dtype):
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(70, 9, generator=generator).argsort(-1)[:, :4]
    weights = torch.rand(70, 4, generator=generator)
    sorting = ops.sort_by_expert(ids, 10)
    for ours, theirs in zip(sorting, reference_rows.sort_by_expert(ids, 10), strict=True):
        assert torch.equal(ours, theirs)
    _, place, _ = sorting
    rows = random(280, 37, dtype=dtype)
    hidden, shared = random(70, 37, seed=1, dtype=dtype), random(70, 37, seed=2, dtype=dtype)
    sums = ops.sum_per_token(rows, place, weights)
    for lying in (rows, placed(rows)):
        assert torch.equal(reference_rows.sum_per_token(lying, place, weights), sums)
        assert torch.equal(registry.bind("sum_per_token", ["cpu", "reference"])(lying, place, weights), sums)
    for added in (None, shared):
        assert torch.equal(ops.add_sums(hidden, sums, added), reference_rows.add_sums(hidden, sums, added))


def test_rows_for_experts_may_stay_where_they_are(dtype):
    gate_up, down = random(3, 2 * 40, 33, seed=1, dtype=dtype), random(3, 33, 40, seed=2, dtype=dtype)
    x, tokens, num_rows = random(7, 33, dtype=dtype), torch.tensor([6, 0, 0, 3, 2, 5, 1]), torch.tensor([2, 0, 5])
    expected = ops.grouped_mlp(x[tokens], num_rows, gate_up, down)
    assert torch.equal(ops.grouped_mlp(x, num_rows, gate_up, down, tokens), expected)
    assert torch.equal(
        reference.grouped_mlp(x, num_rows, gate_up, down, tokens),
        reference.grouped_mlp(x[tokens], num_rows, gate_up, down),
    )
    with pytest.raises(RuntimeError, match="row 7 of 7"):
        ops.grouped_mlp(x, num_rows, gate_up, down, tokens + 1)


@pytest.mark.parametrize("hidden", [1024, 1000])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "8 bits"])
def test_results_that_no_cache_keeps_are_those_of_fewer_rows(hidden, kind):
    eight_bit, dtype = kind == "8 bits", torch.float32 if kind == "float32" else torch.bfloat16
    gate_up, down = random(2, 4, hidden, seed=1, dtype=dtype), random(2, hidden, 2, seed=2, dtype=dtype)
    weights = ops.pack(gate_up, eight_bit=eight_bit, is_paired=True), ops.pack(down, eight_bit=eight_bit)
    x = random(9000, hidden, dtype=dtype)
    y = ops.grouped_mlp(x, torch.tensor([5000, 4000]), *weights)
    for start, stop in ((0, 1000), (4400, 5000), (5000, 6000), (8990, 9000)):
        counts = torch.tensor([0, stop - start] if start >= 5000 else [stop - start, 0])
        assert torch.equal(ops.grouped_mlp(x[start:stop], counts, *weights), y[start:stop])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "num_rows"), [(1, 3), (70, 40), (576, 300), (5, 0)])
def test_rows_are_moved_as_by_the_reference(width, num_rows, dtype, threads):
    rows = (100 * random(1000, width, dtype=torch.float32)).to(dtype)
    numbers = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    # some rows are written that others are copied from: what they held before counts
    sources, targets = numbers[:num_rows], numbers[num_rows // 2 :][:num_rows]
    for num_threads in (1, 2):
        threads(num_threads)
        assert torch.equal(ops.gather_rows(rows, sources), rows[sources])
        every_other = rows[:, None].expand(-1, 2, -1).reshape(2000, width)[::2]
        for own in (rows.clone(), every_other):
            expected = rows.clone()
            reference_rows.copy_rows(expected, sources, targets)
            ops.copy_rows(own, sources, targets)
            assert torch.equal(own, expected)


def test_rows_that_are_not_there_are_refused_and_gaps_go_on_to_the_reference():
    rows, missing = random(4, 3), torch.tensor([1, 4])
    for move in (lambda: ops.gather_rows(rows, missing), lambda: ops.copy_rows(rows, missing, missing - 1)):
        with pytest.raises(RuntimeError, match="row 4 of 4"):
            move()
    with pytest.raises(RuntimeError, match="row 4 of 4"):
        ops.copy_rows(rows, missing - 1, missing)
    turned, numbers = random(3, 4).T, torch.tensor([0, 2])
    expected = turned.clone()
    expected[[1, 3]] = expected[[0, 2]]
    registry.select("copy_rows")(turned, numbers, numbers + 1)
    assert torch.equal(turned, expected)


@pytest.mark.parametrize("width", [1, 16, 33, 1000])
def test_the_largest_logit_is_the_first_among_equals(width):
    logits = torch.randint(-3, 3, (50, width), generator=torch.Generator().manual_seed(0)).float()
    logits[1, width // 2], logits[2, -1], logits[3] = torch.nan, torch.inf, -torch.inf
    tokens, is_finite = ops.argmax(logits)
    assert is_finite.tolist() == [row not in (1, 2, 3) for row in range(50)]
    assert torch.equal(tokens[4:], torch.tensor([row.tolist().index(max(row.tolist())) for row in logits[4:]]))


def test_the_logarithm_of_a_sum_of_powers_is_that_of_float64():
    logits = 20 * random(6, 1003, dtype=torch.float32)
    logits[1] = logits[1, 0]  # all alike
    total = ops.log_sum_exp(logits)
    assert torch.allclose(total, reference_rows.log_sum_exp(logits), rtol=1e-15, atol=1e-14)
    for row in range(6):
        assert torch.equal(ops.log_sum_exp(logits[row : row + 1])[0], total[row])


@pytest.mark.parametrize("count", [0, 1, 5, 20, 129, 5000])
@pytest.mark.parametrize("width", [1, 17, 128, 129, 4097, 129280])
def test_the_most_likely_tokens_are_those_of_the_reference(width, count, threads):
    logits = 3 * random(12, width, dtype=torch.float32)
    logits[1:3] = (4 * logits[1:3]).round() / 4  # many equal
    logits[3], logits[4, ::2] = logits[3, 0].clone(), -torch.inf
    logits[5], logits[5, ::3] = 0.0, -0.0
    in_order = reference_rows.most_likely(logits, count)
    for num_threads in (1, 2):
        threads(num_threads)
        for ours, expected in zip(ops.most_likely(logits, count), in_order, strict=True):
            assert torch.equal(ours, expected)
    # what is not a number comes last: its row means nothing, but has tokens
    logits[6], logits[7, ::2] = torch.nan, torch.nan
    tokens, values = ops.most_likely(logits, count)
    for row in range(12):
        assert len(set(tokens[row].tolist())) == min(count, width)
        torch.testing.assert_close(values[row], logits[row, tokens[row]], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(tokens[8:], in_order[0][8:])


@pytest.mark.parametrize("width", [1, 31, 32, 33, 1000, 129280])
def test_tokens_that_may_not_come_are_those_of_the_bitmask(width, threads):
    logits = 3 * random(9, width, dtype=torch.float32)
    logits[4, ::2] = torch.nan
    draw = np.random.default_rng(width)
    rows = torch.from_numpy(draw.permutation(9)[:6])
    may_come = draw.random((6, width)) < np.array([[0.5], [0.01], [0.99], [1.0], [0.0], [0.5]])
    bits = np.packbits(np.pad(may_come, ((0, 0), (0, -width % 32))), axis=1, bitorder="little")
    allowed = torch.from_numpy(bits.view(np.int32))
    expected = logits.clone()
    for place, row in enumerate(rows.tolist()):
        expected[row][torch.from_numpy(~may_come[place])] = -1e30
    for num_threads in (1, 2):
        threads(num_threads)
        for operation in (ops.apply_token_bitmask, reference_rows.apply_token_bitmask):
            changed = logits.clone()
            operation(changed, rows, allowed)
            assert torch.equal(changed.view(torch.int32), expected.view(torch.int32))


def test_a_bitmask_for_rows_that_do_not_exist_is_refused():
    logits, allowed = torch.zeros(3, 40), torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="row 3 of 3"):
        ops.apply_token_bitmask(logits, torch.tensor([3]), allowed)


def settings_of_draws(num_rows, seed):
    """Temperature, top_k, top_p, min_p and uniform of each row, from none to the extremes, in all combinations."""
    draw = np.random.default_rng(seed)

    def column(*values):
        return torch.from_numpy(draw.choice(values, size=num_rows))

    uniform = torch.from_numpy(draw.random(num_rows))
    uniform[::7], uniform[1::7] = 0, 1 - 2**-53
    return (
        column(1e-310, 1e-9, 0.3, 0.7, 1.0, 5.0, 1000.0),
        column(0, 0, 1, 2, 40, 64, 65, 1000, 10**6),
        column(1e-12, 0.1, 0.5, 0.95, 1 - 2**-53, 1.0, 1.0),
        column(0.0, 0.0, 0.001, 0.3, 1.0),
        uniform,
    )


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 500, 512, 513, 1003, 4097, 8191, 8193, 129280])
@pytest.mark.parametrize("kind", ["different", "many equal", "all equal", "one above all", "some above all"])
def test_drawn_tokens_are_those_of_the_reference_alone_and_among_others(kind, width, threads):
    num_rows = 300 if width < 5000 else 30
    for seed in range(3 if width < 5000 else 1):
        logits = 3 * random(num_rows, width, seed=seed, dtype=torch.float32)
        if kind == "many equal":
            logits = (2 * logits).round() / 2
        elif kind == "all equal":
            logits[:] = logits[:, :1].clone()
        elif kind == "one above all":
            logits[:, width // 2] += 60
        elif kind == "some above all":
            logits[:, ::97] += 20
        settings = settings_of_draws(num_rows, seed)
        threads(2)
        tokens = ops.draw(logits, *settings)
        assert torch.equal(tokens, reference_rows.draw(logits, *settings))
        threads(1)
        for row in range(0, num_rows, 11):
            one = slice(row, row + 1)
            assert ops.draw(logits[one], *(values[one] for values in settings)) == tokens[row]


def test_draws_from_what_is_not_finite_are_some_tokens_and_do_not_harm_others():
    logits = random(8, 100, dtype=torch.float32)
    settings = settings_of_draws(8, seed=0)
    clean = ops.draw(logits, *settings)
    logits[0], logits[2, 3], logits[3, 4], logits[5] = torch.nan, torch.inf, -torch.inf, -torch.inf
    logits[7, ::2] = torch.nan
    tokens = ops.draw(logits, *settings)
    assert torch.equal(tokens[[1, 4, 6]], clean[[1, 4, 6]])
    assert ((tokens >= 0) & (tokens < 100)).all()


def test_a_draw_from_too_many_tokens_is_refused():
    with pytest.raises(RuntimeError, match="a vocabulary of 524288 tokens, more than 524287"):
        ops.draw(torch.zeros(1, 2**19), *settings_of_draws(1, seed=0))


@pytest.mark.parametrize("top_p", [1.0, 1 - 2**-53, 0.75])
def test_the_weights_of_as_many_tokens_as_there_may_be_add_up(top_p):
    logits, ones = torch.zeros(1, reference_rows.MAX_TOKENS), torch.ones(1, dtype=torch.float64)
    settings = ones, torch.tensor([0]), top_p * ones, 0 * ones, ones - 2**-53
    drawn = ops.draw(logits, *settings)
    assert torch.equal(drawn, reference_rows.draw(logits, *settings))
    assert abs(int(drawn) - top_p * reference_rows.MAX_TOKENS) <= 1


def test_cosine_and_sine_are_those_of_float64():
    angles = torch.cat([torch.rand(5000) * 2.0**power for power in range(-8, 24)])
    for scale in (1.0, 0.7):
        for ours, theirs in zip(ops.cos_sin(angles, scale), reference_rows.cos_sin(angles, scale), strict=True):
            assert (ours - theirs).abs().max() <= 2**-24


@pytest.mark.parametrize("eight_bit", [False, True])
def test_a_product_may_be_added_to_the_stream(eight_bit):
    x, weight, bias, stream = random(5, 64), random(7, 64, seed=1), random(7, seed=2), random(5, 7, seed=3)
    packed = ops.pack(weight, eight_bit=eight_bit)
    assert torch.equal(ops.linear(x, packed, residual=stream), stream + ops.linear(x, packed))
    assert torch.equal(ops.linear(x, packed, bias, residual=stream), stream + ops.linear(x, packed, bias))
    assert torch.equal(reference.linear(x, weight, residual=stream), stream + reference.linear(x, weight))


def test_logits_can_be_had_in_float32():
    x, weight = random(5, 64), random(7, 64, seed=1)
    wide = ops.linear(x, weight, float32_out=True)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), ops.linear(x, weight))
    assert torch.equal(reference.linear(x, weight, float32_out=True), reference.linear(x, weight).float())


def in_blocks(weight):
    """A weight rounded to 8 bits with one scale per 128 x 128 values, written out."""
    rounded = weight.float().clone()
    for row in range(0, weight.shape[0], 128):
        for column in range(0, weight.shape[1], 128):
            block = rounded[row : row + 128, column : column + 128]
            scale = block.abs().max() / 127
            block.copy_((block / scale).round() * scale if scale > 0 else torch.zeros(()))
    return rounded


def in_bytes(x):
    """Rows rounded to 8 bits with one scale per 128 values, written out."""
    return torch.cat([in_blocks(row[None]) for row in x])


@pytest.mark.parametrize(("num_in", "num_out"), [(1, 1), (33, 70), (128, 64), (256, 300), (1000, 130)])
def test_an_8_bit_product_is_exact_within_blocks(num_in, num_out, threads):
    x, weight = random(70, num_in), random(num_out, num_in, seed=1)
    weight[:, num_in // 2] *= 20  # blocks of different size
    packed = ops.pack(weight, eight_bit=True)
    threads(2)
    y = ops.linear(x, packed)
    exact = in_bytes(x).double() @ in_blocks(weight).double().T
    terms = in_bytes(x).double().abs() @ in_blocks(weight).double().abs().T
    # a value in the middle of two steps may go either way, which moves a row by one step of a block
    steps = x.float().abs().max() / 127 * weight.float().abs().max()
    off = (y - exact).abs()
    assert (off <= 2**-8 * exact.abs() + 1e-5 * terms + steps).all()
    assert off.mean() <= 2**-8 * exact.abs().mean()
    for num_threads, start, stop in PARTS:
        threads(num_threads)
        assert torch.equal(ops.linear(x[start:stop], packed), y[start:stop])


@pytest.mark.parametrize(("hidden", "width"), [(40, 24), (256, 128), (300, 200)])
def test_8_bit_experts_round_their_rows_and_what_they_pass_on(hidden, width, threads):
    gate_up, down = random(4, 2 * width, hidden, seed=1) / hidden**0.5, random(4, hidden, width, seed=2) / width**0.5
    num_rows = torch.tensor([3, 0, 65, 2])
    x = random(70, hidden)
    weights = ops.pack(gate_up, eight_bit=True, is_paired=True), ops.pack(down, eight_bit=True)
    threads(2)
    y = ops.grouped_mlp(x, num_rows, *weights)
    parts = []
    for expert, rows in enumerate(x.split(num_rows.tolist())):
        gate, up = torch.cat([in_blocks(half) for half in gate_up[expert].chunk(2)]).chunk(2)
        rounded = in_bytes(rows) if len(rows) else rows.float()
        active = (torch.nn.functional.silu(rounded @ gate.T) * (rounded @ up.T)).bfloat16()
        parts.append((in_bytes(active) if len(rows) else active.float()) @ in_blocks(down[expert]).T)
    exact = torch.cat(parts)
    assert (y - exact).abs().mean() < 0.01 * exact.abs().mean()
    # every row alone, from where it stands, and in the masked layout
    threads(1)
    tokens = torch.arange(70).flip(0)
    assert torch.equal(ops.grouped_mlp(x.flip(0), num_rows, *weights, tokens), y)
    blocks = torch.full((4, 66, hidden), torch.nan).bfloat16()
    for expert, rows in enumerate(x.split(num_rows.tolist())):
        blocks[expert, : len(rows)] = rows
    masked = ops.masked_mlp(blocks, num_rows, *weights)
    assert torch.equal(masked[torch.arange(66) < num_rows[:, None]], y)


def test_a_row_that_is_not_finite_stays_so_and_alone_in_8_bits():
    x, packed = random(6, 200), ops.pack(random(9, 200, seed=1), eight_bit=True)
    clean = ops.linear(x, packed)
    x[1, 7], x[4, 199] = torch.inf, torch.nan
    y = ops.linear(x, packed)
    assert torch.equal(y[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])
    assert not torch.isfinite(y[[1, 4]]).any()


def test_zeros_in_8_bits_are_zeros():
    weight = torch.zeros(9, 200).bfloat16()
    weight[0, 0] = 3
    y = ops.linear(torch.zeros(2, 200).bfloat16(), ops.pack(weight, eight_bit=True))
    assert not y.any()


@pytest.mark.parametrize("heads", [1, 5, 8, 16, 20])
def test_requests_that_share_pages_have_the_bits_of_requests_alone(heads, dtype, threads):
    generator = torch.Generator().manual_seed(0)
    pages, q = random(40, 64, 48, dtype=dtype), random(7, heads, 48, seed=1, dtype=dtype)
    table = torch.randperm(40, generator=generator)[:35].view(7, 5)
    table[1, :3] = table[0, :3]  # three pages together
    table[2, :4] = table[0, :4]  # one more with the first
    table[5, :1] = table[3, :1]
    table[6] = table[4]  # the same pages, of different length
    kv_tokens = torch.tensor([300, 200, 257, 64, 130, 70, 190])
    options = {"latent_dim": 32, "scale": 0.2}
    for num_threads in (1, 2):
        threads(num_threads)
        for order in (torch.arange(7), torch.tensor([4, 0, 6, 2, 5, 1, 3])):
            together = ops.mla_decode(
                q[order], PagedKeys(pages, table[order], kv_tokens[order], kv_tokens[order] - 1), **options
            )
            for row, request in enumerate(order.tolist()):
                one = slice(request, request + 1)
                alone = ops.mla_decode(
                    q[one], PagedKeys(pages, table[one], kv_tokens[one], kv_tokens[one] - 1), **options
                )
                assert torch.equal(together[row], alone[0]), request
