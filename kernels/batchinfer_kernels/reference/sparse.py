"""DeepSeek Sparse Attention in plain PyTorch: an indexer scores the keys of a query, and the best of them attend.

DeepSeek-V3.2-Exp report section 2.1. Each token has one small key for all heads of the indexer, kept in the pages next
to its latent. Among keys of equal score the one at the lower position goes first, so that the choice of keys depends on
nothing but the query and the keys before it.
"""

# T tokens, H heads, I width of an index key, R rotary width, C latent width, W = C + R, B requests, P pages
# K keys of a query, X keys that are scored, S = 64 tokens per page

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from batchinfer_kernels.reference.mla import MAX_SCORES, PAGE_TOKENS, attend_pages
from batchinfer_kernels.reference.pointwise import rope
from batchinfer_kernels.reference.products import batched_matmul

NO_SLOT = -1
_MAX_GATHERED = 8 * 2**20  # values of keys held at once


class NewIndexKeys(NamedTuple):
    """The index keys that a step's tokens add to the pages of one layer.

    keys_TI: [T, I], before their norm.
    norm_I, bias_I: of the layer norm, which has this `eps`.
    cos, sin: [T, R / 2] float32; the first R values of a key are rotated.
    pages: [num_pages, S, I], gaps between rows allowed; rows of the tokens are written.
    slots_T: [T] int64, page id * 64 + offset.
    interleaved: as in `pointwise.rope`.
    """

    keys_TI: torch.Tensor
    norm_I: torch.Tensor
    bias_I: torch.Tensor
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor
    pages: torch.Tensor
    slots_T: torch.Tensor
    interleaved: bool


class IndexQueries(NamedTuple):
    """Queries of the indexer: [T, H, I] before their rotation, and the weight of each head, [T, H] float32."""

    q_THI: torch.Tensor
    weights_TH: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool


class IndexedKeys(NamedTuple):
    """The keys that queries are scored with, in one layer.

    pages: [num_pages, S, I], gaps between rows allowed.
    page_table_BP: [B, P] int64, as in `mla.PagedKeys`.
    requests_T: [T] int64, the row of the table of each query; ascending.
    positions_T: [T] int64; a query is scored with the keys at its own position and before.
    kv_tokens_B: [B] int64 on the host, tokens in each request's pages: of prompts; None in decode, where only the
        device knows them.
    schedule: as in `mla.PagedKeys`.
    """

    pages: torch.Tensor
    page_table_BP: torch.Tensor
    requests_T: torch.Tensor
    positions_T: torch.Tensor
    kv_tokens_B: torch.Tensor | None = None
    schedule: dict[str, Any] | None = None


def index_cache(new: NewIndexKeys) -> None:
    """Norm the tokens' index keys, give them their positions, and write them to their pages."""
    keys_TI, norm_I, bias_I, eps, cos, sin, pages, slots_T, interleaved = new
    x64 = keys_TI.double()
    centred = x64 - x64.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    rows_TI = (normed * norm_I.double() + bias_I.double()).to(keys_TI.dtype)
    pages.view(-1, pages.shape[-1])[slots_T] = _rotated(rows_TI, cos, sin, interleaved)


