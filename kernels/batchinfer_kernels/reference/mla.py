"""Latent attention over pages in plain PyTorch, both forms; the oracle for faster versions like the rest of reference.

Sums over keys go page by page in ascending order (64 keys at a time). So a page of masked keys behind a row adds
exactly zero, and a row's result does not depend on how far the pages of its neighbours reach.
"""

# T tokens, H heads, N query/key width without position, R rotary width, A = N + R, V value width, Z = N + V
# C latent width, W = C + R, B requests (or heads), Q query tokens per request, L rows per batch
# P pages, S = 64 tokens per page, X = P * S keys

from typing import Any, NamedTuple

import torch

from batchinfer_kernels.reference.products import ROW_MULTIPLE, batched_matmul, linear

PAGE_TOKENS = 64

# Most attention scores held at once (float32: 16 MB); decides how many queries or requests go into one piece.
MAX_SCORES = 4 * 2**20
_MAX_QUERY_TILE = 128
MAX_DECODE_VALUES = 8 * 2**20


class PagedKeys(NamedTuple):
    """The keys that the requests of a step attend to, in one layer.

    pages: [num_pages, S, C + R], the layer's; with gaps between rows where an indexer's keys are.
    page_table_BP: [B, P] int64, pages of each request in order; behind its last one any valid page.
    kv_tokens_B: [B] int64, tokens in each request's pages, the new ones included; values behind them are ignored.
    positions_T: [T] int64; a token sees the keys at its own position and before.
    schedule: the same for all layers of a step; a faster version may store its split of the step's work there.
    shared_pages_B: [B] int64 on the host, prefill only: the number of first pages that a request has in common with the
        request before it; None: unknown. Faster versions make the keys of common pages once; no result depends on it.
    """

    pages: torch.Tensor
    page_table_BP: torch.Tensor
    kv_tokens_B: torch.Tensor
    positions_T: torch.Tensor
    schedule: dict[str, Any] | None = None
    shared_pages_B: torch.Tensor | None = None


