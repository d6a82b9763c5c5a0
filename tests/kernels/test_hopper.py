"""The operations for Hopper GPUs against stand-ins with the libraries' signatures, and what keeps them from running."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec

import pytest
import torch

from batchinfer.model.config import load_model_config
from batchinfer.model.ops import Ops
from batchinfer.model.transformer import Transformer
from batchinfer.model.weight_loading import load_weights
from batchinfer.parallel.dispatch import LocalDispatcher
from batchinfer.parallel.row_format import RowFormat
from batchinfer.records import ModelError
from batchinfer_kernels import reference, registry
from batchinfer_kernels.hopper import cuts as hopper_cuts
from batchinfer_kernels.hopper import invariant, libraries
from batchinfer_kernels.hopper import ops as hopper
from batchinfer_kernels.reference import mla as reference_mla
from batchinfer_kernels.reference.block_scaled import to_blocks
from batchinfer_kernels.reference.fp8 import ROW_BLOCK
from batchinfer_kernels.reference.mla import PagedKeys
from batchinfer_kernels.reference.places import PlacedRows, in_order
from batchinfer_kernels.triton import probe as triton_probe
from batchinfer_kernels.triton.ops import Kernel
from support import hopper_stand_ins as stand_ins
from support.checkpoints import make_checkpoint
from support.cuda_stand_ins import own_cuts_on_the_cpu
from support.paged_steps import PagedRequests
from support.paths import ROOT
from support.placed_rows import in_tiles
from support.triton_device import needs_triton

TOLERANCE = {"bfloat16": 2**-7}  # of the largest value
DEEP_GEMM = {"upstream": stand_ins.deep_gemm_upstream, "sgl": stand_ins.deep_gemm_sgl}
FLASH_MLA = {
    "first": stand_ins.flash_mla_first,
    "later": stand_ins.flash_mla_later,
    "sgl": stand_ins.flash_mla_sgl,
}
OPS = ("linear", "grouped_mlp", "masked_mlp", "mla_decode")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def forget():
    for function in (
        libraries.why_not_deep_gemm,
        libraries.why_not_flash_mla,
        libraries.decode_parameters,
        libraries.makes_own_metadata,
        libraries.sparse_parameters,
        invariant.why_not,
    ):
        function.cache_clear()


@pytest.fixture
def install(monkeypatch):
    """Puts stand-ins in the libraries' places."""

    def put(*modules):
        forget()
        for module in modules:
            module.__spec__ = ModuleSpec(module.__name__, None)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return modules[0]

    yield put
    forget()


@pytest.fixture
def gpu(monkeypatch, install):
    """Tensors here count as those of a GPU; what the libraries use is the reference."""
    monkeypatch.setattr(hopper, "is_on_gpu", lambda *tensors: True)
    stand_ins.COPIED.clear()
    return install


@pytest.fixture
def one_hopper(monkeypatch):
    own_cuts_on_the_cpu(monkeypatch)


def with_reference(op):
    return registry.bind(op, ["hopper", "reference"])


def close(y, expected):
    return (y.float() - expected.float()).abs().max() <= TOLERANCE["bfloat16"] * expected.float().abs().max()


