"""Grouped-query attention against formulas written out in float64, and rows alone against rows among others."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels.reference import fp8_pages
from batchinfer_kernels.reference.gqa import GqaForm, NewHeads
from batchinfer_kernels.reference.mla import PagedKeys
from support.plain_attention import paged

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-7}  # of the largest value
# H, KV, A: one query head or several per key head, few and many rows, widths in steps of 8; a window, and whether sinks
CASES = [
    ((4, 2, 16), (100, True)),
    ((8, 1, 80), (None, True)),
    ((9, 3, 24), (17, False)),
    ((6, 6, 64), (None, False)),
    ((32, 2, 96), (100, True)),
    ((70, 1, 16), (1, True)),
    ((8, 4, 128), (64, False)),
    ((12, 4, 8), (None, True)),
]
OF_TRITON = 2  # the first of these: its interpreter is slow


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attended(q_HA, kv_XW, num_kv_heads, scale, window, sinks_H):
    """Attention of one token that sees these keys and values, the last of them its own, in float64."""
    k_XNA, v_XNA = (x.double().unflatten(-1, (num_kv_heads, -1)) for x in kv_XW.chunk(2, dim=-1))
    rows = []
    for head, q_A in enumerate(q_HA.double()):
        at = head // (len(q_HA) // num_kv_heads)
        first = 0 if window is None else max(0, len(kv_XW) - window)
        scores = (k_XNA[first:, at] @ q_A) * scale
        extra = scores.new_empty(0) if sinks_H is None else sinks_H[head].double().view(1)
        weights = torch.softmax(torch.cat([scores, extra]), dim=0)[: len(scores)]
        rows.append(weights @ v_XNA[first:, at])
    return torch.stack(rows)


def case(shape, form, dtype, kv_tokens, *, num_queries=1):
    """Queries, keys and how of requests of these lengths, whose last tokens are asked about."""
    (num_heads, num_kv_heads, head_dim), (window, has_sinks) = shape, form
    pages, table, lengths = paged(
        lambda *size, seed: random(*size, seed=seed, dtype=dtype), kv_tokens, 2 * num_kv_heads * head_dim
    )
    positions = torch.cat([torch.arange(tokens - num_queries, tokens) for tokens in kv_tokens])
    q = random(len(positions), num_heads, head_dim, seed=1, dtype=dtype)
    how = GqaForm(num_kv_heads, head_dim**-0.5, window, 2 * random(num_heads, seed=2) if has_sinks else None)
    return q, PagedKeys(pages, table, lengths, positions), how


def expected(q, keys, how):
    num_queries = len(q) // len(keys.page_table_BP)
    rows = []
    for row, position in enumerate(keys.positions_T.tolist()):
        kv_XW = keys.pages[keys.page_table_BP[row // num_queries]].flatten(0, 1)[: position + 1]
        rows.append(attended(q[row], kv_XW, *how))
    return torch.stack(rows)


def assert_near(result, exact):
    assert result.isfinite().all()
    assert (result.double() - exact).abs().max() <= TOLERANCE[result.dtype] * exact.abs().max()


@pytest.fixture
def ops(ops, request):
    of_test = request.node.callspec.params
    if ops.is_triton and "form" in of_test and (of_test["shape"], of_test["form"]) not in CASES[:OF_TRITON]:
        pytest.skip("the interpreter is slow")
    return ops


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "form"), CASES)
def test_decode_is_softmax_written_out(ops, shape, form, dtype):
    for num_queries in (1, 3):
        q, keys, how = case(shape, form, dtype, [3, 64, 65, 190, 128], num_queries=num_queries)
        y = ops("gqa_decode")(q, keys, how)
        assert y.shape == q.shape
        assert y.dtype == dtype
        assert_near(y, expected(q, keys, how))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "form"), CASES)
def test_prefill_is_softmax_written_out_wherever_a_prompt_is_cut(ops, shape, form, dtype):
    """Chunks that are a whole prompt, the end of one, nothing, one token at a page's border."""
    num_tokens, context = [70, 30, 0, 1], [70, 150, 64, 65]
    q, keys, how = case(shape, form, dtype, context)
    positions = torch.cat([torch.arange(end - count, end) for count, end in zip(num_tokens, context, strict=True)])
    q = random(len(positions), *q.shape[1:], seed=3, dtype=dtype)
    y = ops("gqa_prefill")(q, keys._replace(positions_T=positions), torch.tensor(num_tokens), how)
    table = keys.page_table_BP[torch.arange(4).repeat_interleave(torch.tensor(num_tokens))]
    assert_near(y, expected(q, keys._replace(positions_T=positions, page_table_BP=table), how))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "form"), CASES)
