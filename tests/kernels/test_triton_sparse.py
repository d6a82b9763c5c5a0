"""Sparse attention in Triton beyond what test_sparse.py asks of all: tiles, segments and pieces, and odd scores."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels import reference
from batchinfer_kernels.reference.mla import PagedKeys
from batchinfer_kernels.reference.sparse import NO_SLOT, IndexedKeys, IndexQueries
from batchinfer_kernels.triton import decode, indexer, ops
from support.triton_device import DEVICE, TOLERANCE, needs_triton, random, relative_error

pytestmark = needs_triton


def best(scores, topk):
    """Positions of the best scores, the first among equal ones."""
    return sorted(sorted(range(len(scores)), key=lambda key: (-scores[key], key))[:topk])


def odd_scores(num_rows, num_keys):
    """Return scores of all sizes and both signs, with both zeros, infinities and many equal ones."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(num_rows, num_keys, generator=generator) * 10 ** (
        8 * torch.randn(num_rows, num_keys, generator=generator)
    )
    kind = torch.randint(0, 8, scores.shape, generator=generator)
    for value, place in ((0.0, 0), (-0.0, 1), (torch.inf, 2), (-torch.inf, 3), (1.0, 4), (1e-42, 5)):
        scores[kind == place] = value
    return scores


@pytest.mark.parametrize("topk", [1, 100, 1024, 1500])
def test_the_best_of_odd_scores_are_found_over_several_tiles(topk):
    scores, positions = odd_scores(5, 2100)[:, 3:], torch.tensor([topk - 2, topk - 1, 2047, 1023, 2090])
    positions = positions.clamp(min=0).to(DEVICE)
    table = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:33].to(DEVICE)[None]
    keys = IndexedKeys(random(1, 64, 16), table, torch.zeros(5, dtype=torch.int64, device=DEVICE), positions)
    slots = ops.best_slots(scores.to(DEVICE), keys, topk=topk)
    assert torch.equal(slots, reference.best_slots(scores.to(DEVICE), keys, topk=topk))
    for row, position in enumerate(positions.tolist()):
        if position + 1 < topk:
            assert (slots[row] == NO_SLOT).all()
            continue
        of_row = scores[row, : position + 1].tolist()
        assert slots[row].tolist() == [int(table[0, key // 64]) * 64 + key % 64 for key in best(of_row, topk)]


@pytest.mark.parametrize(("heads", "width", "rotary", "interleaved"), [(5, 24, 8, True), (32, 128, 64, False)])
def test_over_segments_and_in_pieces_keys_are_chosen_as_by_the_reference(
    heads, width, rotary, interleaved, monkeypatch
):
    monkeypatch.setattr(indexer, "_SEGMENT_KEYS", 128)
    num_rows, topk = 9, 40
    pages = random(10, 64, 48 + width)[..., 48:]
    table = torch.stack([torch.arange(6), torch.arange(9, 3, -1)]).to(DEVICE)
    q, weights = random(num_rows, heads, width, seed=1), random(num_rows, heads, seed=2, dtype=torch.float32)
    angles = random(num_rows, rotary // 2, seed=3, dtype=torch.float32)
    queries = IndexQueries(q, weights, angles.cos(), angles.sin(), interleaved)
    requests = torch.tensor([0] * 5 + [1] * 4).to(DEVICE)
    positions = torch.tensor([5, 39, 127, 128, 300, 383, 100, 41, 255]).to(DEVICE)
    keys = IndexedKeys(pages, table, requests, positions)

    def choose(rows):
        own = IndexQueries(*(part[rows] for part in queries[:4]), interleaved)
        return ops.choose_keys(own, IndexedKeys(pages, table, requests[rows], positions[rows]), topk=topk, scale=0.1)

    chosen = choose(slice(None))
    plain = reference.choose_keys(queries, keys, topk=topk, scale=0.1)
    # a score that is rounded otherwise may put one key in another's place
    assert (chosen[0] == NO_SLOT).all()
    for row in range(1, num_rows):
        assert len(set(chosen[row].tolist()) & set(plain[row].tolist())) >= topk - 1
    assert torch.equal(chosen[1], plain[1]), "all that it sees"
    for rows in ([4], [2, 3, 8]):
        assert torch.equal(choose(rows), chosen[rows])
    monkeypatch.setattr(indexer, "MAX_SCORE_BYTES", 1)
    assert torch.equal(choose(slice(5, 7)), chosen[5:7])


@pytest.mark.parametrize("width", [16, 64, 128])
def test_rows_are_transformed_and_rounded_as_by_the_reference(width):
    # of all sizes, with a row of zeros, one of equal values, and ones whose largest value is just a power of two
    x = random(150, width + 5)[:, :width]
    x[::3] *= 2.0 ** torch.arange(50, device=DEVICE)[:, None] / 2**20
    x[1], x[2] = 0, 3.0
    x[4] = 0
    x[4, 0] = 448 * width**0.5
    for rows in (None, torch.arange(149, -1, -2, device=DEVICE)):
        values, scales = ops.hadamard_fp8(x, rows)
        expected, expected_scales = reference.hadamard_fp8(x, rows)
        assert torch.equal(scales, expected_scales)
        # sums in float32 may round a value to its neighbour, which is what one in eight of its size is off by
        off = (values.float() - expected.float()).abs()
        assert (off <= expected.float().abs() / 8).all()
        assert (off > 0).float().mean() < 0.01
    assert torch.equal(ops.hadamard_fp8(x[7:8])[0].float(), ops.hadamard_fp8(x)[0][7:8].float())


def test_a_hadamard_transform_leaves_products_as_they_are():
    q, k = torch.randn(2, 30, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    signs = reference.index_fp8.hadamard_signs(128, torch.device("cpu")).double()
    assert torch.equal(signs @ signs.T, 128 * torch.eye(128, dtype=torch.float64))
    (q8, q_scales), (k8, k_scales) = reference.hadamard_fp8(q.float()), reference.hadamard_fp8(k.float())
    products = (q8.double() * q_scales[:, None]) @ (k8.double() * k_scales[:, None]).T
    assert (products - q @ k.T).abs().max() < 0.05 * (q.norm(dim=1) * k.norm(dim=1)).max()
    assert (q8.float().abs().amax(1) > 224).all(), "the whole range is used"
    with pytest.raises(ValueError, match="24 columns"):
        reference.hadamard_fp8(random(1, 24))


def test_no_queries_choose_nothing():
    queries = IndexQueries(random(0, 3, 16), random(0, 3, dtype=torch.float32), *random(2, 0, 4).float(), True)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    chosen = ops.choose_keys(queries, IndexedKeys(random(2, 64, 16), none.view(0, 2), none, none), topk=5, scale=1.0)
    assert chosen.shape == (0, 5)
    assert ops.mla_sparse(random(0, 2, 32), random(2, 64, 32), chosen, latent_dim=16, scale=1.0).shape == (0, 2, 16)


def test_all_keys_over_several_parts_give_the_bits_of_dense_attention(monkeypatch):
    monkeypatch.setattr(decode, "SPLIT_TOKENS", 128)
    pages, table = random(5, 64, 80 + 24)[..., :80], torch.tensor([[4, 0, 2, 1, 3]], device=DEVICE)
    q, options = random(1, 20, 80, seed=1), {"latent_dim": 64, "scale": 0.1}
    for num_keys in (1, 128, 129, 300):
        lengths, keys = torch.tensor([num_keys], device=DEVICE), torch.arange(num_keys, device=DEVICE)
        slots = (table[0, keys // 64] * 64 + keys % 64).int()[None]
        dense = ops.mla_decode(q, PagedKeys(pages, table, lengths, lengths - 1), **options)
        assert torch.equal(ops.mla_sparse(q, pages, slots, **options), dense)
        # index keys behind the latents are not looked at
        assert torch.equal(
            dense, ops.mla_decode(q, PagedKeys(pages.contiguous(), table, lengths, lengths - 1), **options)
        )


def test_attention_to_chosen_keys_is_softmax_over_these_in_any_company():
    pages, generator = random(3, 64, 40 + 8)[..., :40], torch.Generator().manual_seed(2)
    q, options = random(4, 3, 40, seed=1), {"latent_dim": 24, "scale": 0.2}
    slots = torch.stack([torch.randperm(192, generator=generator)[:90] for _ in range(4)]).int().to(DEVICE)
    slots[2] = NO_SLOT
    result = ops.mla_sparse(q, pages, slots, **options)
    keys = pages.reshape(-1, 40)[slots.long()].double()
    exact = torch.softmax(torch.einsum("thw,tkw->thk", q.double(), keys) * 0.2, dim=-1) @ keys[..., :24]
    exact[2] = 0
    assert relative_error(result, exact) < TOLERANCE["bf16"]
    for rows in ([0], [3, 1]):
        assert torch.equal(ops.mla_sparse(q[rows], pages, slots[rows], **options), result[rows])


def test_pages_whose_rows_are_at_unequal_distances_are_refused():
    pages = random(4, 70, 32)[:, :64]
    with pytest.raises(RuntimeError, match="rows of pages are at unequal distances"):
        ops.mla_sparse(random(1, 1, 32), pages, torch.zeros(1, 1, dtype=torch.int32), latent_dim=16, scale=1.0)
