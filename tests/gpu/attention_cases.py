"""Checks of latent attention and of what writes its pages, at DeepSeek-V3's widths."""

# T tokens, B requests, H heads, A query width, C latent width, W latent and rotary width, P pages of a request

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import exact
import torch
from candidates import AHEAD, DESCRIPTORS, PIECES
from cases import SCALE, Case, Dims, Function, Work, bytes_of, normal, parts_of, weight
from published import MLA_DECODE

from batchinfer_kernels import reference, registry
from batchinfer_kernels.hopper import cuts
from batchinfer_kernels.reference import fp8_pages
from batchinfer_kernels.reference.mla import PagedKeys
from batchinfer_kernels.reference.rows import NewKeys

_KV_TOKENS = 4989  # mean of the published day of DeepSeek-V3/R1's service


def attention_cases(dims: Dims, *, is_tiny: bool, is_quick: bool) -> list[Case]:
    """Decode (equal and mixed lengths), prefill, and positions with the write to the pages."""
    both = ("hopper", "triton")
    if is_tiny:
        decode, prompts, tokens = [(3, 70)], (2, 70), 37
    else:
        decode, prompts, tokens = [(128, 4096), (128, _KV_TOKENS), (32, 32768)], (4, 4096), 16384
        if is_quick:
            decode, prompts = decode[1:2], (1, 4096)
    # so long that requests are cut
    long = (2, 8300) if is_tiny else (64, 16384)
    cases = []
    for is_mixed in (False, True):
        for num_requests, kv_tokens in [decode[0], long] if is_mixed else decode:
            is_long = (num_requests, kv_tokens) == long
            for is_fp8 in (False,) if is_long else (False, True):
                # as few heads as flash_mla takes over FP8 pages
                own = replace(dims, heads=64) if is_tiny and is_fp8 else dims
                words = f"{num_requests} x {own.heads} heads, KV {kv_tokens}{', mixed' if is_mixed else ''}"
                make = partial(_decode, own, num_requests, kv_tokens, is_mixed, is_fp8=is_fp8)
                published = None if is_tiny or is_fp8 or is_long else MLA_DECODE
                if is_fp8:
                    cases.append(Case("mla_decode_fp8", words, make, both, published))
                else:
                    # the interpreter would take seconds for a long one
                    behind = both[:1] if is_tiny and is_long else both
                    names = (registry.INVARIANT, *([PIECES] if is_mixed and not is_long else []), *behind)
                    cases.append(Case("mla_decode", words, make, names, published))
    words = f"{prompts[0]} prompts of {prompts[1]}, {dims.heads} heads"
    sizes = (3, 40, 128) if is_tiny else (64, 128, 4096)
    family = "{} prompts of {} behind {}".format(*sizes) + f", {dims.heads} heads"
    prefills = ("triton", DESCRIPTORS, AHEAD)
    pieces = f"{long[0]} x {dims.heads} heads, KV {long[1]}, mixed"
    return [
        *cases,
        Case("spread_queries", pieces, partial(_spread, dims, *long)),
        Case("merge_pieces", pieces, partial(_merge, dims, *long)),
        Case("mla_prefill", words, partial(_prefill, dims, *prompts), (*prefills, "sdpa")),
        Case("mla_prefill", family, partial(_prefill, dims, *sizes), prefills),
        Case("mla_prefill", f"{family}, keys for each", partial(_prefill, dims, *sizes, is_apart=True), prefills),
        Case("mla_prefill_fp8", words, partial(_prefill, dims, *prompts, is_fp8=True)),
        Case("rope_and_cache", f"{tokens} x {dims.heads} heads", partial(_positions, dims, tokens)),
        Case("rope_and_cache_fp8", f"{tokens} x {dims.heads} heads", partial(_positions, dims, tokens, is_fp8=True)),
    ]


