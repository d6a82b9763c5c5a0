"""Checks of grouped-query attention and of what writes its pages, at Qwen3-30B-A3B's and gpt-oss-120b's widths."""

# T tokens, B requests, H query heads, KV key heads, G = H / KV, A head width, P pages of a request, X keys

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import exact
import torch
from attention_cases import held_pages, mixed_lengths, pages_of
from cases import ALL, Case, Dims, Function, Work, bytes_of, normal, parts_of

from batchinfer_kernels import reference
from batchinfer_kernels.reference import fp8_pages
from batchinfer_kernels.reference.gqa import GqaForm, NewHeads
from batchinfer_kernels.reference.mla import PagedKeys


@dataclass(frozen=True)
class Heads:
    """Widths of one model's attention (config.json of the release), or tiny ones for the rehearsal.

    Args:
        has_norms: queries and keys are normed head by head.
        window: tokens that a token sees up to itself; None: all.
        has_sinks: each head has a score without a value.
    """

    name: str
    heads: int
    kv_heads: int
    width: int
    has_norms: bool = False
    window: int | None = None
    has_sinks: bool = False

    @property
    def row(self) -> int:
        """Keys and values of a token in its page."""
        return 2 * self.kv_heads * self.width

    def form(self, device: torch.device) -> GqaForm:
        """How the heads attend."""
        sinks = normal(self.heads, device=device, seed=7, dtype=torch.float32) if self.has_sinks else None
        return GqaForm(self.kv_heads, self.width**-0.5, self.window, sinks)


_QWEN3 = Heads("Qwen3", heads=32, kv_heads=4, width=128, has_norms=True)
_GPT_OSS = Heads("gpt-oss", heads=64, kv_heads=8, width=64, window=128, has_sinks=True)
_TINY = (
    replace(_QWEN3, heads=4, kv_heads=2, width=16),
    replace(_GPT_OSS, heads=4, kv_heads=2, width=16, window=20),
)


def gqa_cases(dims: Dims, *, is_tiny: bool, is_quick: bool) -> list[Case]:
    """Decode (equal and mixed lengths), prefill, and positions with the write to the pages."""
    del dims  # these models have widths of their own
    decode, prompts, tokens = ((3, 70), (2, 70), 37) if is_tiny else ((128, 4096), (4, 4096), 16384)
    if is_quick:
        prompts = (1, 4096)
    cases = []
    for heads in _TINY if is_tiny else (_QWEN3, _GPT_OSS):
        words = f"{heads.heads}/{heads.kv_heads} heads of {heads.width}, {heads.name}"
        for pages, is_fp8 in (("", False), ("_fp8", True)):
            for is_mixed in (False, True):
                shape = f"{decode[0]} x {words}, KV {decode[1]}{', mixed' if is_mixed else ''}"
                make = partial(_decode, heads, *decode, is_mixed, is_fp8=is_fp8)
                cases.append(Case(f"gqa_decode{pages}", shape, make))
            shape = f"{prompts[0]} prompts of {prompts[1]}, {words}"
            cases.append(Case(f"gqa_prefill{pages}", shape, partial(_prefill, heads, *prompts, is_fp8=is_fp8)))
            make = partial(_positions, heads, tokens, is_fp8=is_fp8)
            cases.append(Case(f"gqa_rope_and_cache{pages}", f"{tokens} x {words}", make))
    return cases


