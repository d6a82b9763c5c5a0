"""The products for Hopper GPUs against stand-ins with the libraries' signatures, and a model on all operations."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from batchinfer.model.config import load_model_config
from batchinfer.model.ops import Ops
from batchinfer.model.transformer import Transformer
from batchinfer.model.weight_loading import load_weights
from batchinfer.parallel.dispatch import LocalDispatcher
from batchinfer.parallel.row_format import RowFormat
from batchinfer_kernels import reference, registry
from batchinfer_kernels.hopper import libraries
from batchinfer_kernels.hopper import ops as hopper
from batchinfer_kernels.reference.block_scaled import to_blocks
from batchinfer_kernels.reference.fp8 import ROW_BLOCK
from batchinfer_kernels.reference.mla import PagedKeys
from batchinfer_kernels.reference.places import PlacedRows, in_order
from support import hopper_stand_ins as stand_ins
from support.checkpoints import make_checkpoint
from support.hopper_cases import DEEP_GEMM, OPS, close, decode_case, with_reference
from support.paged_steps import PagedRequests
from support.paths import ROOT
from support.placed_rows import in_tiles
from support.random_tensors import random


def test_the_tests_for_a_gpu_are_right_themselves():
    """The run uses stand-ins for the libraries, without the large ones; `run.sh --rehearse` has them all."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--noconftest", "-p", "no:cacheprovider"]
    command += [
        "-k",
        "not 24576 and (product or experts or 16- or 64-1 or -16)",
        str(ROOT / "tests/gpu/test_hopper_gpu.py"),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["GPU_TESTS"] = "rehearse"
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "13 passed" in done.stdout


@pytest.mark.parametrize("library", DEEP_GEMM)
@pytest.mark.parametrize(("num_rows", "num_in", "num_out"), [(1, 128, 64), (70, 384, 576), (0, 128, 64)])
def test_a_product_in_fp8_is_that_of_the_reference(gpu, library, num_rows, num_in, num_out):
    gpu(DEEP_GEMM[library]())
    x, weight, bias = random(num_rows, num_in), to_blocks(random(num_out, num_in, seed=1)), random(num_out, seed=2)
    added = {"residual": random(num_rows, num_out, seed=3)}
    for options in ({}, {"bias": bias}, {"float32_out": True}, added, {"bias": bias} | added):
        y, expected = hopper.linear(x, weight, **options), reference.linear(x, weight, **options)
        assert torch.equal(y, expected)
        assert y.dtype == expected.dtype
    assert not stand_ins.COPIED


def experts(num_experts=5, hidden=256, width=128):
    gate_up = random(num_experts, 2 * width, hidden, seed=1) / hidden**0.5
    return gate_up, random(num_experts, hidden, width, seed=2) / width**0.5


COUNTS = [[3, 0, 130, 128, 1], [0, 0, 0, 0, 7], [129, 127, 256, 0, 0], [0] * 5]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("library", DEEP_GEMM)
def test_experts_in_fp8_are_those_of_the_reference(gpu, library, counts):
    gpu(DEEP_GEMM[library]())
    weights = tuple(to_blocks(weight) for weight in experts())
    num_rows, total = torch.tensor(counts), sum(counts)
    x = random(total, 256)
    expected = reference.grouped_mlp(x, num_rows, *weights)
    assert torch.equal(grouped_mlp(x, num_rows, *weights), expected)
    # rows that came in FP8, as the exchange of ranks leaves them: with gaps between them
    values, scales = RowFormat("fp8").unpack(RowFormat("fp8").pack(x), 256)
    assert total < 2 or not values.is_contiguous()
    assert torch.equal(grouped_mlp(values, num_rows, *weights, scales=scales), expected)
    # rows that stay where they are
    tokens = torch.arange(total).flip(0)
    moved = grouped_mlp(x.flip(0), num_rows, *weights, tokens)
    assert torch.equal(moved, expected)
    assert torch.equal(grouped_mlp(values.clone().view(torch.uint8).flip(0).view(values.dtype), num_rows,
                                          *weights, tokens, scales.flip(0)), expected)  # fmt: skip
    # rows in whole tiles stay there
    lying, places = in_tiles(x, counts, 128)
    values, scales = reference.quantize_fp8_rows(lying)
    for result in (
        hopper.grouped_mlp(lying, num_rows, *weights, tile_rows=128),
        hopper.grouped_mlp(values, num_rows, *weights, scales=scales, tile_rows=128),
    ):
        assert result.shape == lying.shape
        assert torch.equal(result[places], expected)
    assert not stand_ins.COPIED, "the library had to put scales into its own order"


def test_experts_whose_rows_begin_elsewhere_go_to_the_implementation_behind(gpu):
    gpu(stand_ins.deep_gemm_upstream())
    weights, counts = tuple(to_blocks(weight) for weight in experts()), [3, 0, 4, 0, 1]
    lying, places = in_tiles(random(8, 256), counts, 64)
    y = with_reference("grouped_mlp")(lying, torch.tensor(counts), *weights, tile_rows=64)
    assert torch.equal(y[places], reference.grouped_mlp(lying[places], torch.tensor(counts), *weights))
    assert not y[torch.arange(len(y))[~torch.isin(torch.arange(len(y)), places)]].any()
    reason = "experts' rows do not begin at multiples of 128"
    assert registry.fallbacks()["grouped_mlp", "hopper", "reference", reason] > 0


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("library", DEEP_GEMM)
def test_experts_in_bfloat16_are_near_those_of_the_reference(gpu, library, counts):
    gpu(DEEP_GEMM[library]())
    weights, num_rows, x = experts(), torch.tensor(counts), random(sum(counts), 256)
    y, expected = grouped_mlp(x, num_rows, *weights), reference.grouped_mlp(x, num_rows, *weights)
    assert y.shape == expected.shape
    assert len(x) == 0 or close(y, expected)
    lying, places = in_tiles(x, counts, 128)
    assert torch.equal(hopper.grouped_mlp(lying, num_rows, *weights, tile_rows=128)[places], y)
    values, scales = reference.quantize_fp8_block(x, ROW_BLOCK)
    y = grouped_mlp(values, num_rows, *weights, scales=scales)
    assert len(x) == 0 or close(y, reference.grouped_mlp(values, num_rows, *weights, scales=scales))


def grouped_mlp(*args, **options):
    """The rows in their order; a candidate for Hopper leaves them at their places, in whole tiles."""
    y = hopper.grouped_mlp(*args, **options)
    if not isinstance(y, PlacedRows):
        assert len(y) == 0
        return y
    assert len(y.values_SD) % 128 == 0
    return in_order(y)


def blocks_of(counts, room, hidden=256):
    """Rows in blocks with NaN behind them, and which are rows."""
    blocks, is_row = random(len(counts), room, hidden), torch.arange(room) < torch.tensor(counts)[:, None]
    blocks[~is_row] = torch.nan
    return blocks, is_row


@pytest.mark.parametrize("room", [128, 200])
@pytest.mark.parametrize("library", DEEP_GEMM)
def test_experts_in_blocks_are_those_of_the_reference(gpu, library, room):
    gpu(DEEP_GEMM[library]())
    counts = [3, 0, room, 64, 1]
    blocks, is_row = blocks_of(counts, room)
    num_rows, weights = torch.tensor(counts), tuple(to_blocks(weight) for weight in experts())
    expected = reference.masked_mlp(blocks, num_rows, *weights)
    y = hopper.masked_mlp(blocks, num_rows, *weights, expected_rows=40)
    assert not stand_ins.COPIED
    assert y.shape == expected.shape
    assert torch.equal(y[is_row], expected[is_row])
    values, scales = reference.quantize_fp8_block(blocks.flatten(0, 1), ROW_BLOCK)
    values, scales = values.view(blocks.shape), scales.view(5, room, -1)
    by_column = scales.mT.contiguous().mT  # as DeepEP's low-latency mode gives them
    for form in (scales, by_column):
        stand_ins.COPIED.clear()
        assert torch.equal(hopper.masked_mlp(values, num_rows, *weights, form)[is_row], expected[is_row])
        assert len(stand_ins.COPIED) == (form is scales and room == 128)  # these alone go to the library as they came
    plain = hopper.masked_mlp(blocks, num_rows, *experts(), expected_rows=10**6)
    assert close(plain[is_row], reference.masked_mlp(blocks, num_rows, *experts())[is_row])
    nothing = hopper.masked_mlp(blocks[:, :0], torch.zeros(5, dtype=torch.int64), *weights)
    assert nothing.shape == (5, 0, 256)


def test_what_stands_between_the_products_skips_rows_of_nobody(gpu):
    gpu(stand_ins.deep_gemm_sgl())
    asked = []

    def other(op):
        def run(x, num_rows_E=None, **options):
            asked.append((op, x.shape, num_rows_E, options))
            return getattr(reference, op)(x, num_rows_E, **options)

        return run

    uses = {op: other(op) for op in hopper.masked_mlp.uses}
    blocks, _ = blocks_of([3, 0, 128, 64, 1], 128)
    num_rows = torch.tensor([3, 0, 128, 64, 1])
    hopper.masked_mlp(blocks, num_rows, *(to_blocks(weight) for weight in experts()), **uses)
    hopper.masked_mlp(blocks, num_rows, *experts(), **uses)
    assert [(op, shape, options) for op, shape, _, options in asked] == [
        ("quantize_fp8_rows", (5, 128, 256), {}),
        ("silu_mul_blocks", (5, 128, 256), {"fp8": True}),
        ("silu_mul_blocks", (5, 128, 256), {"fp8": False}),
    ]
    assert all(torch.equal(counts, num_rows.int()) for _, _, counts, _ in asked)


@pytest.mark.parametrize("is_fp8", [True, False], ids=["fp8", "bfloat16"])
def test_the_library_is_told_how_many_rows_of_each_block_are_filled(gpu, monkeypatch, is_fp8):
    gpu(stand_ins.deep_gemm_sgl())
    told = []
    library = libraries.deep_gemm

    def recording(names):
        def product(a, b, out, masked_m, expected_m):
            told.append((masked_m.tolist(), expected_m))
            library(names)(a, b, out, masked_m, expected_m)

        return product

    counts = [3, 0, 128, 64, 1]
    blocks, _ = blocks_of(counts, 128)
    weights = tuple(to_blocks(weight) if is_fp8 else weight for weight in experts())
    monkeypatch.setattr(libraries, "deep_gemm", recording)
    hopper.masked_mlp(blocks, torch.tensor(counts), *weights, expected_rows=40)
    assert told == [(counts, 40)] * 2


def test_places_of_rows_worked_out():
    # tiles of 4 rows: expert 0 has 5 rows, expert 1 none, expert 2 one, expert 3 four
    place, expert, source = reference.expert_places(torch.tensor([5, 0, 1, 4]), 10, 4)
    assert source[place].tolist() == list(range(10))
    assert not source[expert < 0].any()
    assert place.tolist() == [0, 1, 2, 3, 4, 8, 12, 13, 14, 15]
    # room for the most that ten rows of four experts may need: 10 + 4 * 3 in whole tiles
    assert expert.tolist() == [0, 0, 0, 0, 0, -1, -1, -1, 2, -1, -1, -1, 3, 3, 3, 3, -1, -1, -1, -1]
    assert expert.dtype == torch.int32


@pytest.mark.parametrize("seed", range(20))
def test_all_rows_have_room_however_they_spread(seed):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (9,), generator=generator) * torch.randint(0, 140, (9,), generator=generator)
    counts[seed % 9] += 1
    place, expert, _ = reference.expert_places(counts, int(counts.sum()), 128)
    assert len(place.unique()) == len(place) == counts.sum()
    assert torch.equal(expert[place].long(), torch.arange(9).repeat_interleave(counts))
    assert (expert >= 0).sum() == len(place)
    assert len(expert) % 128 == 0


