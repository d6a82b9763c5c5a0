"""Weights in 4 bits: how they are rounded, that stored ones are not, and products of their dequantised twin."""

from __future__ import annotations

import math

import pytest
import torch

from batchinfer_kernels import reference
from batchinfer_kernels.cpu import ops, packed
from batchinfer_kernels.reference.group_scaled import GROUP, GroupScaled, quantize_int8_rows, to_groups
from support.random_tensors import random

# Of a product's terms without their signs: float32 sums, then bfloat16 once.
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-8 * 1.01}
SHAPES = [(1, 1), (7, 33), (64, 32), (131, 100), (256, 1000), (70, 129)]


CASES = {
    "noise": random(9, 70),
    "very different sizes": random(9, 300) * torch.logspace(-8, 8, 300).bfloat16(),
    "the largest is above": random(3, 64).abs(),
    "the largest is below": -random(3, 64).abs(),
    "as large on both sides": torch.tensor([[4.0, -4.0] * 16, [-4.0, 4.0] * 16]).bfloat16(),
    "zeros": torch.zeros(5, 40).bfloat16(),
    "huge": random(3, 64) * 5e37,
    "so small that a scale is subnormal": random(3, 64) * 1e-38,
}


def rounded(group):
    """One group's whole numbers and scale by the definition, one number after the other."""
    largest = max(group, key=lambda value: (abs(value), value < 0))
    scale = float(torch.tensor(largest / -8).bfloat16())
    if abs(scale) < 2.0**-126:
        return [0] * len(group), 0.0
    quotients = (torch.tensor(group) / torch.tensor(scale)).tolist()
    return [min(max(round(quotient), -8), 7) for quotient in quotients], scale


