"""Cuts of decode attention that depend on no other request: between requests, and inside one by its length alone.

A request of up to PIECE_PAGES pages is one piece. A longer one is cut into pieces of PIECE_PAGES pages, or into
MOST_PIECES equal pieces if that would give more. The library treats a piece as a request. Pieces are dealt to the parts
of the GPU, the largest first, in alternating direction:

    parts          0  1  2
    first turn     a  b  c
    second         f  e  d
    third          g  h  -

Nothing is read on the host: there is room for as many pieces as the page table allows, _AT_ONCE in a call.

Layout of the cuts: DecodingSchedMeta and get_mla_metadata_kernel of FlashMLA, version of 2026-04.
"""

# B requests, M pages of one at most, P parts of the GPU, K pieces of a request at most, R pieces of a part at most,
# V = P x R places of pieces, W pages of a piece at most, N = V pieces by request, padded behind the last request

from typing import NamedTuple

import torch
import torch.nn.functional as F

from batchinfer_kernels.reference.mla import PAGE_TOKENS

# A piece's queries and results, with 128 heads, are a twentieth of the bytes of its PIECE_PAGES pages.
PIECE_PAGES = 128
MOST_PIECES = 8  # for each there is room in memory
_AT_ONCE = 2048  # pieces; each takes 0.54 MB with 128 heads, half of it what the library has for sums in float32
_OVERHEAD_PAGES = 5  # fixed cost of a request in pages, as flash_mla counts it


class Cuts(NamedTuple):
    """The requests, or pieces, of each part of the GPU, as the library reads them.

    parts_P8: [P, 8] int32: first and last request, the first page of the one and the end page of the other, number of
        the first piece, whether first and last are cut (never), unused; a part without requests begins behind the last
        request.
    pieces_B: [B + 1] int32, the number of each request's first piece.
    """

    parts_P8: torch.Tensor
    pieces_B: torch.Tensor


class Pieces(NamedTuple):
    """Pieces, treated as requests.

    place_BK: [B, K] int32, the places of each request's pieces in token order; -1 behind the last.
    request_V: [V] int32, the request of each place's piece; -1: no piece.
    kv_tokens_V: [V] int32, 0 without a piece.
    page_table_VW: [V, W] int32.
    """

    place_BK: torch.Tensor
    request_V: torch.Tensor
    kv_tokens_V: torch.Tensor
    page_table_VW: torch.Tensor
    cuts: Cuts


def cut_between_requests(kv_tokens_B: torch.Tensor, num_parts: int) -> Cuts:
    """Cut between requests only: each part of the GPU gets the requests whose middle lies in its share of the work."""
    pages_B = _pages(kv_tokens_B)
    cost_B = pages_B.clamp_min(1) + _OVERHEAD_PAGES
    behind_B = cost_B.cumsum(0)
    part_B = (2 * behind_B - cost_B) * num_parts // (2 * behind_B[-1:])  # where the middle lies
    parts_P = torch.arange(num_parts, device=kv_tokens_B.device)
    first_P = torch.searchsorted(part_B, parts_P)
    behind_P = torch.searchsorted(part_B, parts_P, right=True)
    return _cuts(first_P, behind_P, pages_B)


def max_requests_per_call(most_pages: int, piece_pages: int = PIECE_PAGES) -> int:
    """Return the number of requests with up to `most_pages` pages that fit into one call."""
    return _AT_ONCE // _most_pieces(most_pages, piece_pages)


def cut_into_pieces(
    kv_tokens_B: torch.Tensor, page_table_BM: torch.Tensor, num_parts: int, piece_pages: int = PIECE_PAGES
) -> Pieces:
    """Cut requests by their own lengths and deal the pieces to the parts."""
    device, (num_requests, most_pages) = kv_tokens_B.device, page_table_BM.shape
    most_pieces = _most_pieces(most_pages, piece_pages)
    num_pieces = num_requests * most_pieces
    turns = -(-num_pieces // num_parts)
    num_places = num_parts * turns
    pages_B1 = _pages(kv_tokens_B)[:, None].clamp_min(1)
    size_B1 = ((pages_B1 + (MOST_PIECES - 1)) // MOST_PIECES).clamp_min(piece_pages)
    first_BK = torch.arange(most_pieces, device=device) * size_B1
    pages_BK = torch.minimum(pages_B1 - first_BK, size_B1).clamp_min(0)

    # in the order of places, part by part; pieces without pages and places without pieces come last
    pages_N = F.pad(pages_BK.flatten(), (0, num_places - num_pieces))
    piece_RP = pages_N.argsort(descending=True, stable=True).view(turns, num_parts)
    piece_RP[1::2] = piece_RP[1::2].flip(1)
    piece_V = piece_RP.T.flatten()
    place_N = torch.empty_like(piece_V).scatter_(0, piece_V, torch.arange(num_places, device=device))
    pages_V = pages_N[piece_V]
    is_taken_V = pages_V > 0

    piece_V = piece_V.clamp_max(num_pieces - 1)
    request_V, first_V = piece_V // most_pieces, first_BK.flatten()[piece_V]
    tokens_V = torch.minimum(kv_tokens_B[request_V] - first_V * PAGE_TOKENS, pages_V * PAGE_TOKENS).clamp_min(0)
    most_pages_of_piece = max(piece_pages, -(-most_pages // MOST_PIECES))
    pages_VW = first_V[:, None] + torch.arange(most_pages_of_piece, device=device)
    first_P = torch.arange(0, num_places, turns, device=device)
    return Pieces(
        place_N[:num_pieces].view_as(pages_BK).masked_fill(pages_BK == 0, -1).int(),
        request_V.masked_fill(~is_taken_V, -1).int(),
        tokens_V.int(),
        page_table_BM[request_V[:, None], pages_VW.clamp_max(most_pages - 1)].int(),
        _cuts(first_P, first_P + is_taken_V.view(num_parts, turns).sum(dim=1), _pages(tokens_V)),
    )


def _most_pieces(most_pages: int, piece_pages: int) -> int:
    return min(MOST_PIECES, -(-most_pages // piece_pages))


def _pages(kv_tokens: torch.Tensor) -> torch.Tensor:
    return (kv_tokens.long() + (PAGE_TOKENS - 1)) // PAGE_TOKENS


def _cuts(first_P: torch.Tensor, behind_P: torch.Tensor, pages_B: torch.Tensor) -> Cuts:
    """Return the cuts for parts that each work on the whole requests [first_P, behind_P)."""
    last_P = (behind_P - 1).clamp_min(0)
    first_P = first_P.masked_fill(first_P == behind_P, len(pages_B))
    nothing_P = torch.zeros_like(first_P)
    parts_P8 = torch.stack([first_P, last_P, nothing_P, pages_B[last_P], *4 * [nothing_P]], dim=1)
    return Cuts(parts_P8.int(), torch.arange(len(pages_B) + 1, dtype=torch.int32, device=pages_B.device))