def test_a_row_keeps_its_bits_in_any_batch_chunk_and_pages(ops, shape, form, dtype, threads):
    prompt = 200
    q, keys, how = case(shape, form, dtype, [prompt])
    q = random(prompt, *q.shape[1:], seed=3, dtype=dtype)
    at = torch.arange(prompt)

    def prefilled(start, stop):
        cut = keys._replace(kv_tokens_B=torch.tensor([stop]), positions_T=at[start:stop])
        return ops("gqa_prefill")(q[start:stop], cut, torch.tensor([stop - start]), how)

    threads(2)
    whole = prefilled(0, prompt)
    for start, stop in [(0, 1), (0, 64), (3, 70), (64, 128), (127, 200), (199, 200)]:
        threads(1 + start % 2)
        assert torch.equal(prefilled(start, stop), whole[start:stop]), (start, stop)
    # the same tokens elsewhere in memory, next to another chunk
    moved = torch.cat([random(2, *keys.pages.shape[1:], seed=9, dtype=dtype), keys.pages.flip(0)])
    table = torch.cat([len(moved) - 1 - keys.page_table_BP, torch.tensor([[0, 1, 0, 0]])])
    both = PagedKeys(moved, table, torch.tensor([prompt, 90]), torch.cat([at, at[:90]]))
    beside = ops("gqa_prefill")(torch.cat([q, q[:90]]), both, torch.tensor([prompt, 90]), how)
    assert torch.equal(beside[:prompt], whole)

    # each position as a request that shares the pages with all others
    def decoded(rows, num_queries=1):
        last = rows.view(-1, num_queries)[:, -1]
        cut = keys._replace(
            page_table_BP=keys.page_table_BP.expand(len(last), -1), kv_tokens_B=last + 1, positions_T=rows
        )
        return ops("gqa_decode")(q[rows], cut, how)

    threads(2)
    every = decoded(at)
    for rows in (at[:1], at[70:71], at[199:], at[3:90], at.flip(0), at[torch.randperm(prompt)[:37]]):
        threads(1 + len(rows) % 2)
        assert torch.equal(decoded(rows), every[rows])
    assert torch.equal(decoded(at, num_queries=4), every)


def test_keys_that_a_row_does_not_see_may_be_anything(ops):
    """Those behind it and, in a window, those before it; what it sees makes it NaN."""
    if ops("gqa_decode").name == "triton":
        pytest.skip("a weight of zero is multiplied there, as in mla_decode")
    q, keys, how = case((6, 2, 16), (20, False), torch.float32, [150])
    at = torch.tensor([60, 100, 149])
    table, lengths = keys.page_table_BP.expand(3, -1), torch.tensor([150, 150, 150])
    cut = keys._replace(page_table_BP=table, kv_tokens_B=lengths, positions_T=at)
    q = random(3, *q.shape[1:], seed=3)
    y = ops("gqa_decode")(q, cut, how)
    rows = keys.pages[keys.page_table_BP[0]].flatten(0, 1)
    for odd in (torch.nan, torch.inf):
        broken = rows.clone()
        broken[[3, 40, 61, 75, 101, 120]] = odd
        pages = keys.pages.clone()
        pages[keys.page_table_BP[0]] = broken.view(-1, 64, rows.shape[-1])
        assert torch.equal(ops("gqa_decode")(q, cut._replace(pages=pages), how), y)
        pages[keys.page_table_BP[0][0], 55] = odd
        hit = ops("gqa_decode")(q, cut._replace(pages=pages), how)
        assert hit[0].isnan().all()
        assert torch.equal(hit[1:], y[1:])


def heads(shape, norms, rotary, dtype, num_tokens):
    num_heads, num_kv_heads, head_dim = shape
    angles = 3 * random(num_tokens, rotary // 2, seed=4)
    of_heads = (head_dim, head_dim)
    widths = {"none": (None, None), "head": of_heads, "head in float32": of_heads}.get(
        norms, (num_heads * head_dim, num_kv_heads * head_dim)
    )
    of_norms = torch.float32 if norms == "head in float32" else dtype
    norm_q, norm_k = (
        None if width is None else 1 + random(width, seed=5 + width % 7, dtype=of_norms) / 4 for width in widths
    )
    pages = torch.full((3, 64, 2 * num_kv_heads * head_dim), 7, dtype=dtype)
    slots = torch.randperm(3 * 64, generator=torch.Generator().manual_seed(1))[:num_tokens]
    qkv = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, seed=6, dtype=dtype)
    return qkv, NewHeads(num_heads, num_kv_heads, norm_q, norm_k, 1e-6, angles.cos(), angles.sin(), pages, slots)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", ["none", "head", "head in float32", "whole"])
