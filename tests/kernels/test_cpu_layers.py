"""Layers in single C++ calls against the same layers operation by operation: the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from batchinfer.model import transformer
from batchinfer.model.attention_kinds import kind_of
from batchinfer.model.fused.layers import FusedAttention, FusedMoe
from batchinfer.model.fused.stack import FusedDecode
from batchinfer.model.mla import Attention
from batchinfer.model.moe import MoeMlp
from batchinfer.model.schedules import Schedule
from batchinfer.model.transformer import Transformer
from batchinfer_kernels.cpu import ops, packed
from batchinfer_kernels.reference.pointwise import GEGLU_TANH
from support.checkpoints import GROUPED_MODELS, MODELS, SPARSE_MODELS, make_checkpoint
from support.paged_steps import PagedRequests

BIASED_MOE = {"v2-groups"}  # biases need the operations one by one
NO_EXPERTS = {"youtu", "youtu-yarn"}
DTYPES = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "fp8": {"dtype": torch.bfloat16, "eight_bit": True},
    "int4": {"dtype": torch.bfloat16, "eight_bit": True, "four_bit": True},
}

pytestmark = pytest.mark.usefixtures("cpp")


def prefilled(model, *, chunks=(1000,)):
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 96, (length,), generator=generator) for length in (5, 64, 1, 131)]
    requests = PagedRequests(model, prompts, max_new_tokens=5, seed=3)
    requests.prefill(range(len(prompts)), chunks)
    return requests


def logits_and_pages(model, *, chunks=(1000,)):
    requests = prefilled(model, chunks=chunks)
    requests.decode_greedily(range(4), 5)
    return [requests.all_logits(i) for i in range(4)], requests.pages


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"v3-odd-sizes", *SPARSE_MODELS, *GROUPED_MODELS}))
def test_fused_layers_have_the_bits_of_composed_ones(name, dtype, tmp_path, monkeypatch):
    make_checkpoint(tmp_path, name)
    fused = Transformer.load(tmp_path, **DTYPES[dtype], backend="cpu")
    last = fused.layers[-1]
    assert isinstance(last.attention, FusedAttention)
    assert isinstance(last.mlp, FusedMoe) == (name not in BIASED_MOE | NO_EXPERTS)
    plain = {"build": lambda *given: Attention(*given[:-1])}  # without the layer's number
    monkeypatch.setattr(transformer, "kind_of", lambda config: replace(kind_of(config), **plain))
    monkeypatch.setattr(transformer, "moe_of", MoeMlp)
    composed = Transformer.load(tmp_path, **DTYPES[dtype], backend="cpu")

    for (got, got_pages), (expected, expected_pages) in [
        (logits_and_pages(fused), logits_and_pages(composed)),
        (logits_and_pages(fused, chunks=(50, 7, 64)), logits_and_pages(composed, chunks=(50, 7, 64))),
    ]:
        assert torch.equal(got_pages, expected_pages)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert fused.expert_rows.tolist() == composed.expert_rows.tolist()
    assert bool(fused.expert_rows.any()) == (name not in NO_EXPERTS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"v3-odd-sizes", *SPARSE_MODELS, *GROUPED_MODELS}))
def test_a_decode_step_in_one_call_has_the_bits_of_one_layer_by_layer(name, dtype, tmp_path):
    make_checkpoint(tmp_path, name)
    model = Transformer.load(tmp_path, **DTYPES[dtype], backend="cpu")
    fused = FusedDecode.of(model)
    assert (fused is not None) == (name not in BIASED_MOE)
    if fused is None:
        return
    requests = prefilled(model)
    for i, token in enumerate([9, 1, 2, 3]):
        requests.tokens[i].append(token)
    step, pages, rows_before = requests.decode_input([2, 0, 3]), requests.pages.clone(), model.expert_rows
    expected = model.forward(step, requests.pages)
    rows_L = model.expert_rows - rows_before
    found = model.forward(step, pages, Schedule(decode=fused))
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.expert_counts, expected.expert_counts)
    assert torch.equal(pages, requests.pages)
    assert (model.expert_rows - rows_before).tolist() == (2 * rows_L).tolist()
    assert bool(rows_L.any()) == (name not in NO_EXPERTS)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_queries_grow_with_their_position_in_one_call_and_operation_by_operation(backend, tmp_path):
    theirs = make_checkpoint(tmp_path, "mistral4")
    model = Transformer.load(tmp_path, dtype=torch.float32, backend=backend)
    assert isinstance(model.layers[0].attention, FusedAttention) == (backend == "cpu")
    prompt = torch.arange(70)  # almost three windows of 24 positions
    requests = PagedRequests(model, [prompt], max_new_tokens=4)
    requests.prefill([0], (1000,))
    requests.decode_greedily([0], 4)
    with torch.no_grad():
        expected = theirs(torch.tensor([requests.tokens[0]])).logits[0]
        theirs.config.rope_parameters = theirs.config.rope_parameters | {"llama_4_scaling_beta": 0.0}
        constant = theirs(torch.tensor([requests.tokens[0]])).logits[0]
    found = requests.all_logits(0)
    assert (found - expected).abs().max() < 1e-4
    assert (found[:24] - constant[:24]).abs().max() < 1e-4
    assert (found[24:] - constant[24:]).abs().amax(-1).min() > 1e-3


def test_biases_need_the_operations_one_by_one(tmp_path):
    make_checkpoint(tmp_path, "v3", attention_bias=True)
    model = Transformer.load(tmp_path, dtype=torch.bfloat16, backend="cpu")
    assert isinstance(model.layers[-1].attention, Attention)
    assert isinstance(model.layers[-1].mlp, FusedMoe)
    assert FusedDecode.of(model) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_widths_run_in_cpp_too(dtype, tmp_path):
    make_checkpoint(tmp_path, "v3-odd-sizes")
    model = Transformer.load(tmp_path, **DTYPES[dtype])
    assert model.kernels.startswith("cpu-")
    assert FusedDecode.of(model) is None
    assert all(logits.isfinite().all() for logits in logits_and_pages(model)[0])


@pytest.mark.parametrize("is_int8", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("hidden", [64, 33])
def test_an_mlp_is_an_expert_alone(hidden, is_int8, threads):
    generator = torch.Generator().manual_seed(0)
    shapes = (70, hidden), (48, hidden), (hidden, 24), (70, hidden)
    x, gate_up, down, stream = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    weights = packed.pack(gate_up, is_int8=is_int8, is_paired=True), packed.pack(down, is_int8=is_int8)
    threads(1)
    expected = ops.grouped_mlp(x, torch.tensor([70]), *weights)
    threads(2)
    assert torch.equal(ops.mlp(x, *weights), expected)
    assert torch.equal(ops.mlp(x[3:5], *weights), expected[3:5])
    assert torch.equal(ops.mlp(x, *weights, residual=stream), stream + expected)
    of_expert = ops.grouped_mlp(x, torch.tensor([70]), *weights, activation=GEGLU_TANH)
    assert not torch.equal(of_expert, expected)
    assert torch.equal(ops.mlp(x, *weights, activation=GEGLU_TANH), of_expert)
