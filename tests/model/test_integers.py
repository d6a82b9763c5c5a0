"""Integers of 4 bits as AutoAWQ, AutoGPTQ and AutoRound write them; such checkpoints equal their dequantised twins."""

from __future__ import annotations

import hashlib
import shutil

import pyarrow as pa
import pytest
import torch

from batchinfer.model.config import load_model_config
from batchinfer.model.integers import from_awq, from_gptq
from batchinfer.model.ops import Ops
from batchinfer.model.weight_loading import load_weights
from batchinfer.rank.load import BITS
from batchinfer.records import ModelError
from support.checkpoints import make_checkpoint, read_tensors, write_tensors
from support.jobs import answers, batchinfer, write_job, write_shard
from support.packed_weights import AUTOROUND, AWQ, GPTQ, ONES, awq_words, gptq_words, pack_with_zeros, words
from support.paths import RANDOM_MODEL
from support.tiers import first_in_make_test

SIZES = {"hidden_size": 64, "moe_intermediate_size": 96, "intermediate_size": 96, "q_lora_rank": 32, "kv_lora_rank": 32}
FORMS = {
    "awq": AWQ,
    "autoround as gptq": AUTOROUND,  # with scales of either sign
    "gptq": GPTQ,
    "gptq with zero points": GPTQ | {"sym": False},
    "gptq in no order": GPTQ | {"sym": False, "desc_act": True},
    "gptq's second format": GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
    "autoround with zero points": AUTOROUND | {"sym": False, "packing_format": "auto_round:gptqmodel"},
    "autoround as awq": AUTOROUND | {"sym": False, "packing_format": "auto_round:auto_awq"},
}

N, M, G = 32, 64, 2
OUT, IN, GROUP = torch.arange(N)[:, None], torch.arange(M), torch.arange(G)
VALUES_NM = (7 * OUT + 3 * IN + OUT * IN) % 16
ZEROS_NG = 1 + (OUT + 5 * GROUP) % 15
SCALE_NG = 0.5 ** (1 + (OUT + GROUP) % 3)
GROUP_M = IN * 5 % 2
EXACT = (VALUES_NM - ZEROS_NG.repeat_interleave(M // G, 1)) * SCALE_NG.repeat_interleave(M // G, 1)


def digest(*tensors):
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def test_awq_words_are_those_of_autoawq():
    """Digest: what autoawq 0.2.9 and auto-round 0.15 make of these integers; their dequantize_gemm gives EXACT."""
    values, zeros = awq_words(VALUES_NM.t()), awq_words(ZEROS_NG.t())
    assert digest(values, zeros) == "73287fed3d72cb56"
    found = from_awq(values, zeros, SCALE_NG.t().float())
    assert torch.equal(found.widened(torch.float32), EXACT)
    assert found.in_groups() is None  # integers less their zero points go from -15 to 15


@pytest.mark.parametrize("in_order", [True, False])
def test_gptq_words_are_those_of_autogptq(in_order):
    """Digest: what auto-gptq 0.7.1 makes of these integers; its QuantLinear of the unit matrix gives EXACT.

    In order, auto-round's "auto_round:auto_gptq" has the same digest.
    """
    values, zeros = gptq_words(VALUES_NM), words(ZEROS_NG.t()) - ONES
    assert digest(values, zeros) == "d1550dda15a3d27c"
    group_M = None if in_order else GROUP_M
    found = from_gptq(values, zeros, SCALE_NG.t().float(), zero_shift=1, group_M=group_M)
    exact = EXACT if in_order else (VALUES_NM - ZEROS_NG[:, GROUP_M]) * SCALE_NG[:, GROUP_M]
    assert torch.equal(found.widened(torch.float32), exact)


def test_a_zero_point_of_0_in_gptqs_first_format_borrows_from_the_next():
    zeros_NG = (ZEROS_NG + 3) % 16
    assert (zeros_NG == 0).any()
    scale = SCALE_NG.t().float()
    first = from_gptq(gptq_words(VALUES_NM), words(zeros_NG.t()) - ONES, scale, zero_shift=1)
    second = from_gptq(gptq_words(VALUES_NM), words(zeros_NG.t()), scale, zero_shift=0)
    assert torch.equal(first.widened(torch.float32), second.widened(torch.float32))


def twins(folder, form):
    """Folders of the packed checkpoint and of the same weights wide."""
    for part in ("packed", "wide"):
        make_checkpoint(folder / part, "v3", **SIZES)
    write_tensors(folder / "wide", pack_with_zeros(folder / "packed", FORMS[form]))
    return folder / "packed", folder / "wide"


@pytest.mark.parametrize("form", first_in_make_test(FORMS, 2))
def test_answers_and_their_log_probabilities_are_those_of_the_weights_stored_wide(tmp_path, form):
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 96, (length,), generator=generator).tolist() for length in (70, 5, 1, 33)]
    write_shard(tmp_path / "prompts" / "a.parquet", {"ids": pa.array(prompts, pa.list_(pa.int32()))})
    found = {}
    for folder in twins(tmp_path, form):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(RANDOM_MODEL / file, folder / file)
        job = write_job(
            tmp_path,
            input={"prompt": None, "token_ids": "ids"},
            model={"path": folder.name, "dtype": "bfloat16"},
            sampling={"max_tokens": 6, "logprobs": 2, "ignore_eos": True},
            output={"dir": f"run-{folder.name}"},
        )
        ended = batchinfer("run", job)
        assert ended.code == 0, ended.err
        found[folder.name] = answers(tmp_path / f"run-{folder.name}")
    assert found["packed"] == found["wide"]


