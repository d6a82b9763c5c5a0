"""Decode attention over pieces of requests: queries for each piece, and the pieces' results added up per request."""

# B requests with one query each, K pieces of a request at most, V places of pieces, H heads, C latent width

import torch


def spread_queries(q_BHW: torch.Tensor, request_V: torch.Tensor) -> torch.Tensor:
    """Return the queries of the request at each place, [V, H, W]; anything where there is no piece (-1).

    Args:
        request_V: int32.
    """
    return q_BHW[request_V.clamp_min(0)]


def merge_pieces(parts_VHC: torch.Tensor, log_sums_VH: torch.Tensor, place_BK: torch.Tensor) -> torch.Tensor:
    """Merge the attention over all pieces of each request, [B, H, C]; a single piece keeps its bits.

    A piece counts with its share of the sum of exp(score), as in FlashAttention-2 (arXiv:2307.08691, section 3.1.1).
    Pieces are added up in their order, so a result depends on nothing else.

    Args:
        parts_VHC: attention over each piece alone.
        log_sums_VH: float32, the logarithm of the sum of exp(score) of its keys; not read if a request has one piece.
            Both may be anything at places without a piece.
        place_BK: int32, places of a request's pieces; the first exists, behind the last are -1.
    """
    place_BK = place_BK.long()
    is_piece_BK11 = (place_BK >= 0)[:, :, None, None]
    at_BK = place_BK.clamp_min(0)
    log_sums = log_sums_VH[at_BK][..., None].double().masked_fill(~is_piece_BK11, -torch.inf)
    shares = (log_sums - log_sums.amax(dim=1, keepdim=True)).exp()
    values = parts_VHC[at_BK].double().masked_fill(~is_piece_BK11, 0.0)
    total, weight = torch.zeros_like(values[:, 0]), torch.zeros_like(shares[:, 0])
    for k in range(place_BK.shape[1]):
        total, weight = total + shares[:, k] * values[:, k], weight + shares[:, k]
    is_one_B11 = (place_BK[:, 1:] < 0).all(dim=1)[:, None, None]
    return torch.where(is_one_B11, parts_VHC[at_BK[:, 0]], (total / weight).to(parts_VHC.dtype))
