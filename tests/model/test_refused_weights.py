"""Checkpoints that are refused: tensors that are missing, unknown, damaged or of another form than config.json says."""

from __future__ import annotations

import json
import re

import pytest
import torch

from batchinfer.model.checkpoint import open_checkpoint
from batchinfer.records import ModelError
from support.checkpoints import edit_config, make_checkpoint, read_tensors, split_into_shards, write_tensors
from support.packed_weights import int4_config, pack_int4
from support.small_weights import FP8, IN_BFLOAT16, RAGGED, WHOLE_GROUPS, change, load, quantise


def test_missing_and_unknown_tensors_are_listed(tmp_path):
    make_checkpoint(tmp_path, "v3")
    tensors = read_tensors(tmp_path)
    for expert in range(8):
        for part in ("gate", "up"):
            del tensors[f"model.layers.2.mlp.experts.{expert}.{part}_proj.weight"]
    tensors["model.layers.0.extra.weight"] = torch.ones(1)
    write_tensors(tmp_path, tensors)
    with pytest.raises(ModelError) as error:
        load(tmp_path)
    message = str(error.value)
    assert "16 missing: model.layers.2.mlp.experts.0.gate_proj.weight, " in message
    assert " and 6 more" in message
    assert "1 unknown: model.layers.0.extra.weight" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__norm__weight": torch.ones(31)}, r"model\.norm\.weight is \[31\] instead of \[32\]"),
        ({"model__norm__weight": torch.ones(32, dtype=torch.int64)}, r"model\.norm\.weight is I64"),
        ({"model__norm__weight": None}, r"1 missing: model\.norm\.weight"),
    ],
)
def test_wrong_shapes_and_formats(tmp_path, changes, words):
    make_checkpoint(tmp_path, "v3")
    change(tmp_path, **changes)
    with pytest.raises(ModelError, match=words):
        load(tmp_path)


O_PROJ = "model__layers__0__self_attn__o_proj__weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{O_PROJ}_scale_inv": None}, "is FP8, but there is no"),
        ({f"{O_PROJ}_scale_inv": torch.ones(1, 2)}, r"F32 \[1, 2\] instead of F32 or F16 or BF16 or F8_E8M0 \[2, 1\]"),
        ({f"{O_PROJ}_scale_inv": torch.ones(2, 1).double()}, r"F64 \[2, 1\] instead of F32 or F16 or BF16 or F8_E8M0"),
        ({O_PROJ: None}, r"1 missing: model\.layers\.0\.self_attn\.o_proj\.weight"),
        ({O_PROJ: torch.ones(144, 16)}, "is a scale, but"),
    ],
)
def test_fp8_weights_and_scales_that_do_not_fit(tmp_path, changes, words):
    make_checkpoint(tmp_path, "v3", **RAGGED)
    quantise(tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(ModelError, match=words):
        load(tmp_path)


@pytest.mark.parametrize("options", [{}, IN_BFLOAT16], ids=["widened", "held"])
@pytest.mark.parametrize(
    ("store", "suffix", "value"),
    [
        *((quantise, "_scale_inv", value) for value in (float("nan"), float("inf"), -1.0)),
        *((pack_int4, "_scale", value) for value in (float("nan"), float("inf"), -float("inf"))),
    ],
)
def test_scales_that_cannot_be_are_refused(tmp_path, store, suffix, value, options):
    make_checkpoint(tmp_path, "v3", **WHOLE_GROUPS)
    store(tmp_path)
    name = f"model.layers.1.mlp.experts.3.up_proj.weight{suffix}"
    scale = read_tensors(tmp_path)[name]
    scale[0, -1] = value
    change(tmp_path, **{name: scale})
    with pytest.raises(ModelError, match=rf"{name} is from .* a scale is finite"):
        load(tmp_path, **options)


def test_a_scale_in_e8m0_that_is_no_number_is_refused(tmp_path):
    make_checkpoint(tmp_path, "v3", **RAGGED)
    quantise(tmp_path)
    nothing = torch.full((2, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    change(tmp_path, **{f"{O_PROJ}_scale_inv": nothing})
    with pytest.raises(ModelError, match="is from nan to nan"):
        load(tmp_path)


GATE = "model.layers.2.mlp.experts.7.gate_proj.weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"_packed": None}, f"1 missing: {GATE}; 2 unknown: {GATE}_scale, {GATE}_shape"),
        ({"_scale": None}, f"1 missing: {GATE}_scale"),
        ({"_shape": None}, f"1 missing: {GATE}_shape"),
        ({"": torch.ones(32, 64)}, f"1 unknown: {GATE}."),
        ({"_g_idx": torch.ones(64, dtype=torch.int32)}, f"1 unknown: {GATE}_g_idx"),
        ({"_zero_point": torch.ones(4, 2, dtype=torch.int32)}, f"1 unknown: {GATE}_zero_point"),
        ({"_packed": torch.ones(32, 9, dtype=torch.int32)}, f"{GATE}_packed is [32, 9] instead of [32, 8]"),
        ({"_packed": torch.ones(32, 8)}, f"{GATE}_packed is F32 instead of I32"),
        ({"_scale": torch.ones(32, 1)}, f"{GATE}_scale is [32, 1] instead of [32, 2]"),
        ({"_scale": torch.ones(32, 2, dtype=torch.float64)}, f"{GATE}_scale is F64 instead of BF16 or F16 or F32"),
        ({"_shape": torch.tensor([32, 64, 1])}, f"{GATE}_shape is [3] instead of [2]"),
        ({"_shape": torch.tensor([32.0, 64.0])}, f"{GATE}_shape is F32 instead of I64 or I32"),
        ({"_shape": torch.tensor([64, 32])}, f"{GATE}_shape says [64, 32], but the weight that is packed is [32, 64]"),
    ],
)
def test_packed_weights_that_do_not_fit(tmp_path, changes, words):
    make_checkpoint(tmp_path, "v3", **WHOLE_GROUPS)
    pack_int4(tmp_path)
    change(tmp_path, **{f"{GATE}{suffix}": tensor for suffix, tensor in changes.items()})
    with pytest.raises(ModelError, match=re.escape(words)) as error:
        load(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_packed_weights_and_a_config_that_says_otherwise(tmp_path):
    make_checkpoint(tmp_path, "v3", **WHOLE_GROUPS)
    pack_int4(tmp_path)
    for group, words in ((64, "group_size 64 does not divide its 32 columns"), (16, "[64, 1] instead of [64, 2]")):
        edit_config(tmp_path, quantization_config=int4_config(group_size=group))
        with pytest.raises(ModelError, match=re.escape(words)):
            load(tmp_path)
    for config in (None, FP8):
        edit_config(tmp_path, quantization_config=config)
        with pytest.raises(ModelError, match="is packed, but the quantization_config of"):
            load(tmp_path)


def test_fp8_weights_without_a_quantization_config(tmp_path):
    make_checkpoint(tmp_path, "v3", **RAGGED)
    quantise(tmp_path)
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(ModelError, match=r"is FP8, but config\.json has no quantization_config"):
        load(tmp_path)


def test_pickle_formats_are_not_opened(tmp_path):
    make_checkpoint(tmp_path, "v3")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin but no \*\.safetensors; only safetensors is read"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="only safetensors is read"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_damaged_file_is_named(tmp_path, keep):
    make_checkpoint(tmp_path, "v3")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda index: index["weight_map"].update({"a": "model-9.safetensors"}), r"names model-9\.safetensors, which"),
        (lambda index: index["weight_map"].update({"a": "../x.safetensors"}), "not to a .safetensors file beside it"),
        (lambda index: index["weight_map"].update({"a": 3}), "not to a .safetensors file beside it"),
        (
            lambda index: index["weight_map"].update({"a": "model-00001-of-00002.safetensors"}),
            "holds a, but it does not",
        ),
        (lambda index: index.pop("weight_map"), "weight_map must be an object"),
    ],
)
def test_an_index_that_does_not_fit_its_shards(tmp_path, edit, words):
    make_checkpoint(tmp_path, "v3")
    split_into_shards(tmp_path, 2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=words):
        open_checkpoint(tmp_path)


def test_a_tensor_that_an_index_gives_to_two_files_is_refused(tmp_path):
    make_checkpoint(tmp_path, "v3")
    split_into_shards(tmp_path, 2)
    path = tmp_path / "model.safetensors.index.json"
    name, file = next(iter(json.loads(path.read_text())["weight_map"].items()))
    path.write_text(path.read_text().replace(f'"{name}"', f'"{name}": "other.safetensors", "{name}"', 1))
    with pytest.raises(ModelError, match=f"{name} is there twice, as 'other.safetensors' and as '{file}'"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_refused_without_an_index(tmp_path):
    make_checkpoint(tmp_path, "v3")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(data)
    (tmp_path / "model.safetensors").rename(tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match=r"is in a\.safetensors and in b\.safetensors"):
        load(tmp_path)
