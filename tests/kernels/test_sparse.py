"""Sparse attention: which keys an indexer chooses, and attention to these alone; in plain PyTorch, C++ and Triton."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels import registry
from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys
from batchinfer_kernels.reference.sparse import NO_SLOT, IndexedKeys, IndexQueries, NewIndexKeys
from support import triton_device

DTYPES = [torch.bfloat16, torch.float32]
# of results that are rounded, and with them in bfloat16 the weights of softmax
TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 3e-6}
SLOW_IN_THE_INTERPRETER = {
    "test_what_a_query_chooses_does_not_depend_on_its_company",
    "test_attention_to_all_keys_is_dense_attention_to_the_bit",
    "test_attention_to_chosen_keys_is_softmax_over_these_in_any_company",
}


@pytest.fixture(params=["reference", "cpu", "triton"])
def op(request):
    """The operation of a name."""
    if request.param == "cpu":
        request.getfixturevalue("cpp")
    if request.param == "triton":
        if triton_device.REASON is not None or triton_device.DEVICE.type != "cpu":
            pytest.skip("Triton's interpreter does not run here")
        if request.node.originalname in SLOW_IN_THE_INTERPRETER:
            pytest.skip("slow in Triton's interpreter: test_triton_sparse.py has a smaller one")
        if request.node.callspec.params.get("dtype") is torch.float32:
            pytest.skip("Triton's are in bfloat16")
    # without the registry: rejected arguments do not go to another candidate
    return lambda name: registry.select(name, request.param).implementation


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def small_numbers(*shape, dtype=torch.float32, seed=0):
    """Whole ones, whose products and sums are exact in any order: many scores are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def paged_keys(num_pages, width, before, values):
    """Pages whose rows have `before` other values before these, and more pages than are used, in another order."""
    pages = torch.full((num_pages + 2, PAGE_TOKENS, before + width), torch.nan, dtype=values.dtype)
    ids = torch.randperm(num_pages + 2, generator=torch.Generator().manual_seed(1))[:num_pages]
    pages[ids, :, before:] = values.view(num_pages, PAGE_TOKENS, width)
    return pages[..., before:], ids