def pages_of(width: int, num_requests: int, num_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pages of one layer in any order, and the pages of each request, [B, P]."""
    per_request = -(-num_tokens // exact.PAGE)
    pages = normal(num_requests * per_request, exact.PAGE, width, device=device, seed=3)
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(4)).to(device)
    return pages, order.view(num_requests, per_request)


def held_pages(pages: torch.Tensor, latent_dim: int, is_fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages as an operation gets them, and the bfloat16 values that it is to find there."""
    if not is_fp8:
        return pages, pages
    held = fp8_pages.narrow(pages.flatten(0, 1), latent_dim).unflatten(0, pages.shape[:2])
    return held, fp8_pages.widen(held, latent_dim)


def _decode(
    dims: Dims, num_requests: int, kv_tokens: int, is_mixed: bool, device: torch.device, *, is_fp8: bool = False
) -> Work:
    lengths = mixed_lengths(num_requests, kv_tokens) if is_mixed else [kv_tokens] * num_requests
    pages, table = pages_of(dims.width, num_requests, kv_tokens, device)
    held, pages = held_pages(pages, dims.latent, is_fp8)
    q = normal(num_requests, dims.heads, dims.width, device=device)
    kv_tokens_B = torch.tensor(lengths, device=device)
    positions = kv_tokens_B - 1
    schedule: dict = {}  # as from a step's second layer on

    def run(function: Function, requests: slice) -> torch.Tensor:
        keys = PagedKeys(held, table[requests], kv_tokens_B[requests], positions[requests])
        return function(q[requests], keys, latent_dim=dims.latent, scale=SCALE)

    def timed(function: Function) -> torch.Tensor:
        keys = PagedKeys(held, table, kv_tokens_B, positions, schedule)
        return function(q, keys, latent_dim=dims.latent, scale=SCALE)

    return Work(
        run=run,
        expected=lambda: exact.decode(q, pages, table, lengths, dims.latent, SCALE),
        measure="relative",
        parts=parts_of(num_requests),
        flops=2 * sum(lengths) * dims.heads * (dims.width + dims.latent),
        num_bytes=bytes_of(held[0, :1]) * sum(lengths) + bytes_of(q) + 2 * num_requests * dims.heads * dims.latent,
        timed=timed,
    )


def mixed_lengths(num_requests: int, kv_tokens: int) -> list[int]:
    return [max(1, kv_tokens * (place + 1) // num_requests) for place in range(num_requests)]


def _pieces(num_requests: int, kv_tokens: int, device: torch.device) -> cuts.Pieces:
    """Cut requests as for a GPU with 66 parts."""
    table = torch.zeros(num_requests, -(-kv_tokens // exact.PAGE), dtype=torch.int64, device=device)
    return cuts.cut_into_pieces(torch.tensor(mixed_lengths(num_requests, kv_tokens), device=device), table, 66)


def _spread(dims: Dims, num_requests: int, kv_tokens: int, device: torch.device) -> Work:
    q = normal(num_requests, dims.heads, dims.width, device=device)
    request_V = _pieces(num_requests, kv_tokens, device).request_V
    (taken,) = torch.where(request_V >= 0)
    return Work(
        run=lambda function, pieces: function(q, request_V[taken[pieces]]),
        expected=lambda: q[request_V[taken].long()],
        measure="unequal",
        parts=parts_of(len(taken)),
        flops=0,
        num_bytes=2 * len(taken) * bytes_of(q[:1]),
        timed=lambda function: function(q, request_V),
    )


def _merge(dims: Dims, num_requests: int, kv_tokens: int, device: torch.device) -> Work:
    place_BK, request_V, *_ = _pieces(num_requests, kv_tokens, device)
    parts = normal(len(request_V), dims.heads, dims.latent, device=device)
    log_sums = 3 * normal(len(request_V), dims.heads, device=device, seed=1, dtype=torch.float32)
    parts[request_V < 0] = log_sums[request_V < 0] = torch.nan  # places without a piece
    num_pieces = int((request_V >= 0).sum())
    return Work(
        run=lambda function, requests: function(parts, log_sums, place_BK[requests]),
        expected=lambda: reference.merge_pieces(parts.double(), log_sums, place_BK),
        measure="relative",
        parts=parts_of(num_requests),
        flops=0,
        num_bytes=(num_pieces + num_requests) * bytes_of(parts[:1]),
    )


def _prefill(
    dims: Dims,
    num_prompts: int,
    num_tokens: int,
    *behind_and_device: Any,
    is_fp8: bool = False,
    is_apart: bool = False,
) -> Work:
    """Prompts of `num_tokens` new tokens, behind as many cached ones of one prefix, if a number is given, or none.

    Args:
        is_apart: whether the operation is not told that the prefix is one.
    """
    *cached, device = behind_and_device
    behind = sum(cached)
    pages, table = pages_of(dims.width, num_prompts, behind + num_tokens, device)
    num_shared = behind // exact.PAGE
    table[:, :num_shared] = table[0, :num_shared]
    held, pages = held_pages(pages, dims.latent, is_fp8)
    q = normal(num_prompts * num_tokens, dims.heads, dims.nope + dims.rotary, device=device)
    kv_b = weight(dims.heads, dims.nope + dims.value, dims.latent, device=device, fp8=False)
    assert isinstance(kv_b, torch.Tensor)
    chunks = torch.full((num_prompts,), num_tokens)  # on the host, as a step has them
    lengths = chunks + behind
    in_common = None if is_apart else torch.full((num_prompts,), num_shared)
    positions = torch.arange(behind, behind + num_tokens, device=device).repeat(num_prompts)
    schedule: dict = {}  # as from a step's second layer on

    def of_tokens(whole: torch.Tensor, prompts: slice) -> torch.Tensor:
        return whole.unflatten(0, (num_prompts, -1))[prompts].flatten(0, 1)

    def run(function: Function, prompts: slice) -> torch.Tensor:
        own = PagedKeys(held, table[prompts], lengths[prompts], of_tokens(positions, prompts))
        keys = own if in_common is None else own._replace(shared_pages_B=in_common[prompts])
        return function(of_tokens(q, prompts), keys, kv_b, chunks[prompts], v_dim=dims.value, scale=SCALE)

    def timed(function: Function) -> torch.Tensor:
        keys = PagedKeys(held, table, lengths, positions, schedule, in_common)
        return function(q, keys, kv_b, chunks, v_dim=dims.value, scale=SCALE)

    q_BTHA = q.unflatten(0, (num_prompts, -1))
    seen = num_prompts * num_tokens * (behind + (num_tokens + 1) / 2)
    num_keys = behind + num_prompts * num_tokens  # different ones
    up_projection = 2 * num_keys * dims.latent * dims.heads * (dims.nope + dims.value)
    return Work(
        run=run,
        expected=lambda: exact.prefill(q_BTHA, pages, table, kv_b, dims.value, SCALE, behind).flatten(0, 1),
        measure="relative",
        parts=(slice(0, 1), slice(num_prompts - 1, num_prompts)),
        flops=2 * seen * dims.heads * (dims.nope + dims.rotary + dims.value) + up_projection,
        num_bytes=bytes_of(q, kv_b)
        + bytes_of(held[0, :1]) * num_keys
        + 2 * num_prompts * num_tokens * dims.heads * dims.value,
        take=of_tokens,
        timed=timed,
    )


def _positions(dims: Dims, num_tokens: int, device: torch.device, *, is_fp8: bool = False) -> Work:
    q = normal(num_tokens, dims.heads, dims.nope + dims.rotary, device=device)
    latents = normal(num_tokens, dims.width, device=device, seed=1)
    norm = normal(dims.latent, device=device, seed=2)
    angles = normal(num_tokens, dims.rotary // 2, device=device, seed=3, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    num_pages = -(-num_tokens // exact.PAGE)
    slots = torch.randperm(num_pages * exact.PAGE, generator=torch.Generator().manual_seed(4))[:num_tokens].to(device)
    pages = torch.zeros(num_pages, exact.PAGE, dims.width, dtype=torch.bfloat16, device=device)
    if is_fp8:
        pages = held_pages(pages, dims.latent, is_fp8)[0]

    def call(function: Function, turned: torch.Tensor, rows: slice) -> torch.Tensor:
        return function(turned, NewKeys(latents[rows], norm, 1e-6, cos[rows], sin[rows], pages, slots[rows], True))

    def run(function: Function, rows: slice) -> torch.Tensor:
        """Queries and latents of each token."""
        pages.zero_()
        turned = call(function, q[rows].clone(), rows)
        written = pages.view(-1, pages.shape[-1])[slots[rows]]
        if is_fp8:
            written = fp8_pages.widen(written, dims.latent)
        return torch.cat([turned.flatten(1), written], dim=-1)

    def expected() -> torch.Tensor:
        """The reference's formulas with float64 operands."""
        plain, rotary = q.double().split([dims.nope, dims.rotary], dim=-1)
        latent, key = latents.double().split([dims.latent, dims.rotary], dim=-1)
        turned = torch.cat([plain, _turned(rotary, cos, sin)], dim=-1)
        normed = reference.rms_norm(latent, norm.double(), 1e-6)
        written = torch.cat([normed, _turned(key[:, None], cos, sin)[:, 0]], dim=-1)
        if is_fp8:
            written = fp8_pages.widen(fp8_pages.narrow(written.bfloat16(), dims.latent), dims.latent).double()
        return torch.cat([turned.flatten(1), written], dim=-1)

    scratch = q.clone()
    rotary_bytes = bytes_of(q) * dims.rotary // (dims.nope + dims.rotary)
    return Work(
        run=run,
        expected=expected,
        measure="diff" if is_fp8 else "relative",
        parts=parts_of(num_tokens),
        flops=0,
        num_bytes=2 * rotary_bytes + bytes_of(latents) + num_tokens * bytes_of(pages[0, :1]) + bytes_of(cos, sin),
        timed=lambda function: call(function, scratch, slice(None)),
    )


def _turned(x_THR: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Neighbouring pairs turned, in float64."""
    pairs = torch.view_as_complex(x_THR.unflatten(-1, (-1, 2)).contiguous())
    angle = torch.complex(cos.double(), sin.double())[:, None]
    return torch.view_as_real(pairs * angle).flatten(-2)
