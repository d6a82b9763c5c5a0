"""Row numbers of a step in compressed attention: of each token's window, and of the rows that requests keep."""

# T tokens of a step, B requests, W rows of a window, N rows that chunks find, M rows that they keep, K entries
# L parts of an entry, P pages of a request

from itertools import pairwise
from typing import NamedTuple

import torch

from batchinfer.model.step import AttentionStep, StateMoves
from batchinfer_kernels.reference.compressed import NO_ROW, KeyRows

_KEPT = "rows of windows"


class Group(NamedTuple):
    """Chunks whose rows are kept together: all of a step, or one with copies of states around it.

    rows, chunks: of the step; before, kept: of `before_N` and `kept_from_M`.
    """

    rows: slice
    chunks: slice
    before: slice
    kept: slice
    moves: StateMoves | None


class StepRows(NamedTuple):
    """Numbers of rows, the same in all layers; rows of windows are numbered slot after slot.

    starts_B: [B + 1], first row of each chunk, and T.
    requests_T: [T], the chunk of each token.
    slots_B: [B].
    ids_TWL: [T, W, 1], the window of each token, its own row last: numbers of rows of windows (`in_ring`), else of
        the rows that chunks find and behind these the step's own.
    before_N: rows of windows that chunks find and whose tokens see them.
    kept_from_M, kept_to_M: rows of the step that stay, and the rows of windows where.
    """

    starts_B: torch.Tensor
    requests_T: torch.Tensor
    slots_B: torch.Tensor
    in_ring: bool
    ids_TWL: torch.Tensor
    before_N: torch.Tensor
    kept_from_M: torch.Tensor
    kept_to_M: torch.Tensor
    groups: list[Group]


def rows_of_step(step: AttentionStep, window: int) -> StepRows:
    """Return the numbers of a step's rows, which all of its layers share."""
    if _KEPT not in step.schedule:
        step.schedule[_KEPT] = _found(step, window)
    found: StepRows = step.schedule[_KEPT]
    return found


def visible_entries(pages: torch.Tensor, width: int, page_table_TP: torch.Tensor, visible_T: torch.Tensor) -> KeyRows:
    """Return the places of all entries that each query sees; an entry may be cut into pieces on several pages."""
    piece = min(width, pages.shape[1])
    per_page, num_parts = pages.shape[1] // piece, width // piece
    num_entries = page_table_TP.shape[1] * per_page // num_parts
    places_KL = torch.arange(num_entries * num_parts, device=pages.device).view(num_entries, num_parts)
    ids_TKL = page_table_TP[:, places_KL // per_page] * per_page + places_KL % per_page
    is_hidden_TK = torch.arange(num_entries, device=pages.device) >= visible_T[:, None]
    return KeyRows(pages.view(-1, piece), ids_TKL.masked_fill_(is_hidden_TK[..., None], NO_ROW))


def _found(step: AttentionStep, window: int) -> StepRows:
    positions_T, device = step.positions, step.positions.device
    num_rows, slots_B = len(positions_T), step.state_slots
    if slots_B is None:
        assert num_rows == 0, "requests have slots for their state"
        slots_B = positions_T
    num_chunks = len(slots_B)
    if step.chunk_tokens is None:
        sizes_B = torch.full((num_chunks,), num_rows // max(1, num_chunks), dtype=torch.int64, device=device)
    else:
        sizes_B = step.chunk_tokens.to(device)
    starts_B = torch.cat([sizes_B.new_zeros(1), sizes_B.cumsum(0)])
    requests_T = torch.repeat_interleave(sizes_B, output_size=num_rows)
    rows_T, back_W = torch.arange(num_rows, device=device), torch.arange(window - 1, -1, -1, device=device)
    places_TW = positions_T[:, None] - back_W
    is_kept_T = starts_B[1:][requests_T] - rows_T <= window
    in_ring = step.chunk_tokens is None and num_rows == num_chunks  # a token takes the place of none in its window
    kept_from = rows_T if in_ring else torch.nonzero(is_kept_T).flatten()
    if in_ring:
        ids_TW, before_N = slots_B[requests_T, None] * window + places_TW % window, rows_T[:0]
        num_before_B = torch.zeros_like(slots_B)
    else:
        firsts_B = step.kv_tokens.to(device) - sizes_B
        num_before_B = firsts_B.clamp(max=window - 1)
        begins_B = num_before_B.cumsum(0) - num_before_B  # in before_N
        of_rows_N = torch.repeat_interleave(num_before_B)
        places_N = torch.arange(len(of_rows_N), device=device) + (firsts_B - num_before_B - begins_B)[of_rows_N]
        before_N = slots_B[of_rows_N] * window + places_N % window
        is_own_TW = places_TW >= firsts_B[requests_T, None]
        found_TW = places_TW - (firsts_B - num_before_B - begins_B)[requests_T, None]
        ids_TW = torch.where(is_own_TW, len(before_N) + rows_T[:, None] - back_W, found_TW)
    ids_TWL = ids_TW.masked_fill(places_TW < 0, NO_ROW)[..., None].contiguous()
    kept_to = (slots_B[requests_T] * window + positions_T % window)[kept_from]
    groups = _groups(step, starts_B, num_before_B, is_kept_T)
    return StepRows(starts_B, requests_T, slots_B, in_ring, ids_TWL, before_N, kept_from, kept_to, groups)


def _groups(
    step: AttentionStep, starts_B: torch.Tensor, num_before_B: torch.Tensor, is_kept_T: torch.Tensor
) -> list[Group]:
    """Return one group of all chunks, or the chunks one by one where copies of states stand between them."""
    num_chunks = len(num_before_B)
    if not any(step.moves):
        everything = slice(0, None)
        return [Group(slice(0, len(is_kept_T)), slice(0, num_chunks), everything, everything, None)]
    kept_before_T = torch.cat([is_kept_T.new_zeros(1, dtype=torch.int64), is_kept_T.cumsum(0)])
    bounds = starts_B.tolist(), [0, *num_before_B.cumsum(0).tolist()], kept_before_T[starts_B].tolist()
    cuts = (map(slice, *zip(*pairwise(each), strict=True)) for each in bounds)
    return [
        Group(rows, slice(number, number + 1), before, kept, moves)
        for number, (rows, before, kept, moves) in enumerate(zip(*cuts, step.moves, strict=True))
    ]
