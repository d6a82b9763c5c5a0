"""Products and experts in Triton against float64, in bfloat16 and FP8, with the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels import reference, registry
from batchinfer_kernels.reference.block_scaled import BlockScaled, to_blocks
from batchinfer_kernels.reference.fp8 import ScaledRows
from batchinfer_kernels.triton import ops, router, tiles
from support.placed_rows import in_tiles
from support.tiers import first_in_make_test
from support.triton_device import DEVICE, TOLERANCE, calc_diff, needs_triton, random, relative_error

pytestmark = needs_triton

PARTS = [(0, 1), (3, 10), (130, 131), (0, 0)]  # first row, behind the last row


def wide(values, scales, block):
    """Values × scales in float64."""
    spread = scales.double().repeat_interleave(block[0], 0)[: values.shape[0]]
    return values.double() * spread.repeat_interleave(block[1], 1)[:, : values.shape[1]]


def rounded_rows(x):
    return wide(*reference.quantize_fp8_block(x, (1, 128)), (1, 128))


def rounded_weight(weight):
    return wide(weight.values, weight.scales, (128, 128))


def swiglu(x, gate_up, down, rounded=lambda x: x):
    """One expert in float64, in between rounded as the operations round."""
    gate, up = (x @ gate_up.T).bfloat16().chunk(2, dim=-1)
    active = torch.nn.functional.silu(gate.double()).bfloat16() * up
    return rounded(active).double() @ down.T


@pytest.mark.parametrize(
    ("num_rows", "num_in", "num_out"), first_in_make_test([(131, 1, 1), (131, 33, 70), (131, 200, 150), (4, 128, 2100)])
)
def test_a_product_is_close_to_float64_and_keeps_its_bits(num_rows, num_in, num_out):
    x, weight = random(num_rows, num_in), random(num_out, num_in, seed=1)
    bias, stream = random(num_out), random(num_rows, num_out)
    blocks = to_blocks(weight)
    for held, exact in (
        (weight, x.double() @ weight.double().T),
        (blocks, rounded_rows(x) @ rounded_weight(blocks).T),
    ):
        y = ops.linear(x, held)
        assert y.dtype == torch.bfloat16
        assert relative_error(y, exact) < TOLERANCE["bf16"]
        assert calc_diff(y, exact) < TOLERANCE["fp8"]
        logits = ops.linear(x, held, float32_out=True)
        assert logits.dtype == torch.float32
        assert torch.equal(logits.bfloat16(), y)
        assert torch.equal(ops.linear(x, held, bias), y + bias)
        assert torch.equal(ops.linear(x, held, bias, residual=stream), stream + (y + bias))
        assert torch.equal(ops.linear(x, held, residual=stream), stream + y)
        for start, stop in PARTS:
            assert torch.equal(ops.linear(x[start:stop], held), y[start:stop])
        assert torch.equal(ops.linear(x.flip(0), held), y.flip(0))


def test_rows_that_are_rounded_already_have_the_same_product():
    x, weight, stream = random(9, 300), to_blocks(random(70, 300, seed=1)), random(9, 70, seed=2)
    rows = ScaledRows(*ops.quantize_fp8_rows(x))
    for options in ({}, {"float32_out": True}, {"residual": stream}):
        assert torch.equal(ops.linear(rows, weight, **options), ops.linear(x, weight, **options))
        assert torch.equal(reference.linear(rows, weight, **options), reference.linear(x, weight, **options))


def test_a_product_of_slices_is_the_product_of_copies():
    x, weight = random(9, 40)[:, 3:20], random(17, 30, seed=1).T
    assert torch.equal(ops.linear(x, weight), ops.linear(x.clone(), weight.contiguous()))
    with pytest.raises(RuntimeError, match="x is 17 wide, weight 30"):
        ops.linear(x, random(17, 30))


@pytest.mark.parametrize("is_fp8", [False, True])
def test_what_is_no_number_stays_in_its_row(is_fp8):
    x, weight = random(6, 200), random(9, 200, seed=1)
    weight = to_blocks(weight) if is_fp8 else weight
    clean = ops.linear(x, weight)
    x[1, 7], x[4, 199] = torch.inf, torch.nan
    y = ops.linear(x, weight)
    assert torch.equal(y[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])
    assert not torch.isfinite(y[[1, 4]]).any()


@pytest.mark.parametrize(("num_in", "num_out"), [(1, 1), (33, 17), (64, 130)])
def test_a_batched_product_is_close_to_float64_and_keeps_its_bits(num_in, num_out):
    x = random(65, 3, num_in + 1)[:, :, 1:].transpose(0, 1)  # as attention gives it: heads apart within a row
    weight = random(3, num_in, num_out, seed=1).mT
    whole = ops.batched_linear(x, ops.pack(weight))
    assert torch.equal(ops.batched_linear(x, weight), whole)
    assert relative_error(whole, x.double() @ weight.double().mT) < TOLERANCE["bf16"]
    for start, stop in [(0, 1), (3, 10), (64, 65), (0, 0)]:
        assert torch.equal(ops.batched_linear(x[:, start:stop], weight), whole[:, start:stop])
    wider = torch.full((65, 3, num_out + 5), 7.0, dtype=torch.bfloat16)
    ops.batched_linear(x, weight, wider[..., :num_out].transpose(0, 1))
    assert torch.equal(wider[..., :num_out].transpose(0, 1), whole)
    assert (wider[..., num_out:] == 7).all()


def test_a_vocabulary_has_wider_tiles(monkeypatch):
    x, weight = random(70, 40), random(300, 40, seed=1)
    narrow = ops.linear(x, weight, float32_out=True)
    monkeypatch.setattr(tiles, "_VOCABULARY", 300)
    assert torch.allclose(ops.linear(x, weight, float32_out=True), narrow, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("many_rows", [1024, 8])  # from 1024 rows on tiles are larger
@pytest.mark.parametrize(("hidden", "experts"), [(33, 5), (256, 64), (1100, 130)])
def test_router_logits_are_those_of_float32(hidden, experts, many_rows, monkeypatch):
    monkeypatch.setattr(router, "_MANY_ROWS", many_rows)
    x, weight = random(70, hidden), random(experts, hidden, seed=1, dtype=torch.float32) / hidden**0.5
    logits = ops.router(x, ops.pack_router(weight))
    terms = x.double().abs() @ weight.double().abs().T
    assert logits.dtype == torch.float32
    assert ((logits - x.double() @ weight.double().T).abs() <= 1e-6 * terms).all()
    assert torch.equal(ops.router(x, weight), logits)
    for start, stop in [(0, 1), (3, 10), (69, 70), (0, 0)]:
        assert torch.equal(ops.router(x[start:stop], weight), logits[start:stop])


def experts_of(num, hidden, width, *, is_fp8):
    gate_up = random(num, 2 * width, hidden, seed=1) / hidden**0.5
    down = random(num, hidden, width, seed=2) / width**0.5
    return (to_blocks(gate_up), to_blocks(down)) if is_fp8 else (gate_up, down)


def exact_experts(x, num_rows, gate_up, down):
    parts = []
    for expert, rows in enumerate(x.split(num_rows)):
        if isinstance(gate_up, BlockScaled):
            parts.append(
                swiglu(rounded_rows(rows), rounded_weight(gate_up[expert]), rounded_weight(down[expert]), rounded_rows)
                if len(rows)
                else rows.double()
            )
        else:
            parts.append(swiglu(rows.double(), gate_up[expert].double(), down[expert].double()))
    return torch.cat(parts)


@pytest.mark.parametrize("is_fp8", first_in_make_test([False, True], 2))
@pytest.mark.parametrize(
    ("num_rows", "hidden", "width"),
    [([3, 0, 65, 1, 4], 300, 200), ([0, 0, 0, 0, 131], 40, 24), ([0, 0, 0, 0, 0], 40, 24)],
)
def test_experts_are_close_to_float64_and_both_layouts_give_the_same_bits(num_rows, hidden, width, is_fp8):
    weights = experts_of(5, hidden, width, is_fp8=is_fp8)
    counts, room = torch.tensor(num_rows, device=DEVICE), 132
    x = random(sum(num_rows), hidden)
    y = ops.grouped_mlp(x, counts, *weights)
    assert y.shape == x.shape
    if len(x):
        exact = exact_experts(x, num_rows, *weights)
        # in FP8 a value that falls on the other side of a middle moves its whole row by one step
        assert relative_error(y, exact) < TOLERANCE["bf16"] * (2 if is_fp8 else 1)
        assert calc_diff(y, exact) < TOLERANCE["fp8"]
    tokens = torch.arange(len(x), device=DEVICE).flip(0)
    assert torch.equal(ops.grouped_mlp(x.flip(0), counts, *weights, tokens), y)
    for tile_rows in (4, 128):
        lying, places = in_tiles(x, num_rows, tile_rows)
        assert torch.equal(ops.grouped_mlp(lying, counts, *weights, tile_rows=tile_rows)[places], y)

    is_row = torch.arange(room, device=DEVICE) < counts[:, None]
    blocks = torch.full((5, room, hidden), torch.nan, dtype=torch.bfloat16, device=DEVICE)  # rows that are not there
    blocks[is_row] = x
    masked = ops.masked_mlp(blocks, counts.int(), *weights)
    assert torch.equal(masked[is_row], y)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_row_of_an_expert_has_the_same_bits_alone(is_fp8):
    gate_up, down = experts_of(3, 72, 40, is_fp8=is_fp8)
    x, num_rows = random(20, 72), [7, 0, 13]
    whole = ops.grouped_mlp(x, torch.tensor(num_rows, device=DEVICE), gate_up, down)
    one = torch.tensor([0, 0, 1], device=DEVICE)
    for row in (7, 12, 19):
        assert torch.equal(ops.grouped_mlp(x[row : row + 1], one, gate_up, down)[0], whole[row])


@pytest.mark.parametrize("is_fp8", [False, True])
def test_rows_that_come_in_fp8_are_taken_as_they_are(is_fp8):
    weights, num_rows = experts_of(3, 200, 40, is_fp8=is_fp8), torch.tensor([7, 0, 13], device=DEVICE)
    x, tokens = random(20, 200), torch.arange(20, device=DEVICE).flip(0)
    values, scales = ops.quantize_fp8_block(x, (1, 128))
    plain = ops.grouped_mlp(ops.dequantize_fp8_block(values, scales, torch.bfloat16, (1, 128)), num_rows, *weights)
    expected = ops.grouped_mlp(x, num_rows, *weights) if is_fp8 else plain
    assert torch.equal(ops.grouped_mlp(values, num_rows, *weights, None, scales), expected)
    assert torch.equal(
        ops.grouped_mlp(values, num_rows, *weights, tokens, scales),
        ops.grouped_mlp(values[tokens], num_rows, *weights, None, scales[tokens]),
    )
    # in the masked layout; the scales may stand column by column, as a low-latency dispatch leaves them
    blocks = torch.zeros(3, 13, 200, dtype=torch.float8_e4m3fn, device=DEVICE)
    block_scales = torch.ones(3, 13, 2, device=DEVICE)
    blocks[0, :7], blocks[2], block_scales[0, :7], block_scales[2] = values[:7], values[7:], scales[:7], scales[7:]
    for held in (block_scales, block_scales.mT.contiguous().mT):
        masked = ops.masked_mlp(blocks, num_rows, *weights, held)
        assert torch.equal(torch.cat([masked[0, :7], masked[2]]), expected)


def test_float32_keeps_the_bits_of_the_reference():
    x, weight = random(5, 24, dtype=torch.float32), random(7, 24, seed=1, dtype=torch.float32)
    for op, operands in (("linear", (x, weight)), ("silu_mul", (x, x)), ("router", (x, weight))):
        with_triton = registry.bind(op, ["triton", "reference"])
        assert torch.equal(with_triton(*operands), getattr(reference, op)(*operands))