def test_nothing_waits_for_the_device(gpu, monkeypatch):
    # tensors of the device "meta" have shapes and no values, so reading one fails
    monkeypatch.setattr(libraries, "deep_gemm", lambda names: lambda *args, **options: None)
    flash_mla = gpu(stand_ins.flash_mla_sgl())
    monkeypatch.setattr(stand_ins, "dense_decode", lambda q, *_: (q[..., :512], None))
    monkeypatch.setattr(stand_ins.FlashMLASchedMeta, "use", lambda *_: None)
    meta = partial(torch.empty, device="meta")
    weights = tuple(to_blocks(weight) for weight in experts())
    on_meta = tuple(type(weight)(weight.values.to("meta"), weight.scales.to("meta")) for weight in weights)
    num_rows = meta(5, dtype=torch.int64)
    x = meta(70, 256, dtype=torch.bfloat16)
    assert hopper.linear(x, on_meta[0][0]).shape == (70, 256)
    assert grouped_mlp(x, num_rows, *on_meta, meta(90, dtype=torch.int64)).shape == (90, 256)
    assert hopper.masked_mlp(meta(5, 70, 256, dtype=torch.bfloat16), num_rows, *on_meta).shape == (5, 70, 256)
    q, keys, options = decode_case()
    keys = PagedKeys(*(tensor.to("meta") for tensor in keys[:4]))
    y = hopper.mla_decode(q.to("meta"), keys, **options)
    assert (y.shape, flash_mla.num_schedules) == ((5, 16, 512), 1)
    with pytest.raises(NotImplementedError):
        reference.masked_mlp(meta(5, 70, 256, dtype=torch.bfloat16), num_rows, *on_meta)


