"""Checks of sparse attention at DeepSeek-V3.2's widths: index keys, which keys are chosen, and attention to these."""

# T queries, B requests, H heads, I width of an index key, X keys of a request, K chosen keys, W latent and rotary width

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import exact
import torch
from cases import SCALE, Case, Dims, Function, Work, bytes_of, normal, parts_of

from batchinfer_kernels import reference
from batchinfer_kernels.reference.sparse import IndexedKeys, IndexQueries, NewIndexKeys


@dataclass(frozen=True)
class Sparse:
    """The sizes that DeepSeek-V3.2 adds to V3 (config.json of the release), or smaller ones for the rehearsal."""

    heads: int = 64
    width: int = 128
    topk: int = 2048


_TINY = Sparse(heads=32, width=64, topk=128)


def sparse_cases(dims: Dims, *, is_tiny: bool, is_quick: bool) -> list[Case]:
    """Each in decode, one query per request, and in prefill, the last queries of one prompt."""
    sizes = _TINY if is_tiny else Sparse()
    decode, prompt, attended = [(128, 8192), (32, 32768)], (1024, 8192), (128, 2048)
    if is_tiny:
        decode, prompt, attended = [(2, 150)], (3, 150), (3,)
    elif is_quick:
        decode, attended = decode[:1], (128,)
    heads = 64 if is_tiny else dims.heads
    last, context = prompt
    indexer = f"{sizes.heads} heads"
    cases = [Case("index_cache", f"{last} x {sizes.width}", partial(_index_cache, dims, sizes, last))]
    for count, keys in decode:
        make = partial(_choose, dims, sizes, count, 1, keys)
        cases.append(Case("choose_keys", f"{count} x {indexer}, {sizes.topk} of {keys} keys", make))
    words = f"last {last} of {context} tokens, {indexer}"
    cases += [
        Case("choose_keys", words, partial(_choose, dims, sizes, 1, last, context)),
        Case("choose_keys", f"{words}, equal scores", partial(_choose, dims, sizes, 1, last, context, has_ties=True)),
        Case("choose_keys", f"{words}, FP8", partial(_choose, dims, sizes, 1, last, context, is_fp8=True), ("hopper",)),
    ]
    cases += [
        Case("rotated_queries", f"{last} x {indexer}", partial(_rotate, dims, sizes, last)),
        Case("hadamard_fp8", f"{context} x {sizes.width}", partial(_hadamard, dims, sizes, context)),
        Case("best_slots", f"{last} x {sizes.topk} of {context}", partial(_best, sizes, last, context)),
    ]
    for count in attended:
        make = partial(_attend, dims, sizes, heads, count)
        cases.append(Case("mla_sparse", f"{count} x {heads} heads, {sizes.topk} keys", make, ("hopper", "triton")))
    return cases


def _pages(dims: Dims, sizes: Sparse, num_pages: int, device: torch.device) -> torch.Tensor:
    """Pages whose rows have a latent, a rotary key and an index key."""
    return normal(num_pages, exact.PAGE, dims.width + sizes.width, device=device, seed=3)


