"""Attention to a window and to compressed entries, in plain PyTorch (DeepSeek-V4 report section 2.3).

One row is key and value of all heads. Every sum goes in one order, whatever the other rows are: entries are pooled
token by token, and keys attend in the order of their positions, the window's before the entries.

    a page of 64 tokens   [ 64 / M entries of M tokens each ]   or, of an entry of 128 tokens, one half of its values
"""

# T tokens, H heads, C width of a key, A width of a head, R rotary width, B requests, P pages of a request
# K keys of a query, L parts of a key, M tokens of an entry, V width of a token's part, I width of an index key
# N entries that are made, W rows that a state keeps, E entries, X keys with those that fill pages up

import math
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from batchinfer_kernels.reference.mla import MAX_SCORES, PAGE_TOKENS, attend_pages
from batchinfer_kernels.reference.pointwise import rms_norm, rope
from batchinfer_kernels.reference.sparse import index_scores

NO_ROW = -1
_MAX_GATHERED = 8 * 2**20  # values of keys held at once


class KeyRows(NamedTuple):
    """Keys of each query in the order of their positions, by numbers of rows.

    values: [..., C / L] without gaps, seen as rows.
    ids_TKL: [T, K, L] int64, the rows that make up a key; NO_ROW in all of a key that is not there.
    """

    values: torch.Tensor
    ids_TKL: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        """The values as rows."""
        return self.values.view(-1, self.values.shape[-1])


class NewEntries(NamedTuple):
    """The tokens of a step, chunk after chunk of consecutive positions, as parts of the entries of one layer.

    values_TV, gates_TV: float32, without gaps; with an overlap V is two widths of an entry, the first for the entry
        behind the token's own, else one.
    bias_MV: float32, added to the gates by the place of a token in its entry.
    norm_C, eps: of the RMS norm of an entry, in float32.
    cos, sin: [T, R / 2] float32, of the first token of each token's entry.
    positions_T, requests_T: [T] int64; the request is a row of the tables below.
    starts_B: [B + 1] int64, first row of each chunk, and T.
    slots_B: [B] int64, where the state of each request is.
    waiting: [num_slots, W, 2, V] float32, values and gates of a request's last tokens, by position modulo W.
    pages: [num_pages, values of a page], that get the entries.
    page_table_BP: [B, P] int64.
    """

    values_TV: torch.Tensor
    gates_TV: torch.Tensor
    bias_MV: torch.Tensor
    norm_C: torch.Tensor
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor
    positions_T: torch.Tensor
    requests_T: torch.Tensor
    starts_B: torch.Tensor
    slots_B: torch.Tensor
    waiting: torch.Tensor
    pages: torch.Tensor
    page_table_BP: torch.Tensor


class EntryKeys(NamedTuple):
    """The entries of which some are chosen for each query, by keys of their own.

    pages: [num_pages, E of a page * I].
    page_table_BP: [B, P] int64.
    requests_T: [T] int64, the row of the table of each query; ascending.
    visible_T: [T] int64, number of entries that a query sees: the first ones.
    """

    pages: torch.Tensor
    page_table_BP: torch.Tensor
    requests_T: torch.Tensor
    visible_T: torch.Tensor


