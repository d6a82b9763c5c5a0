"""Attention to a window and to compressed entries, and its parts, against formulas written out in float64.

Rows alone are compared with rows among others, bit by bit, in any chunks and with any number of threads.
"""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels.reference.compressed import NO_ROW, EntryKeys, KeyRows, NewEntries

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-7}  # of the largest value
EPS = 1e-6


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(result, exact, dtype=None):
    assert result.isfinite().all()
    assert (result.double() - exact).abs().max() <= TOLERANCE[dtype or result.dtype] * exact.abs().max()


def turned(x, cos, sin):
    """Rotate the last values of rows [T, ..., C] in float64."""
    x, rotary = x.double().clone(), 2 * cos.shape[-1]
    shape = (len(x), *[1] * (x.dim() - 2), cos.shape[-1])
    cos, sin = cos.double().view(shape), sin.double().view(shape)
    first, second = x[..., -rotary::2].clone(), x[..., -rotary + 1 :: 2].clone()
    x[..., -rotary::2], x[..., -rotary + 1 :: 2] = first * cos - second * sin, second * cos + first * sin
    return x


def angles(count, rotary, seed=4):
    values = 3 * random(count, rotary // 2, seed=seed)
    return values.cos(), values.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize(("heads", "width", "rotary"), [(3, 24, 8), (1, 80, 64), (5, 16, 16)])
def test_heads_are_normed_and_their_ends_rotated(ops, heads, width, rotary, is_normed, dtype):
    x, norm = random(37, heads * width, dtype=dtype), 1 + random(width, seed=1, dtype=dtype) / 4
    cos, sin = angles(37, rotary)
    y = ops("rotate_heads")(x, heads, norm if is_normed else None, EPS, cos, sin)
    exact = x.double().unflatten(-1, (heads, width))
    if is_normed:
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPS) * norm.double()
    assert y.is_contiguous()
    assert_near(y, turned(exact, cos, sin), dtype)
    for rows in (slice(0, 1), slice(3, 30)):
        alone = ops("rotate_heads")(x[rows], heads, norm if is_normed else None, EPS, cos[rows], sin[rows])
        assert torch.equal(alone, y[rows])


# ---- pools: tokens of an entry, width of one, whether entries overlap, values of a page

POOLS = [(4, 24, True, 16 * 24), (4, 16, True, 16 * 16), (128, 16, False, 8), (128, 40, False, 20)]