@pytest.mark.parametrize(
    ("what", "weight"),
    [
        ("on a CPU", lambda: to_blocks(random(64, 128))),
        ("columns", lambda: to_blocks(random(65, 128))),
        ("depth", lambda: to_blocks(random(64, 130))),
        ("not in FP8", lambda: random(64, 128)),
    ],
)
def test_what_the_library_does_not_take_goes_to_the_implementation_behind(install, monkeypatch, what, weight):
    install(stand_ins.deep_gemm_upstream())
    if what != "on a CPU":
        monkeypatch.setattr(hopper, "is_on_gpu", lambda *tensors: True)
    weight = weight()
    x = random(3, 130 if what == "depth" else 128)
    before = registry.num_fallbacks()
    assert close(with_reference("linear")(x, weight), reference.linear(x, weight))
    assert registry.num_fallbacks() == before + 1
    if what in ("columns", "not in FP8"):
        return
    weights, num_rows = tuple(to_blocks(weight) for weight in experts(2, x.shape[1], 128)), torch.tensor([1, 2])
    y = in_order(with_reference("grouped_mlp")(x, num_rows, *weights))
    assert torch.equal(y, reference.grouped_mlp(x, num_rows, *weights))
    blocks = random(2, 4, x.shape[1])
    y = with_reference("masked_mlp")(blocks, num_rows, *weights, expected_rows=1)
    assert torch.equal(y, reference.masked_mlp(blocks, num_rows, *weights))