def mla_prefill(
    q_THA: torch.Tensor,
    keys: PagedKeys,
    kv_b_HZC: torch.Tensor,
    num_tokens_B: torch.Tensor,
    *,
    v_dim: int,
    scale: float,
) -> torch.Tensor:
    """Compute causal attention of several requests' chunks in the plain form: per-head keys and values from latents.

    DeepSeek-V2 report section 2.1. The chunks' own latents must be in the pages already.

    Args:
        q_THA: [T, H, N + R], chunk after chunk, rotary part last.
        keys: of each chunk's request, with `kv_tokens_B` on the host.
        kv_b_HZC: [H, N + V, C], from latent to key (N rows), then value (V rows).
        num_tokens_B: [B] int64 on the host, tokens of each chunk, adding up to T.
        v_dim: V.
        scale: factor on the scores.

    Returns:
        [T, H, V] in the dtype of q.
    """
    out_THV = q_THA.new_empty(*q_THA.shape[:2], v_dim)
    start = 0
    chunks = zip(keys.page_table_BP, num_tokens_B.tolist(), keys.kv_tokens_B.tolist(), strict=True)
    for pages_P, num_tokens, context_tokens in chunks:
        rows, num_pages = slice(start, start + num_tokens), -(-context_tokens // PAGE_TOKENS)
        out_THV[rows] = _prefill_chunk(
            q_THA[rows], keys.pages, pages_P[:num_pages], keys.positions_T[rows], kv_b_HZC, context_tokens, v_dim, scale
        )
        start += num_tokens
    return out_THV


def mla_decode(q_THW: torch.Tensor, keys: PagedKeys, *, latent_dim: int, scale: float) -> torch.Tensor:
    """Compute causal attention of many requests in the absorbed form: queries meet the latents directly.

    DeepSeek-V2 report section 2.1.2: one shared key of width C + R per token, whose first C values are the value too.

    Args:
        q_THW: [B * Q, H, C + R], request-major, queries already multiplied by the key up-projection.
        latent_dim: C.
        scale: factor on the scores.

    Returns:
        [B * Q, H, C] in the dtype of q, to be multiplied by the value up-projection.
    """
    pages, page_table_BP, kv_tokens_B, positions_T, *_ = keys
    num_requests, num_pages = page_table_BP.shape
    num_rows, num_heads, width = q_THW.shape
    out_THC = q_THW.new_empty(num_rows, num_heads, latent_dim)
    if num_requests == 0:
        return out_THC
    num_queries = num_rows // num_requests
    num_keys = num_pages * PAGE_TOKENS
    keys_X = torch.arange(num_keys, device=pages.device)
    piece = max(1, MAX_DECODE_VALUES // (num_keys * (width + num_queries * num_heads)))
    for start in range(0, num_requests, piece):
        stop = min(start + piece, num_requests)
        rows = slice(start * num_queries, stop * num_queries)
        latent_BXW = pages[page_table_BP[start:stop]].flatten(1, 2)
        latent_BXW.masked_fill_((keys_X >= kv_tokens_B[start:stop, None])[..., None], 0)
        latent_BXW = latent_BXW.float()
        # all heads of a request share its keys, so they are rows of one product
        q_BLW = q_THW[rows].unflatten(0, (-1, num_queries)).flatten(1, 2).float()
        seen_BQX = keys_X <= positions_T[rows].view(-1, num_queries, 1)
        seen_BLX = seen_BQX[:, :, None].expand(-1, -1, num_heads, -1).flatten(1, 2)
        v_BPSC = latent_BXW[..., :latent_dim].unflatten(1, (num_pages, PAGE_TOKENS))
        out_BLC = attend_pages(q_BLW, latent_BXW, v_BPSC, seen_BLX, scale)
        out_THC[rows] = out_BLC.reshape(-1, num_heads, latent_dim).to(q_THW.dtype)
    return out_THC


def _prefill_chunk(
    q_THA: torch.Tensor,
    pages: torch.Tensor,
    page_ids_P: torch.Tensor,
    positions_T: torch.Tensor,
    kv_b_HZC: torch.Tensor,
    context_tokens: int,
    v_dim: int,
    scale: float,
) -> torch.Tensor:
    """Attend with one request's chunk, [T, H, V]."""
    num_tokens, num_heads, _ = q_THA.shape
    latent_dim, rope_dim = kv_b_HZC.shape[-1], pages.shape[-1] - kv_b_HZC.shape[-1]
    latent_XW = pages[page_ids_P].flatten(0, 1)
    latent_XW[context_tokens:] = 0  # leftovers of earlier owners; even inf must not reach a product
    # nor may values that are not finite: with AMX one such row has changed other rows of PyTorch's bfloat16 products
    is_odd_X1 = ~torch.isfinite(latent_XW[:, :latent_dim]).all(-1, keepdim=True)
    compressed_XC = latent_XW[:, :latent_dim].masked_fill(is_odd_X1, 0)
    kv_XHZ = linear(compressed_XC, kv_b_HZC.flatten(0, 1)).masked_fill_(is_odd_X1, torch.nan)
    kv_XHZ = kv_XHZ.unflatten(-1, (num_heads, -1)).float()
    k_nope_XHN, v_XHV = kv_XHZ.split([kv_XHZ.shape[-1] - v_dim, v_dim], dim=-1)
    k_rope_XHR = latent_XW[:, None, latent_dim:].float().expand(-1, num_heads, rope_dim)
    k_HXA = torch.cat([k_nope_XHN, k_rope_XHR], dim=-1).transpose(0, 1).contiguous()
    v_HPSV = v_XHV.transpose(0, 1).contiguous().unflatten(1, (-1, PAGE_TOKENS))

    out_THV = q_THA.new_empty(num_tokens, num_heads, v_dim)
    tile = query_tile(num_heads * k_HXA.shape[1])
    for start in range(0, num_tokens, tile):
        rows = slice(start, min(start + tile, num_tokens))
        # The tile's own positions bound its pages, in host arithmetic: a chunk is a run of consecutive positions.
        num_keys = whole_pages(context_tokens - num_tokens + rows.stop)
        q_HTA = q_THA[rows].transpose(0, 1).float()
        seen_TX = torch.arange(num_keys, device=pages.device) <= positions_T[rows, None]
        out_HTV = attend_pages(q_HTA, k_HXA[:, :num_keys], v_HPSV[:, : num_keys // PAGE_TOKENS], seen_TX, scale)
        out_THV[rows] = out_HTV.transpose(0, 1).to(q_THA.dtype)
    return out_THV


def attend_pages(
    q_BLA: torch.Tensor,
    k_BXA: torch.Tensor,
    v_BPSV: torch.Tensor,
    seen_LX: torch.Tensor,
    scale: float,
    sinks_BL: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute softmax(q · kᵀ × scale) · v in float32 over batches B (heads or requests) of L queries, [B, L, V].

    Every row must see at least one key. `seen_LX` is [L, X] or [B, L, X]. Unseen keys and values never change a row,
    even if they are not finite (which a factor of zero alone would not ensure). A row that sees such a value is NaN.
    A row's sink is one more score, of a key with the value zero.
    """
    is_finite_BPSV = torch.isfinite(v_BPSV)
    is_odd_BX = ~is_finite_BPSV.all(-1).flatten(1)
    sees_odd_BL = (seen_LX & is_odd_BX[:, None]).any(-1)
    v_BPSV = torch.where(is_finite_BPSV, v_BPSV, 0.0)
    num_pages = v_BPSV.shape[1]
    scores_BLX = batched_matmul(q_BLA, k_BXA.transpose(1, 2)) * scale
    scores_BLX.masked_fill_(~seen_LX, -torch.inf)
    peak_BL1 = scores_BLX.amax(-1, keepdim=True)
    if sinks_BL is not None:
        peak_BL1 = torch.maximum(peak_BL1, sinks_BL[..., None])
    weights_BLX = scores_BLX.double().sub_(peak_BL1).exp_().float()

    weights_BLPS = weights_BLX.unflatten(-1, (num_pages, PAGE_TOKENS))
    totals_BLP = weights_BLPS.sum(-1, dtype=torch.float64)
    weights_PBLS = weights_BLPS.permute(2, 0, 1, 3).contiguous()
    total_BL = torch.zeros_like(totals_BLP[:, :, 0])
    if sinks_BL is not None:
        total_BL += (sinks_BL.double() - peak_BL1[..., 0]).exp_()
    out_BLV = total_BL.new_zeros(*total_BL.shape, v_BPSV.shape[-1])
    for page in range(num_pages):
        total_BL += totals_BLP[:, :, page]
        out_BLV += batched_matmul(weights_PBLS[page], v_BPSV[:, page])
    return (out_BLV / total_BL[..., None]).masked_fill_(sees_odd_BL[..., None], torch.nan).float()


def query_tile(scores_per_query: int) -> int:
    """Return how many queries to work on together: as many as MAX_SCORES allows, in steps of the row multiple."""
    fitting = MAX_SCORES // max(1, scores_per_query) // ROW_MULTIPLE * ROW_MULTIPLE
    return min(max(fitting, ROW_MULTIPLE), _MAX_QUERY_TILE)


def whole_pages(num_tokens: int) -> int:
    """Return num_tokens rounded up to a multiple of PAGE_TOKENS."""
    return -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS
