"""The layer for multi-token prediction: which checkpoints have it, and its guesses in C++ and in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.model.checkpoint import open_checkpoint
from batchinfer.model.config import load_model_config
from batchinfer.model.fused.stack import FusedDecode
from batchinfer.model.mtp import DraftInput
from batchinfer.model.sampling import SamplingRows
from batchinfer.model.tensor_names import check_tensors, mtp_tensors, why_no_mtp
from batchinfer.model.transformer import Transformer
from batchinfer_kernels.cpu import build
from support.checkpoints import edit_config, make_checkpoint, read_tensors, write_tensors

DTYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "fp8": {"dtype": torch.bfloat16, "eight_bit": True},
}


def make_with_layer(folder, name="v3", **changes):
    """Make a random checkpoint with a random layer for multi-token prediction."""
    make_checkpoint(folder, name, **changes)
    edit_config(folder, num_nextn_predict_layers=1)
    config, generator = load_model_config(folder), torch.Generator().manual_seed(5)
    tensors = read_tensors(folder)
    for tensor_name, shape in mtp_tensors(config):
        values = torch.randn(shape, generator=generator)
        is_vector = len(shape) == 1
        tensors[tensor_name] = 1 + 0.2 * values if is_vector else values * 1.2 / shape[-1] ** 0.5
    write_tensors(folder, tensors)
    return config


def why(folder):
    config = load_model_config(folder)
    checkpoint = open_checkpoint(folder, config.carrier)
    check_tensors(checkpoint, config)  # whatever the layer is like, the model can be used
    return why_no_mtp(checkpoint, config)


def test_a_whole_layer_is_found_and_loaded_where_it_is_asked_for(tmp_path):
    config = make_with_layer(tmp_path)
    assert why(tmp_path) is None
    assert Transformer.load(tmp_path, dtype=torch.float32).mtp is None
    told = []
    model = Transformer.load(tmp_path, dtype=torch.float32, mtp=True, on_read=lambda *sizes: told.append(sizes))
    assert model.mtp is not None
    assert len(model.layers) == config.num_hidden_layers
    assert told[-1][0] == told[-1][1] == sum(one.nbytes for one in read_tensors(tmp_path).values())


def test_a_layer_that_is_not_there_or_not_whole_is_told(tmp_path):
    make_with_layer(tmp_path)
    tensors = read_tensors(tmp_path)
    without = {name: one for name, one in tensors.items() if name != "model.layers.3.mlp.experts.5.up_proj.weight"}
    write_tensors(tmp_path, without)
    assert why(tmp_path) == "the checkpoint has no model.layers.3.mlp.experts.5.up_proj.weight"
    write_tensors(tmp_path, tensors | {"model.layers.3.eh_proj.weight": torch.zeros(32, 32)})
    assert why(tmp_path) == "model.layers.3.eh_proj.weight is [32, 32] instead of [32, 64]"
    write_tensors(tmp_path, tensors | {"model.layers.3.hnorm.weight": torch.zeros(32, dtype=torch.int32)})
    assert "model.layers.3.hnorm.weight is I32" in why(tmp_path)
    edit_config(tmp_path, num_nextn_predict_layers=0)
    write_tensors(tmp_path, {name: one for name, one in tensors.items() if "layers.3." not in name})
    assert why(tmp_path) == "config.json names no layer for multi-token prediction"


def draft_input(model: Transformer, *, temperature: float, seed: int = 0) -> DraftInput:
    """Three guesses for two requests with four and two states, which begin at places 70 and 3 of their texts."""
    generator = torch.Generator().manual_seed(seed)
    counts, starts, guesses = [4, 2], [70, 3], 3
    places = torch.cat([*(torch.arange(count) for count in counts), *(torch.tensor(counts) + i for i in range(2))])
    of_row = torch.tensor([0] * 4 + [1] * 2 + [0, 1] * 2)
    pages = torch.tensor([[5, 1], [2, 7]])[of_row]
    states = torch.randn(6, model.config.hidden_size, generator=generator).to(model.dtype)
    shares = np.array([temperature, temperature / 2])
    keys = np.array([11, 12], dtype=np.uint64)
    return DraftInput(
        states=states,
        tokens=torch.randint(0, 96, (6,), generator=generator),
        last_rows=torch.tensor([3, 5]),
        positions=places + torch.tensor(starts)[of_row],
        places=places,
        slots=pages[:, 0] * 64 + places,
        page_table=pages,
        sampling=SamplingRows(shares, np.array([0, 40]), np.array([1.0, 0.9]), np.zeros(2), keys, np.array([-1, -1])),
        num_new=np.array([3, 9]),
        num_guesses=guesses,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["v3", "v3-groups", "v3-yarn", "v3-wide", "glm", "kimi-k2"])
def test_guesses_in_one_call_are_those_of_one_operation_after_the_other(tmp_path, name, dtype, temperature):
    if build.why_not() is not None:
        pytest.skip("no C++ operations here")
    make_with_layer(tmp_path, name)
    model = Transformer.load(tmp_path, **DTYPES[dtype], mtp=True)
    fused = FusedDecode.of(model)
    assert fused is not None
    assert fused.has_mtp
    given = draft_input(model, temperature=temperature)
    pages = torch.zeros(8, 64, model.config.attention.latent_dim, dtype=model.dtype)
    expected_pages = pages.clone()
    expected = model.mtp(model, given, expected_pages)
    assert torch.equal(fused.draft(model, given, pages), expected)
    assert torch.equal(pages, expected_pages)
    assert expected.shape == (3, 2)


@pytest.mark.parametrize("name", ["v3-odd-sizes", "v2-groups", "youtu"])
def test_layers_that_are_not_one_call_draft_operation_by_operation(tmp_path, name):
    config = make_with_layer(tmp_path, name)
    model = Transformer.load(tmp_path, dtype=torch.float32, mtp=True)
    fused = FusedDecode.of(model)
    assert fused is None or not fused.has_mtp
    pages = torch.zeros(8, 64, config.attention.latent_dim)
    guesses = model.mtp(model, draft_input(model, temperature=0.0), pages)
    assert guesses.shape == (3, 2)
    # a later guess goes by the ones before it, and by their keys
    assert pages[5, :6].abs().sum(-1).gt(0).all()
    assert not pages[5, 6:].any()