@pytest.mark.parametrize(("shape", "rotary"), [((6, 2, 16), 16), ((4, 1, 80), 40), ((3, 3, 24), 8), ((2, 1, 64), 64)])
def test_heads_are_normed_and_rotated_and_written_to_their_pages(ops, shape, rotary, norms, dtype):
    num_heads, num_kv_heads, head_dim = shape
    qkv, new = heads(shape, norms, rotary, dtype, 70)

    def exact(x_TA, norm):
        x_TA = x_TA.double()
        if norms.startswith("head"):
            x_TA = x_TA.unflatten(-1, (-1, head_dim))
        if norm is not None:
            x_TA = x_TA * torch.rsqrt(x_TA.square().mean(-1, keepdim=True) + new.eps) * norm.double()
        x_THA = x_TA.reshape(len(x_TA), -1, head_dim)
        first, second = x_THA[..., : rotary // 2], x_THA[..., rotary // 2 : rotary]
        cos, sin = new.cos.double()[:, None], new.sin.double()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, x_THA[..., rotary:]], -1)

    q_TA, k_TA, v_TA = qkv.split([num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], dim=-1)
    q = ops("gqa_rope_and_cache")(qkv.clone(), new)
    assert q.is_contiguous()
    assert_near(q, exact(q_TA, new.norm_q))
    held = new.pages.view(3 * 64, -1)
    assert_near(held[new.slots_T].chunk(2, dim=-1)[0], exact(k_TA, new.norm_k).flatten(1))
    assert torch.equal(held[new.slots_T].chunk(2, dim=-1)[1], v_TA)
    others = torch.ones(3 * 64, dtype=torch.bool)
    others[new.slots_T] = False
    assert (held[others] == 7).all()
    for some in (slice(0, 1), slice(3, 40)):
        cut = {name: getattr(new, name)[some] for name in ("cos", "sin", "slots_T")}
        part = new._replace(pages=torch.zeros_like(new.pages), **cut)
        assert torch.equal(ops("gqa_rope_and_cache")(qkv[some].clone(), part), q[some])
        assert torch.equal(part.pages.view(3 * 64, -1)[cut["slots_T"]], held[cut["slots_T"]])


def test_pages_in_fp8_are_plain_ones_rounded_and_read_as_they_are_widened(ops):
    shape = (6, 2, 48)
    qkv, new = heads(shape, "head", 48, torch.bfloat16, 150)
    q = ops("gqa_rope_and_cache")(qkv.clone(), new)
    width = new.pages.shape[-1]
    held = torch.full((3, 64, fp8_pages.row_bytes(width, 0)), 7, dtype=torch.uint8)
    assert torch.equal(ops("gqa_rope_and_cache_fp8")(qkv.clone(), new._replace(pages=held)), q)
    slots = new.slots_T
    rounded = fp8_pages.narrow(new.pages.view(3 * 64, -1)[slots], width)
    assert torch.equal(held.view(3 * 64, -1)[slots], rounded)

    held = fp8_pages.narrow(random(9 * 64, width, dtype=torch.bfloat16), width).view(9, 64, -1)
    wide = fp8_pages.widen(held, width)
    q, keys, how = case(shape, (30, True), torch.bfloat16, [1, 64, 65, 190, 7])
    keys = keys._replace(pages=held)
    plain = ops("gqa_decode")(q, keys._replace(pages=wide), how)
    assert torch.equal(ops("gqa_decode_fp8")(q, keys, how), plain)
    counts = torch.tensor([1, 1, 1, 1, 1])
    plain = ops("gqa_prefill")(q, keys._replace(pages=wide), counts, how)
    assert torch.equal(ops("gqa_prefill_fp8")(q, keys, counts, how), plain)


def test_no_rows_are_none(ops):
    q, keys, how = case((4, 2, 16), (None, False), torch.bfloat16, [5])
    nothing = torch.empty(0, dtype=torch.int64)
    empty = PagedKeys(keys.pages, keys.page_table_BP[:0], nothing, nothing)
    assert ops("gqa_decode")(q[:0], empty, how).shape == (0, 4, 16)
    assert ops("gqa_prefill")(q[:0], empty, nothing, how).shape == (0, 4, 16)
    held = torch.zeros(1, 64, fp8_pages.row_bytes(64, 0), dtype=torch.uint8)
    assert ops("gqa_decode_fp8")(q[:0], empty._replace(pages=held), how).shape == (0, 4, 16)


def test_forms_that_cannot_be_are_refused(ops):
    q, keys, how = case((4, 2, 16), (None, False), torch.bfloat16, [5])
    with pytest.raises(ValueError, match="a window of 0 tokens: each token sees itself at least"):
        ops("gqa_decode")(q, keys, how._replace(window=0))
    if ops("gqa_decode").name == "cpu":
        with pytest.raises(RuntimeError, match=r"pages must be \[pages, 64, keys and values of 1 heads\]"):
            ops("gqa_decode")(q, keys, how._replace(num_kv_heads=1))
        with pytest.raises(RuntimeError, match="one sink per query head"):
            ops("gqa_prefill")(q, keys, torch.tensor([1]), how._replace(sinks_H=torch.zeros(3)))
