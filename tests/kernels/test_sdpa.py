"""Prefill attention through PyTorch's own: close to the reference, wherever a prompt is cut; only by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from batchinfer.model.ops import Ops
from batchinfer.model.transformer import Transformer
from batchinfer.records import ModelError
from batchinfer_kernels import registry, sdpa
from batchinfer_kernels.reference import mla as reference_mla
from batchinfer_kernels.reference.gqa import GqaForm, gqa_prefill
from batchinfer_kernels.reference.mla import PagedKeys
from support.paged_steps import PagedRequests
from support.paths import RANDOM_MODEL

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}  # of the largest value


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("keys_at_once", [2**30, 1])
def test_chunks_anywhere_in_their_prompts_attend_as_in_the_reference(monkeypatch, dtype, keys_at_once):
    monkeypatch.setattr(sdpa, "_MAX_KEY_BYTES", keys_at_once)  # all heads at once, or one at a time
    # a whole prompt, the end of one, nothing, one token at a page's border
    num_tokens, context = torch.tensor([70, 30, 0, 1]), torch.tensor([70, 150, 64, 65])
    pages, table = (
        random(12, 64, 24).to(dtype),
        torch.randperm(12, generator=torch.Generator().manual_seed(1)).view(4, 3),
    )
    for request, tokens in enumerate(context.tolist()):  # memory behind a prompt's last token must not be read
        pages[table[request, (tokens - 1) // 64], (tokens - 1) % 64 + 1 :] = torch.nan
    positions = torch.cat([torch.arange(end - count, end) for count, end in zip(num_tokens, context, strict=True)])
    q, kv_b = random(101, 3, 16 + 8, seed=2).to(dtype), random(3, 16 + 11, 16, seed=3).to(dtype) / 4
    arguments, options = (q, PagedKeys(pages, table, context, positions), kv_b, num_tokens), {"v_dim": 11, "scale": 0.2}
    y, expected = sdpa.mla_prefill(*arguments, **options), reference_mla.mla_prefill(*arguments, **options)
    assert y.dtype == dtype
    assert (y - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_grouped_heads_attend_as_in_the_reference(dtype):
    num_tokens, context = torch.tensor([70, 30, 0, 1]), torch.tensor([70, 150, 64, 65])
    pages, table = random(12, 64, 2 * 2 * 24).to(dtype), torch.randperm(12).view(4, 3)
    positions = torch.cat([torch.arange(end - count, end) for count, end in zip(num_tokens, context, strict=True)])
    q, form = random(101, 6, 24, seed=2).to(dtype), GqaForm(2, 0.2)
    arguments = q, PagedKeys(pages, table, context, positions), num_tokens, form
    y, expected = sdpa.gqa_prefill(*arguments), gqa_prefill(*arguments)
    assert y.dtype == dtype
    assert (y - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    for other in (form._replace(window=9), form._replace(sinks_H=random(6))):
        with pytest.raises(RuntimeError, match="heads have a window or sinks"):
            sdpa.gqa_prefill(*arguments[:3], other)


def test_a_model_prefills_with_it():
    prompts = [torch.arange(70) % 96, torch.arange(5)]
    plain = Transformer.load(RANDOM_MODEL, dtype=torch.float32, backend="reference")
    ops = replace(Ops.select("reference", torch.float32), mla_prefill=registry.bind("mla_prefill", ["sdpa"]))
    model = Transformer(plain.config, plain.weights, [layer.mlp.dispatcher for layer in plain.layers[1:]], ops)
    logits = []
    for one in (model, plain):
        requests = PagedRequests(one, prompts, max_new_tokens=0)
        requests.prefill([1, 0], (64, 7))
        logits.append(torch.cat([requests.all_logits(i) for i in (0, 1)]))
    assert torch.allclose(*logits, atol=1e-4)


def test_it_is_for_gpus_and_taken_only_by_name():
    rows = {row.candidate: row for row in registry.explain(device="cuda") if row.op == "mla_prefill"}
    assert not rows["sdpa"].chosen
    assert "where its prompt was cut, so only by name" in rows["sdpa"].reason
    chosen = Ops.select("sdpa", torch.bfloat16, device="cuda")
    assert chosen.mla_prefill.implementation is sdpa.mla_prefill
    assert chosen.mla_decode.name == Ops.select("auto", torch.bfloat16, device="cuda").mla_decode.name
    assert "sdpa" in chosen.names()
    with pytest.raises(ModelError, match="sdpa cannot run here: it is for GPUs, not for cpu tensors"):
        Ops.select("sdpa", torch.bfloat16)