@pytest.mark.parametrize("case", CASES)
def test_rounding_is_that_of_the_definition(case):
    weight = CASES[case]
    held = to_groups(weight)
    values = torch.stack((held.values & 15, held.values >> 4), dim=-1).flatten(-2).int() - 8
    for row, numbers in enumerate(weight.float().tolist()):
        for group in range(0, len(numbers), GROUP):
            whole, scale = rounded(numbers[group : group + GROUP])
            assert values[row, group : group + len(whole)].tolist() == whole
            assert held.scales[row, group // GROUP].item() == scale


def test_what_four_bits_hold_stays_as_it_is():
    steps, scales = torch.arange(-8, 8).repeat(4, 2), torch.tensor([0.5, -3.0, 1e-20, 1e20]).bfloat16()
    weight = steps * scales.float()[:, None]
    assert torch.equal(to_groups(weight).plain(), weight)


def test_a_scale_of_what_is_no_number_is_none_either():
    weight = random(4, 64)
    weight[1, 3], weight[2, 40] = torch.nan, -torch.inf
    is_lost = to_groups(weight).scales.isnan()
    assert is_lost.nonzero().tolist() == [[1, 0], [2, 1]]


def exact(x, held):
    """Rows as they are rounded times the dequantised twin in float64, and the sum of the terms without signs."""
    values, scales = quantize_int8_rows(x)
    rows = (values.double() * scales.double().repeat_interleave(128, 1)[:, : values.shape[1]])[:, : x.shape[1]]
    twin = held.plain().double()[:, : x.shape[1]]
    return rows @ twin.T, rows.abs() @ twin.abs().T


def assert_close(y, x, held):
    expected, terms = exact(x, held)
    least = 2.0**-126  # below it numbers count as zero
    assert ((y.double() - expected).abs() <= TOLERANCE["bfloat16"] * expected.abs() + 1e-6 * terms + least).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_that_of_the_dequantised_twin(shape):
    x, held = random(20, shape[1]), to_groups(random(*shape, seed=1))
    expected, terms = exact(x, held)
    assert ((held.product(x) - expected).abs() <= TOLERANCE["float32"] * terms).all()
    assert_close(reference.linear(x, held), x, held)


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize("case", CASES)
def test_cpp_rounds_as_the_reference(case):
    weight = CASES[case]
    for is_paired in (False, True):
        parts = (weight, weight.flip(0)) if is_paired else (weight,)
        whole = packed.pack(torch.cat(parts), is_int4=True, is_paired=is_paired)
        assert torch.equal(whole.data, stored(*map(to_groups, parts), depth=weight.shape[1]).data)


def stored(*parts, depth):
    """Packed of parts that are in 4 bits already, gate above up if there are two."""
    num_rows = sum(len(part.values) for part in parts)
    kind = packed.WeightKind.INT4
    held = packed.Packed.empty(1, num_rows, depth, kind=kind, is_paired=len(parts) == 2)
    held.put(0, *parts)
    return held


@pytest.mark.usefixtures("cpp")
def test_what_is_stored_in_four_bits_is_not_rounded_again():
    # no group of these has -8, so rounding again would give other scales
    generator = torch.Generator().manual_seed(3)
    nibbles = torch.randint(2, 15, (2, 9, 32), generator=generator, dtype=torch.uint8)
    held = GroupScaled(nibbles[0] | nibbles[1] << 4, random(9, 2).abs())
    x = random(5, 64)
    assert not torch.equal(to_groups(held.plain()).plain(), held.plain())
    for y in (ops.linear(x, stored(held, depth=64)), reference.linear(x, held)):
        assert_close(y, x, held)
    room = GroupScaled.empty(2, 9, 64)
    room.put(1, held)
    assert torch.equal(room[1].plain(), held.plain())


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize("is_paired", [False, True])
def test_a_part_stored_in_groups_may_lie_beside_a_plain_one(is_paired):
    """As where a checkpoint leaves some modules in 16 bits."""
    gate, up = random(48, 70), random(48, 70)
    held = []
    for parts in ((gate, up), (to_groups(gate), up), (gate, to_groups(up))):
        weight = packed.Packed.empty(1, 96, 70, kind=packed.WeightKind.INT4, is_paired=is_paired)
        weight.put(0, *parts)
        held.append(weight.data)
    assert torch.equal(held[0], held[1])
    assert torch.equal(held[0], held[2])


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize("shape", SHAPES)
def test_cpp_products_are_those_of_the_twin_with_the_same_bits_in_any_company(shape, threads):
    weight, x = random(*shape, seed=1), random(100, shape[1])
    held, tiles = to_groups(weight), ops.pack(weight, four_bit=True)
    threads(2)
    whole = ops.linear(x, tiles)
    assert_close(whole, x, held)
    for num_threads, start, stop in [(1, 0, 100), (2, 0, 1), (1, 1, 3), (2, 3, 6), (1, 5, 9), (2, 7, 12), (2, 99, 100)]:
        threads(num_threads)
        assert torch.equal(ops.linear(x[start:stop], tiles), whole[start:stop])


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize(("hidden", "width"), [(64, 48), (333, 90), (128, 128)])
def test_experts_are_those_of_the_reference(hidden, width, threads):
    gate_up, down = random(4, 2 * width, hidden, seed=1) / hidden**0.5, random(4, hidden, width, seed=2) / width**0.5
    x, num_rows = random(30, hidden), torch.tensor([10, 0, 3, 17])
    tiles = ops.pack(gate_up, four_bit=True, is_paired=True), ops.pack(down, four_bit=True)
    threads(2)
    y = ops.grouped_mlp(x, num_rows, *tiles)
    expected = reference.grouped_mlp(x, num_rows, to_groups(gate_up), to_groups(down))
    # a value between the products may be rounded to another of 8 bits, or of bfloat16
    assert (y.double() - expected.double()).norm() <= 0.01 * expected.double().norm()
    room = torch.zeros(4, 17, hidden).bfloat16()
    starts = [0, 10, 10, 13]
    for expert, (start, count) in enumerate(zip(starts, num_rows.tolist(), strict=True)):
        room[expert, :count] = x[start : start + count]
    threads(1)
    masked = ops.masked_mlp(room, num_rows, *tiles)
    for expert, (start, count) in enumerate(zip(starts, num_rows.tolist(), strict=True)):
        assert torch.equal(masked[expert, :count], y[start : start + count])
    tokens = torch.tensor([4, 4, 0, 29, 7, 1, 2, 3, 5, 6, *range(20)])
    assert torch.equal(ops.grouped_mlp(x, num_rows, *tiles, tokens), ops.grouped_mlp(x[tokens], num_rows, *tiles))


@pytest.mark.usefixtures("cpp")
def test_a_row_that_is_not_finite_stays_so_and_alone():
    x, weight = random(6, 200), random(9, 200, seed=1)
    x[1, 7], x[4, 150] = torch.inf, torch.nan
    for y in (ops.linear(x, ops.pack(weight, four_bit=True)), reference.linear(x, to_groups(weight))):
        assert y.isfinite().all(-1).tolist() == [True, False, True, True, False, True]


def test_it_takes_four_and_a_half_bits_a_weight():
    held = to_groups(random(64, 4096))
    assert sum(tensor.nbytes for tensor in held.slots()) == 64 * 4096 * 4.5 / 8
    assert math.isclose(held.plain().std().item(), 1, rel_tol=0.02)
