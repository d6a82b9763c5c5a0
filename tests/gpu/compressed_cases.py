"""Checks of attention to compressed entries and of hyper-connections, at DeepSeek-V4-Flash's widths."""

# T tokens, B requests, H heads, C width of a key, I width of an index key, K chosen entries, N streams, D hidden

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import exact
import torch
from cases import Case, Dims, Function, Work, bytes_of, normal, parts_of

from batchinfer_kernels import registry
from batchinfer_kernels.reference.compressed import NO_ROW, EntryKeys, KeyRows, NewEntries
from batchinfer_kernels.reference.hyper import StreamMix, StreamRule

_EPS, _FLOAT = 1e-6, torch.float32


@dataclass(frozen=True)
class Entries:
    """Widths of the release's attention (config.json), or tiny ones for the rehearsal."""

    heads: int = 64
    width: int = 512
    rotary: int = 64
    window: int = 128
    index_heads: int = 64
    index_width: int = 128
    topk: int = 512
    hidden: int = 4096
    streams: int = 4


_TINY = Entries(heads=4, width=32, rotary=8, window=20, index_heads=16, index_width=16, topk=16, hidden=48)


def compressed_cases(dims: Dims, *, is_tiny: bool, is_quick: bool) -> list[Case]:
    """Heads, pools, choice, core attention in decode and of many queries, and streams."""
    del dims  # this model has widths of its own
    sizes = _TINY if is_tiny else Entries()
    requests, context, tokens = (3, 300, 37) if is_tiny else (128, 4096, 1024 if is_quick else 4096)
    heads = f"{sizes.heads} heads of {sizes.width}"
    cases = [Case("rotate_heads", f"{tokens} x {heads}", partial(_rotate, sizes, tokens))]
    for ratio in (4, 128):
        pooled = max(tokens, 400)  # some entries of 128 tokens
        words = f"{pooled} tokens, entries of {ratio}"
        cases.append(Case("pool_entries", words, partial(_pool, sizes, ratio, pooled)))
    words = f"{requests} x {sizes.index_heads} heads, {sizes.topk} of {context // 4} entries"
    cases.append(Case("choose_entries", words, partial(_choose, sizes, requests, context // 4)))
    for count in (requests, tokens):
        for parts, keys in ((1, sizes.topk), (2, context // 128)):
            words = f"{count} x {heads}, window {sizes.window}, {keys} entries"
            cases.append(Case("attend_entries", words, partial(_attend, sizes, count, keys, parts)))
    streams = f"{tokens} x {sizes.streams} streams of {sizes.hidden}"
    for op, make in (
        ("stream_products", _products),
        ("stream_mix", _mix),
        ("join_streams", _join),
        ("leave_streams", _leave),
    ):
        cases.append(Case(op, streams, partial(make, sizes, tokens)))
    return cases


def _angles(count: int, rotary: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    angles = normal(count, rotary // 2, device=device, seed=9, dtype=_FLOAT)
    return angles.cos(), angles.sin()


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the last values of rows [T, ..., C] in float64."""
    x, rotary = x.double().clone(), 2 * cos.shape[-1]
    shape = (len(x), *[1] * (x.dim() - 2), cos.shape[-1])
    cos, sin = cos.double().view(shape), sin.double().view(shape)
    first, second = x[..., -rotary::2].clone(), x[..., -rotary + 1 :: 2].clone()
    x[..., -rotary::2], x[..., -rotary + 1 :: 2] = first * cos - second * sin, second * cos + first * sin
    return x


def _rotate(sizes: Entries, num_tokens: int, device: torch.device) -> Work:
    x, norm = (
        normal(num_tokens, sizes.heads * sizes.width, device=device),
        normal(sizes.width, device=device, seed=1),
    )
    cos, sin = _angles(num_tokens, sizes.rotary, device)

    def expected() -> torch.Tensor:
        wide = x.double().unflatten(-1, (sizes.heads, -1))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS) * norm.double()
        return _turned(normed, cos, sin)

    return Work(
        run=lambda function, rows: function(x[rows], sizes.heads, norm, _EPS, cos[rows], sin[rows]),
        expected=expected,
        measure="relative",
        parts=parts_of(num_tokens),
        flops=0,
        num_bytes=2 * bytes_of(x) + bytes_of(cos, sin),
    )


def _pool(sizes: Entries, ratio: int, num_tokens: int, device: torch.device) -> Work:
    """One prompt from its beginning; parts of it are its first tokens."""
    raw = sizes.width * (2 if ratio == 4 else 1)
    values, gates = (normal(num_tokens, raw, device=device, seed=seed, dtype=_FLOAT) for seed in (1, 2))
    bias, norm = (
        normal(ratio, raw, device=device, seed=3, dtype=_FLOAT),
        normal(sizes.width, device=device, seed=4, dtype=_FLOAT),
    )
    positions = torch.arange(num_tokens, device=device)
    angles = _angles(num_tokens // ratio + 1, sizes.rotary, device)
    num_pages = -(-num_tokens // exact.PAGE)
    pages = torch.zeros(num_pages, exact.PAGE * sizes.width // ratio, dtype=torch.bfloat16, device=device)
    waiting = torch.zeros(1, 8 if ratio == 4 else 128, 2, raw, dtype=_FLOAT, device=device)
    table, slots = torch.arange(num_pages, device=device)[None], torch.zeros(1, dtype=torch.int64, device=device)

    def run(function: Function, rows: slice) -> torch.Tensor:
        end = len(positions[: rows.stop])
        cos, sin = (each[positions[:end] // ratio] for each in angles)
        starts, requests = torch.tensor([0, end], device=device), torch.zeros_like(positions[:end])
        new = NewEntries(
            values[:end], gates[:end], bias, norm, _EPS, cos, sin, positions[:end], requests, starts, slots,
            waiting, pages, table,
        )  # fmt: skip
        function(new)
        return pages.flatten()[: end // ratio * sizes.width].view(-1, sizes.width).clone()

    def expected() -> torch.Tensor:
        return _pooled(sizes.width, ratio, values, gates + bias[positions % ratio], norm, angles)

    return Work(
        run=run,
        expected=expected,
        measure="relative",
        parts=(slice(0, num_tokens // 2), slice(0, num_tokens // 3)),
        flops=0,
        num_bytes=bytes_of(values, gates, pages),
        take=lambda whole, rows: whole[: rows.stop // ratio],
    )


def _pooled(
    width: int,
    ratio: int,
    values: torch.Tensor,
    gates: torch.Tensor,
    norm: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """All entries of a prompt in float64."""
    count = len(values) // ratio
    rows = [each[: count * ratio].double().unflatten(0, (count, ratio)) for each in (values, gates)]
    own_values, own_gates = (each[..., -width:] for each in rows)
    if ratio == 4:
        before = [torch.cat([torch.zeros_like(each[:1]), each[:-1]])[..., :width] for each in rows]
        before[1][0] = -torch.inf
        own_values, own_gates = torch.cat([before[0], own_values], 1), torch.cat([before[1], own_gates], 1)
    mean = (torch.softmax(own_gates, dim=1) * own_values).sum(1)
    normed = mean * torch.rsqrt(mean.square().mean(-1, keepdim=True) + _EPS) * norm.double()
    return _turned(normed, *(each[:count] for each in angles))


def _choose(sizes: Entries, num_requests: int, num_entries: int, device: torch.device) -> Work:
    """Small whole numbers: every sum is exact in any order, and many scores are equal."""
    per_request = -(-num_entries // 16)
    pages, q, weights = (
        normal(*shape, device=device, seed=seed).round().clamp(-2, 2)
        for seed, shape in enumerate(
            [
                (num_requests * per_request, 16 * sizes.index_width),
                (num_requests, sizes.index_heads, sizes.index_width),
                (num_requests, sizes.index_heads),
            ]
        )
    )
    weights = weights.float()
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(4)).to(device)
    table, requests = order.view(num_requests, per_request), torch.arange(num_requests, device=device)
    visible = num_entries - requests % 7
    reference = registry.bind("choose_entries", ["reference"])

    def run(function: Function, rows: slice) -> torch.Tensor:
        own = requests[rows]
        keys = EntryKeys(pages, table[own], torch.arange(len(own), device=device), visible[rows])
        return function(q[rows], weights[rows], keys, topk=sizes.topk, scale=0.25)

    return Work(
        run=run,
        expected=lambda: run(reference, slice(None)),
        measure="unequal",
        parts=parts_of(num_requests),
        flops=2 * num_requests * num_entries * sizes.index_heads * sizes.index_width,
        num_bytes=bytes_of(pages, q),
    )


def _attend(sizes: Entries, num_rows: int, num_entries: int, num_parts: int, device: torch.device) -> Work:
    """Queries with windows of their own and entries all over memory; the first one has none of some."""
    q = normal(num_rows, sizes.heads, sizes.width, device=device)
    rows = normal(num_rows + sizes.window, sizes.width, device=device, seed=1)
    ids = torch.arange(num_rows, device=device)[:, None] + torch.arange(1, sizes.window + 1, device=device)
    entries = normal(2 * num_entries * num_parts, sizes.width // num_parts, device=device, seed=2)
    places = torch.rand(num_rows, 2 * num_entries * num_parts, device=device).argsort(-1)[:, : num_entries * num_parts]
    places = places.view(num_rows, num_entries, num_parts).contiguous()
    ids[0, : sizes.window // 2], places[0, num_entries // 2 :] = NO_ROW, NO_ROW
    sinks = normal(sizes.heads, device=device, seed=3, dtype=_FLOAT)
    cos, sin = _angles(num_rows, sizes.rotary, device)

    def run(function: Function, some: slice) -> torch.Tensor:
        keys = KeyRows(rows, ids[some, :, None]), KeyRows(entries, places[some])
        return function(q[some], *keys, sinks, sizes.width**-0.5, cos[some], sin[some])

    def expected() -> torch.Tensor:
        out = torch.empty(q.shape, dtype=torch.float64, device=device)
        for row in range(num_rows):
            near, chosen = ids[row][ids[row] != NO_ROW], places[row][places[row, :, 0] != NO_ROW]
            keys = torch.cat([rows[near], entries[chosen].flatten(1)]).double()
            scores = torch.cat([q[row].double() @ keys.T * sizes.width**-0.5, sinks.double()[:, None]], dim=1)
            out[row] = torch.softmax(scores, dim=1)[:, :-1] @ keys
        return _turned(out, cos, -sin)

    return Work(
        run=run,
        expected=expected,
        measure="relative",
        parts=parts_of(num_rows),
        flops=4 * num_rows * (sizes.window + num_entries) * sizes.heads * sizes.width,
        num_bytes=2 * bytes_of(q) + bytes_of(rows) + 2 * num_rows * num_entries * sizes.width,
    )


def _streams(sizes: Entries, num_tokens: int, device: torch.device) -> torch.Tensor:
    return normal(num_tokens, sizes.streams, sizes.hidden, device=device)


def _products(sizes: Entries, num_tokens: int, device: torch.device) -> Work:
    streams, count = _streams(sizes, num_tokens, device), sizes.streams * (2 + sizes.streams)
    weight = normal(count, sizes.streams * sizes.hidden, device=device, seed=1, dtype=_FLOAT)
    mixing = registry.bind("pack_router", ["triton"])(weight)

    def expected() -> torch.Tensor:
        flat = streams.double().flatten(1)
        return flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + _EPS) @ weight.double().T

    return Work(
        run=lambda function, rows: function(streams[rows], mixing, _EPS),
        expected=expected,
        measure="relative",
        parts=parts_of(num_tokens),
        flops=2 * count * streams.numel(),
        num_bytes=bytes_of(streams),
    )


def _factors(sizes: Entries, num_tokens: int, device: torch.device) -> StreamMix:
    shapes = [(sizes.streams,), (sizes.streams,), (sizes.streams, sizes.streams)]
    return StreamMix(
        *(normal(num_tokens, *shape, device=device, seed=seed, dtype=_FLOAT) for seed, shape in enumerate(shapes))
    )


def _mix(sizes: Entries, num_tokens: int, device: torch.device) -> Work:
    count = sizes.streams
    mixed = normal(num_tokens, count * (2 + count), device=device, dtype=_FLOAT)
    base, scale = normal(count * (2 + count), device=device, seed=1, dtype=_FLOAT), torch.ones(3, device=device)

    def run(function: Function, rows: slice) -> torch.Tensor:
        return torch.cat([each.flatten(1) for each in function(mixed[rows], scale, base, StreamRule(20, _EPS))], dim=1)

    def expected() -> torch.Tensor:
        before, after, past = (mixed.double() + base.double()).split([count, count, count * count], dim=-1)
        past = torch.softmax(past.unflatten(-1, (count, count)), dim=-1) + _EPS
        past = past / (past.sum(-2, keepdim=True) + _EPS)
        for _ in range(19):
            past = past / (past.sum(-1, keepdim=True) + _EPS)
            past = past / (past.sum(-2, keepdim=True) + _EPS)
        return torch.cat([torch.sigmoid(before) + _EPS, 2 * torch.sigmoid(after), past.flatten(1)], dim=1)

    return Work(
        run=run,
        expected=expected,
        measure="relative",
        parts=parts_of(num_tokens),
        flops=0,
        num_bytes=2 * bytes_of(mixed),
    )


def _join(sizes: Entries, num_tokens: int, device: torch.device) -> Work:
    streams, factors = _streams(sizes, num_tokens, device), _factors(sizes, num_tokens, device).before_TN
    return Work(
        run=lambda function, rows: function(streams[rows], factors[rows]),
        expected=lambda: (streams.double() * factors.double()[..., None]).sum(1),
        measure="relative",
        parts=parts_of(num_tokens),
        flops=0,
        num_bytes=bytes_of(streams) * 5 // 4,
    )


def _leave(sizes: Entries, num_tokens: int, device: torch.device) -> Work:
    streams, mix = _streams(sizes, num_tokens, device), _factors(sizes, num_tokens, device)
    y = normal(num_tokens, sizes.hidden, device=device, seed=5)

    def expected() -> torch.Tensor:
        past = torch.einsum("tjk,tjd->tkd", mix.past_TNN.double(), streams.double())
        return mix.after_TN.double()[..., None] * y.double()[:, None] + past

    return Work(
        run=lambda function, rows: function(streams[rows], StreamMix(*(each[rows] for each in mix)), y[rows]),
        expected=expected,
        measure="relative",
        parts=parts_of(num_tokens),
        flops=0,
        num_bytes=2 * bytes_of(streams) + bytes_of(y),
    )