def test_the_tests_for_a_gpu_are_right_themselves():
    """With stand-ins for the libraries, but for the large ones; `run.sh --rehearse` has them all."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--noconftest", "-p", "no:cacheprovider"]
    command += ["-k", "not 24576 and (product or experts or 16- or 64-1)", str(ROOT / "tests/gpu/test_hopper_gpu.py")]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["GPU_TESTS"] = "rehearse"
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "11 passed" in done.stdout


# ---- products


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


# ---- decode attention


def decode_case(num_queries=1, heads=16, kv_tokens=(1, 64, 150, 200, 7), seed=0):
    num_requests = len(kv_tokens)
    pages = random(20, 64, 576, seed=seed)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[: 4 * num_requests].view(num_requests, 4)
    lengths = torch.tensor(kv_tokens) + num_queries - 1
    positions = (lengths[:, None] - num_queries + torch.arange(num_queries)).flatten()
    q = random(num_requests * num_queries, heads, 576, seed=seed + 1)
    return q, PagedKeys(pages, table, lengths, positions), {"latent_dim": 512, "scale": 0.1352}


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("library", FLASH_MLA)
def test_decode_attention_is_that_of_the_reference(gpu, library, heads, num_queries):
    gpu(FLASH_MLA[library]())
    q, keys, options = decode_case(num_queries, heads)
    y, expected = hopper.mla_decode(q, keys, **options), reference_mla.mla_decode(q, keys, **options)
    assert y.shape == expected.shape
    assert close(y, expected)
    nothing = PagedKeys(keys.pages, *(tensor[:0] for tensor in keys[1:4]))
    assert hopper.mla_decode(q[:0], nothing, **options).shape == (0, heads, 512)


@pytest.mark.parametrize("library", FLASH_MLA)
def test_metadata_is_made_once_per_schedule_and_never_used_for_other_lengths(gpu, library):
    flash_mla = gpu(FLASH_MLA[library]())
    q, keys, options = decode_case()
    schedule = {}
    for layer in range(3):
        y = hopper.mla_decode(q * layer, keys._replace(schedule=schedule), **options)
        assert close(y, reference_mla.mla_decode(q * layer, keys, **options))
    assert flash_mla.num_schedules == 1
    longer = keys._replace(kv_tokens_B=keys.kv_tokens_B + 1, positions_T=keys.kv_tokens_B, schedule={})
    hopper.mla_decode(q, longer, **options)
    assert flash_mla.num_schedules == 2
    with pytest.raises(AssertionError, match="serves one step"):
        hopper.mla_decode(q, longer._replace(schedule=schedule), **options)


# ---- decode attention with each request in one piece


@pytest.mark.parametrize("num_parts", [1, 33, 66, 132])
def test_parts_get_whole_requests_and_none_much_more_than_its_share(num_parts):
    generator = torch.Generator().manual_seed(num_parts)
    for count, longest in ((1, 9000), (5, 1), (128, 4989), (128, 40_000), (300, 2000)):
        lengths = torch.randint(0, longest + 1, (count,), generator=generator, dtype=torch.int32)
        cuts, splits = hopper_cuts.whole_requests(lengths, num_parts)
        assert (cuts.dtype, cuts.shape, splits.tolist()) == (torch.int32, (num_parts, 8), list(range(count + 1)))
        pages = [-(-length // 64) for length in lengths.tolist()]
        assert stand_ins.pieces_of(cuts, splits, lengths) == [[(0, number)] for number in pages]
        costs = [max(1, number) + 5 for number in pages]
        loads = [sum(costs[begin : end + 1]) for begin, end, *_ in cuts.tolist() if begin < count]
        assert max(loads) <= sum(costs) / num_parts + max(costs)


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("library", ["later", "sgl"])
def test_each_request_is_one_piece_and_the_result_that_of_the_reference(gpu, one_hopper, library, heads, num_queries):
    flash_mla = gpu(FLASH_MLA[library]())
    q, keys, options = decode_case(num_queries, heads)
    schedule = {}
    keys = keys._replace(schedule=schedule)
    for layer in range(2):
        y = invariant.mla_decode(q * layer, keys, **options)
        assert close(y, reference_mla.mla_decode(q * layer, keys, **options))
    metadata, _ = schedule["hopper"][-1]
    assert all(len(pieces) == 1 for pieces in metadata.pieces)
    assert flash_mla.num_schedules == 1
    equal = torch.full((3,), 40 * 64, dtype=torch.int32)  # left to itself it cuts the one in the middle
    assert [len(one) for one in stand_ins.pieces_of(*stand_ins.equal_shares(equal, 2), equal)] == [1, 2, 1]


def test_cuts_that_are_described_otherwise_are_never_given(machine, monkeypatch):
    """ "auto" finds that out before a model is loaded, and takes the next one."""
    shares = stand_ins.equal_shares
    machine()
    assert registry.select("mla_decode", dtype=torch.bfloat16, device="cuda").name == "hopper-invariant"
    monkeypatch.setattr(stand_ins, "equal_shares", lambda *given: (shares(*given)[0].flip(0), shares(*given)[1]))
    machine()
    assert registry.select("mla_decode", dtype=torch.bfloat16, device="cuda").name == "reference"
    with pytest.raises(
        ModelError, match=r"hopper-invariant cannot run here: flash_mla 1\.0\.0 describes its cuts otherwise"
    ):
        Ops.select("hopper-invariant", torch.bfloat16, device="cuda")
    machine(flash_mla=stand_ins.flash_mla_first)
    assert invariant.why_not().startswith("flash_mla 1.0.0 describes its cuts otherwise; another version is needed")


def test_a_library_that_fails_when_it_is_asked_for_its_cuts_is_passed_over(machine, monkeypatch):
    monkeypatch.setattr(stand_ins, "dense_decode", lambda *_: 1 // 0)
    machine()
    assert invariant.why_not().startswith("flash_mla 1.0.0 cannot be asked for its cuts here (ZeroDivisionError: ")


@pytest.mark.parametrize("change", ["width", "latent", "float32"])
def test_attention_that_the_library_does_not_take_goes_to_the_one_behind(gpu, change):
    gpu(stand_ins.flash_mla_sgl())
    q, keys, options = decode_case()
    if change == "width":
        q, keys = q[..., :560].contiguous(), keys._replace(pages=keys.pages[..., :560].contiguous())
    elif change == "latent":
        options["latent_dim"] = 448
    else:
        q, keys = q.float(), keys._replace(pages=keys.pages.float())
    y = with_reference("mla_decode")(q, keys._replace(schedule={}), **options)
    assert torch.equal(y, reference_mla.mla_decode(q, keys, **options))


def test_more_requests_than_the_library_can_cut_for_are_refused(gpu):
    """As the rows of a prompt that is scored, in the last layer of its prefill."""
    gpu(stand_ins.flash_mla_sgl())
    q, keys, options = decode_case(heads=1, kv_tokens=(1,))
    for count, reason in ((11_622, None), (11_623, "there are more requests than flash_mla can cut a step for")):
        many = PagedKeys(keys.pages, *(tensor.expand(count, *tensor.shape[1:]) for tensor in keys[1:4]))
        assert hopper.mla_decode.refuses(q.expand(count, -1, -1), many, **options) == reason
    stand_ins.equal_shares(torch.ones(11_622, dtype=torch.int32), 66)  # as the library would
    with pytest.raises(AssertionError, match="the process exits"):
        stand_ins.equal_shares(torch.ones(11_623, dtype=torch.int32), 66)


# ---- a model


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


# ---- probes


GPU = {
    "cuda": "13.0",
    "available": True,
    "capability": (9, 0),
    "home": True,
    "deep_gemm": stand_ins.deep_gemm_sgl,
    "flash_mla": stand_ins.flash_mla_sgl,
}


@pytest.fixture
def machine(monkeypatch, install, tmp_path):
    """A machine as a Hopper node is, but for some changes."""

    def make(**changes):
        facts = GPU | changes
        own_cuts_on_the_cpu(monkeypatch)
        monkeypatch.setattr(torch.version, "cuda", facts["cuda"])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: facts["available"])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: facts["capability"])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU X")
        monkeypatch.delenv("CUDA_PATH", raising=False)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
        (tmp_path / "cuda" / "bin").mkdir(parents=True, exist_ok=True)
        if facts["home"]:
            (tmp_path / "cuda" / "bin" / "nvcc").write_text("")
            (tmp_path / "cuda" / "bin" / "nvcc").chmod(0o755)
        for name in ("deep_gemm", "flash_mla"):
            if facts[name] is not None:
                install(facts[name]())
        forget()

    return make


REASONS = [
    ({}, None, None),
    ({"cuda": None}, "built without CUDA", "built without CUDA"),
    ({"available": False}, "no GPU that this torch", "no GPU that this torch"),
    ({"capability": (8, 0)}, "GPU X has compute capability 8.0", "Hopper GPUs have 9.0"),
    ({"capability": (10, 0)}, "GPU X has compute capability 10.0", "10.0"),
    ({"home": False}, "no compiler .*/cuda/bin/nvcc", None),
    ({"deep_gemm": None, "flash_mla": None}, "deep_gemm is not installed", "flash_mla is not installed"),
    ({"deep_gemm": stand_ins.deep_gemm_1_0}, "deep_gemm of unknown version has no fp8_gemm_nt", None),
    ({"flash_mla": stand_ins.flash_mla_without_hopper}, None, "2026.9.30 has no dense decode"),
    ({"flash_mla": partial(stand_ins.flash_mla_sgl, legacy=False)}, None, "no dense decode for Hopper"),
    ({"deep_gemm": stand_ins.deep_gemm_upstream, "flash_mla": stand_ins.flash_mla_first}, None, None),
]


@pytest.mark.parametrize(("changes", "deep_gemm", "flash_mla"), REASONS)
def test_a_probe_says_what_is_missing(machine, changes, deep_gemm, flash_mla):
    machine(**changes)
    for reason, expected in (
        (libraries.why_not_deep_gemm(), deep_gemm),
        (libraries.why_not_flash_mla(), flash_mla),
    ):
        if expected is None:
            assert reason is None
        else:
            assert re.search(expected, reason), reason
    rows = {row.op: row for row in registry.explain(device="cuda") if row.candidate == "hopper"}
    over_fp8_pages = rows.pop("mla_decode_fp8")
    assert not over_fp8_pages.chosen
    if flash_mla is None:
        assert "longest one of its step, so only by name" in over_fp8_pages.reason
        assert registry.select("mla_decode_fp8", "hopper", torch.bfloat16, "cuda").name == "hopper"
    own_cuts = rows.pop("mla_decode")
    assert not own_cuts.chosen
    if flash_mla is None:
        assert "depend on what is decoded beside it, so only by name" in own_cuts.reason
        assert registry.select("mla_decode", "hopper", torch.bfloat16, "cuda").name == "hopper"
    assert set(rows) == {*OPS, "choose_keys", "mla_sparse"} - {"mla_decode"}
    for op, row in rows.items():
        assert row.chosen == ((flash_mla if op == "mla_sparse" else deep_gemm) is None)
    chosen = registry.select("mla_decode", dtype=torch.bfloat16, device="cuda")
    assert (chosen.name == "hopper-invariant") == (invariant.why_not() is None)
    assert chosen.name != "hopper"


def test_a_library_that_cannot_be_imported_is_named_with_its_error(machine, tmp_path, monkeypatch):
    machine(deep_gemm=None)
    (tmp_path / "deep_gemm.py").write_text("raise OSError('libnvrtc.so.13: cannot\\nopen')")
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    reason = libraries.why_not_deep_gemm()
    assert reason == "deep_gemm cannot be imported here (OSError: libnvrtc.so.13: cannot open)"


def test_toolkits_are_looked_for_where_the_library_looks(machine, tmp_path, monkeypatch):
    machine(home=False)
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")  # compiles without nvcc
    assert libraries._why_no_toolkit() is None
    monkeypatch.delenv("DG_JIT_USE_NVRTC")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert "no CUDA toolkit in" in libraries._why_no_toolkit()
    machine()
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path / "cuda" / "bin"))
    assert libraries._why_no_toolkit() is None


def test_a_cpu_user_pays_nothing(monkeypatch):
    """A torch without CUDA is asked nothing else, and nothing is imported."""
    for name in ("is_available", "get_device_capability", "init", "device_count"):
        monkeypatch.setattr(torch.cuda, name, partial(pytest.fail, f"torch.cuda.{name} was called"))
    monkeypatch.setattr(libraries.importlib, "import_module", partial(pytest.fail, "a library was imported"))
    monkeypatch.setattr(torch.version, "cuda", None)
    forget()
    assert libraries.why_not_deep_gemm() == libraries.why_not_flash_mla() == "this torch is built without CUDA"
    forget()


def test_a_hopper_gpu_gets_its_libraries_first(machine):
    machine()
    ops = Ops.select("auto", torch.bfloat16, eight_bit=True, device="cuda")
    expected = [invariant.mla_decode if name == "mla_decode" else getattr(hopper, name) for name in OPS]
    assert [getattr(ops, name).implementation for name in OPS] == expected
    assert "hopper-deep_gemm-0.1.2" in ops.names()
    assert "hopper-invariant-flash_mla-1.0.0" in ops.names()
    assert ops.reads_on_host, "without Triton what these do not take goes to the reference"
    assert Ops.select("auto", torch.float32, device="cuda").linear.name == "reference"
    assert [candidate.name for candidate in ops.linear.candidates] == ["hopper", "reference"]
    with pytest.raises(registry.BackendError, match="hopper cannot run here: it is for GPUs, not for cpu tensors"):
        registry.select("linear", "hopper", torch.bfloat16)
    machine(available=False)
    with pytest.raises(registry.BackendError, match="hopper cannot run here: no GPU that this torch can use"):
        registry.select("linear", "hopper", torch.bfloat16, "cuda")


# no kernels of their own on GPUs
PLAIN = ("cos_sin", "log_sum_exp")


def test_tensors_of_a_device_never_go_to_operations_for_another(machine, monkeypatch):
    """Also on a machine where all of them can run."""
    machine()
    monkeypatch.setattr(triton_probe, "why_not", lambda: None)
    monkeypatch.setattr(triton_probe, "interprets", lambda: False)
    listed = {
        op: tuple(
            replace(candidate, probe=lambda: None, probe_auto=lambda: None) if candidate.name == "triton" else candidate
            for candidate in candidates
        )
        for op, candidates in registry._CANDIDATES.items()
    }
    monkeypatch.setattr(registry, "_CANDIDATES", listed)
    on_gpus = {"hopper-invariant", "hopper", "triton"}
    for device, names in (("cpu", {"cpu", "reference"}), ("cuda:1", on_gpus), ("meta", {"reference"})):
        chosen = {op: registry.select(op, dtype=torch.bfloat16, device=device).name for op in registry.ops()}
        assert {name for op, name in chosen.items() if op not in PLAIN} <= names, device
        assert {row.candidate for row in registry.explain(device=device) if row.chosen} <= names | {"reference"}
    assert not Ops.select("auto", torch.bfloat16, device="cuda").reads_on_host
    assert Ops.select("reference", torch.bfloat16, device="cuda").reads_on_host
    for choice, device in (("cpu", "cuda"), ("triton", "cpu"), ("hopper", "cpu")):
        with pytest.raises(ModelError, match=f"backend '{choice}': .* it is for .*, not for {device} tensors"):
            Ops.select(choice, torch.bfloat16, device=device)


@needs_triton
def test_all_implementations_take_what_the_reference_takes():
    def parameters(run):
        return [(name.rstrip("ABCDEFHKMNPTW_"), it.kind) for name, it in inspect.signature(run).parameters.items()]

    for op, listed in registry._CANDIDATES.items():
        for candidate in listed:
            implementation = candidate.implementation
            run = implementation.run.function if isinstance(implementation.run, Kernel) else implementation.run
            found = [it for it in parameters(run) if it[0] not in implementation.uses]
            assert found == parameters(listed[-1].implementation.run), (op, candidate.name)


def test_the_page_on_gpus_names_the_versions_that_are_installed():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["hopper"]
    page = (ROOT / "docs" / "gpus.md").read_text()  # what the reasons point to
    pinned = dict(requirement.split("==") for requirement in extra if "==" in requirement)
    assert set(pinned) == {"sgl-deep-gemm", "apache-tvm-ffi"}
    for name, version in pinned.items():
        assert f"{name} {version}" in page
    # flash_mla's package asks for a newer torch than its kernels need, so it goes in apart
    assert "pip install --no-deps sgl-flash-mla==1.0.0" in page
    (torch_needed,) = [requirement for requirement in extra if requirement.startswith("torch")]
    assert torch_needed == "torch>=2.11,<2.12"
    assert "| torch | 2.11, built for CUDA 13.0 |" in page
    assert "written and checked against signatures" in page