def _index_cache(dims: Dims, sizes: Sparse, num_tokens: int, device: torch.device) -> Work:
    num_pages = -(-num_tokens // exact.PAGE)
    pages = torch.zeros(num_pages, exact.PAGE, dims.width + sizes.width, dtype=torch.bfloat16, device=device)
    index_keys = pages[..., dims.width :]
    keys, norm = normal(num_tokens, sizes.width, device=device), normal(sizes.width, device=device, seed=1)
    bias = normal(sizes.width, device=device, seed=2)
    angles = normal(num_tokens, dims.rotary // 2, device=device, seed=3, dtype=torch.float32)
    slots = torch.randperm(num_pages * exact.PAGE, generator=torch.Generator().manual_seed(4))[:num_tokens].to(device)

    def call(function: Function, rows: slice) -> torch.Tensor:
        turned = angles[rows].cos(), angles[rows].sin()
        function(NewIndexKeys(keys[rows], norm, bias, 1e-6, *turned, index_keys, slots[rows], False))
        return index_keys.reshape(-1, sizes.width)[slots[rows]]

    def expected() -> torch.Tensor:
        normed = torch.nn.functional.layer_norm(keys.double(), (sizes.width,), norm.double(), bias.double(), 1e-6)
        first, second, plain = normed.split([dims.rotary // 2, dims.rotary // 2, sizes.width - dims.rotary], dim=-1)
        cos, sin = angles.double().cos(), angles.double().sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, plain], dim=-1)

    return Work(
        run=call,
        expected=expected,
        measure="relative",
        parts=parts_of(num_tokens),
        flops=0,
        num_bytes=2 * bytes_of(keys) + bytes_of(angles),
    )


def _choose(
    dims: Dims,
    sizes: Sparse,
    num_requests: int,
    num_queries: int,
    num_keys: int,
    device: torch.device,
    *,
    is_fp8: bool = False,
    has_ties: bool = False,
) -> Work:
    """The last queries of each request; all but one see more keys than are chosen."""
    per_request = -(-num_keys // exact.PAGE)
    pages = _pages(dims, sizes, num_requests * per_request, device)
    num_rows = num_requests * num_queries
    q = normal(num_rows, sizes.heads, sizes.width, device=device)
    weights = normal(num_rows, sizes.heads, device=device, seed=1, dtype=torch.float32)
    if has_ties:  # small whole numbers: every sum is exact in any order, and many scores are equal
        pages, q, weights = (part.round().clamp(-2, 2) for part in (pages, q, weights))
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(4)).to(device)
    table = order.view(num_requests, per_request)
    upright = torch.ones(num_rows, dims.rotary // 2, device=device)  # not turned, so that they stay whole numbers
    requests = torch.arange(num_requests, device=device).repeat_interleave(num_queries)
    positions = torch.arange(num_keys - num_queries, num_keys, device=device).repeat(num_requests)
    positions[num_rows // 2] = min(5, sizes.topk - 2)
    lengths = torch.full((num_requests,), num_keys) if num_queries > 1 else None  # on the host
    scale = 1 / 8 if has_ties else sizes.width**-0.5  # by a power of two sums stay exact
    schedule: dict = {}

    def operands(rows: slice) -> tuple[IndexQueries, IndexedKeys]:
        queries = IndexQueries(q[rows], weights[rows], upright[rows], 0 * upright[rows], False)
        kept = None if rows != slice(None) else schedule
        return queries, IndexedKeys(pages[..., dims.width :], table, requests[rows], positions[rows], lengths, kept)

    def scores_of(row: int, slots: torch.Tensor) -> torch.Tensor:
        """In float64, of operands as they are or as they are rounded; unscaled."""
        keys, own = pages.view(-1, pages.shape[-1])[slots, dims.width :], q[row]
        if is_fp8:
            rounded = map(reference.hadamard_fp8, (keys, own))
            keys, own = (values.double() * scales[:, None] for values, scales in rounded)
        return weights[row].double() @ (own.double() @ keys.double().T).relu()

    def best_scores(slots_TK: torch.Tensor, rows: range) -> torch.Tensor:
        """Return the scores of the chosen keys, largest first: of almost equal keys either one may be chosen."""
        found = [
            torch.zeros(sizes.topk, dtype=torch.float64, device=device)
            if own[0] < 0
            else scores_of(row, own.long()).sort(descending=True).values
            for row, own in zip(rows, slots_TK, strict=True)
        ]
        return torch.stack(found)

    def run(function: Function, rows: slice) -> torch.Tensor:
        chosen = function(*operands(rows), topk=sizes.topk, scale=scale)
        return chosen if has_ties else best_scores(chosen, range(num_rows)[rows])

    def expected() -> torch.Tensor:
        found = []
        for row in range(num_rows):
            seen = torch.arange(int(positions[row]) + 1, device=device)
            slots = table[requests[row], seen // exact.PAGE] * exact.PAGE + seen % exact.PAGE
            if len(seen) < sizes.topk:
                found.append(torch.full((sizes.topk,), -1, device=device))
                continue
            best = scores_of(row, slots).sort(descending=True, stable=True).indices[: sizes.topk]
            found.append(slots[best.sort().values])
        slots_TK = torch.stack(found).int()
        return slots_TK.cpu() if has_ties else best_scores(slots_TK, range(num_rows))

    return Work(
        run=run,
        expected=expected,
        measure="unequal" if has_ties else "relative",
        parts=parts_of(num_rows),
        flops=2 * num_rows * num_keys * sizes.heads * sizes.width,
        num_bytes=2 * num_requests * num_keys * sizes.width + bytes_of(q) + 4 * num_rows * sizes.topk,
        timed=lambda function: function(*operands(slice(None)), topk=sizes.topk, scale=scale),
        is_fp8=is_fp8,
    )


def _rotate(dims: Dims, sizes: Sparse, num_rows: int, device: torch.device) -> Work:
    q = normal(num_rows, sizes.heads, sizes.width, device=device)
    weights = normal(num_rows, sizes.heads, device=device, dtype=torch.float32)
    angles = normal(num_rows, dims.rotary // 2, device=device, seed=1, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()

    def expected() -> torch.Tensor:
        pairs, plain = q.double().split([dims.rotary, sizes.width - dims.rotary], dim=-1)
        first, second = pairs.unflatten(-1, (-1, 2)).unbind(-1)
        c, s = cos.double()[:, None], sin.double()[:, None]
        turned = torch.stack([first * c - second * s, second * c + first * s], dim=-1).flatten(-2)
        return torch.cat([turned, plain], dim=-1)

    return Work(
        run=lambda function, rows: function(IndexQueries(q[rows], weights[rows], cos[rows], sin[rows], True)),
        expected=expected,
        measure="relative",
        parts=parts_of(num_rows),
        flops=0,
        num_bytes=2 * bytes_of(q),
    )


def _hadamard(dims: Dims, sizes: Sparse, num_keys: int, device: torch.device) -> Work:
    """Keys of a prompt, gathered out of its pages."""
    pages = _pages(dims, sizes, -(-num_keys // exact.PAGE), device)
    keys = pages.view(-1, pages.shape[-1])[:, dims.width :]
    slots = torch.randperm(len(keys), generator=torch.Generator().manual_seed(4))[:num_keys].to(device)

    def values_of(function: Function, rows: slice) -> torch.Tensor:
        values, scales = function(keys, slots[rows])
        return values.double() * scales[:, None]

    return Work(
        run=values_of,
        expected=lambda: values_of(reference.hadamard_fp8, slice(None)),
        measure="diff",
        parts=parts_of(num_keys),
        flops=0,
        num_bytes=3 * num_keys * sizes.width,
        timed=lambda function: function(keys, slots),
    )


def _best(sizes: Sparse, num_rows: int, num_keys: int, device: torch.device) -> Work:
    """Scores of few different values: many are equal."""
    scores = normal(num_rows, num_keys, device=device, dtype=torch.float32).mul(4).round()
    table = torch.randperm(-(-num_keys // exact.PAGE), generator=torch.Generator().manual_seed(4)).to(device)[None]
    positions = torch.arange(num_keys - num_rows, num_keys, device=device)
    requests = torch.zeros_like(positions)

    def run(function: Function, rows: slice) -> torch.Tensor:
        return function(scores[rows], IndexedKeys(scores, table, requests[rows], positions[rows]), topk=sizes.topk)

    return Work(
        run=run,
        expected=lambda: run(reference.best_slots, slice(None)).cpu(),
        measure="unequal",
        parts=parts_of(num_rows),
        flops=0,
        num_bytes=bytes_of(scores) + 4 * num_rows * sizes.topk,
    )


def _attend(dims: Dims, sizes: Sparse, heads: int, num_rows: int, device: torch.device) -> Work:
    pages = _pages(dims, sizes, max(4, 2 * sizes.topk // exact.PAGE), device)
    latents = pages[..., : dims.width]
    q = normal(num_rows, heads, dims.width, device=device)
    generator = torch.Generator(device).manual_seed(5)
    num_slots = len(pages) * exact.PAGE
    slots = torch.rand(num_rows, num_slots, generator=generator, device=device).argsort(1)[:, : sizes.topk]
    slots = slots.sort(1).values.int()
    slots[num_rows // 2] = -1  # a query that is not wanted gives zeros

    def expected() -> torch.Tensor:
        out = torch.zeros(num_rows, heads, dims.latent, dtype=torch.float64, device=device)
        for row, own in enumerate(slots):
            if own[0] >= 0:
                keys = pages.view(-1, pages.shape[-1])[own.long(), : dims.width].double()
                out[row] = torch.softmax(q[row].double() @ keys.T * SCALE, dim=-1) @ keys[:, : dims.latent]
        return out

    return Work(
        run=lambda function, rows: function(q[rows], latents, slots[rows], latent_dim=dims.latent, scale=SCALE),
        expected=expected,
        measure="relative",
        parts=parts_of(num_rows),
        flops=2 * num_rows * sizes.topk * heads * (dims.width + dims.latent),
        num_bytes=2 * num_rows * sizes.topk * dims.width + bytes_of(q, slots) + 2 * num_rows * heads * dims.latent,
    )