class Pool:
    """One request's tokens, whose parts go to a pool in chunks."""

    def __init__(self, shape, dtype, num_tokens):
        self.per_entry, self.width, self.overlaps, page_values = shape
        raw = self.width * (1 + self.overlaps)
        self.values, self.gates = random(num_tokens, raw, seed=1), 2 * random(num_tokens, raw, seed=2)
        self.bias, self.norm = random(self.per_entry, raw, seed=3), 1 + random(self.width, seed=4) / 4
        self.angles = angles(num_tokens // self.per_entry + 1, 8)
        self.num_tokens, self.raw, self.dtype, self.page_values = num_tokens, raw, dtype, page_values
        self.num_pages = -(-num_tokens // 64)

    def empty(self, num_requests):
        """State and pages full of leftovers."""
        ring = self.per_entry * (1 + self.overlaps)
        waiting = torch.full((num_requests + 1, ring, 2, self.raw), torch.nan)
        return waiting, torch.full((num_requests * self.num_pages + 1, self.page_values), 7, dtype=self.dtype)

    def chunks(self, ops, bounds, memory, slots, tables):
        """Run one step of a chunk per request; `bounds` are positions of the first token and behind the last."""
        rows = torch.cat([torch.arange(*each) for each in bounds])
        sizes = torch.tensor([end - first for first, end in bounds])
        cos, sin = (each[rows // self.per_entry] for each in self.angles)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        requests = torch.arange(len(bounds)).repeat_interleave(sizes)
        new = NewEntries(
            self.values[rows], self.gates[rows], self.bias, self.norm, EPS, cos, sin, rows, requests, starts,
            torch.tensor(slots), *memory, torch.stack(tables),
        )  # fmt: skip
        ops("pool_entries")(new)

    def entries(self, memory, table):
        count = self.num_tokens // self.per_entry
        return memory[1][table].flatten()[: count * self.width].view(count, self.width)

    def expected(self):
        rows = []
        at = torch.arange(self.num_tokens)
        gates = (self.gates + self.bias[at % self.per_entry]).double()
        for entry in range(self.num_tokens // self.per_entry):
            begin = entry * self.per_entry
            own = slice(begin, begin + self.per_entry)
            values, weights = self.values[own, -self.width :].double(), gates[own, -self.width :]
            if self.overlaps and entry:
                before = slice(begin - self.per_entry, begin)
                values = torch.cat([self.values[before, : self.width].double(), values])
                weights = torch.cat([gates[before, : self.width], weights])
            mean = (torch.softmax(weights, dim=0) * values).sum(0)
            rows.append(mean * torch.rsqrt(mean.square().mean() + EPS) * self.norm.double())
        count = len(rows)
        return turned(torch.stack(rows), *(each[:count] for each in self.angles))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", POOLS)
def test_entries_are_means_of_their_tokens_wherever_a_prompt_is_cut(ops, shape, dtype, threads):
    pool = Pool(shape, dtype, 150 if ops.is_triton else 300)
    table = torch.randperm(pool.num_pages, generator=torch.Generator().manual_seed(5))
    whole = pool.empty(1)
    threads(2)
    pool.chunks(ops, [(0, pool.num_tokens)], whole, [1], [table])
    assert_near(pool.entries(whole, table), pool.expected(), dtype)
    for cuts in ([1, 2, 3, 7, 8, 9], [128], [127, 131], list(range(1, 12))):
        parts = pool.empty(1)
        threads(1)
        for first, end in zip([0, *cuts], [*cuts, pool.num_tokens], strict=True):
            pool.chunks(ops, [(first, end)], parts, [1], [table])
        assert torch.equal(pool.entries(parts, table), pool.entries(whole, table))
        assert torch.equal(parts[0][1], whole[0][1])
        assert parts[0][0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", POOLS[:1] + POOLS[3:])
def test_a_request_pools_the_same_next_to_others(ops, shape, dtype):
    pool = Pool(shape, dtype, 140)
    tables = list((torch.randperm(3 * pool.num_pages, generator=torch.Generator().manual_seed(6))).chunk(3))
    memory, alone = pool.empty(3), pool.empty(3)
    pool.chunks(ops, [(0, 140)], alone, [2], tables[:1])
    pool.chunks(ops, [(0, 50), (0, 130), (0, 3)], memory, [2, 0, 3], tables)
    pool.chunks(ops, [(50, 140), (130, 131), (3, 5)], memory, [2, 0, 3], tables)
    assert torch.equal(pool.entries(memory, tables[0]), pool.entries(alone, tables[0]))
    assert torch.equal(memory[0][2], alone[0][2])
    one_each = pool.empty(3)
    for at in range(140):  # as in decode
        pool.chunks(ops, [(at, at + 1)] * 3, one_each, [0, 1, 2], tables)
    assert torch.equal(pool.entries(one_each, tables[1]), pool.entries(alone, tables[0]))


# ---- choice


def scored(q, weights, keys, table, scale):
    """Scores of one query for all entries of its table, in float64."""
    rows = keys[table].flatten().double().view(-1, q.shape[1])
    return ((q.double() @ rows.T * scale).relu() * weights.double()[:, None]).sum(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width", "topk"), [(3, 32, 5), (64, 128, 20), (17, 16, 100)])
def test_the_best_entries_are_chosen_in_their_order(ops, heads, width, topk, dtype):
    pages, table = random(13, 16 * width, seed=1, dtype=dtype), torch.randperm(12).view(3, 4)
    requests, visible = torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([64, 0, 3, 20, 21, 63])
    q, weights = random(6, heads, width, seed=2, dtype=dtype), random(6, heads, seed=3)
    scale = (heads * width) ** -0.5
    chosen = ops("choose_entries")(q, weights, EntryKeys(pages, table, requests, visible), topk=topk, scale=scale)
    assert chosen.shape == (6, min(topk, 64))
    number_of = torch.full((13 * 16,), -1)
    for row in range(6):
        places = table[requests[row]].repeat_interleave(16) * 16 + torch.arange(16).repeat(4)
        number_of[places] = torch.arange(64)
        count = min(topk, int(visible[row]))
        assert (chosen[row, count:] == NO_ROW).all()
        numbers = number_of[chosen[row, :count]]
        assert (numbers.diff() > 0).all()
        assert (numbers < visible[row]).all()
        assert (numbers >= 0).all()
        if count < visible[row]:
            scores = scored(q[row], weights[row], pages, table[requests[row]], scale)[: visible[row]]
            others = torch.ones(len(scores), dtype=torch.bool)
            others[numbers] = False
            assert scores[numbers].min() >= scores[others].max() - 1e-5
        alone = EntryKeys(pages, table, requests[row : row + 1], visible[row : row + 1])
        again = ops("choose_entries")(q[row : row + 1], weights[row : row + 1], alone, topk=topk, scale=scale)
        assert torch.equal(again[0], chosen[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_entries_of_equal_score_the_first_are_chosen(ops, dtype):
    pages = torch.zeros(2, 16 * 32, dtype=dtype)
    pages[1, :32] = 1  # entry 16
    keys = EntryKeys(pages, torch.tensor([[0, 1]]), torch.tensor([0]), torch.tensor([30]))
    chosen = ops("choose_entries")(torch.ones(1, 4, 32, dtype=dtype), torch.ones(1, 4), keys, topk=4, scale=1.0)
    assert chosen.tolist() == [[0, 1, 2, 16]]


# ---- core attention: heads, width, rotary width, parts of an entry

SHAPES = [(4, 32, 8, 1), (70, 64, 64, 2), (64, 80, 16, 1), (9, 24, 24, 3), (16, 128, 64, 2)]


def attention_case(shape, dtype, num_rows=11):
    """Queries with windows of 40 rows, of which the first queries have fewer, and some of 90 entries."""
    heads, width, rotary, parts = shape
    q, rows = random(num_rows, heads, width, seed=1, dtype=dtype), random(100, width, seed=2, dtype=dtype)
    back = torch.arange(39, -1, -1)
    ids = 3 * torch.arange(num_rows)[:, None] - back
    window = KeyRows(rows, torch.where(ids < 0, NO_ROW, ids)[..., None])
    entries = random(200, width // parts, seed=3, dtype=dtype)
    chosen = torch.stack(
        [torch.randperm(200, generator=torch.Generator().manual_seed(row))[: 60 * parts] for row in range(num_rows)]
    )
    chosen = chosen.view(num_rows, 60, parts)
    chosen[torch.arange(60) >= 6 * torch.arange(num_rows)[:, None]] = NO_ROW
    return q, window, KeyRows(entries, chosen), 2 * random(heads, seed=5), width**-0.5, *angles(num_rows, rotary)


def attended(q, window, entries, sinks, scale, cos, sin):
    out = torch.empty(q.shape, dtype=torch.float64)
    for row in range(len(q)):
        keys = [
            each.rows[ids].flatten().double()
            for each in (window, entries)
            if each is not None
            for ids in each.ids_TKL[row]
            if ids[0] != NO_ROW
        ]
        keys = torch.stack(keys)
        scores = torch.cat([q[row].double() @ keys.T * scale, sinks.double()[:, None]], dim=1)
        out[row] = torch.softmax(scores, dim=1)[:, :-1] @ keys
    return turned(out, cos, -sin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_softmax_written_out(ops, shape, dtype):
    if ops.is_triton and shape not in SHAPES[:2]:
        pytest.skip("the interpreter is slow")
    case = attention_case(shape, dtype)
    y = ops("attend_entries")(*case)
    assert y.dtype == dtype
    assert_near(y, attended(*case))
    without = (*case[:2], None, *case[3:])
    assert_near(ops("attend_entries")(*without), attended(*without))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_a_row_keeps_its_bits_next_to_others(ops, shape, dtype, threads):
    if ops.is_triton and shape != SHAPES[0]:
        pytest.skip("the interpreter is slow")
    q, window, entries, sinks, scale, cos, sin = attention_case(shape, dtype)
    threads(2)
    y = ops("attend_entries")(q, window, entries, sinks, scale, cos, sin)
    for rows in (slice(0, 1), slice(4, 5), slice(2, 9), slice(10, 11)):
        threads(1)
        # the list of entries is as long as that of the query with most of them
        count = int((entries.ids_TKL[rows, :, 0] != NO_ROW).sum(1).max())
        some = window._replace(ids_TKL=window.ids_TKL[rows]), entries._replace(ids_TKL=entries.ids_TKL[rows, :count])
        assert torch.equal(ops("attend_entries")(q[rows], *some, sinks, scale, cos[rows], sin[rows]), y[rows])


def test_keys_that_a_row_does_not_have_may_be_anything(ops):
    dtype = torch.bfloat16
    q, window, entries, sinks, scale, cos, sin = attention_case(SHAPES[0], dtype)
    y = ops("attend_entries")(q, window, entries, sinks, scale, cos, sin)
    rows, values = window.values.clone(), entries.values.clone()
    rows[31:] = torch.nan
    values[[each for each in range(200) if each not in set(entries.ids_TKL.flatten().tolist())]] = torch.inf
    odd = window._replace(values=rows), entries._replace(values=values)
    assert torch.equal(ops("attend_entries")(q, *odd, sinks, scale, cos, sin), y)
    rows[2] = torch.nan
    hit = ops("attend_entries")(q, *odd, sinks, scale, cos, sin)
    assert hit[1:].isnan().all()
    assert torch.equal(hit[0], y[0])


def test_no_rows_are_none(ops):
    dtype = torch.bfloat16
    q, window, entries, sinks, scale, cos, sin = attention_case(SHAPES[0], dtype)
    some = window._replace(ids_TKL=window.ids_TKL[:0]), entries._replace(ids_TKL=entries.ids_TKL[:0])
    assert ops("attend_entries")(q[:0], *some, sinks, scale, cos[:0], sin[:0]).shape == (0, 4, 32)
    nothing = torch.empty(0, dtype=torch.int64)
    keys = EntryKeys(torch.zeros(2, 16 * 32, dtype=dtype), torch.tensor([[1]]), nothing, nothing)
    assert ops("choose_entries")(q[:0], torch.empty(0, 4), keys, topk=3, scale=1.0).shape == (0, 3)
    assert ops("rotate_heads")(random(0, 64, dtype=dtype), 2, None, EPS, *angles(0, 8)).shape == (0, 2, 32)


@pytest.mark.parametrize("ops", ["cpu"], indirect=True)  # which checks what Python would not
def test_arguments_that_do_not_fit_are_refused(ops):
    q, window, entries, sinks, scale, cos, sin = attention_case(SHAPES[0], torch.float32)
    wrong = entries._replace(ids_TKL=torch.where(entries.ids_TKL == NO_ROW, 200, entries.ids_TKL))
    with pytest.raises(RuntimeError, match="row 200 of 200"):
        ops("attend_entries")(q, window, wrong, sinks, scale, cos, sin)
    with pytest.raises(RuntimeError, match="one sink per head"):
        ops("attend_entries")(q, window, entries, sinks[:3], scale, cos, sin)
    with pytest.raises(RuntimeError, match="keys of 1 parts of 16 values for queries of 32"):
        ops("attend_entries")(q, window, entries._replace(values=random(400, 16)), sinks, scale, cos, sin)
    pool = Pool(POOLS[0], torch.float32, 20)
    with pytest.raises(RuntimeError, match="slot 2 of 2"):
        pool.chunks(ops, [(0, 5)], pool.empty(1), [2], [torch.tensor([0])])
    with pytest.raises(RuntimeError, match="position 3 is behind the pages"):
        pool.chunks(ops, [(0, 20)], pool.empty(1), [0], [torch.tensor([], dtype=torch.int64)])
