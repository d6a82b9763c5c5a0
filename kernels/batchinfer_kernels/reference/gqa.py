"""Grouped-query attention over pages in plain PyTorch: norms and positions of heads, prefill and decode.

    row of a page   [ keys KV x A | values KV x A ]     query head h meets key head h // (H / KV)

Sums over keys go page by page in ascending order, as in mla.py, and pages are read as they are stored. So a row's
result depends on its own tokens alone: on no other row, no chunk, and no place of pages.
"""

# T tokens, H query heads, KV key heads, G = H / KV query heads per key head, A head width, R rotary width
# B requests (in attend_pages: with key heads), Q query tokens per request, L rows per batch
# P pages, S = 64 tokens per page, X = P * S keys, Y bytes of a row in FP8

from typing import NamedTuple

import torch

from batchinfer_kernels.reference import fp8_pages
from batchinfer_kernels.reference.mla import (
    MAX_DECODE_VALUES,
    PAGE_TOKENS,
    PagedKeys,
    attend_pages,
    query_tile,
    whole_pages,
)
from batchinfer_kernels.reference.pointwise import rms_norm, rope


class GqaForm(NamedTuple):
    """Settings of grouped-query attention in one layer.

    num_kv_heads: KV.
    scale: factor on the scores.
    window: number of tokens that a token attends to, itself included; None: all.
    sinks_H: [H] float32, a score per head without a value: exp(sink) is added to the sum that weights are divided by;
        `scale` is no factor of it. None: there is none.
    """

    num_kv_heads: int
    scale: float
    window: int | None = None
    sinks_H: torch.Tensor | None = None

    @property
    def window_or_0(self) -> int:
        """The window as kernels take it, 0 for none.

        Raises:
            ValueError: a token would not see itself.
        """
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window of {self.window} tokens: each token sees itself at least")
        return self.window or 0


class NewHeads(NamedTuple):
    """Settings for making queries, and keys and values in one layer's pages, from a step's projections.

    num_heads, num_kv_heads: H and KV; H is a multiple of KV.
    norm_q, norm_k: weights of RMS norms with this `eps`, before the rotation: [A] norms each head alone, [H * A] and
        [KV * A] norm the whole row, None norms nothing.
    cos, sin: [T, R / 2] float32; the first R values of a head are rotated, in pairs (0, R / 2), (1, R / 2 + 1), …
    pages: [num_pages, 64, 2 * KV * A]; rows of the tokens are written.
    slots_T: [T] int64, page id * 64 + offset.
    """

    num_heads: int
    num_kv_heads: int
    norm_q: torch.Tensor | None
    norm_k: torch.Tensor | None
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor
    pages: torch.Tensor
    slots_T: torch.Tensor


def gqa_rope_and_cache(qkv_TW: torch.Tensor, new: NewHeads) -> torch.Tensor:
    """Norm and rotate queries and keys, and write the tokens' keys and values to their pages.

    Args:
        qkv_TW: [T, (H + 2 * KV) * A], the heads' queries, then keys, then values; biases are added already.

    Returns:
        [T, H, A], the queries, without gaps.
    """
    num_heads, num_kv_heads = new.num_heads, new.num_kv_heads
    head_dim = qkv_TW.shape[-1] // (num_heads + 2 * num_kv_heads)
    q_TA, k_TA, v_TA = qkv_TW.split([num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], dim=-1)
    k_TA = _placed(k_TA, new.norm_k, head_dim, new).flatten(1)
    new.pages.view(-1, new.pages.shape[-1])[new.slots_T] = torch.cat([k_TA, v_TA], dim=-1)
    return _placed(q_TA, new.norm_q, head_dim, new)


