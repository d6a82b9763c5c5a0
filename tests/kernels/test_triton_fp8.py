"""FP8 rounding in Triton: bit for bit the reference's, from nothing to the largest and for what is no number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchinfer_kernels import reference, registry
from batchinfer_kernels.triton import ops
from support.triton_device import DEVICE, needs_triton, random

pytestmark = needs_triton


def assert_same(ours, theirs):
    (values, scales), (expected, expected_scales) = ours, theirs
    assert values.dtype == torch.float8_e4m3fn
    assert torch.equal(values.cpu().float().nan_to_num(nan=1e9), expected.float().nan_to_num(nan=1e9))
    assert torch.equal(scales.cpu().nan_to_num(nan=-1), expected_scales.nan_to_num(nan=-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (0, 5), (3, 128), (37, 300), (130, 260)])
def test_rows_and_blocks_round_as_in_the_reference(shape, dtype):
    x = (random(*shape).cpu().float() * torch.logspace(-8, 6, max(shape[0], 1))[: shape[0], None]).to(dtype)
    for block in [(1, 128), (128, 128), (100, 96)]:
        rounded = ops.quantize_fp8_block(x.to(DEVICE), block)
        assert_same(rounded, reference.quantize_fp8_block(x, block))
        for wanted in (torch.bfloat16, torch.float32):
            back = ops.dequantize_fp8_block(*rounded, wanted, block)
            expected = reference.dequantize_fp8_block(*(part.cpu() for part in rounded), wanted, block)
            assert torch.equal(back.cpu(), expected)


def test_every_value_between_two_steps_goes_to_the_even_one():
    steps = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # all sizes that E4M3 has
    middles = (steps[1:] + steps[:-1]) / 2
    around = [middles, middles * (1 + 2**-20), middles * (1 - 2**-20), steps]
    rows = [torch.cat([part, torch.zeros(128 - len(part) - 1), torch.tensor([448.0])]) for part in around]
    x = torch.stack(rows + [-row for row in rows])  # the largest is 448, so the scale is 1
    assert_same(ops.quantize_fp8_block(x.to(DEVICE), (1, 128)), reference.quantize_fp8_block(x, (1, 128)))


def test_zeros_huge_values_and_what_is_no_number():
    x = random(5, 300, dtype=torch.float32).cpu()
    x[0], x[1, 3], x[2, 200], x[3], x[4, :128] = 0, torch.nan, torch.inf, 3e38, 1e-30
    assert_same(ops.quantize_fp8_block(x.to(DEVICE), (1, 128)), reference.quantize_fp8_block(x, (1, 128)))
    assert_same(ops.quantize_fp8_block(x.to(DEVICE)), reference.quantize_fp8_block(x))


@pytest.mark.parametrize("shape", [(1, 1), (0, 5), (37, 300), (2, 10, 130), (3, 4, 128)])
def test_scales_lie_column_by_column_as_the_reference_lays_them(shape):
    x = random(*shape)
    values, scales = ops.quantize_fp8_rows(x)
    expected, expected_scales = reference.quantize_fp8_rows(x.cpu())
    assert_same((values, scales), (expected, expected_scales))
    assert scales.stride() == expected_scales.stride()
    room = -(-shape[-2] // 4) * 4
    assert not len(x) or scales.stride()[-2:] == (1, room)
    assert len(shape) == 2 or scales.stride(0) == room * scales.shape[-1]
    assert_same((values.flatten(0, -2), scales.flatten(0, -2)), ops.quantize_fp8_block(x.flatten(0, -2), (1, 128)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_of_nobody_are_neither_read_nor_written(monkeypatch, dtype):
    counts, room = torch.tensor([3, 0, 40, 17], dtype=dtype, device=DEVICE), 40
    is_row = torch.arange(room, device=DEVICE) < counts[:, None]
    x = random(4, room, 300)
    x[~is_row] = torch.nan
    # memory that is handed out holds a mark where nothing has been written
    plain_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: mark(plain_empty(*shape, **options)))
    values, scales = ops.quantize_fp8_rows(x, counts)
    active, none = ops.silu_mul_blocks(x, counts)
    rounded, active_scales = ops.silu_mul_blocks(x, counts, fp8=True)
    monkeypatch.undo()
    assert none is None
    for of_rows, dtype_of_rows in ((values, torch.uint8), (active, torch.int16), (rounded, torch.uint8)):
        assert (of_rows.view(dtype_of_rows)[~is_row] == MARK).all()
    assert (scales[~is_row] == MARK).all()
    assert (active_scales[~is_row] == MARK).all()
    expected = reference.quantize_fp8_rows(x[is_row].cpu())
    assert_same((values.view(torch.uint8)[is_row].view(values.dtype), scales[is_row]), expected)
    gate, up = x[is_row].chunk(2, dim=-1)
    assert torch.equal(active[is_row], ops.silu_mul(gate, up))
    expected = reference.quantize_fp8_rows(active[is_row].cpu())
    assert_same((rounded.view(torch.uint8)[is_row].view(rounded.dtype), active_scales[is_row]), expected)


MARK = 7


def mark(room):
    return (
        (room.view(torch.uint8) if room.itemsize == 1 else room.view(torch.int16) if room.itemsize == 2 else room)
        .fill_(MARK)
        .view(room.dtype)
    )


def test_blocks_without_counts_are_all_rows():
    x = random(2, 5, 40)
    active, _ = ops.silu_mul_blocks(x)
    assert torch.equal(active, ops.silu_mul(*x.flatten(0, 1).chunk(2, dim=-1)).view(2, 5, 20))
    wide = random(2, 5, 600)
    assert_same(
        tuple(part.flatten(0, 1) for part in ops.silu_mul_blocks(wide, fp8=True)),
        tuple(part.flatten(0, 1) for part in ops.silu_mul_blocks(wide, torch.tensor([5, 5], device=DEVICE), fp8=True)),
    )
    active, scales = ops.silu_mul_blocks(x[:, :0], fp8=True)
    assert (active.shape, scales.shape) == ((2, 0, 20), (2, 0, 1))
    plain = x.float()
    active, _ = registry.bind("silu_mul_blocks", ["triton", "reference"])(plain)
    assert torch.equal(active, reference.silu_mul_blocks(plain)[0])


def test_a_row_rounds_alone_as_among_others():
    x = random(40, 200)
    values, scales = ops.quantize_fp8_block(x, (1, 128))
    for row in (0, 17, 39):
        alone, scale = ops.quantize_fp8_block(x[row : row + 1], (1, 128))
        assert torch.equal(alone[0].float(), values[row].float())
        assert torch.equal(scale[0], scales[row])


def test_a_quotient_by_a_blocks_inverse_and_what_it_leaves_is_the_nearest():
    """Compiled kernels divide like this; the interpreter's fma rounds twice, so the test computes it itself."""
    generator = np.random.default_rng(0)

    def bfloat16(x):
        return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    largest = bfloat16(np.abs(generator.standard_normal(10**6)) * 10.0 ** generator.uniform(-5, 30, 10**6))
    scale = np.maximum(largest, np.float32(1e-4)) / np.float32(448)
    x = bfloat16(largest * generator.uniform(-1, 1, 10**6))
    inverse = np.float32(1) / scale
    y = x * inverse
    left = (x.astype(np.float64) - y.astype(np.float64) * scale.astype(np.float64)).astype(np.float32)
    corrected = (y.astype(np.longdouble) + left.astype(np.longdouble) * inverse.astype(np.longdouble)).astype(
        np.float32
    )
    assert not np.array_equal(y, x / scale)
    assert np.array_equal(corrected, x / scale)
