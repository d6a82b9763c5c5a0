"""Experts whose tiles are read by tensor descriptors: the bits of today's kernel, in any tiles and company."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels import reference
from batchinfer_kernels.reference.block_scaled import BlockScaled, to_blocks
from batchinfer_kernels.triton import experts
from support.triton_device import DEVICE, needs_triton, random

import experts_tma  # isort: skip  # support.triton_device finds it

pytestmark = needs_triton

FEW, MANY = 8, 512  # expected rows: tiles of 64 and of 128


def weights(num_experts, hidden, width, *, is_fp8):
    gate_up = random(num_experts, 2 * width, hidden, seed=1) / hidden**0.5
    down = random(num_experts, hidden, width, seed=2) / width**0.5
    return (to_blocks(gate_up), to_blocks(down)) if is_fp8 else (gate_up, down)


def filled(y_ECD, counts):
    return torch.cat([y_CD[:count] for y_CD, count in zip(y_ECD, counts, strict=True)])


def rows_of(counts, room, hidden):
    """Rows of experts in blocks, behind them what is no number."""
    x_ECD = torch.full((len(counts), room, hidden), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    for expert, count in enumerate(counts):
        x_ECD[expert, :count] = random(count, hidden, seed=expert)
    return x_ECD, torch.tensor(counts, device=DEVICE)


# hidden: less than a block of scales more than whole tiles, an odd number of blocks; counts: none, one, several tiles
@pytest.mark.parametrize("expected_rows", [FEW, MANY])
@pytest.mark.parametrize(
    ("counts", "room", "hidden", "width"),
    [([5, 0, 66], 70, 208, 128), ([131], 140, 384, 256), ([0, 0], 3, 128, 128)],
)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_the_bits_are_those_of_the_kernel_in_use(counts, room, hidden, width, is_fp8, expected_rows):
    x_ECD, num_rows_E = rows_of(counts, room, hidden)
    held = weights(len(counts), hidden, width, is_fp8=is_fp8)
    y_ECD = experts_tma.masked_mlp(x_ECD, num_rows_E, *held, expected_rows=expected_rows)
    assert y_ECD.shape == x_ECD.shape
    ours, theirs = filled(y_ECD, counts), filled(experts.masked_mlp(x_ECD, num_rows_E, *held), counts)
    assert ours.isfinite().all()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("num_programs", [1, 100])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_any_number_of_programs_and_any_company_give_a_row_the_same_bits(num_programs, is_fp8, monkeypatch):
    x_ECD, num_rows_E = rows_of([66, 3], 67, 256)
    held = weights(2, 256, 128, is_fp8=is_fp8)
    whole = experts_tma.masked_mlp(x_ECD, num_rows_E, *held)
    monkeypatch.setattr(experts_tma, "_PROGRAMS_WITHOUT_GPU", num_programs)
    assert torch.equal(filled(experts_tma.masked_mlp(x_ECD, num_rows_E, *held), [66, 3]), filled(whole, [66, 3]))
    alone = experts_tma.masked_mlp(x_ECD[:, 2:3], (num_rows_E - 2).clamp(max=1), *held, expected_rows=MANY)
    assert torch.equal(alone[:, 0], whole[:, 2])


def test_rows_of_nobody_are_not_written(monkeypatch):
    """The room behind an expert's rows keeps what it held, in results and between the products."""
    kept = []

    def marked(*shape, dtype, device):
        kept.append(torch.ones(*shape, dtype=dtype, device=device))
        return kept[-1]

    x_ECD, num_rows_E = rows_of([5, 1], 70, 128)
    held = weights(2, 128, 128, is_fp8=False)
    with monkeypatch.context() as patched:
        patched.setattr(experts_tma.torch, "empty", marked)
        y_ECD = experts_tma.masked_mlp(x_ECD, num_rows_E, *held)
    assert (y_ECD[0, 5:] == 1).all()
    assert (y_ECD[1, 1:] == 1).all()
    assert (kept[-1].view(2, 70, -1)[1, 1:] == 1).all()


@pytest.mark.parametrize("is_fp8", [True, False])
def test_rows_that_come_in_fp8_are_taken_as_they_are(is_fp8):
    """With scales by row and, as DeepEP gives them, by column."""
    counts, held = [9, 2], weights(2, 256, 128, is_fp8=is_fp8)
    values, scales = reference.quantize_fp8_block(random(2 * 11, 256), (1, 128))
    values, scales = values.view(2, 11, 256), scales.view(2, 11, 2)
    num_rows_E = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    theirs = experts.masked_mlp(values, num_rows_E, *held, scales)
    for laid_out in (scales, scales.mT.contiguous().mT):
        y_ECD = experts_tma.masked_mlp(values, num_rows_E, *held, laid_out)
        assert torch.equal(filled(y_ECD, counts), filled(theirs, counts))


def test_no_rows_or_no_room_give_an_empty_result():
    held = weights(2, 128, 128, is_fp8=True)
    none = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    assert experts_tma.masked_mlp(random(2, 0, 128), none, *held).shape == (2, 0, 128)


def test_weights_that_the_kernel_does_not_take_are_refused_in_a_sentence():
    x_ECD, num_rows_E = random(1, 4, 128), torch.tensor([4], device=DEVICE)
    plain, blocks = weights(1, 128, 128, is_fp8=False), weights(1, 128, 128, is_fp8=True)
    for held, words in (
        (weights(1, 128, 96, is_fp8=False), "the width of experts is 96, not a multiple of 128"),
        (weights(1, 100, 128, is_fp8=True), "rows of weights are not multiples of 16 bytes"),
        ((plain[0], blocks[1]), "not both in bfloat16 or both in FP8 blocks"),
        ((plain[0].mT.contiguous().mT, plain[1]), "have gaps in memory"),
    ):
        assert isinstance(held[0], torch.Tensor | BlockScaled)
        with pytest.raises(ValueError, match=words):
            experts_tma.masked_mlp(x_ECD, num_rows_E, *held)