def choose_keys(queries: IndexQueries, keys: IndexedKeys, *, topk: int, scale: float) -> torch.Tensor:
    """Choose the keys that each query attends to, by the best scores Σ over heads of weight · max(0, q · k × scale).

    Args:
        topk: K.

    Returns:
        [T, K] int32 slots (page id * 64 + offset), in the order of their positions; NO_SLOT in the whole row of a query
        that sees fewer keys, for it attends to all of them.
    """
    q_THI = rotated_queries(queries)
    slots_TK = torch.empty(len(q_THI), topk, dtype=torch.int32, device=q_THI.device)
    requests, counts = torch.unique_consecutive(keys.requests_T, return_counts=True)
    start = 0
    for request, count in zip(requests.tolist(), counts.tolist(), strict=True):
        rows = slice(start, start + count)
        num_keys = max(int(keys.positions_T[rows].max()) + 1, topk)
        num_pages = -(-num_keys // PAGE_TOKENS)
        if num_pages > keys.page_table_BP.shape[1]:
            start += count
            continue  # none of these queries sees that number of keys
        pages_P = keys.page_table_BP[request, :num_pages]
        keys_XI = keys.pages[pages_P].flatten(0, 1).float()
        piece = max(1, MAX_SCORES // (len(keys_XI) * q_THI.shape[1]))
        for first in range(start, start + count, piece):
            some = slice(first, min(first + piece, start + count))
            scores_TX = index_scores(q_THI[some], queries.weights_TH[some], keys_XI, scale)
            chosen_TK = _best(scores_TX, keys.positions_T[some], topk)
            slots_TK[some] = (pages_P[chosen_TK // PAGE_TOKENS] * PAGE_TOKENS + chosen_TK % PAGE_TOKENS).int()
        start += count
    return slots_TK.masked_fill_((keys.positions_T + 1 < topk)[:, None], NO_SLOT)


def mla_sparse(
    q_THW: torch.Tensor, pages: torch.Tensor, slots_TK: torch.Tensor, *, latent_dim: int, scale: float
) -> torch.Tensor:
    """Attend in the absorbed form (see `mla.mla_decode`) to the latents in these slots alone.

    For all keys that a query sees, in the order of their positions, the result is that of mla_decode to the bit.

    Args:
        q_THW: [T, H, C + R].
        pages: [num_pages, S, C + R], gaps between rows allowed.
        slots_TK: [T, K] int32; NO_SLOT in the whole row of a query that needs no attention here, which gives zeros.
        latent_dim: C.
        scale: factor on the scores.

    Returns:
        [T, H, C] in the dtype of q.
    """
    rows_XW, num_keys = pages.view(-1, pages.shape[-1]), slots_TK.shape[1]
    num_whole = -(-num_keys // PAGE_TOKENS) * PAGE_TOKENS
    seen_X = torch.arange(num_whole, device=pages.device) < num_keys
    out_THC = q_THW.new_empty(*q_THW.shape[:2], latent_dim)
    piece = max(1, _MAX_GATHERED // (num_whole * (q_THW.shape[1] + q_THW.shape[2])))
    for start in range(0, len(q_THW), piece):
        rows = slice(start, start + piece)
        latent_TXW = rows_XW.new_zeros(len(q_THW[rows]), num_whole, rows_XW.shape[1], dtype=torch.float32)
        is_wanted_T11 = (slots_TK[rows, :1] != NO_SLOT)[..., None]
        latent_TXW[:, :num_keys] = rows_XW[slots_TK[rows].long().clamp(min=0)].float().masked_fill(~is_wanted_T11, 0)
        values_TPSC = latent_TXW[..., :latent_dim].unflatten(1, (-1, PAGE_TOKENS))
        seen_THX = seen_X.expand(len(latent_TXW), q_THW.shape[1], -1)
        out_THC[rows] = attend_pages(q_THW[rows].float(), latent_TXW, values_TPSC, seen_THX, scale).to(q_THW.dtype)
    return out_THC


def rotated_queries(queries: IndexQueries) -> torch.Tensor:
    """Return the queries rotated to their positions, [T, H, I]."""
    return _rotated(queries.q_THI, queries.cos, queries.sin, queries.interleaved)


def best_slots(scores_TX: torch.Tensor, keys: IndexedKeys, *, topk: int) -> torch.Tensor:
    """Return the result of `choose_keys`, given the scores.

    Args:
        scores_TX: float32, a query's score of the key at position 0 first; anything behind its last key.
    """
    chosen_TK = _best(F.pad(scores_TX, (0, max(0, topk - scores_TX.shape[1]))), keys.positions_T, topk)
    is_near_T1 = (keys.positions_T + 1 < topk)[:, None]
    chosen_TK = chosen_TK.masked_fill(is_near_T1, 0)
    pages_TK = keys.page_table_BP[keys.requests_T].gather(1, chosen_TK // PAGE_TOKENS)
    return (pages_TK * PAGE_TOKENS + chosen_TK % PAGE_TOKENS).int().masked_fill(is_near_T1, NO_SLOT)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first values of each row of x."""
    turned, plain = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    return torch.cat([rope(turned, cos, sin, interleaved=interleaved), plain], dim=-1)


def index_scores(q_THI: torch.Tensor, weights_TH: torch.Tensor, keys_XI: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the scores of queries of one request, [T, X] float32."""
    products_LX = batched_matmul(q_THI.float().flatten(0, 1)[None], keys_XI.T[None])[0]
    scores_THX = products_LX.mul_(scale).relu_().unflatten(0, (len(q_THI), -1))
    return (scores_THX * weights_TH[..., None]).sum(1, dtype=torch.float64).float()


def _best(scores_TX: torch.Tensor, positions_T: torch.Tensor, topk: int) -> torch.Tensor:
    """Return the positions of the best scores in ascending order, [T, K] int64; among equal scores the first."""
    unseen_TX = torch.arange(scores_TX.shape[1], device=scores_TX.device) > positions_T[:, None]
    order_TX = torch.sort(scores_TX.masked_fill(unseen_TX, -torch.inf), dim=-1, descending=True, stable=True).indices
    return order_TX[:, :topk].sort(dim=-1).values
