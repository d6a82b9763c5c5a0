"""Tensors under the names and in the forms of others: stacked experts, FP8 with one scale, Mistral's own files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from batchinfer.model.config import load_model_config
from batchinfer.model.headers import read_headers
from batchinfer.model.ops import Ops
from batchinfer.model.stored_names import Part, TensorInfo, own_names
from batchinfer.model.tensor_names import check_tensors
from batchinfer.model.transformer import Transformer
from batchinfer.model.weight_loading import load_weights
from batchinfer.records import ModelError
from batchinfer.run.fingerprint import config_digest
from support.checkpoints import edit_config, make_checkpoint, read_tensors, write_tensors
from support.mistral_files import LARGE_3, one_by_one
from support.paged_steps import PagedRequests

WIDE = {"hidden_size": 160, "moe_intermediate_size": 130}  # more than one block of 128
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
EXPERT = "model.layers.1.mlp.experts.3"


def info(*shape: int, dtype: str = "F32", name: str = "stored") -> TensorInfo:
    return TensorInfo(Path("a.safetensors"), name, shape, dtype)


def to_fp8(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (tensor / scale).to(torch.float8_e4m3fn)


def store_per_tensor(folder: Path) -> dict[str, torch.Tensor]:
    """Store a checkpoint as Mistral Small 4 is published; return all tensors multiplied out."""
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in read_tensors(folder).items():
        is_stacked = tensor.dim() == 3
        if not is_stacked and not name.endswith("_proj.weight"):
            stored[name] = plain[name] = tensor
            continue
        scale = tensor.abs().amax(dim=(1, 2) if is_stacked else (0, 1), keepdim=is_stacked) / 448
        stored[name] = to_fp8(tensor, scale)
        plain[name] = stored[name].float() * scale
        stored[f"{name}_scale_inv"] = scale
        inputs = f"{name}_activation_scale" if is_stacked else name.replace(".weight", ".activation_scale")
        stored[inputs] = torch.ones(len(tensor)) if is_stacked else torch.tensor(1.0)
    write_tensors(folder, stored)
    edit_config(folder, quantization_config=STATIC)
    return plain


def store_in_blocks(folder: Path) -> dict[str, torch.Tensor]:
    """Store a checkpoint in compressed-tensors' blocks, each expert apart; return all tensors multiplied out."""
    stored, plain = {}, {}
    for name, tensor in one_by_one(read_tensors(folder)).items():
        stored[name] = plain[name] = tensor
        if ".experts." in name:
            grid = torch.rand([-(-size // 128) for size in tensor.shape]) / 100 + 0.01
            scale = grid.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[1]]
            stored[name] = to_fp8(tensor, scale)
            plain[name], stored[f"{name}_scale"] = stored[name].float() * scale, grid
    write_tensors(folder, stored)
    edit_config(folder, quantization_config=LARGE_3["quantization_config"])
    return plain


LLM_COMPRESSOR = ("FP8_DYNAMIC", "FP8", "W8A8")


def store_by_llm_compressor(
    folder: Path, scheme: str, scale_dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Store a checkpoint by one of llm-compressor's schemes; return it multiplied out.

    Args:
        scale_dtype: llm-compressor takes the dtype of the weights before they were rounded.
    """
    stored, plain = {}, {}
    for name, tensor in one_by_one(read_tensors(folder)).items():
        stored[name] = plain[name] = tensor
        if name.endswith("_proj.weight"):
            largest = tensor.abs().amax()[None] if scheme == "FP8" else tensor.abs().amax(1, keepdim=True)
            scale = (largest / (120 if scheme == "W8A8" else 440)).to(scale_dtype)
            values = tensor / scale.float()
            stored[f"{name}_scale"] = scale
            stored[name] = values.round().to(torch.int8) if scheme == "W8A8" else values.to(torch.float8_e4m3fn)
            plain[name] = stored[name].float() * scale.float()
            if scheme == "FP8":
                stored[name.replace(".weight", ".input_scale")] = torch.ones(1)
    write_tensors(folder, stored)
    edit_config(folder, quantization_config=llm_compressor_config(scheme))
    return plain


def llm_compressor_config(scheme: str) -> dict[str, Any]:
    kind = "int" if scheme == "W8A8" else "float"
    rounded = {"num_bits": 8, "type": kind, "symmetric": True, "group_size": None, "block_structure": None}
    is_fixed = scheme == "FP8"
    weights = rounded | {"strategy": "tensor" if is_fixed else "channel", "dynamic": False, "observer": "minmax"}
    inputs = rounded | {"strategy": "tensor" if is_fixed else "token", "dynamic": not is_fixed}
    group = {"weights": weights, "input_activations": inputs, "output_activations": None, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group},
        "format": f"{kind}-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def logits_of(folder: Path, **options: Any) -> list[torch.Tensor]:
    requests = PagedRequests(Transformer.load(folder, **options), [torch.arange(70)], max_new_tokens=3)
    requests.prefill([0], (1000,))
    requests.decode_greedily([0], 3)
    return requests.all_logits(0)


@pytest.mark.parametrize("store", [store_per_tensor, store_in_blocks])
def test_weights_in_fp8_compute_what_they_are_multiplied_out(tmp_path, store):
    for name in ("stored", "plain"):
        make_checkpoint(tmp_path / name, "mistral4", **WIDE)
    write_tensors(tmp_path / "plain", store(tmp_path / "stored"))
    found, expected = (logits_of(tmp_path / name, dtype=torch.float32) for name in ("stored", "plain"))
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    # a rank that multiplies in FP8 holds the values as they are stored
    config, ops = load_model_config(tmp_path / "stored"), Ops.select("reference", torch.bfloat16, eight_bit=True)
    held = load_weights(tmp_path / "stored", config, dtype=torch.bfloat16, ops=ops).layers[1].mlp.down_EDF
    stored = read_tensors(tmp_path / "stored")
    whole = "model.layers.1.mlp.experts.down_proj"
    values = stored[whole][3] if whole in stored else stored[f"{EXPERT}.down_proj.weight"]
    assert torch.equal(held.values[3, :, :130].view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("scheme", LLM_COMPRESSOR)
@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe", "v3"])
def test_weights_of_llm_compressor_in_8_bits_compute_what_they_are_multiplied_out(tmp_path, name, scheme):
    for folder in ("stored", "plain"):
        make_checkpoint(tmp_path / folder, name)
    scale_dtype = torch.float16 if name == "v3" else torch.bfloat16
    write_tensors(tmp_path / "plain", store_by_llm_compressor(tmp_path / "stored", scheme, scale_dtype))
    ways: list[dict[str, Any]] = [{"dtype": torch.float32}]
    if scheme != "FP8":  # weights with one scale are held as stored in FP8, the plain ones are rounded
        ways.append({"dtype": torch.bfloat16, "eight_bit": True, "backend": "reference"})
    for way in ways:
        found, expected = (logits_of(tmp_path / folder, **way) for folder in ("stored", "plain"))
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


def test_what_does_not_fit_a_scheme_of_llm_compressor_is_refused(tmp_path):
    make_checkpoint(tmp_path, "qwen2")
    store_by_llm_compressor(tmp_path, "FP8_DYNAMIC")
    tensors, name = read_tensors(tmp_path), "model.layers.0.self_attn.o_proj.weight"

    def refused():
        with pytest.raises(ModelError) as error:
            check_tensors(read_headers(tmp_path), load_model_config(tmp_path))
        return str(error.value)

    write_tensors(tmp_path, tensors | {f"{name}_scale": torch.ones(1, 1)})
    assert re.search(rf"{name}_scale_inv is F32 \[1, 1\] instead of .*\[32, 1\]", refused())
    write_tensors(tmp_path, tensors | {name: torch.zeros(32, 48, dtype=torch.int8)})
    assert f"{name} is I8; supported are" in refused()
    write_tensors(tmp_path, tensors)
    edit_config(tmp_path, quantization_config=llm_compressor_config("W8A8"))
    assert "is FP8, but config.json has no quantization_config that says so" in refused()


def test_a_scale_of_another_shape_than_one_or_the_blocks_is_refused(tmp_path):
    make_checkpoint(tmp_path, "mistral4", **WIDE)
    store_per_tensor(tmp_path)
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    write_tensors(tmp_path, read_tensors(tmp_path) | {name: torch.ones(3)})
    with pytest.raises(ModelError, match=f"{name} is F32 \\[3\\] instead of"):
        check_tensors(read_headers(tmp_path), load_model_config(tmp_path))
    in_blocks = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    edit_config(tmp_path, quantization_config=STATIC | in_blocks)
    with pytest.raises(ModelError, match=r"unknown: .*activation_scale"):
        check_tensors(read_headers(tmp_path), load_model_config(tmp_path))


def test_stacked_experts_are_parts_of_one_tensor():
    layer = "model.layers.3.mlp.experts"
    named = own_names({f"{layer}.gate_up_proj": info(2, 6, 5), f"{layer}.down_proj": info(2, 5, 3)})
    assert {name.removeprefix(layer): (one.part, one.shape) for name, one in named.items()} == {
        ".0.gate_proj.weight": (Part(0, 0, 3), (3, 5)),
        ".0.up_proj.weight": (Part(0, 3, 6), (3, 5)),
        ".1.gate_proj.weight": (Part(1, 0, 3), (3, 5)),
        ".1.up_proj.weight": (Part(1, 3, 6), (3, 5)),
        ".0.down_proj.weight": (Part(0, 0, 5), (5, 3)),
        ".1.down_proj.weight": (Part(1, 0, 5), (5, 3)),
    }
    assert sum(one.num_bytes for one in named.values()) == 4 * (60 + 30)


@pytest.mark.parametrize(
    ("rows", "scale_rows", "parts"),
    [
        (512, 4, [Part(0, 0, 2), Part(0, 2, 4)]),  # two blocks each
        (200, 1, [Part(0, 0, 1), Part(0, 0, 1)]),  # one scale for both
        (200, 2, None),  # the first block has rows of both
    ],
)
def test_scales_of_stacked_experts_go_with_their_blocks(rows, scale_rows, parts):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    named = own_names({name: info(1, rows, 256, dtype="F8_E4M3"), f"{name}_scale_inv": info(1, scale_rows, 2)})
    scales = [one.part for key, one in named.items() if key.endswith(".weight_scale_inv")]
    assert scales == (parts or [])
    assert (f"{name}_scale_inv" in named) == (parts is None)


def test_alternating_experts_are_parts_with_every_other_row_or_column():
    layer = "model.layers.3.mlp.experts."
    shapes = {"gate_up_proj_bias": (1, 6), "gate_up_proj_blocks": (1, 6, 2, 16), "down_proj": (1, 3, 5)}
    named = own_names({layer + name: info(*shape) for name, shape in shapes.items()})
    assert {name.removeprefix(layer): (one.part, one.shape) for name, one in named.items()} == {
        "0.gate_proj.bias": (Part(0, 0, 6, 2), (3,)),
        "0.up_proj.bias": (Part(0, 1, 6, 2), (3,)),
        "0.gate_proj.weight_blocks": (Part(0, 0, 6, 2), (3, 2, 16)),
        "0.up_proj.weight_blocks": (Part(0, 1, 6, 2), (3, 2, 16)),
        "0.down_proj.weight": (Part(0, 0, 5, 1, True), (5, 3)),
    }
    odd = {f"{layer}gate_up_proj_bias": info(6), f"{layer}down_proj": info(5, 3)}
    assert own_names(odd) == odd


@pytest.mark.parametrize("shape", [(2, 7, 5), (6, 5), (5000, 2, 0)])
def test_what_is_no_stack_of_experts_keeps_its_name(shape):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert list(own_names({name: info(*shape)})) == [name]


def test_names_of_mistral_large_3():
    names = {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "layers.60.attention.wkv_a_with_mqa.weight": "model.layers.60.self_attn.kv_a_proj_with_mqa.weight",
        "layers.0.feed_forward.w2.weight": "model.layers.0.mlp.down_proj.weight",
        "layers.3.experts.127.w3.weight": "model.layers.3.mlp.experts.127.up_proj.weight",
        "layers.3.experts.127.w3.qscale_weight": "model.layers.3.mlp.experts.127.up_proj.weight_scale_inv",
        "layers.3.experts.127.w3.qscale_act": "model.layers.3.mlp.experts.127.up_proj.activation_scale",
        "layers.3.gate.weight": "model.layers.3.mlp.gate.weight",
        "layers.3.router.weight": "layers.3.router.weight",
    }
    found = own_names({name: info(1, name=name) for name in names})
    assert {one.stored_name: name for name, one in found.items()} == names


def test_the_identity_of_a_model_has_its_params_and_the_growth_of_its_queries(tmp_path):
    for name, model in (("params", "mistral-params"), ("config", "mistral4")):
        make_checkpoint(tmp_path / name, model)
    digests = {config_digest(tmp_path / name) for name in ("params", "config")}
    params = tmp_path / "params" / "params.json"
    params.write_text(params.read_text().replace('"beta": 0.4', '"beta": 0.5'))
    digests.add(config_digest(tmp_path / "params"))
    rope = {"rope_parameters": {"llama_4_scaling_beta": 0.5}}
    edit_config(tmp_path / "config", **rope)
    digests.add(config_digest(tmp_path / "config"))
    assert len(digests) == 4
