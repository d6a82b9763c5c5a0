"""Models with an indexer on the operations in Triton: dense where there is nothing to choose, near what is exact."""

from __future__ import annotations

import pytest
import torch

from batchinfer.model.transformer import Transformer
from batchinfer_kernels import registry
from batchinfer_kernels.triton import probe
from support.checkpoints import make_checkpoint
from support.sparse_models import logits_of, prompts_of, without_indexer
from support.triton_device import DEVICE, needs_triton

pytestmark = needs_triton
DENSE_LAYERS = {"num_hidden_layers": 2, "first_k_dense_replace": 2}  # the interpreter is slow
BF16 = {"dtype": torch.bfloat16, "backend": "triton", "device": DEVICE}


@pytest.mark.all  # make test: logits, below
@pytest.mark.parametrize(
    "name", ["v32", pytest.param("glm-dsa", marks=pytest.mark.slow), pytest.param("v32-yarn", marks=pytest.mark.slow)]
)
def test_at_most_topk_keys_are_attended_to_as_in_a_dense_model_to_the_bit(tmp_path, name):
    make_checkpoint(tmp_path, name, index_topk=26, **DENSE_LAYERS)
    prompts = prompts_of(1, 24)
    # the second one sees a key more than are chosen in its last step
    together = logits_of(Transformer.load(tmp_path, **BF16), prompts, 3, (20, 50))
    without_indexer(tmp_path)
    dense = logits_of(Transformer.load(tmp_path, **BF16), prompts, 3, (50, 10))
    assert torch.equal(together[0], dense[0])
    assert torch.equal(together[1][:26], dense[1][:26])
    assert not torch.equal(together[1][26], dense[1][26])


@pytest.mark.all  # make test: tests/kernels/test_triton_sparse.py
@pytest.mark.parametrize(
    ("name", "changes", "length"),
    [
        ("glm-dsa", DENSE_LAYERS | {"index_topk": 6}, 20),
        pytest.param("glm-dsa-shared", {}, 70, marks=pytest.mark.slow),
        pytest.param("v32", {}, 70, marks=pytest.mark.slow),
    ],
)
def test_a_row_has_the_same_bits_in_any_company_and_cut(tmp_path, name, changes, length):
    make_checkpoint(tmp_path, name, **changes)
    model = Transformer.load(tmp_path, **BF16)
    prompts = prompts_of(4, length, 7)
    before = registry.num_fallbacks()
    together = logits_of(model, prompts, 2, (7, 30, 64), order=[2, 0, 1])
    assert registry.num_fallbacks() == before, "Triton takes all of it"
    alone = logits_of(model, [prompts[1]], 2)
    assert torch.equal(alone[0], together[1])
    assert all(logits.isfinite().all() for logits in together)


@pytest.mark.parametrize("name", ["v32", pytest.param("glm-dsa", marks=pytest.mark.slow)])
def test_logits_are_near_those_in_float32(tmp_path, name):
    # one layer: further on a key that is chosen instead of one as good makes all the difference of a random model
    make_checkpoint(tmp_path, name, num_hidden_layers=1, first_k_dense_replace=1)
    prompts = prompts_of(40)
    exact = logits_of(Transformer.load(tmp_path, dtype=torch.float32), prompts, 1)[0][:40]
    for options in (BF16, {"dtype": torch.bfloat16, "backend": "reference"}):
        close = logits_of(Transformer.load(tmp_path, **options), prompts, 1)[0][:40]
        assert ((close - exact).norm(dim=-1) / exact.norm(dim=-1)).median() < 0.03


@pytest.mark.skipif(not probe.interprets(), reason="Triton is not interpreted: it runs on the GPU here")
def test_a_graph_could_hold_the_choice_of_keys(tmp_path):
    make_checkpoint(tmp_path, "v32")
    assert not Transformer.load(tmp_path, **BF16).ops.chooses_on_host
    assert Transformer.load(tmp_path, dtype=torch.bfloat16, backend="reference").ops.chooses_on_host
