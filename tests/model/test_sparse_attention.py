"""Models with an indexer: dense where there is nothing to choose, the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from batchinfer.model.config import load_model_config
from batchinfer.model.row_computations import plain_computations
from batchinfer.model.transformer import Transformer
from batchinfer.records import ModelError
from support.checkpoints import SPARSE_MODELS, make_checkpoint, read_tensors, write_tensors
from support.sparse_models import logits_of, prompts_of, without_indexer

DTYPES = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "fp8": {"dtype": torch.bfloat16, "eight_bit": True},
}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["v32", "glm-dsa"])
def test_at_most_topk_keys_are_attended_to_as_in_a_dense_model_to_the_bit(tmp_path, name, dtype, backend, request):
    if backend == "cpu":
        request.getfixturevalue("cpp")
    make_checkpoint(tmp_path, name, index_topk=150)
    prompts = prompts_of(1, 140, 64, 30)
    sparse = logits_of(Transformer.load(tmp_path, backend=backend, **DTYPES[dtype]), prompts, 10, (50, 100))
    without_indexer(tmp_path)
    dense = logits_of(Transformer.load(tmp_path, backend=backend, **DTYPES[dtype]), prompts, 10, (70, 1000))
    for ours, theirs in zip(sparse, dense, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPARSE_MODELS)
def test_a_row_has_the_same_bits_in_any_company_and_cut(tmp_path, name, dtype, threads):
    make_checkpoint(tmp_path, name)
    model = Transformer.load(tmp_path, backend="cpu", **DTYPES[dtype])
    prompts = prompts_of(5, 64, 1, 131, 30, 160, 16, 17)
    threads(2)
    together = logits_of(model, prompts, 8, (7, 64, 30, 100), order=[3, 1, 0, 2, 7, 6, 5, 4])
    threads(1)
    for prompt, of_prompt in zip(prompts, together, strict=True):
        assert torch.equal(logits_of(model, [prompt], 8)[0], of_prompt)
        assert of_prompt.isfinite().all()


@pytest.mark.parametrize("name", ["wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_an_indexer_with_a_number_that_is_none_is_refused(tmp_path, name, value):
    """Other keys would be chosen, and the answers would look sound."""
    make_checkpoint(tmp_path, "v32")
    tensors = read_tensors(tmp_path)
    damaged = f"model.layers.1.self_attn.indexer.{name}"
    tensors[damaged].view(-1)[-1] = value
    write_tensors(tmp_path, tensors)
    with pytest.raises(ModelError, match=f"{damaged} holds a value that is not finite"):
        Transformer.load(tmp_path, dtype=torch.bfloat16)


def test_bfloat16_and_8_bits_are_close_to_float32(tmp_path):
    # one layer: further on a key that is chosen instead of one as good makes all the difference of a random model
    make_checkpoint(tmp_path, "v32", num_hidden_layers=1, first_k_dense_replace=1)
    prompts = prompts_of(150)
    exact = logits_of(Transformer.load(tmp_path, dtype=torch.float32), prompts, 1)[0]
    for dtype, most in (("bfloat16", 0.03), ("fp8", 0.06)):
        close = logits_of(Transformer.load(tmp_path, **DTYPES[dtype]), prompts, 1)[0]
        errors = (close[:150] - exact[:150]).norm(dim=-1) / exact[:150].norm(dim=-1)
        assert errors.median() < most


def test_a_page_has_room_for_the_index_keys(tmp_path):
    make_checkpoint(tmp_path, "v32")
    config = load_model_config(tmp_path)
    assert config.attention.row_width == config.attention.latent_dim + 16
    assert config.kv_bytes_per_token(2) == 3 * (16 + 8 + 16) * 2
    assert Transformer.load(tmp_path, dtype=torch.float32).new_pages(5).shape == (3, 5, 64, 40)


def test_a_checkpoint_without_the_tensors_of_an_indexer_is_refused(tmp_path):
    make_checkpoint(tmp_path, "glm-dsa-shared")
    tensors = read_tensors(tmp_path)
    assert "model.layers.1.self_attn.indexer.wk.weight" not in tensors
    write_tensors(
        tmp_path, {name: value for name, value in tensors.items() if "layers.2.self_attn.indexer" not in name}
    )
    with pytest.raises(ModelError, match=r"5 missing: model\.layers\.2\.self_attn\.indexer\.wq_b\.weight"):
        Transformer.load(tmp_path, dtype=torch.float32)


@pytest.mark.usefixtures("cpp")
def test_nothing_of_it_is_left_to_plain_pytorch(tmp_path):
    make_checkpoint(tmp_path, "v32")
    model = Transformer.load(tmp_path, dtype=torch.bfloat16, backend="cpu")
    assert model.ops.has_fixed_sums
    assert list(plain_computations(model)) == []