def gqa_prefill(q_THA: torch.Tensor, keys: PagedKeys, num_tokens_B: torch.Tensor, form: GqaForm) -> torch.Tensor:
    """Compute causal attention of several requests' chunks (arXiv 2305.13245).

    The chunks' own keys and values must be in the pages already.

    Args:
        q_THA: [T, H, A], chunk after chunk.
        keys: of each chunk's request, with pages [num_pages, 64, 2 * KV * A] and `kv_tokens_B` on the host.
        num_tokens_B: [B] int64 on the host, tokens of each chunk, adding up to T.

    Returns:
        [T, H, A] in the dtype of q.
    """
    out_THA = torch.empty_like(q_THA)
    start = 0
    chunks = zip(keys.page_table_BP, num_tokens_B.tolist(), keys.kv_tokens_B.tolist(), strict=True)
    for pages_P, num_tokens, context_tokens in chunks:
        end, num_pages = start + num_tokens, -(-context_tokens // PAGE_TOKENS)
        kv_XW = keys.pages[pages_P[:num_pages]].flatten(0, 1)
        kv_XW[context_tokens:] = 0  # leftovers of earlier owners; even inf must not reach a product
        tile = query_tile(q_THA.shape[1] * len(kv_XW))
        for first in range(start, end, tile):
            rows = slice(first, min(first + tile, end))
            num_keys = whole_pages(context_tokens - end + rows.stop)  # a chunk is a run of consecutive positions
            out_THA[rows] = _attend(q_THA[None, rows], kv_XW[None, :num_keys], keys.positions_T[None, rows], form)[0]
        start = end
    return out_THA


def gqa_decode(q_THA: torch.Tensor, keys: PagedKeys, form: GqaForm) -> torch.Tensor:
    """Compute causal attention of many requests with few queries each, as gqa_prefill does.

    Args:
        q_THA: [B * Q, H, A], request-major.

    Returns:
        [B * Q, H, A] in the dtype of q.
    """
    pages, page_table_BP, kv_tokens_B, positions_T, *_ = keys
    num_requests, num_pages = page_table_BP.shape
    out_THA = torch.empty_like(q_THA)
    if num_requests == 0:
        return out_THA
    num_rows, num_heads, _ = q_THA.shape
    num_queries, num_keys = num_rows // num_requests, num_pages * PAGE_TOKENS
    is_behind_BX = torch.arange(num_keys, device=pages.device) >= kv_tokens_B[:, None]
    piece = max(1, MAX_DECODE_VALUES // (num_keys * (pages.shape[-1] + num_queries * num_heads)))
    for start in range(0, num_requests, piece):
        stop = min(start + piece, num_requests)
        rows = slice(start * num_queries, stop * num_queries)
        kv_BXW = pages[page_table_BP[start:stop]].flatten(1, 2)
        kv_BXW.masked_fill_(is_behind_BX[start:stop, :, None], 0)
        q_BQHA = q_THA[rows].unflatten(0, (-1, num_queries))
        positions_BQ = positions_T[rows].view(-1, num_queries)
        out_BQHA = _attend(q_BQHA, kv_BXW, positions_BQ, form)
        out_THA[rows] = out_BQHA.flatten(0, 1)
    return out_THA


def gqa_rope_and_cache_fp8(qkv_TW: torch.Tensor, new: NewHeads) -> torch.Tensor:
    """Run gqa_rope_and_cache in bfloat16, then round the rows into pages [num_pages, 64, Y] uint8.

    Keys and values are rounded as the latents of fp8_pages.py, with a scale per 128 values of a row.
    """
    return fp8_pages.cache_via_bfloat16(gqa_rope_and_cache, qkv_TW, new, new_width(qkv_TW, new), 0)


def gqa_prefill_fp8(q_THA: torch.Tensor, keys: PagedKeys, num_tokens_B: torch.Tensor, form: GqaForm) -> torch.Tensor:
    """Run gqa_prefill over the widened rows of pages [num_pages, 64, Y] uint8."""
    return gqa_prefill(q_THA, fp8_pages.widen_pages(keys, held_width(q_THA, form)), num_tokens_B, form)


def gqa_decode_fp8(q_THA: torch.Tensor, keys: PagedKeys, form: GqaForm) -> torch.Tensor:
    """Run gqa_decode over the widened rows of pages [num_pages, 64, Y] uint8."""
    return fp8_pages.decode_via_bfloat16(gqa_decode, q_THA, keys, held_width(q_THA, form), form)


def held_width(q_THA: torch.Tensor, form: GqaForm) -> int:
    """Return 2 * KV * A, the values that a token has in a page."""
    return 2 * form.num_kv_heads * q_THA.shape[-1]


def new_width(qkv_TW: torch.Tensor, new: NewHeads) -> int:
    """Return 2 * KV * A, the values that a token has in a page."""
    return qkv_TW.shape[-1] // (new.num_heads + 2 * new.num_kv_heads) * 2 * new.num_kv_heads


def _placed(x_TA: torch.Tensor, norm: torch.Tensor | None, head_dim: int, new: NewHeads) -> torch.Tensor:
    """Return heads [T, heads, A] after their norm and rotation."""
    if norm is not None and len(norm) != head_dim:
        x_TA, norm = rms_norm(x_TA, norm, new.eps), None
    x_THA = x_TA.unflatten(-1, (-1, head_dim))
    if norm is not None:
        x_THA = rms_norm(x_THA, norm, new.eps)
    rotary = 2 * new.cos.shape[-1]
    rotated, plain = x_THA.split([rotary, head_dim - rotary], dim=-1)
    return torch.cat([rope(rotated, new.cos, new.sin, interleaved=False), plain], dim=-1)


def _attend(
    q_BQHA: torch.Tensor,
    kv_BXW: torch.Tensor,
    positions_BQ: torch.Tensor,
    form: GqaForm,
) -> torch.Tensor:
    """Attend with queries of some requests to these keys and values, [B, Q, H, A]."""
    num_kv_heads, scale, _, sinks_H = form
    num_requests, num_queries, num_heads, _ = q_BQHA.shape
    group = num_heads // num_kv_heads

    def by_key_head(x_BQH: torch.Tensor) -> torch.Tensor:
        # the query heads of a key head are rows of one product: [B * KV, Q * G, ...]
        return x_BQH.unflatten(2, (num_kv_heads, group)).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    keys_X = torch.arange(kv_BXW.shape[1], device=kv_BXW.device)
    seen_BQX = keys_X <= positions_BQ[..., None]
    if window := form.window_or_0:
        seen_BQX &= keys_X > positions_BQ[..., None] - window
    seen_BLX = by_key_head(seen_BQX[:, :, None].expand(-1, -1, num_heads, -1))
    k_BXA, v_BXA = (
        x.unflatten(-1, (num_kv_heads, -1)).transpose(1, 2).flatten(0, 1).float().contiguous()
        for x in kv_BXW.chunk(2, dim=-1)
    )
    sinks_BL = None if sinks_H is None else by_key_head(sinks_H.expand(num_requests, num_queries, -1))
    v_BPSA = v_BXA.unflatten(1, (-1, PAGE_TOKENS))
    out_BLA = attend_pages(by_key_head(q_BQHA).float(), k_BXA, v_BPSA, seen_BLX, scale, sinks_BL)
    out_BNQGA = out_BLA.unflatten(0, (num_requests, num_kv_heads)).unflatten(2, (num_queries, group))
    return out_BNQGA.transpose(1, 2).flatten(2, 3).to(q_BQHA.dtype)