def rotate_heads(
    x_TW: torch.Tensor, num_heads: int, norm_A: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Norm each head of a row, and rotate its last R values, in pairs of neighbours.

    Args:
        x_TW: [T, H * A].
        norm_A: weight of the RMS norm of each head; None: there is no norm.
        cos, sin: [T, R / 2] float32.

    Returns:
        [T, H, A], without gaps.
    """
    x_THA = x_TW.unflatten(-1, (num_heads, -1))
    return _rotated(x_THA if norm_A is None else rms_norm(x_THA, norm_A, eps), cos, sin)


def pool_entries(new: NewEntries) -> None:
    """Write the entries that the tokens complete to their pages, then the tokens' parts to the states.

    An entry is the mean of its tokens' values by a softmax over their gates, each channel alone. Where V is two widths,
    the tokens of the entry before belong to it, too, with the first half of their parts.
    """
    bias_TV = new.bias_MV[new.positions_T % len(new.bias_MV)]
    parts = torch.stack([new.values_TV, new.gates_TV + bias_TV], dim=1)
    ring_size, bounds = new.waiting.shape[1], new.starts_B.tolist()
    for request, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        ring, own = new.waiting[new.slots_B[request]], slice(start, end)
        _pool_chunk(new, request, own, parts[own], ring)
        kept = slice(max(start, end - ring_size), end)
        ring[new.positions_T[kept] % ring_size] = parts[kept]


def _pool_chunk(new: NewEntries, request: int, own: slice, parts: torch.Tensor, ring: torch.Tensor) -> None:
    """Write the entries that one chunk completes."""
    num_tokens, width = len(new.bias_MV), len(new.norm_C)
    first = int(new.positions_T[own.start])
    last = first + own.stop - own.start
    first_entry, num_entries = first // num_tokens, last // num_tokens - first // num_tokens
    if num_entries == 0:
        return
    overlaps = parts.shape[-1] > width
    begin = (first_entry - overlaps) * num_tokens
    before = torch.arange(max(0, begin), first, device=ring.device) % len(ring)
    parts = torch.cat([parts.new_zeros(max(0, -begin), *parts.shape[1:]), ring[before], parts])
    values, gates = parts[: last // num_tokens * num_tokens - begin].unflatten(0, (-1, num_tokens)).unbind(2)
    if overlaps:
        values, gates = _overlapping(values), _overlapping(gates)
    if begin < 0:
        gates[0, :num_tokens] = -math.inf  # no tokens are before the first entry
    entries_NC = rms_norm(pooled(values, gates), new.norm_C, new.eps)
    at = new.positions_T[own] % num_tokens == num_tokens - 1
    entries_NC = _rotated(entries_NC, new.cos[own][at], new.sin[own][at])
    piece = min(width, new.pages.shape[1])  # of an entry in one page
    places = torch.arange(num_entries * width // piece, device=ring.device) + first_entry * (width // piece)
    per_page = new.pages.shape[1] // piece
    rows = new.page_table_BP[request, places // per_page] * per_page + places % per_page
    new.pages.view(-1, piece)[rows] = entries_NC.reshape(-1, piece).to(new.pages.dtype)


def pooled(values_NMV: torch.Tensor, gates_NMV: torch.Tensor) -> torch.Tensor:
    """Return the mean of an entry's tokens by a softmax over their gates, each channel alone: [N, V] float32."""
    gates = gates_NMV.double()
    weights = (gates - gates.amax(1, keepdim=True)).exp()
    total = weights[:, 0]
    sum_NV = weights[:, 0] * values_NMV[:, 0]
    for token in range(1, values_NMV.shape[1]):
        total = total + weights[:, token]
        sum_NV = sum_NV + weights[:, token] * values_NMV[:, token]
    return (sum_NV / total).float()


def choose_entries(
    q_THI: torch.Tensor, weights_TH: torch.Tensor, keys: EntryKeys, *, topk: int, scale: float
) -> torch.Tensor:
    """Choose the entries of the best scores Σ over heads of weight · max(0, q · k × scale); among equal ones the first.

    Returns:
        [T, min(topk, E of the table)] int64, page id times entries of a page plus number in the page, in the order of
        the entries; NO_ROW behind the last one of a query that sees fewer.
    """
    pages, page_table_BP, requests_T, visible_T = keys
    per_page = pages.shape[1] // q_THI.shape[2]
    num_entries = page_table_BP.shape[1] * per_page
    numbers_E = torch.arange(num_entries, device=pages.device)
    ids_TK = page_table_BP.new_empty(len(q_THI), min(topk, num_entries))
    requests, counts = torch.unique_consecutive(requests_T, return_counts=True)
    piece, end = max(1, MAX_SCORES // max(1, num_entries * q_THI.shape[1])), 0
    for request, count in zip(requests.tolist(), counts.tolist(), strict=True):
        end += count
        keys_EI = pages[page_table_BP[request]].view(num_entries, -1).float()
        for start in range(end - count, end, piece):
            rows = slice(start, min(start + piece, end))
            scores_TE = index_scores(q_THI[rows], weights_TH[rows], keys_EI, scale)
            scores_TE.masked_fill_(numbers_E >= visible_T[rows, None], -torch.inf)
            order_TE = scores_TE.sort(dim=-1, descending=True, stable=True).indices
            ids_TK[rows] = order_TE[:, :topk].sort(dim=-1).values
    seen_TK = ids_TK < visible_T[:, None]
    page_ids = page_table_BP[requests_T].gather(1, ids_TK // per_page) if num_entries else ids_TK
    return (page_ids * per_page + ids_TK % per_page).masked_fill(~seen_TK, NO_ROW)


def attend_entries(
    q_THC: torch.Tensor,
    window: KeyRows,
    entries: KeyRows | None,
    sinks_H: torch.Tensor,
    scale: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Attend to rows of a window and then to entries, and rotate the last R values of each result back.

    Args:
        window: the query's own row among them.
        sinks_H: float32, a score of each head without a value.
        cos, sin: [T, R / 2] float32, by which the queries were rotated.

    Returns:
        [T, H, C] in the dtype of q.
    """
    out_THC = torch.empty_like(q_THC)
    sets = [window] if entries is None else [window, entries]
    num_keys = sum(each.ids_TKL.shape[1] + -each.ids_TKL.shape[1] % PAGE_TOKENS for each in sets)
    piece = max(1, _MAX_GATHERED // (num_keys * (q_THC.shape[1] + q_THC.shape[2])))
    for start in range(0, len(q_THC), piece):
        rows = slice(start, start + piece)
        gathered = [_gathered(each, rows) for each in sets]
        keys_TXC, seen_TX = (torch.cat(both, dim=1) for both in zip(*gathered, strict=True))
        seen_THX = seen_TX[:, None].expand(-1, q_THC.shape[1], -1)
        sinks_TH = sinks_H.expand(len(keys_TXC), -1)
        values_TPSC = keys_TXC.unflatten(1, (-1, PAGE_TOKENS))
        out_THC[rows] = attend_pages(q_THC[rows].float(), keys_TXC, values_TPSC, seen_THX, scale, sinks_TH).to(
            q_THC.dtype
        )
    return _rotated(out_THC, cos, -sin)


def _gathered(keys: KeyRows, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys in float32 and whether each is there, both filled up to whole pages: [T, X, C] and [T, X]."""
    ids_TKL = keys.ids_TKL[rows]
    pad = -ids_TKL.shape[1] % PAGE_TOKENS
    keys_TKC = keys.rows[ids_TKL.clamp(min=0)].flatten(2).float()
    return F.pad(keys_TKC, (0, 0, 0, pad)), F.pad(ids_TKL[..., 0] != NO_ROW, (0, pad))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the last R values of each row; [T, ..., C] and [T, R / 2] to [T, ..., C]."""
    rotary = 2 * cos.shape[-1]
    plain, turned = x.split([x.shape[-1] - rotary, rotary], dim=-1)
    return torch.cat([plain, rope(turned, cos, sin, interleaved=True)], dim=-1)


def _overlapping(parts_NMV: torch.Tensor) -> torch.Tensor:
    """Return the rows of each entry that overlaps the one before it, [N - 1, 2 M, V / 2]; the first has none before."""
    of_next, own = parts_NMV.chunk(2, dim=-1)
    return torch.cat([of_next[:-1], own[1:]], dim=1)
