"""Weights and rows in FP8: how they are rounded, what their products are, and that a row's result is its own."""

from __future__ import annotations

import math

import pytest
import torch

from batchinfer_kernels import reference, registry
from batchinfer_kernels.cpu import build
from batchinfer_kernels.cpu import ops as cpu_ops
from batchinfer_kernels.reference import fp8_pages, group_scaled
from batchinfer_kernels.reference.block_scaled import BlockScaled, stack, to_blocks
from batchinfer_kernels.reference.fp8 import ROW_BLOCK, block_product
from support.divisors import Divisors
from support.random_tensors import random

TOLERANCE = {"float32": 1e-6}
GRID = sorted(
    {
        (2.0 ** (max(code >> 3, 1) - 7) * ((code >> 3 > 0) + (code & 7) / 8), code & 1)
        for code in range(127)  # 127 is NaN
    }
)  # what E4M3 can hold, and whether the last bit is set


def nearest(value):
    """The E4M3 number nearest to `value`, the one with an even last bit among two."""
    best = min(GRID, key=lambda entry: (abs(entry[0] - abs(value)), entry[1]))[0]
    return math.copysign(best, value)


def rounded(block):
    """One block's numbers and scale by the definition, one number after the other."""
    scale = float(torch.tensor(max(float(block.double().abs().max()), 1e-4)).float() / 448)
    quotients = (block.double() / scale).float().double().clamp(-448, 448)
    return [[nearest(value) for value in row] for row in quotients.tolist()], scale


def bits(tensor):
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def same(left, right):
    return torch.equal(bits(left.values), bits(right.values)) and torch.equal(left.scales, right.scales)


