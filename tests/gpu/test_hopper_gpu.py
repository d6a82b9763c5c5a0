"""The operations for Hopper GPUs on a Hopper GPU, against plain PyTorch on the CPU: `pytest -m gpu tests/gpu`.

flash_mla comes first: nothing of it has to be compiled. With GPU_TESTS=rehearse in the environment stand-ins take the
libraries' places, on the CPU: so the tests themselves are tried.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from batchinfer_kernels import reference, registry
from batchinfer_kernels.hopper import invariant as hopper_invariant
from batchinfer_kernels.hopper import libraries
from batchinfer_kernels.reference import fp8_pages
from batchinfer_kernels.reference import mla as reference_mla
from batchinfer_kernels.reference.block_scaled import BlockScaled, to_blocks
from batchinfer_kernels.reference.fp8 import ROW_BLOCK
from batchinfer_kernels.reference.mla import PagedKeys
from batchinfer_kernels.reference.places import in_order

# of the largest value; FP8: an intermediate value that falls on the other side of a step moves a row by a step
TOLERANCE = {"bfloat16": 2**-6, "fp8": 2**-4}
OPS = ("linear", "grouped_mlp", "masked_mlp", "mla_decode", "mla_decode_fp8")
hopper = SimpleNamespace(**{op: registry.bind(op, ["hopper", "triton", "reference"]) for op in OPS})
invariant = registry.bind("mla_decode", [registry.INVARIANT, "triton", "reference"])
pytestmark = pytest.mark.gpu
REHEARSES = os.environ.get("GPU_TESTS") == "rehearse"
DEVICE = torch.device("cpu" if REHEARSES else "cuda")


def needs(library, why_not):
    return pytest.mark.skipif(why_not is not None, reason=f"no {library} here: {why_not}")


if REHEARSES:
    from support.cuda_stand_ins import hopper_on_the_cpu

    hopper_on_the_cpu(pytest.MonkeyPatch())
    needs_deep_gemm, needs_flash_mla = needs("deep_gemm", None), needs("flash_mla", None)
    needs_own_cuts = needs("flash_mla", None)
else:
    needs_deep_gemm = needs("deep_gemm", libraries.why_not_deep_gemm())
    needs_flash_mla = needs("flash_mla", libraries.why_not_flash_mla())
    needs_own_cuts = needs("flash_mla", hopper_invariant.why_not())


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def gpu(value):
    if isinstance(value, BlockScaled):
        return BlockScaled(gpu(value.values), gpu(value.scales))
    return value.to(DEVICE)


def assert_close(y, expected, dtype):
    off, largest = (y.cpu().float() - expected.float()).abs().max(), expected.float().abs().max()
    assert off <= TOLERANCE[dtype] * largest, f"{off} of {largest}"


@needs_flash_mla
@pytest.mark.parametrize("num_queries", [1, 2])
@pytest.mark.parametrize("heads", [16, 128])
def test_decode_attention(heads, num_queries):
    pages, table = random(300, 64, 576), torch.randperm(300, generator=torch.Generator().manual_seed(0)).view(6, 50)
    lengths = torch.tensor([num_queries, 64, 65, 3000, 1000, 7])
    positions = (lengths[:, None] - num_queries + torch.arange(num_queries)).flatten()
    keys = PagedKeys(pages, table, lengths, positions)
    on_gpu = PagedKeys(*map(gpu, keys[:4]), schedule={})
    for layer in range(2):
        q = random(6 * num_queries, heads, 576, seed=layer + 1)
        y = hopper.mla_decode(gpu(q), on_gpu, latent_dim=512, scale=0.1352)
        expected = reference_mla.mla_decode(q, keys, latent_dim=512, scale=0.1352)
        assert_close(y, expected, "bfloat16")


@needs_flash_mla
def test_how_this_library_describes_its_cuts_is_known():
    """Otherwise the tests of requests in any company would only be left out."""
    if libraries.makes_own_metadata():
        assert hopper_invariant.why_not() is None


# the longer ones are cut into pieces
LENGTHS = {
    "whole": [1, 64, 65, 3000, 1000, 7, 3200, 128, 2000, 2999, 500, 640],
    "cut": [1, 8192, 8193, 20_000, 1000, 7, 12_000, 128, 16_385, 2999, 500, 640],
}


def paged(lengths):
    """Pages that requests share, as the tokens of prefixes are."""
    generator = torch.Generator().manual_seed(0)
    pages = random(600, 64, 576)
    return pages, torch.randint(600, (len(lengths), -(-max(lengths) // 64)), generator=generator)


@needs_own_cuts
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kind", LENGTHS)
def test_requests_have_their_bits_in_any_company(kind, heads):
    pages, table = paged(LENGTHS[kind])
    lengths = torch.tensor(LENGTHS[kind])
    q = random(12, heads, 576, seed=1)

    def attend(some):
        most_pages = -(-int(lengths[some].max()) // 64)  # where no request is cut nothing is
        keys = PagedKeys(*map(gpu, (pages, table[some, :most_pages], lengths[some], lengths[some] - 1)), schedule={})
        return invariant(gpu(q[some]), keys, latent_dim=512, scale=0.1352)

    among_all = attend(slice(0, 12))
    all_keys = PagedKeys(pages, table, lengths, lengths - 1)
    assert_close(among_all, reference_mla.mla_decode(q, all_keys, latent_dim=512, scale=0.1352), "bfloat16")
    for some in (slice(3, 4), slice(2, 9), slice(11, 12), slice(0, 6), slice(9, 12)):
        assert torch.equal(attend(some), among_all[some])


@needs_own_cuts
@pytest.mark.skipif(REHEARSES, reason="NO GPU: a graph has not been captured")
@pytest.mark.parametrize("kind", LENGTHS)
def test_requests_have_their_bits_in_a_graph_whose_lengths_change(kind):
    pages, table = paged(LENGTHS[kind])
    q, lengths = gpu(random(12, 128, 576, seed=1)), gpu(torch.full((12,), 3000))
    keys = PagedKeys(gpu(pages), gpu(table), lengths, lengths - 1)

    def attend():
        return invariant(q, keys._replace(positions_T=lengths - 1, schedule={}), latent_dim=512, scale=0.1352)

    attend()  # compares the cuts, once
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = attend()
    for changed in (LENGTHS[kind], [max(LENGTHS[kind]), *11 * [1]]):
        lengths.copy_(torch.tensor(changed))
        graph.replay()
        in_graph = y.clone()
        assert torch.equal(in_graph, attend())


@needs_flash_mla
@pytest.mark.parametrize("num_queries", [1, 2])
@pytest.mark.parametrize("heads", [64, 128])
def test_decode_attention_over_fp8_pages(heads, num_queries):
    wide = random(301 * 64, 576)
    wide[-64:] = torch.nan  # a page that no request has
    pages = fp8_pages.narrow(wide, 512).view(301, 64, 656)
    table = torch.randperm(300, generator=torch.Generator().manual_seed(0)).view(6, 50)
    table = torch.cat([table, torch.full((6, 14), 300)], dim=1)
    lengths = torch.tensor([num_queries, 64, 65, 3000, 1000, 7])
    positions = (lengths[:, None] - num_queries + torch.arange(num_queries)).flatten()
    keys = PagedKeys(pages, table, lengths, positions)
    on_gpu = PagedKeys(*map(gpu, keys[:4]), schedule={})
    for layer in range(2):
        q = random(6 * num_queries, heads, 576, seed=layer + 1)
        y = hopper.mla_decode_fp8(gpu(q), on_gpu, latent_dim=512, scale=0.1352)
        expected = fp8_pages.mla_decode_fp8(q, keys, latent_dim=512, scale=0.1352)
        assert_close(y, expected, "bfloat16")


@needs_deep_gemm
@pytest.mark.parametrize(("num_rows", "num_in", "num_out"), [(1, 128, 64), (77, 7168, 576), (300, 1536, 24576)])
def test_a_product_in_fp8(num_rows, num_in, num_out):
    x, weight = random(num_rows, num_in), to_blocks(random(num_out, num_in, seed=1))
    # rows are rounded alike, sums are in another order of float32
    assert_close(hopper.linear(gpu(x), gpu(weight)), reference.linear(x, weight), "bfloat16")


@needs_deep_gemm
@pytest.mark.parametrize("counts", [[3, 0, 130, 128, 1], [0, 0, 0, 0, 7], [129, 127, 256, 0, 0]])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_experts_of_both_layouts(dtype, counts):
    gate_up, down = random(5, 512, 1024, seed=1) / 32, random(5, 1024, 256, seed=2) / 16
    weights = (gate_up, down) if dtype == "bfloat16" else (to_blocks(gate_up), to_blocks(down))
    on_gpu, num_rows = tuple(map(gpu, weights)), torch.tensor(counts)
    x = random(sum(counts), 1024)
    expected = reference.grouped_mlp(x, num_rows, *weights)
    assert_close(in_order(hopper.grouped_mlp(gpu(x), gpu(num_rows), *on_gpu)), expected, dtype)
    values, scales = reference.quantize_fp8_block(x, ROW_BLOCK)
    received = in_order(hopper.grouped_mlp(gpu(values), gpu(num_rows), *on_gpu, scales=gpu(scales)))
    assert_close(received, reference.grouped_mlp(values, num_rows, *weights, scales=scales), dtype)

    blocks, is_row = random(5, 256, 1024, seed=3), torch.arange(256) < num_rows[:, None]
    blocks[is_row], blocks[~is_row] = x, torch.nan
    masked = hopper.masked_mlp(gpu(blocks), gpu(num_rows), *on_gpu, expected_rows=64)
    assert_close(masked.cpu()[is_row], expected, dtype)


@needs_deep_gemm
@pytest.mark.skipif(REHEARSES, reason="NO GPU: a graph has not been captured")
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_a_captured_graph_stays_good_when_counts_change(dtype):
    gate_up, down = random(4, 256, 512, seed=1) / 22, random(4, 512, 128, seed=2) / 11
    weights = (gate_up, down) if dtype == "bfloat16" else (to_blocks(gate_up), to_blocks(down))
    on_gpu, x = tuple(map(gpu, weights)), random(64, 512)
    rows, num_rows = gpu(x), gpu(torch.tensor([64, 0, 0, 0]))
    hopper.grouped_mlp(rows, num_rows, *on_gpu)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = in_order(hopper.grouped_mlp(rows, num_rows, *on_gpu))
    for counts in ([1, 2, 3, 58], [0, 60, 4, 0]):
        num_rows.copy_(torch.tensor(counts))
        graph.replay()
        assert_close(y, reference.grouped_mlp(x, torch.tensor(counts), *weights), dtype)