def no_rotation(num_rows, rotary):
    return torch.ones(num_rows, rotary // 2), torch.zeros(num_rows, rotary // 2)


def best(scores, topk):
    """Return the positions of the best scores, the first among equal ones."""
    order = sorted(range(len(scores)), key=lambda key: (-scores[key], key))
    return sorted(order[:topk])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width", "topk"), [(1, 8, 1), (3, 12, 16), (64, 128, 70), (70, 33, 64), (32, 16, 5)])
def test_the_best_keys_are_chosen_and_the_first_among_equal_ones(op, dtype, heads, width, topk):
    positions = torch.tensor([topk - 1, topk, 200, 100, 64 * 4 - 1, 63 + topk])
    q = small_numbers(6, heads, width, dtype=dtype, seed=1)
    weights = small_numbers(6, heads, seed=2)
    values = small_numbers(4 * PAGE_TOKENS, width, dtype=dtype, seed=3)
    pages, ids = paged_keys(4, width, 9, values)
    table = torch.stack([ids, ids.flip(0)])
    requests = torch.tensor([0, 0, 0, 1, 1, 1])
    chosen = op("choose_keys")(
        IndexQueries(q, weights, *no_rotation(6, 4), True),
        IndexedKeys(pages, table, requests, positions),
        topk=topk,
        scale=0.5,
    )
    assert chosen.dtype is torch.int32
    scores = torch.einsum("thx,th->tx", torch.relu(q.double() @ values.double().T), weights.double())
    for row, position in enumerate(positions.tolist()):
        of_row = scores[row] if requests[row] == 0 else scores[row].view(4, PAGE_TOKENS).flip(0).flatten()
        wanted = torch.tensor(best(of_row[: position + 1].tolist(), topk))
        slots = table[requests[row], wanted // PAGE_TOKENS] * PAGE_TOKENS + wanted % PAGE_TOKENS
        assert chosen[row].tolist() == slots.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_sees_fewer_keys_than_are_chosen_gets_none_and_its_attention_is_zero(op, dtype):
    positions, requests = torch.tensor([0, 68, 69, 127]), torch.tensor([0, 0, 1, 1])
    pages, ids = paged_keys(2, 16, 0, random(2 * PAGE_TOKENS, 16, dtype=dtype))
    queries = IndexQueries(random(4, 3, 16, dtype=dtype, seed=1), random(4, 3, seed=2), *no_rotation(4, 4), True)
    chosen = op("choose_keys")(queries, IndexedKeys(pages, ids.repeat(2, 1), requests, positions), topk=70, scale=1.0)
    assert (chosen[:2] == NO_SLOT).all()
    assert (chosen[2:] != NO_SLOT).all()
    assert sorted(chosen[2].tolist()) == sorted(
        int(ids[key // PAGE_TOKENS]) * PAGE_TOKENS + key % PAGE_TOKENS for key in range(70)
    )
    out = op("mla_sparse")(random(4, 2, 16, dtype=dtype), pages, chosen, latent_dim=8, scale=1.0)
    assert not out[:2].any()
    assert out[2:].all()
    # nothing is looked up for them
    short = op("choose_keys")(
        IndexQueries(*(part[:2] for part in queries[:4]), True),
        IndexedKeys(pages, ids[:1].repeat(2, 1), requests[:2], torch.tensor([0, 63])),
        topk=70,
        scale=1.0,
    )
    assert (short == NO_SLOT).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_among_keys_without_a_score_the_first_ones_are_chosen(op, dtype):
    # query · key is below 0 everywhere, so every score is 0, some of them with the sign of the weight
    pages, ids = paged_keys(2, 8, 0, -torch.ones(2 * PAGE_TOKENS, 8, dtype=dtype))
    queries = IndexQueries(
        torch.ones(1, 3, 8, dtype=dtype), torch.tensor([[1.0, -1.0, -2.0]]), *no_rotation(1, 4), False
    )
    chosen = op("choose_keys")(
        queries, IndexedKeys(pages, ids[None], torch.tensor([0]), torch.tensor([127])), topk=70, scale=1.0
    )
    expected = [int(ids[key // PAGE_TOKENS]) * PAGE_TOKENS + key % PAGE_TOKENS for key in range(70)]
    assert chosen[0].tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
def test_queries_are_rotated_before_they_are_scored(op, interleaved, dtype):
    # a quarter turn: the pair (x, y) becomes (-y, x), so the query below meets the second key
    pair = (0, 1) if interleaved else (0, 2)
    q, values = torch.zeros(1, 1, 6, dtype=dtype), torch.zeros(PAGE_TOKENS, 6, dtype=dtype)
    q[0, 0, pair[0]] = 1.0
    values[0, pair[0]] = values[1, pair[1]] = 1.0
    pages, ids = paged_keys(1, 6, 0, values)
    queries = IndexQueries(q, torch.ones(1, 1), torch.zeros(1, 2), torch.ones(1, 2), interleaved)
    keys = IndexedKeys(pages, ids[None], torch.tensor([0]), torch.tensor([63]))
    chosen = op("choose_keys")(queries, keys, topk=1, scale=1.0)
    assert chosen.tolist() == [[int(ids[0]) * PAGE_TOKENS + 1]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_query_chooses_does_not_depend_on_its_company(op, dtype, threads):
    heads, width, topk, num_rows = 5, 24, 16, 40
    pages, ids = paged_keys(12, width, 8, random(12 * PAGE_TOKENS, width, dtype=dtype))
    q, weights = random(num_rows, heads, width, dtype=dtype, seed=1), random(num_rows, heads, seed=2)
    cos, sin = random(num_rows, 4, seed=3), random(num_rows, 4, seed=4)
    table, requests = torch.stack([ids, ids.flip(0)]), (torch.arange(num_rows) // 25)
    positions = (torch.arange(num_rows) * 37 % 700) + topk

    def choose(rows):
        queries = IndexQueries(q[rows], weights[rows], cos[rows], sin[rows], True)
        keys = IndexedKeys(pages, table, requests[rows], positions[rows])
        return op("choose_keys")(queries, keys, topk=topk, scale=0.2)

    threads(2)
    whole = choose(torch.arange(num_rows))
    for num_threads in (1, 2):
        threads(num_threads)
        for rows in ([0], [39], [24, 25], list(range(30, 3, -1))):
            assert torch.equal(choose(torch.tensor(rows)), whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("width", "rotary"), [(128, 64), (16, 8), (11, 6), (37, 2)])
def test_index_keys_are_normed_and_rotated_in_their_slots(op, dtype, interleaved, width, rotary):
    keys = 3 * random(5, width, dtype=dtype) + 1
    norm, bias = random(width, dtype=dtype, seed=1), random(width, dtype=dtype, seed=2)
    angles, slots = random(5, rotary // 2, seed=3), torch.tensor([3, 70, 69, 127, 0])
    whole = torch.full((2, PAGE_TOKENS, 7 + width), 9.0, dtype=dtype)
    pages = whole[..., 7:]
    op("index_cache")(NewIndexKeys(keys, norm, bias, 1e-6, angles.cos(), angles.sin(), pages, slots, interleaved))
    expected = torch.nn.functional.layer_norm(keys.double(), (width,), norm.double(), bias.double(), 1e-6)
    expected = expected.to(dtype).double()
    turned = expected[:, :rotary].clone()
    firsts, seconds = (
        (slice(0, rotary, 2), slice(1, rotary, 2)) if interleaved else (slice(rotary // 2), slice(rotary // 2, rotary))
    )
    cos, sin = angles.double().cos(), angles.double().sin()
    expected[:, firsts] = turned[:, firsts] * cos - turned[:, seconds] * sin
    expected[:, seconds] = turned[:, seconds] * cos + turned[:, firsts] * sin
    found = pages.reshape(-1, width)[slots].double()
    assert (found - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    assert (whole[..., :7] == 9).all()
    others = [slot for slot in range(128) if slot not in slots.tolist()]
    assert (pages.reshape(-1, width)[others] == 9).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "latent_dim", "rotary"), [(1, 16, 6), (7, 35, 4), (9, 64, 16), (70, 96, 32)])
def test_attention_to_all_keys_is_dense_attention_to_the_bit(op, dtype, heads, latent_dim, rotary, threads):
    width = latent_dim + rotary
    kv_tokens = torch.tensor([1, 63, 64, 65, 200])
    # with and without index keys behind the rows
    for behind in (0, 11, 16):
        whole = random(9, PAGE_TOKENS, width + behind, dtype=dtype)
        pages, table = whole[..., :width], torch.tensor([[3, 1, 7, 5]]).repeat(5, 1)
        q = random(5, heads, width, dtype=dtype, seed=1)
        options = {"latent_dim": latent_dim, "scale": width**-0.5}
        dense = op("mla_decode")(q, PagedKeys(pages, table, kv_tokens, kv_tokens - 1), **options)
        without_gaps = PagedKeys(pages.contiguous(), table, kv_tokens, kv_tokens - 1)
        assert torch.equal(dense, op("mla_decode")(q, without_gaps, **options))
        for row, num_keys in enumerate(kv_tokens.tolist()):
            keys = torch.arange(num_keys)
            slots = (table[row, keys // PAGE_TOKENS] * PAGE_TOKENS + keys % PAGE_TOKENS).int()
            threads(1 + row % 2)
            assert torch.equal(op("mla_sparse")(q[row : row + 1], pages, slots[None], **options)[0], dense[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_to_chosen_keys_is_softmax_over_these_in_any_company(op, dtype):
    heads, latent_dim, width, num_keys = 20, 48, 64, 90
    pages = random(6, PAGE_TOKENS, width + 8, dtype=dtype)[..., :width]
    q, generator = random(30, heads, width, dtype=dtype, seed=1), torch.Generator().manual_seed(2)
    slots = torch.stack([torch.randperm(6 * PAGE_TOKENS, generator=generator)[:num_keys] for _ in range(30)]).int()
    options = {"latent_dim": latent_dim, "scale": 0.2}
    result = op("mla_sparse")(q, pages, slots, **options)
    keys = pages.reshape(-1, width)[slots.long()].double()
    exact = torch.softmax(torch.einsum("thw,tkw->thk", q.double(), keys) * 0.2, dim=-1) @ keys[..., :latent_dim]
    assert (result.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()
    for rows in ([0], [29], [5, 3, 17]):
        assert torch.equal(op("mla_sparse")(q[rows], pages, slots[rows], **options), result[rows])


@pytest.mark.usefixtures("cpp")
def test_cpp_refuses_pages_whose_rows_are_at_unequal_distances():
    pages = torch.zeros(4, PAGE_TOKENS, 16)[:, :32]
    with pytest.raises(RuntimeError, match="rows at equal distances"):
        registry.select("mla_sparse", "cpu")(
            torch.zeros(1, 1, 16), pages, torch.zeros(1, 1, dtype=torch.int32), latent_dim=8, scale=1.0
        )
