"""Attention in Triton, both forms, against softmax written out in float64: page borders, cuts, company, garbage."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from batchinfer_kernels.reference.mla import PagedKeys
from batchinfer_kernels.triton import decode, ops, prefill, prefill_cut
from support import plain_attention
from support.plain_attention import decoded
from support.triton_device import DEVICE, TOLERANCE, needs_triton, random, relative_error

import prefill_tma  # isort: skip  # support.triton_device finds it

pytestmark = needs_triton
paged = partial(plain_attention.paged, random, unused=torch.nan)


@pytest.fixture
def short_parts(monkeypatch):
    """Keys cut every 128 tokens, so that short requests have several parts."""
    monkeypatch.setattr(decode, "SPLIT_TOKENS", 128)


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize(("heads", "latent_dim", "rotary"), [(1, 16, 6), (3, 64, 16), (22, 80, 64), (33, 16, 0)])
@pytest.mark.parametrize("num_queries", [1, 2])
def test_decode_attention_is_close_to_float64_and_a_request_keeps_its_bits(heads, latent_dim, rotary, num_queries):
    pages, table, kv_tokens = paged([num_queries, 63, 64, 65, 128, 129, 300], latent_dim + rotary)
    q = random(7 * num_queries, heads, latent_dim + rotary, seed=1)
    positions = kv_tokens[:, None] - num_queries + torch.arange(num_queries, device=DEVICE)
    options = {"latent_dim": latent_dim, "scale": (latent_dim + rotary) ** -0.5}
    whole = ops.mla_decode(q, PagedKeys(pages, table, kv_tokens, positions.flatten()), **options)
    assert relative_error(whole, decoded(q, pages, table, positions.flatten(), **options)[0]) < TOLERANCE["bf16"]
    q_BQ, whole_BQ = q.unflatten(0, (7, -1)), whole.unflatten(0, (7, -1))
    for requests, columns in [([0], 1), ([6, 2], 5)]:
        alone = ops.mla_decode(
            q_BQ[requests].flatten(0, 1),
            PagedKeys(pages, table[requests, :columns], kv_tokens[requests], positions[requests].flatten()),
            **options,
        )
        assert torch.equal(alone, whole_BQ[requests].flatten(0, 1))
    # queries one by one: each is the last token when its turn comes
    for request, query in [(5, 0), (6, num_queries - 1)]:
        at = positions[request, query][None]
        one = ops.mla_decode(q_BQ[request, query][None], PagedKeys(pages, table[request][None], at + 1, at), **options)
        assert torch.equal(one[0], whole_BQ[request, query])


def test_decode_attention_in_pieces_and_over_long_parts_is_the_same(monkeypatch):
    pages, table, kv_tokens = paged([1030, 5, 70], 48)
    q, options = random(3, 2, 48, seed=1), {"latent_dim": 32, "scale": 0.2}
    whole = ops.mla_decode(q, PagedKeys(pages, table, kv_tokens, kv_tokens - 1), **options)
    assert relative_error(whole, decoded(q, pages, table, kv_tokens - 1, **options)[0]) < TOLERANCE["bf16"]
    monkeypatch.setattr(decode, "_MAX_PART_BYTES", 1)
    assert torch.equal(ops.mla_decode(q, PagedKeys(pages, table, kv_tokens, kv_tokens - 1), **options), whole)


@pytest.mark.usefixtures("short_parts")
def test_decode_attention_follows_a_peak_that_comes_late_and_takes_requests_without_tokens():
    # key 150, in the second part, outweighs all before it: their sums must shrink to nothing
    pages, table, kv_tokens = paged([151, 0], 32)
    q = (30 * pages[table[0, 2], 22])[None, None].expand(2, 1, -1)
    result = ops.mla_decode(q, PagedKeys(pages, table, kv_tokens, kv_tokens - 1), latent_dim=16, scale=1.0)
    assert torch.equal(result[0, 0], pages[table[0, 2], 22, :16])
    assert not result[1].any()
    none = ops.mla_decode(q[:0], PagedKeys(pages, table[:0], kv_tokens[:0], kv_tokens[:0]), latent_dim=16, scale=1.0)
    assert none.shape == (0, 1, 16)


def exact_prefill(q, latents, positions, kv_b, nope, scale):
    latent_dim = kv_b.shape[-1]
    kv = torch.einsum("xc,hzc->xhz", latents[:, :latent_dim].double(), kv_b.double())
    rotary = latents[:, None, latent_dim:].double().expand(-1, kv.shape[1], -1)
    scores = torch.einsum("tha,xha->htx", q.double(), torch.cat([kv[..., :nope], rotary], -1)) * scale
    is_seen = torch.arange(len(latents), device=DEVICE) <= positions[:, None]
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return torch.einsum("htx,xhv->thv", weights, kv[..., nope:])


@pytest.mark.parametrize(("heads", "nope", "rotary", "v_dim"), [(1, 5, 1, 16), (3, 16, 8, 32), (2, 6, 4, 11)])
@pytest.mark.parametrize("context", [1, 64, 150])
def test_prefill_attention_is_close_to_float64_and_cut_anywhere_gives_the_same_bits(
    heads, nope, rotary, v_dim, context, monkeypatch
):
    pages, table, _ = paged([context], 48 + rotary)
    q, kv_b = random(context, heads, nope + rotary, seed=1), random(heads, nope + v_dim, 48, seed=2) / 7
    options = {"v_dim": v_dim, "scale": (nope + rotary) ** -0.5}

    def attend(start, stop):
        counts = torch.tensor([stop - start]), torch.tensor([stop])
        positions = torch.arange(start, stop, device=DEVICE)
        return ops.mla_prefill(q[start:stop], PagedKeys(pages, table, counts[1], positions), kv_b, counts[0], **options)

    whole = attend(0, context)
    latents = pages[table[0]].flatten(0, 1)[:context]
    exact = exact_prefill(q, latents, torch.arange(context, device=DEVICE), kv_b, nope, options["scale"])
    assert relative_error(whole, exact) < TOLERANCE["bf16"]
    for start, stop in [(0, 1), (context // 3, context), (context // 5, 70)]:
        if start < stop <= context:
            assert torch.equal(attend(start, stop), whole[start:stop])
    monkeypatch.setattr(prefill, "_MAX_KEY_BYTES", 1)  # one head at a time
    assert torch.equal(attend(0, context), whole)


@pytest.mark.parametrize("most_keys", [prefill._MAX_KEYS, 200, 1])
def test_chunks_of_several_requests_do_not_meet(most_keys, monkeypatch):
    """Whether their keys are made together, or those of some, or of each alone."""
    monkeypatch.setattr(prefill, "_MAX_KEYS", most_keys)
    pages, table, _ = paged([150, 70, 64], 24)
    num_tokens, context = [90, 0, 3], [150, 70, 64]  # the first and the last continue earlier chunks
    q, kv_b = random(93, 2, 12, seed=1), random(2, 12, 16, seed=2)
    positions = torch.cat([torch.arange(60, 150), torch.arange(61, 64)]).to(DEVICE)
    options = {"v_dim": 8, "scale": 0.3}
    lengths = torch.tensor(num_tokens), torch.tensor(context)
    whole = ops.mla_prefill(q, PagedKeys(pages, table, lengths[1], positions), kv_b, lengths[0], **options)
    for request, rows in ((0, slice(0, 90)), (2, slice(90, 93))):
        latents = pages[table[request]].flatten(0, 1)[: context[request]]
        exact = exact_prefill(q[rows], latents, positions[rows], kv_b, 4, 0.3)
        assert relative_error(whole[rows], exact) < TOLERANCE["bf16"]
        alone = ops.mla_prefill(
            q[rows],
            PagedKeys(pages, table[request][None], lengths[1][request][None], positions[rows]),
            kv_b,
            lengths[0][request][None],
            **options,
        )
        assert torch.equal(alone, whole[rows])
    works = prefill_cut.cut(table, *lengths, None, tile_rows=128, tile_keys=64, max_keys=most_keys)
    assert max(len(work.slots_X) for work in works) <= max(most_keys, 192)  # whole pages of the longest
    # the work is cut once per step: a second layer finds it, another step must not
    schedule = {}
    again = [
        ops.mla_prefill(q, PagedKeys(pages, table, lengths[1], positions, schedule), kv_b, lengths[0], **options)
        for _ in range(2)
    ]
    assert torch.equal(again[0], whole)
    assert torch.equal(again[1], whole)
    assert list(schedule) == [prefill.SCHEDULE]
    with pytest.raises(AssertionError, match="serves one step"):
        ops.mla_prefill(
            q, PagedKeys(pages, table, lengths[1], positions, schedule), kv_b, lengths[0].clone(), **options
        )
    none = ops.mla_prefill(
        q[:0], PagedKeys(pages, table[:0], lengths[1][:0], positions[:0]), kv_b, lengths[0][:0], **options
    )
    assert none.shape == (0, 2, 8)


PREFILLS = {
    "pages": prefill.mla_prefill,
    "descriptors": prefill_tma.mla_prefill,
    "ahead": prefill_tma.mla_prefill_ahead,
}


@pytest.mark.parametrize("kernel", PREFILLS)
def test_a_prefix_in_common_is_made_once_and_changes_no_bit(kernel):
    """Four requests behind 256 tokens, a fifth behind 128 of them; short ones share a program, the last has its own."""
    attend = PREFILLS[kernel]
    pages, table, _ = paged([300, 300, 410, 270, 200], 24 + 16)
    table[1:4, :4], table[4, :2] = table[0, :4], table[0, :2]
    context, num_tokens = torch.tensor([300, 299, 410, 270, 200]), torch.tensor([44, 10, 150, 14, 72])
    in_common = torch.tensor([0, 4, 4, 4, 2])
    starts = num_tokens.cumsum(0) - num_tokens
    positions = torch.cat([torch.arange(c - n, c) for n, c in zip(num_tokens, context, strict=True)]).to(DEVICE)
    q, kv_b = random(len(positions), 2, 32, seed=1), random(2, 32, 24, seed=2) / 5
    options = {"v_dim": 16, "scale": 0.2}
    schedule = {}
    keys = PagedKeys(pages, table, context, positions, schedule, in_common)
    whole = attend(q, keys, kv_b, num_tokens, **options)
    (work,) = schedule[prefill.SCHEDULE][1]
    apart = PagedKeys(pages, table, context, positions, {})
    assert torch.equal(attend(q, apart, kv_b, num_tokens, **options), whole)
    (work_apart,) = apart.schedule[prefill.SCHEDULE][1]
    assert len(work.slots_X) <= len(work_apart.slots_X) - 3 * 256  # the prefix once for four requests
    assert [0, 54, 0, 256] in work.tiles_N5[:, :4].tolist()  # the first two requests share a program
    for request, (start, count) in enumerate(zip(starts.tolist(), num_tokens.tolist(), strict=True)):
        rows, length = slice(start, start + count), context[request][None]
        alone = PagedKeys(pages, table[request][None], length, positions[rows])
        assert torch.equal(attend(q[rows], alone, kv_b, num_tokens[request][None], **options), whole[rows])
        latents = pages[table[request]].flatten(0, 1)[: context[request]]
        exact = exact_prefill(q[rows], latents, positions[rows], kv_b, 16, options["scale"])
        assert relative_error(whole[rows], exact) < TOLERANCE["bf16"]


@pytest.mark.parametrize("kernel", ["descriptors", "ahead"])
@pytest.mark.parametrize("context", [1, 130, 300])
def test_tiles_by_descriptors_are_close_to_float64_and_cut_anywhere_give_the_same_bits(context, kernel):
    pages, table, _ = paged([context], 48 + 16)
    q, kv_b = random(context, 3, 48, seed=1), random(3, 48, 48, seed=2) / 7
    options = {"v_dim": 16, "scale": 0.15}

    def attend(start, stop):
        counts = torch.tensor([stop - start]), torch.tensor([stop])
        keys = PagedKeys(pages, table, counts[1], torch.arange(start, stop, device=DEVICE))
        return PREFILLS[kernel](q[start:stop], keys, kv_b, counts[0], **options)

    whole = attend(0, context)
    latents = pages[table[0]].flatten(0, 1)[:context]
    exact = exact_prefill(q, latents, torch.arange(context, device=DEVICE), kv_b, 32, options["scale"])
    assert relative_error(whole, exact) < TOLERANCE["bf16"]
    for start, stop in [(0, 1), (context // 3, context), (context // 5, 140)]:
        if start < stop <= context:
            assert torch.equal(attend(start, stop), whole[start:stop])
    with pytest.raises(ValueError, match="not powers of two"):
        PREFILLS[kernel](q, PagedKeys(pages, table, *2 * [torch.tensor([1])]), kv_b, q, v_dim=11, scale=1.0)


@pytest.mark.parametrize(
    ("in_common", "runs"),
    [
        ([0, 9, 9, 9], [(4, 9)]),
        ([0, 9, 9, 2, 9], [(3, 9), (2, 9)]),  # two families that have little in common
        ([0, 2, 9, 9], [(1, 0), (3, 9)]),  # the first one is of another family
        ([0, 9, 7, 7], [(4, 7)]),
        ([0, 0, 0], [(3, 0)]),
    ],
)
def test_requests_next_to_each_other_form_the_runs_that_spare_most(in_common, runs):
    num_tokens, context = torch.full((len(in_common),), 64), torch.full((len(in_common),), 64 * 20)
    requests = prefill_cut._requests(num_tokens, context, torch.tensor(in_common), 64)
    assert [(len(run), prefix // 64) for run, prefix in prefill_cut._runs(requests)] == runs


def test_what_only_some_rows_see_is_not_in_common():
    # the second request's rows begin within the pages that both have; a request without rows between them counts, too
    requests = prefill_cut._requests(
        torch.tensor([10, 0, 100]), torch.tensor([400, 300, 300]), torch.tensor([0, 6, 4]), 64
    )
    assert [request.shared for request in requests] == [0, 192]


def test_what_a_prefix_in_common_spares_is_as_the_docs_say():
    num_prompts, num_tokens, behind = 80, 200, 10_000
    lengths = torch.full((num_prompts,), num_tokens), torch.full((num_prompts,), behind + num_tokens)
    table = torch.arange(160).repeat(num_prompts, 1)
    in_common = torch.full((num_prompts,), behind // 64)
    made = {
        name: sum(
            len(work.slots_X)
            for work in prefill_cut.cut(table, *lengths, told, tile_rows=128, tile_keys=64, max_keys=2**18)
        )
        for name, told in {"together": in_common, "apart": None}.items()
    }
    assert made == {"together": pytest.approx(30_000, rel=0.02), "apart": pytest.approx(820_000, rel=0.02)}
