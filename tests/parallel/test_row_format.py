"""Rows as they travel: what is packed comes out again, rounded as the format says."""

from __future__ import annotations

import pytest
import torch

from batchinfer.parallel.row_format import SCALE_VALUES, RowFormat
from batchinfer_kernels import reference

WIDTHS = (1, 3, 32, 45, 127, 128, 129, 256, 514)
BLOCK = (1, SCALE_VALUES)


def random_rows(num_rows, width, seed=0, dtype=torch.float32):
    """Rows of very different sizes, with a zero here and there."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, width, generator=generator) * 10.0 ** torch.arange(-3, num_rows - 3)[:, None].clamp(
        max=4
    )
    return (rows * (torch.rand(num_rows, width, generator=generator) < 0.9)).to(dtype)


def test_worked_example():
    # three values of one byte each, a byte of padding, one scale of 4 bytes: largest value / 448
    # 448 / 448 = 1, so the values are stored as they are; between 64 and 128 E4M3 has steps of 8: 100 lies half way
    # between 96 and 104 and goes to the even one
    row_format = RowFormat("fp8")
    packed = row_format.pack(torch.tensor([[448.0, -2.0, 100.0]]))
    assert packed.shape == (1, row_format.row_bytes(3)) == (1, 8)
    assert packed[0, 4:].view(torch.float32).tolist() == [1.0]
    values, scales = row_format.unpack(packed, 3)
    assert values.dtype == torch.float8_e4m3fn
    assert values.float().tolist() == [[448.0, -2.0, 96.0]]
    assert scales.tolist() == [[1.0]]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("dtype", "plain"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_rows_of_the_format_s_own_dtype_come_back_bit_for_bit(dtype, plain, width):
    rows = random_rows(9, width, dtype=plain)
    row_format = RowFormat(dtype)
    packed = row_format.pack(rows)
    assert packed.dtype == torch.uint8
    assert packed.shape == (9, row_format.row_bytes(width)) == (9, width * plain.itemsize)
    unpacked, scales = row_format.unpack(packed, width)
    assert torch.equal(unpacked, rows)
    assert unpacked.dtype == plain
    assert scales is None


def test_wider_rows_are_rounded_once():
    rows = random_rows(9, 33)
    assert torch.equal(RowFormat("bfloat16").unpack(RowFormat("bfloat16").pack(rows), 33)[0], rows.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_fp8_rows_carry_what_block_quantisation_gives(width, dtype):
    rows = random_rows(9, width, dtype=dtype)
    row_format = RowFormat("fp8")
    packed = row_format.pack(rows)
    assert packed.shape == (9, row_format.row_bytes(width))
    values, scales = row_format.unpack(packed, width)
    expected_values, expected_scales = reference.quantize_fp8_block(rows, BLOCK)
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    assert scales.shape == (9, -(-width // SCALE_VALUES))
    expected = reference.dequantize_fp8_block(expected_values, expected_scales, dtype, BLOCK)
    assert torch.equal(reference.dequantize_fp8_block(values, scales, dtype, BLOCK), expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_an_fp8_row_is_as_near_as_its_three_bits_allow(width):
    rows = random_rows(9, width)
    values, scales = RowFormat("fp8").unpack(RowFormat("fp8").pack(rows), width)
    error = (reference.dequantize_fp8_block(values, scales, torch.float32, BLOCK) - rows).abs()
    # half a step: 2 ** -4 of the value, or of the smallest normal number (2 ** -6) where values are smaller than that
    step = torch.maximum(rows.abs(), 2**-6 * scales.repeat_interleave(SCALE_VALUES, dim=1)[:, :width])
    assert (error <= 2**-4 * step * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_rows_can_be_cut_apart_and_put_together_while_they_are_packed(dtype):
    rows = random_rows(9, 130)
    row_format = RowFormat(dtype)
    order = torch.tensor([8, 0, 3, 3, 1])
    together, together_scales = row_format.unpack(row_format.pack(rows)[order], 130)
    first, last = row_format.pack(rows[order[:2]]), row_format.pack(rows[order[2:]])
    apart, apart_scales = row_format.unpack(torch.cat([first, last]), 130)
    assert torch.equal(together.view(torch.uint8), apart.view(torch.uint8))
    assert (together_scales is None) == (dtype != "fp8")
    assert dtype != "fp8" or torch.equal(together_scales, apart_scales)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("width", WIDTHS)
def test_no_rows(width, dtype):
    row_format = RowFormat(dtype)
    packed = row_format.pack(torch.zeros(0, width))
    assert packed.shape == (0, row_format.row_bytes(width))
    values, scales = row_format.unpack(packed, width)
    assert values.shape == (0, width)
    assert scales is None or scales.shape == (0, -(-width // SCALE_VALUES))


def test_a_row_of_zeros_stays_one():
    values, scales = RowFormat("fp8").unpack(RowFormat("fp8").pack(torch.zeros(2, 200)), 200)
    assert not values.float().any()
    assert (scales > 0).all()


def test_results_travel_back_wider_than_fp8():
    backs = {dtype: RowFormat.for_combine(RowFormat(dtype)).dtype for dtype in ("float32", "bfloat16", "fp8")}
    assert backs == {"float32": "float32", "bfloat16": "bfloat16", "fp8": "bfloat16"}
