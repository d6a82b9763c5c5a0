"""The bound on answers of models with FP8 weights: an engine that rounds is below it, one with a fault is above it."""

from __future__ import annotations

import pytest
import torch

from batchinfer.model.transformer import Transformer
from batchinfer_kernels.reference.fp8 import dequantize_fp8_rows, quantize_fp8_rows
from bench.large_checkpoint import write_checkpoint
from support.fp8_answers import Float64Model, Rounding, distances, given_by, spread_prompts
from support.published_shapes import GLM_FLASH

# every product has a depth of two groups of 128 or more, but those of latents and heads
WIDTHS = {"hidden_size": 256, "q_lora_rank": 256, "kv_lora_rank": 64, "moe_intermediate_size": 256, "v_head_dim": 64}
WIDTHS |= {"qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "intermediate_size": 512, "vocab_size": 1024}
COUNTS = {"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8") / "model"
    write_checkpoint(folder, GLM_FLASH | WIDTHS | COUNTS | {"max_position_embeddings": 512}, fp8=False)
    return folder


def load(folder):
    return Transformer.load(folder, dtype=torch.bfloat16, backend="reference", eight_bit=True)


@pytest.fixture(scope="module")
def plain(folder):
    return load(folder)


def found_by(model, plain):
    return distances(plain, given_by(model, spread_prompts(1024, (34, 25, 19)), decoded=3))


def test_an_engine_that_rounds_is_as_far_as_its_roundings_explain(plain):
    found, bound = found_by(plain, plain)
    print(found, bound)
    assert bound.divergence / 4 < found.divergence <= bound.divergence
    assert found.lost_score <= bound.lost_score


def one_scale(layers):
    """One of the 2 x 2 blocks of a projection."""
    layers[1].attention.out.weight.scales[0, 0] *= 2


def all_scales(layers):
    layers[2].mlp.shared.down.weight.scales.mul_(1.25)


def missing_group(layers):
    layers[1].attention.q_down.weight.scales[:, 1] = 0


def missing_group_of_an_expert(layers):
    layers[1].mlp.down_EDF.scales[3, :, 1] = 0


def swapped_experts(layers):
    for part in layers[1].mlp.gate_up_EFD.slots():
        part[[2, 5]] = part[[5, 2]]


def swapped_gates(layers):
    layers[2].mlp.router_ED[[2, 5]] = layers[2].mlp.router_ED[[5, 2]]


@pytest.mark.parametrize(
    "fault", [one_scale, all_scales, missing_group, missing_group_of_an_expert, swapped_experts, swapped_gates]
)
def test_a_fault_in_one_place_is_further_away(folder, plain, fault):
    model = load(folder)
    fault(model.weights.layers)
    found, bound = found_by(model, plain)
    print(found, bound)
    if fault is swapped_gates:
        assert found.lost_score > bound.lost_score
    else:
        assert found.divergence > bound.divergence


def test_errors_of_rounded_values_are_as_large_as_real_ones():
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    real = dequantize_fp8_rows(*quantize_fp8_rows(x.float()), torch.float32).double() - x
    assert (Rounding(1).fp8(x) - x).square().mean() == pytest.approx(float(real.square().mean()), rel=0.1)
    real = x.bfloat16().double() - x
    assert (Rounding(1).bfloat16(x) - x).square().mean() == pytest.approx(float(real.square().mean()), rel=0.1)
    assert torch.equal(Rounding(None).fp8(x), x)


def test_the_reference_is_the_engine_where_nothing_is_rounded(folder):
    """In float32: the formulas are the engine's."""
    model = Transformer.load(folder, dtype=torch.float32, backend="reference")
    given = given_by(model, spread_prompts(1024, (20,)), decoded=2)
    logits, own_choice, _ = Float64Model(model).run(given.prompts[0], given.chosen[0], Rounding(None))
    assert (logits - given.logits[0]).abs().max() < 1e-4 * logits.abs().max()
    assert all(torch.equal(own, taken) for own, taken in zip(own_choice, given.chosen[0], strict=True))
