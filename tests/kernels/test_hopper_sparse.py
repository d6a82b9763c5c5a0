"""Sparse attention by DeepSeek's libraries for Hopper GPUs, against stand-ins with their signatures."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from batchinfer.model.config import load_model_config
from batchinfer.model.ops import Ops
from batchinfer.model.transformer import Transformer, local_dispatcher
from batchinfer.model.weight_loading import load_weights
from batchinfer_kernels import reference, registry
from batchinfer_kernels.hopper import sparse
from batchinfer_kernels.reference.sparse import NO_SLOT, IndexedKeys, IndexQueries
from support import hopper_stand_ins as stand_ins
from support.checkpoints import make_checkpoint
from support.hopper_cases import DEEP_GEMM, SPARSE_FLASH_MLA, close, with_reference
from support.paged_steps import PagedRequests
from support.random_tensors import random


@pytest.fixture
def gpu(monkeypatch, install):
    """Tensors here count as those of a GPU."""
    monkeypatch.setattr(sparse, "is_on_gpu", lambda *tensors: True)
    return install


def index_case(heads=64, width=128):
    """Chunks of three prompts, some queries of which see fewer than 100 keys; garbage behind the last tokens."""
    num_tokens, kv_tokens = torch.tensor([5, 40, 3]), torch.tensor([300, 120, 64])
    pages = random(9, 64, 16 + width)[..., 16:]
    table = torch.tensor([[4, 0, 7, 2, 8], [1, 5, 6, 6, 6], [3, 6, 6, 6, 6]])
    pages[8, 300 - 256 :], pages[5, 120 - 64 :], pages[6] = torch.nan, torch.inf, torch.nan
    requests = torch.repeat_interleave(num_tokens)
    positions = torch.cat([torch.arange(stop - count, stop) for count, stop in zip(num_tokens, kv_tokens, strict=True)])
    angles = random(48, 32, seed=3).float()
    weights = random(48, heads, seed=2).float()
    queries = IndexQueries(random(48, heads, width, seed=1), weights, angles.cos(), angles.sin(), False)
    return queries, IndexedKeys(pages, table, requests, positions, kv_tokens, {})


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("library", DEEP_GEMM)
def test_keys_are_chosen_by_their_scores_in_fp8(gpu, library, heads):
    gpu(DEEP_GEMM[library]())
    queries, keys = index_case(heads)
    chosen = sparse.choose_keys(queries, keys, topk=100, scale=128**-0.5)
    q8, q_scales = reference.hadamard_fp8(reference.rotated_queries(queries).flatten(0, 1))
    q8, q_scales = q8.view(48, heads, 128), q_scales.view(48, heads, 1)
    is_near = keys.positions_T < 99
    assert is_near.sum() == 19 + 3
    assert (chosen[is_near] == NO_SLOT).all()
    in_bfloat16 = reference.choose_keys(queries, keys, topk=100, scale=128**-0.5)
    for row in (~is_near).nonzero()[:, 0].tolist():
        places = torch.arange(int(keys.positions_T[row]) + 1)
        slots = keys.page_table_BP[keys.requests_T[row], places // 64] * 64 + places % 64
        k8, k_scales = reference.hadamard_fp8(keys.pages.reshape(-1, 128), slots)
        products = (q8[row].float() * q_scales[row]) @ (k8.float() * k_scales[:, None]).T
        scores = queries.weights_TH[row].double() @ products.relu().double()
        least = scores[torch.isin(slots, chosen[row])].min()
        assert len(set(chosen[row].tolist())) == 100
        assert (slots[torch.isin(slots, chosen[row])] == chosen[row]).all(), "in the order of positions"
        assert least >= scores.sort(descending=True).values[99] - 1e-4 * scores.abs().max()
        # FP8 moves few of them
        assert torch.isin(chosen[row], in_bfloat16[row]).float().mean() > 0.85


def test_a_query_chooses_the_same_alone_in_pieces_and_from_layer_to_layer(gpu, monkeypatch):
    gpu(stand_ins.deep_gemm_sgl())
    queries, keys = index_case()
    whole = sparse.choose_keys(queries, keys, topk=100, scale=0.1)
    assert torch.equal(sparse.choose_keys(queries, keys, topk=100, scale=0.1), whole)
    (held,) = keys.schedule.values()
    assert (len(held.slots_X), held.most) == (64 * (5 + 2 + 1), 320)
    alone = keys._replace(
        page_table_BP=keys.page_table_BP[1:2],
        requests_T=torch.zeros(40, dtype=torch.int64),
        positions_T=keys.positions_T[5:45],
        kv_tokens_B=keys.kv_tokens_B[1:2],
    )
    own = IndexQueries(*(part[5:45] for part in queries[:4]), False)
    with pytest.raises(AssertionError, match="serves one step"):
        sparse.choose_keys(own, alone, topk=100, scale=0.1)
    assert torch.equal(sparse.choose_keys(own, alone._replace(schedule=None), topk=100, scale=0.1), whole[5:45])
    monkeypatch.setattr(sparse, "_MAX_SCORE_BYTES", 4 * 320 * 7)
    assert torch.equal(sparse.choose_keys(queries, keys, topk=100, scale=0.1), whole)
    none = keys._replace(requests_T=keys.requests_T[:0], positions_T=keys.positions_T[:0])
    nobody = IndexQueries(*(part[:0] for part in queries[:4]), False)
    assert sparse.choose_keys(nobody, none, topk=100, scale=0.1).shape == (0, 100)


def test_nothing_waits_for_the_device(gpu, monkeypatch):
    """Tensors of the device "meta" have shapes and no values: reading one fails."""
    gpu(stand_ins.deep_gemm_sgl())

    def fp8_mqa_logits(q, *_, max_seqlen_k, **__):
        return torch.empty(len(q), max_seqlen_k, device="meta")

    monkeypatch.setattr(sys.modules["deep_gemm"], "fp8_mqa_logits", fp8_mqa_logits)
    queries, keys = index_case()
    on_meta = IndexQueries(*(part.to("meta") for part in queries[:4]), False)
    keys = keys._replace(**{name: getattr(keys, name).to("meta") for name in keys._fields[:4]})
    chosen = sparse.choose_keys(on_meta, keys, topk=100, scale=0.1)
    assert (chosen.shape, chosen.device.type) == ((48, 100), "meta")


@pytest.mark.parametrize(
    ("heads", "width", "changes", "reason"),
    [
        (64, 128, {"kv_tokens_B": None}, "in decode keys are scored where they lie in the pages"),
        (16, 128, {}, "the indexer has other heads than 32 or 64 of 32, 64 or 128 values"),
        (64, 96, {}, "the indexer has other heads than 32 or 64 of 32, 64 or 128 values"),
    ],
)
def test_scores_that_the_library_does_not_give_come_from_the_one_behind(gpu, heads, width, changes, reason):
    gpu(stand_ins.deep_gemm_sgl())
    queries, keys = index_case(heads, width)
    before = registry.fallbacks().get(("choose_keys", "hopper", "reference", reason), 0)
    chosen = with_reference("choose_keys")(queries, keys._replace(**changes), topk=100, scale=0.1)
    assert torch.equal(chosen, reference.choose_keys(queries, keys, topk=100, scale=0.1))
    assert registry.fallbacks()["choose_keys", "hopper", "reference", reason] == before + 1


def chosen_case(heads=64, num_keys=128):
    generator = torch.Generator().manual_seed(4)
    slots = torch.stack([torch.randperm(256, generator=generator)[:num_keys] for _ in range(5)]).int()
    slots[3] = NO_SLOT
    return random(5, heads, 576, seed=1), random(4, 64, 576 + 128)[..., :576], slots


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("library", SPARSE_FLASH_MLA)
def test_attention_to_chosen_keys_is_that_of_the_reference(gpu, library, heads):
    gpu(SPARSE_FLASH_MLA[library]())
    q, pages, slots = chosen_case(heads)
    options = {"latent_dim": 512, "scale": 0.0422}
    y, expected = sparse.mla_sparse(q, pages, slots, **options), reference.mla_sparse(q, pages, slots, **options)
    assert close(y, expected)
    assert not y[3].any()
    assert sparse.mla_sparse(q[:0], pages, slots[:0], **options).shape == (0, heads, 512)


@pytest.mark.parametrize(
    ("library", "heads", "num_keys", "reason"),
    [
        (stand_ins.flash_mla_sgl, 16, 128, "there are not 64 or 128 heads of 512 + 64 latent values"),
        (stand_ins.flash_mla_sgl, 64, 100, "the number of keys is not a multiple of 128"),
        (stand_ins.flash_mla_first, 64, 128, "flash_mla has no sparse attention"),
    ],
)
def test_attention_that_the_library_does_not_take_goes_to_the_one_behind(gpu, library, heads, num_keys, reason):
    gpu(library())
    operands = chosen_case(heads, num_keys)
    assert reason in sparse.mla_sparse.rejects(*operands, latent_dim=512, scale=0.1)
    y = with_reference("mla_sparse")(*operands, latent_dim=512, scale=0.1)
    assert torch.equal(y, reference.mla_sparse(*operands, latent_dim=512, scale=0.1))


def test_a_model_with_an_indexer_is_near_itself_on_the_reference(gpu, tmp_path):
    gpu(stand_ins.flash_mla_sgl(), stand_ins.deep_gemm_sgl())
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 16, "qk_rope_head_dim": 64, "v_head_dim": 16}
    sizes |= {"num_hidden_layers": 2, "first_k_dense_replace": 2, "num_attention_heads": 64, "num_key_value_heads": 64}
    make_checkpoint(tmp_path, "glm-dsa", **sizes, index_topk=128, index_n_heads=32, index_head_dim=64)
    config, plain = load_model_config(tmp_path), Ops.select("reference", torch.bfloat16)
    ours = replace(plain, choose_keys=with_reference("choose_keys"), mla_sparse=with_reference("mla_sparse"))
    weights = load_weights(tmp_path, config, dtype=torch.bfloat16, ops=plain)
    logits = []
    for ops in (ours, plain):
        model = Transformer(config, weights, [local_dispatcher(config, ops, "cpu")] * config.num_moe_layers, ops)
        requests = PagedRequests(model, [torch.arange(150) % 96, torch.arange(20)], max_new_tokens=1)
        requests.prefill([0, 1], [100, 1000])
        for tokens in requests.tokens:
            tokens.append(3)
        requests.decode_step([0, 1])
        logits.append([requests.all_logits(i) for i in (0, 1)])
    assert torch.equal(logits[0][1], logits[1][1]), "nothing is chosen for a short prompt"
    assert torch.equal(logits[0][0][:128], logits[1][0][:128])
    assert (logits[0][0] - logits[1][0]).norm() <= 0.1 * logits[1][0].norm()
    assert not torch.equal(logits[0][0][128:], logits[1][0][128:])