def attend(
    q_THA: torch.Tensor, kv_XW: torch.Tensor, positions_T: torch.Tensor, heads: Heads, form: GqaForm
) -> torch.Tensor:
    """Attention of one request's queries to its keys in float64, [T, H, A], head by head."""
    k_XNA, v_XNA = (part.unflatten(-1, (heads.kv_heads, -1)).double() for part in kv_XW.chunk(2, dim=-1))
    place_X = torch.arange(len(kv_XW), device=kv_XW.device)
    unseen_TX = place_X > positions_T[:, None]
    if heads.window is not None:
        unseen_TX |= place_X <= positions_T[:, None] - heads.window
    out = torch.empty(q_THA.shape, dtype=torch.float64, device=q_THA.device)
    for head in range(heads.heads):
        key_head = head // (heads.heads // heads.kv_heads)
        scores = (q_THA[:, head].double() @ k_XNA[:, key_head].T * form.scale).masked_fill_(unseen_TX, -torch.inf)
        if form.sinks_H is not None:
            sink = form.sinks_H[head].double().expand(len(scores), 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = torch.softmax(scores, dim=-1)[:, : len(kv_XW)]
        out[:, head] = weights @ v_XNA[:, key_head]
    return out


def _num_seen(heads: Heads, position: int) -> int:
    return min(position + 1, heads.window or position + 1)


def _decode(
    heads: Heads, num_requests: int, kv_tokens: int, is_mixed: bool, device: torch.device, *, is_fp8: bool
) -> Work:
    lengths = mixed_lengths(num_requests, kv_tokens) if is_mixed else [kv_tokens] * num_requests
    pages, table = pages_of(heads.row, num_requests, kv_tokens, device)
    held, pages = held_pages(pages, heads.row, is_fp8)
    q_BHA = normal(num_requests, heads.heads, heads.width, device=device)
    kv_tokens_B, form = torch.tensor(lengths, device=device), heads.form(device)
    positions_B = kv_tokens_B - 1

    def run(function: Function, requests: slice) -> torch.Tensor:
        keys = PagedKeys(held, table[requests], kv_tokens_B[requests], positions_B[requests])
        return function(q_BHA[requests], keys, form)

    def expected() -> torch.Tensor:
        parts = (
            attend(q_BHA[one, None], pages[table[one]].flatten(0, 1)[:length], positions_B[one, None], heads, form)
            for one, length in enumerate(lengths)
        )
        return torch.cat(list(parts))

    num_seen = sum(_num_seen(heads, length - 1) for length in lengths)
    return Work(
        run=run,
        expected=expected,
        measure="relative",
        parts=parts_of(num_requests),
        flops=4 * num_seen * heads.heads * heads.width,
        num_bytes=bytes_of(held[0, :1]) * num_seen + 2 * bytes_of(q_BHA),
    )


def _prefill(heads: Heads, num_prompts: int, num_tokens: int, device: torch.device, *, is_fp8: bool) -> Work:
    pages, table = pages_of(heads.row, num_prompts, num_tokens, device)
    held, pages = held_pages(pages, heads.row, is_fp8)
    q_BTHA = normal(num_prompts, num_tokens, heads.heads, heads.width, device=device)
    lengths = torch.full((num_prompts,), num_tokens)  # on the host, as a step has them
    positions_BT = torch.arange(num_tokens, device=device).repeat(num_prompts, 1)
    schedule: dict = {}  # as from a step's second layer on
    form = heads.form(device)

    def run(function: Function, prompts: slice) -> torch.Tensor:
        own = lengths[prompts]
        keys = PagedKeys(held, table[prompts], own, positions_BT[prompts].flatten())
        return function(q_BTHA[prompts].flatten(0, 1), keys, own, form)

    def timed(function: Function) -> torch.Tensor:
        keys = PagedKeys(held, table, lengths, positions_BT.flatten(), schedule)
        return function(q_BTHA.flatten(0, 1), keys, lengths, form)

    def expected() -> torch.Tensor:
        parts = (
            attend(q_THA, pages[ids].flatten(0, 1)[:num_tokens], positions_BT[0], heads, form)
            for q_THA, ids in zip(q_BTHA, table, strict=True)
        )
        return torch.cat(list(parts))

    num_seen = num_prompts * sum(_num_seen(heads, position) for position in range(num_tokens))
    return Work(
        run=run,
        expected=expected,
        measure="relative",
        parts=(slice(0, 1), slice(num_prompts - 1, num_prompts)),
        flops=4 * num_seen * heads.heads * heads.width,
        num_bytes=2 * bytes_of(q_BTHA) + bytes_of(held[0, :1]) * num_prompts * num_tokens,
        take=lambda whole, prompts: whole.unflatten(0, (num_prompts, -1))[prompts].flatten(0, 1),
        timed=timed,
    )


def _positions(heads: Heads, num_tokens: int, device: torch.device, *, is_fp8: bool) -> Work:
    qkv_TW = normal(num_tokens, (heads.heads + 2 * heads.kv_heads) * heads.width, device=device)
    norms = [normal(heads.width, device=device, seed=seed) if heads.has_norms else None for seed in (1, 2)]
    angles = normal(num_tokens, heads.width // 2, device=device, seed=3, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    num_pages = -(-num_tokens // exact.PAGE)
    order = torch.randperm(num_pages * exact.PAGE, generator=torch.Generator().manual_seed(4))
    slots = order[:num_tokens].to(device)
    blank = torch.zeros(num_pages, exact.PAGE, heads.row, dtype=torch.bfloat16, device=device)
    pages, _ = held_pages(blank, heads.row, is_fp8)

    def call(function: Function, rows: slice) -> torch.Tensor:
        own = NewHeads(heads.heads, heads.kv_heads, *norms, 1e-6, cos[rows], sin[rows], pages, slots[rows])
        return function(qkv_TW[rows], own)

    def run(function: Function, rows: slice) -> torch.Tensor:
        """Queries, keys and values of each token."""
        pages.zero_()
        q_THA = call(function, rows)
        written = pages.view(-1, pages.shape[-1])[slots[rows]]
        if is_fp8:
            written = fp8_pages.widen(written, heads.row)
        return torch.cat([q_THA.flatten(1), written], dim=-1)

    def expected() -> torch.Tensor:
        """The reference's formulas with float64 operands."""
        q, k, v = qkv_TW.double().unflatten(-1, (-1, heads.width)).split([heads.heads, *2 * [heads.kv_heads]], dim=1)
        q, k = (
            part if norm is None else reference.rms_norm(part, norm.double(), 1e-6)
            for part, norm in zip((q, k), norms, strict=True)
        )
        written = torch.cat([_turned(k, cos, sin), v], dim=1).flatten(1)
        if is_fp8:
            written = fp8_pages.widen(fp8_pages.narrow(written.bfloat16(), heads.row), heads.row).double()
        return torch.cat([_turned(q, cos, sin).flatten(1), written], dim=-1)

    return Work(
        run=run,
        expected=expected,
        measure="diff" if is_fp8 else "relative",
        parts=parts_of(num_tokens),
        flops=0,
        num_bytes=2 * bytes_of(qkv_TW) + bytes_of(cos, sin),
        timed=lambda function: call(function, ALL),
    )


def _turned(x_THA: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs (0, A / 2), (1, A / 2 + 1), … in float64."""
    first, second = x_THA.chunk(2, dim=-1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