@pytest.mark.parametrize("form", first_in_make_test(FORMS, 2))
def test_in_int4_experts_are_held_as_they_are_stored_where_they_can_be(tmp_path, form):
    packed, wide = twins(tmp_path, form)
    twin = read_tensors(wide)
    ops = Ops.select("reference", torch.bfloat16, **BITS["int4"])
    down = load_weights(packed, load_model_config(packed), dtype=torch.bfloat16, ops=ops).layers[1].mlp.down_EDF
    names = [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in range(len(down.values))]
    expected = torch.stack([twin[name] for name in names])
    error = ((down.plain() - expected).norm() / expected.norm()).item()
    assert (
        error < 2**-8 if form in ("gptq", "autoround as gptq") else error < 0.15
    )  # the scales' rounding; else to 4 bits once more


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    packed, _ = twins(tmp_path, "gptq in no order")
    tensors = read_tensors(packed)
    expert = "model.layers.1.mlp.experts.5.up_proj"

    def refused(changed):
        write_tensors(packed, {name: tensor for name, tensor in changed.items() if tensor is not None})
        with pytest.raises(ModelError) as error:
            load_weights(packed, load_model_config(packed), dtype=torch.float32)
        return str(error.value)

    assert f"1 missing: {expert}.g_idx" in refused(tensors | {f"{expert}.g_idx": None})
    beyond = torch.full_like(tensors[f"{expert}.g_idx"], 2)
    assert f"{expert}.g_idx is from 2 to 2, but there are 2 groups." in refused(tensors | {f"{expert}.g_idx": beyond})
    narrow = tensors[f"{expert}.qzeros"][:, :-1].contiguous()
    assert f"{expert}.qzeros is [2, 11] instead of [2, 12]" in refused(tensors | {f"{expert}.qzeros": narrow})
    floats = tensors[f"{expert}.qweight"].float()
    assert f"{expert}.qweight is F32 instead of I32." in refused(tensors | {f"{expert}.qweight": floats})


def test_biases_of_zeros_that_gptqs_writers_add_are_left_out(tmp_path):
    make_checkpoint(tmp_path, "qwen2", hidden_size=64, intermediate_size=96, num_attention_heads=8)
    pack_with_zeros(tmp_path, GPTQ)
    tensors = read_tensors(tmp_path)
    of_weights = {name: f"{name.removesuffix('.qweight')}.bias" for name in tensors if name.endswith(".qweight")}
    spare = {bias: torch.zeros(tensors[name].shape[1]).half() for name, bias in of_weights.items()}
    added = sorted(spare.keys() - tensors.keys())
    assert [name.rpartition("layers.0.")[2] for name in added[:4]] == [
        *("mlp.down_proj.bias", "mlp.gate_proj.bias", "mlp.up_proj.bias"),
        "self_attn.o_proj.bias",
    ]
    write_tensors(tmp_path, spare | tensors)
    layer = load_weights(tmp_path, load_model_config(tmp_path), dtype=torch.float32).layers[0]
    assert layer.mlp.gate_up.bias is layer.mlp.down.bias is layer.attention.out.bias is None
    assert layer.attention.qkv.bias is not None
    write_tensors(tmp_path, spare | tensors | {added[1]: spare[added[1]] + 1})
    with pytest.raises(ModelError, match=r"layers.0.mlp.gate_proj.bias is a bias that the model does not have"):
        load_weights(tmp_path, load_model_config(tmp_path), dtype=torch.float32)
