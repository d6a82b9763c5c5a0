"""Activations, gates, biases, norms with weights in float32, weights in FP4: C++ and Triton against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels import reference
from batchinfer_kernels.cpu import build, packed
from batchinfer_kernels.cpu import ops as cpu
from batchinfer_kernels.reference.experts import ExpertBiases
from batchinfer_kernels.reference.fp4 import VALUES, Fp4Scaled
from batchinfer_kernels.reference.gating import GateRule
from batchinfer_kernels.reference.pointwise import GEGLU_TANH, SWIGLU, Activation
from batchinfer_kernels.triton import ops as triton
from support.triton_device import DEVICE, REASON

GPT_OSS = Activation(limit=7.0, alpha=1.702, shift=1.0)
FORMS = [GPT_OSS, Activation(limit=2.0), GEGLU_TANH, SWIGLU]
RULE = GateRule("topk_softmax", topk=4, num_groups=1, topk_groups=1, normalize=True, scale=1.0)
needs_interpreter = pytest.mark.skipif(REASON is not None or DEVICE.type != "cpu", reason="no interpreter of Triton")
needs_cpp = pytest.mark.skipif(build.why_not() is not None, reason="no C++ operations on this machine")
CANDIDATES = [
    pytest.param(cpu, torch.float32, marks=needs_cpp, id="cpu-float32"),
    pytest.param(cpu, torch.bfloat16, marks=needs_cpp, id="cpu-bfloat16"),
    pytest.param(triton, torch.bfloat16, marks=needs_interpreter, id="triton"),
]


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(result, expected):
    assert result.dtype is expected.dtype
    most = 2e-6 if result.dtype is torch.float32 else 2**-6
    assert (result.double() - expected.double()).abs().max() <= most * expected.double().abs().max()


@pytest.mark.parametrize(("ops", "dtype"), CANDIDATES)
@pytest.mark.parametrize("activation", FORMS)
def test_activations_follow_the_reference_also_at_their_limits(ops, dtype, activation):
    gate, up = 6 * random(9, 70, dtype=dtype), 6 * random(9, 70, seed=1, dtype=dtype)
    gate[0, :6] = torch.tensor([7.0, 100, -100, 2, torch.inf, 0])
    up[0, :6] = torch.tensor([-7.0, 100, -100, 3, 1, -torch.inf])
    expected = reference.silu_mul(gate, up, activation)
    finite = expected.isfinite()
    y = ops.silu_mul(gate, up, activation)
    assert torch.equal(y.isfinite(), finite)
    assert_near(y[finite], expected[finite])
    gate[3, 3], up[4, 4] = torch.nan, torch.nan
    y = ops.silu_mul(gate, up, activation)
    assert y[3, 3].isnan()
    assert y[4, 4].isnan()


@pytest.mark.parametrize(("ops", "dtype"), CANDIDATES)
@pytest.mark.parametrize("width", [16, 70])
def test_a_norm_with_a_weight_in_float32_rounds_once(ops, dtype, width):
    x, weight = 3 * random(9, width, dtype=dtype), 1 + random(width, seed=1) / 4
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight
    most = 2**-22 if dtype is torch.float32 else 2**-8 * 1.001  # of each value; twice that with two roundings
    for y in (ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)):
        assert y.dtype is dtype
        assert ((y.double() - exact).abs() <= most * exact.abs()).all()
    assert torch.equal(ops.rms_norm(x[3:4], weight, 1e-6), ops.rms_norm(x, weight, 1e-6)[3:4])


@pytest.mark.parametrize(("ops", "dtype"), CANDIDATES)
@pytest.mark.parametrize("has_biases", [True, False])
def test_experts_have_biases_and_other_activations_in_both_layouts(ops, dtype, has_biases):
    counts, hidden, width = torch.tensor([3, 0, 17, 1]), 48, 40
    x = random(21, hidden, dtype=dtype)
    gate_up = random(4, 2 * width, hidden, seed=1, dtype=dtype) / hidden**0.5
    down = random(4, hidden, width, seed=2, dtype=dtype) / width**0.5
    biases = ExpertBiases(random(4, 2 * width, seed=3, dtype=dtype), random(4, hidden, seed=4, dtype=dtype))
    options = {"activation": GPT_OSS, "biases": biases if has_biases else None}
    y = ops.grouped_mlp(x, counts, gate_up, down, **options)
    assert_near(y, reference.grouped_mlp(x, counts, gate_up, down, **options))
    blocks = torch.full((4, 17, hidden), torch.nan, dtype=dtype)
    is_row = torch.arange(17) < counts[:, None]
    blocks[is_row] = x
    assert torch.equal(ops.masked_mlp(blocks, counts.int(), gate_up, down, **options)[is_row], y)
    alone = ops.grouped_mlp(x[5:6], torch.tensor([0, 0, 1, 0]), gate_up, down, **options)
    assert torch.equal(alone[0], y[5])


@pytest.mark.parametrize(
    "ops", [pytest.param(cpu, marks=needs_cpp, id="cpu"), pytest.param(triton, marks=needs_interpreter, id="triton")]
)
@pytest.mark.parametrize("num_experts", [4, 32, 40, 128])
def test_the_gate_of_gpt_oss_is_that_of_the_reference(ops, num_experts):
    logits, bias = 5 * random(37, num_experts), random(num_experts, seed=1)
    logits[0], logits[1, ::3], logits[2, 1] = 1.0, 9.0, -torch.inf
    for given in (bias, None):
        ids, weights = ops.gate(logits, given, RULE)
        expected_ids, expected = reference.gate(logits, given, RULE)
        assert torch.equal(ids, expected_ids)
        assert torch.allclose(weights, expected, rtol=1e-6)
    assert ops.gate(torch.zeros(1, num_experts), None, RULE)[0].tolist() == [[0, 1, 2, 3]]
    logits[3, 2], logits[4, 0] = torch.nan, torch.inf
    weights = ops.gate(logits, None, RULE)[1]
    assert weights[3:5].isnan().all()
    assert weights[5:].isfinite().all()


def fp4(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(256, (*shape[:-1], shape[-1] // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 126, (*shape[:-1], shape[-1] // 32), generator=generator, dtype=torch.uint8)
    return Fp4Scaled(values, scales)


def in_tiles(weight, *, is_paired=False):
    weights = weight if weight.values.dim() == 3 else Fp4Scaled(weight.values[None], weight.scales[None])
    count, columns, num_bytes = weights.values.shape
    tiles = packed.Packed.empty(count, columns, 2 * num_bytes, kind=packed.WeightKind.FP4, is_paired=is_paired)
    for slot in range(count):
        tiles.put(slot, weights[slot])
    return tiles


def test_fp4_is_taken_apart_by_hand():
    held = fp4(3, 64)
    held.scales[0] = torch.tensor([127, 130])
    held.values[0, :8] = torch.arange(8, dtype=torch.uint8) * 34 + 16  # all sixteen values, the lower half first
    plain = held.plain()
    for row in range(3):
        for k in range(64):
            byte = int(held.values[row, k // 2])
            value = VALUES[byte >> 4 if k % 2 else byte & 15]
            assert plain[row, k].item() == value * 2.0 ** (int(held.scales[row, k // 32]) - 127)
    held.scales[1, 1] = 255
    assert held.plain()[1, 32:].isnan().all()
    part = held[0]
    assert torch.equal(part.plain(), plain[0])
    one = Fp4Scaled(held.values[:1], held.scales[:1])
    x = random(5, 64, dtype=torch.bfloat16)
    assert torch.equal(reference.linear(x, one), reference.linear(x, plain[:1]))


@needs_cpp
@pytest.mark.parametrize(("columns", "depth"), [(64, 32), (70, 96), (131, 416), (5, 1056)])
def test_products_with_fp4_have_the_bits_of_those_with_its_plain_values(columns, depth, threads):
    weight, x = fp4(columns, depth), random(101, depth, dtype=torch.bfloat16)
    tiles, plain = in_tiles(weight), packed.pack(weight.plain())
    assert tiles.data.shape[1] * 3 < plain.data.shape[1]
    for num_threads, rows in [
        (1, slice(0, 1)),
        (2, slice(1, 6)),
        (2, slice(0, 101)),
        (1, slice(3, 90)),
        (2, slice(0, 0)),
    ]:
        threads(num_threads)
        assert torch.equal(cpu.linear(x[rows], tiles), cpu.linear(x[rows], plain))


@needs_cpp
def test_experts_in_fp4_have_the_bits_of_plain_ones():
    counts, hidden, width = torch.tensor([3, 0, 40, 1]), 96, 64
    x = random(44, hidden, dtype=torch.bfloat16)
    gate_up, down = fp4(4, 2 * width, hidden, seed=1), fp4(4, hidden, width, seed=2)
    biases = ExpertBiases(random(4, 2 * width, dtype=torch.bfloat16), random(4, hidden, dtype=torch.bfloat16))
    options = {"activation": GPT_OSS, "biases": biases}
    tiles = in_tiles(gate_up, is_paired=True), in_tiles(down)
    y = cpu.grouped_mlp(x, counts, *tiles, **options)
    assert torch.equal(y, cpu.grouped_mlp(x, counts, gate_up.plain(), down.plain(), **options))
    assert_near(y, reference.grouped_mlp(x, counts, gate_up, down, **options))
    order = torch.arange(44).flip(0)
    assert torch.equal(cpu.grouped_mlp(x[order], counts, *tiles, order, **options), y)
