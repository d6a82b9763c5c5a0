"""Attention to a window and to compressed entries, in plain PyTorch (DeepSeek-V4 report section 2.3).

One row is key and value of all heads. Every sum goes in one order, whatever the other rows are: entries are pooled
token by token, and keys attend in the order of their positions, the window's before the entries.
"""

# T queries, H heads, C width of a row, R rotary width, W rows of the window, E entries, K chosen entries, X keys
# N entries that are made, M tokens of an entry, V width of a token's part

from typing import NamedTuple

import torch
import torch.nn.functional as F

from batchinfer_kernels.reference.mla import MAX_SCORES, PAGE_TOKENS, attend_pages
from batchinfer_kernels.reference.pointwise import rope
from batchinfer_kernels.reference.sparse import index_scores

_MAX_GATHERED = 8 * 2**20  # values of keys held at once


class ChosenEntries(NamedTuple):
    """Numbers of a query's entries in ascending order [T, K] int64, and whether each is one [T, K]."""

    ids_TK: torch.Tensor
    seen_TK: torch.Tensor


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the last R values of each row, in pairs (0, 1), (2, 3), …; [T, ..., C] and [T, R / 2] to [T, ..., C]."""
    rotary = 2 * cos.shape[-1]
    plain, turned = x.split([x.shape[-1] - rotary, rotary], dim=-1)
    return torch.cat([plain, rope(turned, cos, sin, interleaved=True)], dim=-1)


def overlapping(parts_NMV: torch.Tensor) -> torch.Tensor:
    """Return the rows of each entry that overlaps the one before it, [N - 1, 2 M, V / 2]; the first has none before."""
    of_next, own = parts_NMV.chunk(2, dim=-1)
    return torch.cat([of_next[:-1], own[1:]], dim=1)


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
    q_THI: torch.Tensor, weights_TH: torch.Tensor, keys_EI: torch.Tensor, num_visible_T: torch.Tensor, topk: int
) -> ChosenEntries:
    """Choose the entries of the best scores Σ over heads of weight · max(0, q · key); among equal ones the first.

    Args:
        num_visible_T: [T] int64, number of entries that a query sees; the first ones.
    """
    keys_EI, numbers_E = keys_EI.float(), torch.arange(len(keys_EI), device=keys_EI.device)
    ids_TK = numbers_E.new_empty(len(q_THI), min(topk, len(keys_EI)))
    piece = max(1, MAX_SCORES // max(1, len(keys_EI) * q_THI.shape[1]))
    for start in range(0, len(q_THI), piece):
        rows = slice(start, start + piece)
        scores_TE = index_scores(q_THI[rows], weights_TH[rows], keys_EI, 1.0)
        scores_TE.masked_fill_(numbers_E >= num_visible_T[rows, None], -torch.inf)
        order_TE = scores_TE.sort(dim=-1, descending=True, stable=True).indices
        ids_TK[rows] = order_TE[:, :topk].sort(dim=-1).values
    return ChosenEntries(ids_TK, ids_TK < num_visible_T[:, None])


def attend_rows(
    q_THC: torch.Tensor,
    window_TWC: torch.Tensor,
    num_in_window_T: torch.Tensor,
    entries_EC: torch.Tensor,
    chosen: ChosenEntries,
    sinks_H: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend to the window and the chosen entries of each query, [T, H, C] in the dtype of q.

    Args:
        window_TWC: rows in the order of their positions, the query's own last.
        num_in_window_T: [T] int64, number of last rows of the window that are there.
        sinks_H: float32, a score of each head without a value.
    """
    num_rows, num_chosen = window_TWC.shape[1], chosen.ids_TK.shape[1]
    window_pad, chosen_pad = -num_rows % PAGE_TOKENS, -num_chosen % PAGE_TOKENS
    out_THC = torch.empty_like(q_THC)
    num_keys = num_rows + window_pad + num_chosen + chosen_pad
    piece = max(1, _MAX_GATHERED // (num_keys * (q_THC.shape[1] + q_THC.shape[2])))
    places_W = torch.arange(num_rows, device=q_THC.device)
    for start in range(0, len(q_THC), piece):
        rows = slice(start, start + piece)
        window = F.pad(window_TWC[rows].float(), (0, 0, 0, window_pad))
        in_window = F.pad(places_W >= num_rows - num_in_window_T[rows, None], (0, window_pad))
        entries = F.pad(entries_EC[chosen.ids_TK[rows]].float(), (0, 0, 0, chosen_pad))
        seen_TX = torch.cat([in_window, F.pad(chosen.seen_TK[rows], (0, chosen_pad))], dim=1)
        keys_TXC = torch.cat([window, entries], dim=1)
        seen_THX = seen_TX[:, None].expand(-1, q_THC.shape[1], -1)
        sinks_TH = sinks_H.expand(len(keys_TXC), -1)
        values_TPSC = keys_TXC.unflatten(1, (-1, PAGE_TOKENS))
        out_THC[rows] = attend_pages(q_THC[rows].float(), keys_TXC, values_TPSC, seen_THX, scale, sinks_TH).to(
            q_THC.dtype
        )
    return out_THC
