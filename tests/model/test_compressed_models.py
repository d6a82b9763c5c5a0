"""Models with a window and compressed entries against transformers, and the bits of a request's rows in any steps.

Sizes are such that everything counts: chosen entries are fewer than there are, windows end, prompts end inside entries.
"""

from dataclasses import replace

import pytest
import torch

from batchinfer.model.transformer import Transformer
from batchinfer.records import ModelError
from support.compressed_models import KINDS, published_tensors, random_model, write_compressed
from support.paged_steps import PagedRequests

TOLERANCE = 3e-5


@pytest.fixture(scope="module", params=list(KINDS))
def models(request, tmp_path_factory):
    changes = KINDS[request.param]
    theirs = random_model(**changes)
    folder = write_compressed(tmp_path_factory.mktemp(request.param), published_tensors(theirs), **changes)
    return theirs, Transformer.load(folder, dtype=torch.float32)


def prompt(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 96, (count,), generator=torch.Generator().manual_seed(1000 * seed + count))


def wanted(theirs, tokens):
    with torch.no_grad():
        return theirs(torch.tensor([tokens]), use_cache=False).logits[0]


def computed(model, prompts, chunks, num_new=0):
    requests = PagedRequests(model, prompts, max_new_tokens=num_new)
    requests.prefill(range(len(prompts)), chunks)
    if num_new:
        requests.decode_greedily(range(len(prompts)), num_new)
    return requests


def test_every_position_is_as_in_transformers(models):
    theirs, model = models
    prompts = [prompt(count) for count in (1, 3, 5, 127, 131, 300)]
    requests = computed(model, prompts, (300,), num_new=6)
    for number in range(len(prompts)):
        ours = requests.all_logits(number)
        assert (ours - wanted(theirs, requests.tokens[number])).abs().max() < TOLERANCE


def test_bits_are_those_of_the_request_alone_in_one_chunk(models):
    _, model = models
    prompts = [prompt(count, 1) for count in (2, 70, 150, 263)]
    alone = [computed(model, [one], (263,), num_new=5).all_logits(0) for one in prompts]
    for chunks in ((1, 40, 7), (64,), (5, 3, 130)):
        requests = computed(model, prompts, chunks, num_new=5)
        assert all(torch.equal(requests.all_logits(number), alone[number]) for number in range(4))


def test_old_values_of_memory_reach_no_result(models):
    _, model = models
    prompts = [prompt(count, 2) for count in (9, 140)]
    clean, used = (PagedRequests(model, prompts, max_new_tokens=3) for _ in range(2))
    for layer in used.pages:
        for tensor in (layer.window, *layer.entries, *layer.waiting):
            tensor.fill_(torch.nan)
    for requests in (clean, used):
        requests.prefill(range(2), (50,))
        requests.decode_greedily(range(2), 3)
    assert all(torch.equal(clean.all_logits(number), used.all_logits(number)) for number in range(2))


def test_a_prompt_of_not_finite_values_gives_no_numbers(models):
    _, model = models
    requests = PagedRequests(model, [prompt(20, 3)], max_new_tokens=1)
    embedding = model.weights.embedding
    token = requests.tokens[0][5]
    kept = embedding[token].clone()
    embedding[token] = torch.nan
    try:
        requests.prefill(range(1), (7,))
    finally:
        embedding[token] = kept
    assert requests.all_logits(0)[5:].isnan().all()


def test_the_last_layer_finishes_the_wanted_rows_alone(models):
    _, model = models
    whole = computed(model, [prompt(150, 4), prompt(7, 4)], (150,))
    some = PagedRequests(model, [prompt(150, 4), prompt(7, 4)], max_new_tokens=0)
    step = some.prefill_input([0, 1], {0: 150, 1: 7})
    logits = model.forward(replace(step, logit_rows=torch.tensor([149, 131, 156])), some.pages).logits
    assert torch.equal(
        logits, torch.stack([whole.all_logits(0)[149], whole.all_logits(0)[131], whole.all_logits(1)[6]])
    )
    nothing = torch.tensor([], dtype=torch.int64)
    again = PagedRequests(model, [prompt(150, 4), prompt(7, 4)], max_new_tokens=0)
    assert model.forward(replace(step, logit_rows=nothing), again.pages).logits.shape == (0, 96)
    assert all(torch.equal(one.window, other.window) for one, other in zip(some.pages, again.pages, strict=True))


CHANGES = {
    "window": {"sliding_window": 127},
    "larger-window": {"sliding_window": 129},
    "topk": {"index_topk": 8},
    "lower-topk": {"index_topk": 6},
    "theta": {"rope_theta": 10100},
    "compressed-theta": {"compress_rope_theta": 200000},
    "clamp": {"swiglu_limit": 0.5},
    "no-clamp": {"swiglu_limit": 1e9},
    "rounds": {"hc_sinkhorn_iters": 19},
    "scale": {"routed_scaling_factor": 1.6},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_differs_in_one_value_gives_other_logits(tmp_path, name):
    tensors = published_tensors(random_model())
    logits = []
    for changes in ({}, CHANGES[name]):
        folder = write_compressed(tmp_path / str(len(logits)), tensors, **changes)
        logits.append(computed(Transformer.load(folder, dtype=torch.float32), [prompt(140)], (140,)).all_logits(0))
    assert (logits[0] - logits[1]).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("end", "value"),
    [("attn_sink", 0), ("attn_sink", -1e30), ("ape", 0), ("gate.tid2eid", 7), ("gate.bias", 0), ("hc_ffn_base", 0)],
)
def test_each_small_tensor_counts(tmp_path, end, value):
    tensors = published_tensors(random_model())
    logits = []
    for one in (tensors, {name: torch.full_like(t, value) if name.endswith(end) else t for name, t in tensors.items()}):
        folder = write_compressed(tmp_path / str(len(logits)), one)
        logits.append(computed(Transformer.load(folder, dtype=torch.float32), [prompt(140)], (140,)).all_logits(0))
    assert (logits[0] - logits[1]).abs().max() > 10 * TOLERANCE


def test_layers_that_choose_experts_by_scores_give_other_logits_than_hash_layers(tmp_path):
    tensors = published_tensors(random_model())
    scored = {name: tensor for name, tensor in tensors.items() if not name.endswith("tid2eid")}
    scored |= {f"layers.{layer}.ffn.gate.bias": torch.zeros(8) for layer in range(2)}
    logits = []
    for own, changes in ((tensors, {}), (scored, {"num_hash_layers": 0})):
        folder = write_compressed(tmp_path / str(len(logits)), own, **changes)
        logits.append(computed(Transformer.load(folder, dtype=torch.float32), [prompt(140)], (140,)).all_logits(0))
    assert (logits[0] - logits[1]).abs().max() > 10 * TOLERANCE


def test_a_table_of_experts_that_are_not_there_is_refused(tmp_path):
    tensors = published_tensors(random_model())
    tensors["layers.1.ffn.gate.tid2eid"][5, 1] = 8
    folder = write_compressed(tmp_path, tensors)
    with pytest.raises(ModelError, match=r"tid2eid is from 0 to 8, but there are 8 experts"):
        Transformer.load(folder, dtype=torch.float32)