def test_bfloat16_experts_go_on_where_the_library_has_no_product_for_them(gpu):
    library = gpu(stand_ins.deep_gemm_upstream())
    del library.m_grouped_bf16_gemm_nt_contiguous
    x, num_rows = random(8, 256), torch.tensor([3, 0, 4, 0, 1])
    y = with_reference("grouped_mlp")(x, num_rows, *experts())
    assert torch.equal(y, reference.grouped_mlp(x, num_rows, *experts()))
    reason = "deep_gemm has no such product in bfloat16"
    assert registry.fallbacks()["grouped_mlp", "hopper", "reference", reason] > 0


SIZES = {
    "hidden_size": 256,
    "intermediate_size": 200,
    "moe_intermediate_size": 72,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}


def test_a_model_in_fp8_decodes_as_on_the_reference(gpu, tmp_path):
    flash_mla = gpu(stand_ins.flash_mla_sgl(), stand_ins.deep_gemm_sgl())
    make_checkpoint(tmp_path, "v3", **SIZES)
    config, plain = load_model_config(tmp_path), Ops.select("reference", torch.bfloat16, eight_bit=True)
    calls = []

    def counted(name):
        def run(*args, **options):
            calls.append(name)
            return with_reference(name)(*args, **options)

        return run

    # the head is not in FP8
    ours = replace(plain, **{name: counted(name) for name in OPS})
    weights = load_weights(tmp_path, config, dtype=torch.bfloat16, ops=plain)
    logits = []
    for ops in (ours, plain):
        dispatchers = [LocalDispatcher(8, RowFormat("fp8"), gathers=False)] * 2
        requests = PagedRequests(
            Transformer(config, weights, dispatchers, ops),
            [torch.arange(5), torch.arange(70) % 96],
            max_new_tokens=8,
        )
        requests.prefill([0, 1], [1000])
        for tokens in requests.tokens:
            tokens += [3, 5, 7]
        for _ in range(3):
            requests.decode_step([0, 1])
        logits.append(torch.stack([requests.all_logits(i)[-3:] for i in (0, 1)]))
    # one per step, not one per layer; in prefill, too, whose last layer works like decode
    assert flash_mla.num_schedules == 1 + 3
    assert {name: calls.count(name) for name in OPS} == {
        "linear": 4 * (3 * 4 + 2 + 2 * 2 + 1),
        "grouped_mlp": 4 * 2,
        "masked_mlp": 0,
        "mla_decode": 1 + 3 * 3,
    }
    assert (logits[0] - logits[1]).norm() <= 0.05 * logits[1].norm()
