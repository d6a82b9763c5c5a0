"""Decode attention over pieces of requests in Triton: queries for each piece, and results per request.

See reference/pieces.py.
"""

# B requests, K pieces of a request at most, V places of pieces, H heads, C latent width

import torch
import triton
import triton.language as tl

_TILE = 4096


def spread_queries(q_BHW: torch.Tensor, request_V: torch.Tensor) -> torch.Tensor:
    q_BHW = q_BHW.contiguous()
    spread_VHW = torch.empty(len(request_V), *q_BHW.shape[1:], dtype=q_BHW.dtype, device=q_BHW.device)
    width = spread_VHW[0].numel() if len(spread_VHW) else 0
    if width:
        _spread_queries[(len(request_V), triton.cdiv(width, _TILE))](q_BHW, request_V, spread_VHW, width, TILE=_TILE)
    return spread_VHW


def merge_pieces(parts_VHC: torch.Tensor, log_sums_VH: torch.Tensor, place_BK: torch.Tensor) -> torch.Tensor:
    (num_requests, most_pieces), (_, num_heads, width) = place_BK.shape, parts_VHC.shape
    parts_VHC, log_sums_VH, place_BK = parts_VHC.contiguous(), log_sums_VH.contiguous(), place_BK.contiguous()
    merged_BHC = torch.empty(num_requests, num_heads, width, dtype=parts_VHC.dtype, device=parts_VHC.device)
    if merged_BHC.numel():
        _merge_pieces[(num_requests, num_heads)](
            parts_VHC, log_sums_VH, place_BK, merged_BHC, num_heads, width, most_pieces,
            WIDTH=triton.next_power_of_2(width),
        )  # fmt: skip
    return merged_BHC


@triton.jit
def _spread_queries(q_ptr, request_ptr, spread_ptr, width, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ptr + place).to(tl.int64)
    if request >= 0:
        columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
        values = tl.load(q_ptr + request * width + columns, mask=columns < width)
        tl.store(spread_ptr + place * width + columns, values, mask=columns < width)


@triton.jit
def _merge_pieces(
    parts_ptr, log_sums_ptr, place_ptr, merged_ptr, num_heads, width, most_pieces, WIDTH: tl.constexpr
):  # fmt: skip
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place_at = place_ptr + request * most_pieces
    columns = tl.arange(0, WIDTH)
    first = tl.load(place_at).to(tl.int64) * num_heads + head
    merged = tl.load(parts_ptr + first * width + columns, mask=columns < width, other=0.0)
    if tl.load(place_at + 1, mask=most_pieces > 1, other=-1) >= 0:
        peak = tl.load(log_sums_ptr + first)
        for k in range(1, most_pieces):
            place = tl.load(place_at + k).to(tl.int64)
            log_sum = tl.load(log_sums_ptr + place * num_heads + head, mask=place >= 0, other=-float("inf"))
            peak = tl.maximum(peak, log_sum)
        total, weight = tl.zeros((WIDTH,), tl.float32), peak * 0.0
        for k in range(0, most_pieces):
            place = tl.load(place_at + k).to(tl.int64)
            at = place * num_heads + head
            share = tl.exp(tl.load(log_sums_ptr + at, mask=place >= 0, other=-float("inf")) - peak)
            is_inside = (columns < width) & (place >= 0)
            total += share * tl.load(parts_ptr + at * width + columns, mask=is_inside, other=0.0).to(tl.float32)
            weight += share
        merged = (total / weight).to(merged.dtype)
    tl.store(merged_ptr + (request * num_heads + head) * width + columns, merged, mask=columns < width)
