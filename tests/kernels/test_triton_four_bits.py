"""Products and experts in Triton with weights in 4 bits: the bits of the widened weight's, in any company."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels import reference
from batchinfer_kernels.reference.fp4 import VALUES, Fp4Scaled
from batchinfer_kernels.reference.group_scaled import GroupScaled, to_groups
from batchinfer_kernels.triton import four_bits, ops
from support.placed_rows import in_tiles
from support.tiers import first_in_make_test
from support.triton_device import DEVICE, TOLERANCE, needs_triton, random, relative_error

pytestmark = needs_triton

FORMS = ["int4", "fp4"]
PARTS = [(0, 1), (3, 10), (130, 131), (0, 0)]  # first row, behind the last row


def held_in(form, *shape, seed=1):
    """A weight in 4 bits whose values are of the size of 1 / sqrt(depth)."""
    if form == "int4":
        return ops.pack(random(*shape, seed=seed) / shape[-1] ** 0.5, four_bit=True)
    generator = torch.Generator().manual_seed(seed)
    groups = -(-shape[-1] // 32)
    values = torch.randint(256, (*shape[:-1], 16 * groups), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 126, (*shape[:-1], groups), generator=generator, dtype=torch.uint8)
    return Fp4Scaled(values.to(DEVICE), scales.to(DEVICE))


def test_every_e2m1_value_times_every_scale_is_what_the_reference_has():
    # below, results are subnormal, which the interpreter does not have; above, 6 times the scale is infinite
    scales = torch.arange(2, 253, dtype=torch.uint8, device=DEVICE)
    every = torch.arange(16, dtype=torch.uint8, device=DEVICE).repeat(len(scales), 1)
    held = Fp4Scaled(torch.cat([every + 16 * part for part in range(16)]), scales.repeat(16)[:, None])
    one = torch.eye(32, dtype=torch.bfloat16, device=DEVICE)
    plain = ops.linear(one, held).T
    assert torch.equal(plain, held.plain())
    assert set(plain.flatten().tolist()) >= {size * 2.0**-3 for size in VALUES}
    scales = torch.full((1, 1), 255, dtype=torch.uint8, device=DEVICE)
    assert ops.linear(one, Fp4Scaled(held.values[:1], scales)).isnan().all()


def test_every_integer_times_its_scale_is_rounded_to_bfloat16():
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE).unflatten(0, (16, 16)).repeat(40, 1)
    scales = random(640, 1, seed=3) * torch.logspace(-30, 30, 640, device=DEVICE)[:, None]
    held = GroupScaled(every, scales.bfloat16())
    plain = ops.linear(torch.eye(32, dtype=torch.bfloat16, device=DEVICE), held).T
    assert torch.equal(plain, held.plain().bfloat16())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("num_rows", "num_in", "num_out"), first_in_make_test([(131, 288, 70), (131, 32, 1), (4, 128, 2100), (3, 1120, 20)])
)
def test_a_product_has_the_bits_of_the_widened_weight_in_any_company(form, num_rows, num_in, num_out):
    x, held = random(num_rows, num_in), held_in(form, num_out, num_in)
    bias, stream = random(num_out), random(num_rows, num_out)
    y, wide = ops.linear(x, held), four_bits.widened(held)
    assert relative_error(y, x.double() @ wide.double().T) < TOLERANCE["bf16"]
    assert torch.equal(y, ops.linear(x, wide))
    assert torch.equal(ops.linear(x, held, bias, residual=stream), ops.linear(x, wide, bias, residual=stream))
    for start, stop in PARTS:
        assert torch.equal(ops.linear(x[start:stop], held), y[start:stop])
    assert torch.equal(ops.linear(x.flip(0), held), y.flip(0))


@pytest.mark.parametrize("num_in", [1, 33, 200])
def test_integers_have_zeros_behind_a_row_that_ends_within_a_group(num_in):
    x, held = random(5, num_in), held_in("int4", 20, num_in)
    wide = four_bits.widened(held)[:, :num_in]
    assert torch.equal(ops.linear(x, held), ops.linear(x, wide))
    with pytest.raises(RuntimeError, match=f"x is {num_in + 32} wide, weight"):
        ops.linear(random(5, num_in + 32), held)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_number_stays_in_its_row(form):
    x, held = random(6, 224), held_in(form, 9, 224)
    clean = ops.linear(x, held)
    x[1, 7], x[4, 199] = torch.inf, torch.nan
    y = ops.linear(x, held)
    assert torch.equal(y[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])
    assert not torch.isfinite(y[[1, 4]]).any()


@pytest.mark.parametrize("form", FORMS)
def test_experts_have_the_bits_of_widened_ones_in_both_layouts(form):
    num_rows, hidden, width = [2, 0, 5, 1, 3], 96, 32
    weights = held_in(form, 5, 2 * width, hidden), held_in(form, 5, hidden, width, seed=2)
    wide = [four_bits.widened(weight) for weight in weights]
    counts, room = torch.tensor(num_rows, device=DEVICE), 6
    x = random(sum(num_rows), hidden)
    y = ops.grouped_mlp(x, counts, *weights)
    assert torch.equal(y, ops.grouped_mlp(x, counts, *wide))
    plain = reference.grouped_mlp(x.cpu(), counts.cpu(), *(weight.cpu() for weight in wide))
    assert relative_error(y, plain.double().to(DEVICE)) < TOLERANCE["bf16"]
    tokens = torch.arange(len(x), device=DEVICE).flip(0)
    assert torch.equal(ops.grouped_mlp(x.flip(0), counts, *weights, tokens), y)
    lying, places = in_tiles(x, num_rows, 4)
    assert torch.equal(ops.grouped_mlp(lying, counts, *weights, tile_rows=4)[places], y)
    is_row = torch.arange(room, device=DEVICE) < counts[:, None]
    blocks = torch.full((5, room, hidden), torch.nan, dtype=torch.bfloat16, device=DEVICE)  # rows that are not there
    blocks[is_row] = x
    assert torch.equal(ops.masked_mlp(blocks, counts.int(), *weights)[is_row], y)
    values, scales = ops.quantize_fp8_block(x, (1, 128))  # rows that come in FP8 are widened
    came = ops.dequantize_fp8_block(values, scales, torch.bfloat16, (1, 128))
    assert torch.equal(ops.grouped_mlp(values, counts, *weights, None, scales), ops.grouped_mlp(came, counts, *weights))


def test_integers_are_those_of_the_reference_and_as_near_to_its_products_as_its_rounding_of_rows():
    """The reference rounds rows to 8 bits, half a step of 1/127 of a block's largest value each; Triton does not."""
    weight, x = random(40, 256, seed=1), random(30, 256)
    held, theirs = ops.pack(weight, four_bit=True), to_groups(weight.cpu())
    assert torch.equal(held.values.cpu(), theirs.values)
    assert torch.equal(held.scales.cpu(), theirs.scales)
    steps = x.double().abs().cpu().unflatten(1, (2, 128)).amax(2) / 127
    sizes = theirs.plain().double().abs().unflatten(1, (2, 128)).sum(2)
    terms = x.double().abs().cpu() @ theirs.plain().double().abs().T
    bound = steps @ sizes.T / 2 + 2**-8 * terms  # and the weight's and the result's rounding to bfloat16
    off = ops.linear(x, held).double().cpu() - reference.linear(x.cpu(), theirs).double()
    assert (off.abs() <= bound).all()
    assert (off.abs() > bound / 20).any()