CASES = {
    "noise": random(130, 200),
    "very different sizes": random(9, 300) * torch.logspace(-8, 8, 300).bfloat16(),
    "ties": torch.cat([torch.tensor([448.0]), torch.arange(255) / 2 - 60])[None].expand(3, -1).bfloat16(),
    "small steps": torch.cat([torch.tensor([448.0]), torch.arange(127) * 2.0**-11])[None].bfloat16(),
    "zeros": torch.zeros(5, 131).bfloat16(),
    "huge": random(3, 140) * 5e37,
    "tiny": random(3, 140) * 1e-38,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", [(128, 128), ROW_BLOCK])
def test_rounding_is_that_of_the_definition_bit_for_bit(case, block):
    weight = CASES[case]
    values, scales = reference.quantize_fp8_block(weight, block)
    for i, rows in enumerate(range(0, len(weight), block[0])):
        for j, columns in enumerate(range(0, weight.shape[1], block[1])):
            part = (slice(rows, rows + block[0]), slice(columns, columns + block[1]))
            expected, scale = rounded(weight[part])
            assert scales[i, j].item() == scale
            assert values[part].float().tolist() == expected


def test_a_product_worked_out():
    # depth 130: a block of 128 with scale 2 (row) x 0.5 (weight), and one of 2 with scale 1 x 4
    values, weight = torch.zeros(1, 130), torch.zeros(1, 130)
    values[0, :2], weight[0, :2] = torch.tensor([3.0, -1.0]), torch.tensor([1.5, 0.25])  # 4.25 x 1
    values[0, 128], weight[0, 128] = 2.0, 8.0  # 16 x 4
    fp8 = torch.float8_e4m3fn
    y = block_product(values.to(fp8), torch.tensor([[2.0, 1.0]]), weight.to(fp8), torch.tensor([[0.5, 4.0]]))
    assert y.tolist() == [[4.25 + 64]]


@pytest.mark.parametrize(("num_in", "num_out"), [(1, 1), (33, 70), (128, 64), (256, 300), (1000, 130)])
def test_a_product_adds_in_float32_what_the_rounded_numbers_give(num_in, num_out):
    x, weight = random(20, num_in), random(num_out, num_in, seed=1)
    weight[:, num_in // 2] *= 20  # blocks of different size
    blocks = reference.pack(weight, eight_bit=True)
    assert isinstance(blocks, BlockScaled)
    rows = reference.dequantize_fp8_block(*reference.quantize_fp8_block(x, ROW_BLOCK), torch.float64, ROW_BLOCK)
    wide = reference.dequantize_fp8_block(blocks.values, blocks.scales, torch.float64)
    terms = rows.abs() @ wide.abs().T
    assert ((reference.linear(x.float(), blocks) - rows @ wide.T).abs() <= TOLERANCE["float32"] * terms).all()
    y = reference.linear(x, blocks)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, reference.linear(x.float(), blocks).bfloat16())
    # and so it is near the product of what was not rounded: 3 bits behind the leading one on both sides
    exact = x.double() @ weight.double().T
    assert (y - exact).norm() <= 0.06 * exact.norm()


def test_bias_stream_and_float32_are_as_with_plain_weights():
    x, bias, stream = random(5, 200), random(7, seed=2), random(5, 7, seed=3)
    blocks = to_blocks(random(7, 200, seed=1))
    y = reference.linear(x, blocks)
    assert torch.equal(reference.linear(x, blocks, bias, residual=stream), stream + (y + bias))
    assert torch.equal(reference.linear(x, blocks, float32_out=True), y.float())


@pytest.mark.parametrize("num_in", [5, 128, 300])
def test_a_row_has_the_same_bits_beside_any_others(num_in, threads):
    x, blocks = random(40, num_in), to_blocks(random(70, num_in, seed=1))
    threads(2)
    whole = reference.linear(x, blocks)
    for num_threads, start, stop in [(1, 0, 1), (2, 1, 3), (1, 3, 10), (2, 7, 15), (1, 11, 40), (1, 4, 4)]:
        threads(num_threads)
        assert torch.equal(reference.linear(x[start:stop], blocks), whole[start:stop])


def test_a_row_that_is_not_finite_stays_so_and_alone():
    x, blocks = random(6, 200), to_blocks(random(9, 200, seed=1))
    clean = reference.linear(x, blocks)
    x[1, 7], x[4, 199] = torch.inf, torch.nan
    y = reference.linear(x, blocks)
    assert torch.equal(y[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])
    assert not torch.isfinite(y[[1, 4]]).any()


def experts(hidden, width, seed=1):
    gate_up, down = random(4, 2 * width, hidden, seed=seed), random(4, hidden, width, seed=seed + 1)
    return gate_up / hidden**0.5, down / width**0.5


@pytest.mark.parametrize(("hidden", "width"), [(40, 24), (256, 128), (300, 200)])
def test_experts_round_their_rows_and_what_they_pass_on(hidden, width):
    gate_up, down = experts(hidden, width)
    weights = reference.pack(gate_up, eight_bit=True, is_paired=True), reference.pack(down, eight_bit=True)
    x, num_rows = random(20, hidden), torch.tensor([3, 0, 15, 2])
    y = reference.grouped_mlp(x, num_rows, *weights)
    assert y.dtype == torch.bfloat16
    for row, expert in enumerate([0] * 3 + [2] * 15 + [3] * 2):
        gate, up = reference.linear(x[row : row + 1], weights[0][expert]).chunk(2, dim=-1)
        expected = reference.linear(reference.silu_mul(gate, up), weights[1][expert])
        assert torch.equal(y[row], expected[0])
    plain = reference.grouped_mlp(x.float(), num_rows, gate_up.float(), down.float())
    assert (y - plain).norm() <= 0.08 * plain.norm()


@pytest.mark.parametrize(("hidden", "width"), [(40, 24), (300, 200)])
def test_rows_rounded_where_they_are_sent_give_the_bits_of_rows_rounded_where_they_arrive(hidden, width):
    weights = tuple(to_blocks(weight) for weight in experts(hidden, width))
    x, num_rows, tokens = random(20, hidden), torch.tensor([3, 0, 15, 2]), torch.arange(20).flip(0) // 2
    values, scales = reference.quantize_fp8_block(x, ROW_BLOCK)
    y = reference.grouped_mlp(x, num_rows, *weights)
    assert torch.equal(reference.grouped_mlp(values, num_rows, *weights, scales=scales), y)
    moved = reference.grouped_mlp(x, num_rows, *weights, tokens)
    assert torch.equal(reference.grouped_mlp(values, num_rows, *weights, tokens, scales), moved)

    is_row = torch.arange(16) < num_rows[:, None]
    blocks, block_scales = torch.full((4, 16, hidden), torch.nan).to(values.dtype), torch.full((4, 16, 3), torch.nan)
    blocks.view(torch.uint8)[is_row], block_scales[is_row, : scales.shape[1]] = values.view(torch.uint8), scales
    masked = reference.masked_mlp(blocks, num_rows.int(), *weights, block_scales[..., : scales.shape[1]])
    assert torch.equal(masked[is_row], y)
    assert not masked[~is_row].any()


@pytest.mark.parametrize("kind", ["reference", "cpu", "cpu, integers"])
def test_rows_in_fp8_are_multiplied_out_for_other_weights(kind):
    if kind != "reference" and build.why_not() is not None:
        pytest.skip(f"no C++ operations on this machine: {build.why_not()}")
    module = reference if kind == "reference" else cpu_ops
    weights = tuple(module.pack(weight, eight_bit=kind == "cpu, integers") for weight in experts(300, 200))
    x, num_rows = random(20, 300), torch.tensor([3, 0, 15, 2])
    values, scales = reference.quantize_fp8_block(x, ROW_BLOCK)
    plain = reference.dequantize_fp8_block(values, scales, torch.bfloat16, ROW_BLOCK)
    y = module.grouped_mlp(values, num_rows, *weights, scales=scales)
    assert torch.equal(y, module.grouped_mlp(plain, num_rows, *weights))
    block, one = torch.tensor([20]), tuple(module.pack(weight[:1]) for weight in experts(300, 200))
    masked = module.masked_mlp(values[None], block, *one, scales[None])
    assert torch.equal(masked, module.masked_mlp(plain[None], block, *one))


def test_the_c_plus_plus_operations_leave_weights_in_fp8_to_the_reference():
    weights = tuple(to_blocks(weight) for weight in experts(40, 24))
    x, num_rows = random(20, 40), torch.tensor([3, 0, 15, 2])
    linear, grouped_mlp, pack = (registry.bind(op, ["cpu", "reference"]) for op in ("linear", "grouped_mlp", "pack"))
    assert torch.equal(linear(x, weights[0][0]), reference.linear(x, weights[0][0]))
    assert torch.equal(grouped_mlp(x, num_rows, *weights), reference.grouped_mlp(x, num_rows, *weights))
    assert isinstance(pack(random(3, 5).float(), eight_bit=True), BlockScaled)


def test_places_hold_what_is_put_there():
    plain = random(3, 130, 200)
    blocks = to_blocks(plain)
    assert blocks.values.shape == (3, 130, 200)
    assert blocks.scales.shape == (3, 2, 2)
    room = BlockScaled.empty(2, 130, 200)
    room.put(1, plain[2])
    room.put(0, BlockScaled(*reference.quantize_fp8_block(plain[1])))
    assert same(room[1], blocks[2])
    assert same(room[0], blocks[1])


def test_weights_above_each_other_keep_their_blocks():
    upper, lower = to_blocks(random(70, 200)), to_blocks(random(70, 200, seed=1))
    with pytest.raises(AssertionError, match="rows of two weights"):
        stack([upper, lower])
    whole = stack([upper.padded(128, 200), lower])
    assert whole.values.shape == (198, 200)
    assert same(BlockScaled(whole.values[128:], whole.scales[1:]), lower)
    x = random(3, 200, seed=2)
    y = reference.linear(x, whole)
    assert torch.equal(y[:, :70], reference.linear(x, upper))
    assert torch.equal(y[:, 128:], reference.linear(x, lower))
    assert not y[:, 70:128].any()
    # padding with zeros to the right is allowed as long as it fills a block that was begun
    wider = upper.padded(70, 256)
    assert torch.equal(reference.linear(torch.nn.functional.pad(x, (0, 56)), wider), reference.linear(x, upper))
    with pytest.raises(AssertionError, match="not those of blocks"):
        upper.padded(129, 200)


def test_scales_are_divided_by_what_lies_on_the_same_device():
    """By a plain number PyTorch multiplies on a GPU, with a rounded inverse: scales were other ones than on a CPU."""

    with Divisors() as found:
        reference.quantize_fp8_block(random(130, 200))
        fp8_pages.scales_of(random(3, 4).float().abs())
        group_scaled.quantize_int8_rows(random(3, 130))
    assert len(found.divisors) >= 5
    assert all(isinstance(divisor, torch.Tensor) for divisor in found.divisors), found.divisors
