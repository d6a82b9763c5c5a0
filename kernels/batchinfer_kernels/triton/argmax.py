"""The largest logit of each row over a large vocabulary, in Triton: first within parts of the row, then over them."""

# S rows, V vocabulary, P parts

import torch
import triton
import triton.language as tl

_PART = 8192


def argmax(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, width = logits_SV.shape
    num_parts = triton.cdiv(width, _PART)
    tokens_S = torch.empty(num_rows, dtype=torch.int64, device=logits_SV.device)
    is_finite_S = torch.empty(num_rows, dtype=torch.bool, device=logits_SV.device)
    if num_rows:
        peaks = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits_SV.device)
        places = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits_SV.device)
        logits_SV = logits_SV if logits_SV.stride(1) == 1 else logits_SV.contiguous()
        _largest_of_part[(num_rows, num_parts)](logits_SV, peaks, places, width, logits_SV.stride(0), PART=_PART)
        _largest[(num_rows,)](peaks, places, tokens_S, is_finite_S, num_parts, PARTS=triton.next_power_of_2(num_parts))
    return tokens_S, is_finite_S


@triton.jit
def _largest_of_part(logits_ptr, peaks_ptr, places_ptr, width, stride, PART: tl.constexpr):
    """Find the peak of one part and its place; store -1 - place if a value of the part is not finite."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * PART + tl.arange(0, PART)
    is_inside = columns < width
    logits = tl.load(logits_ptr + row * stride + columns, mask=is_inside, other=-float("inf"))
    is_finite = tl.sum((is_inside & ~(tl.abs(logits) < float("inf"))).to(tl.int32), 0) == 0
    peak = tl.max(logits, 0)
    place = tl.min(tl.where(is_inside & (logits == peak), columns, 2**30), 0)
    at = row * tl.num_programs(1) + part
    tl.store(peaks_ptr + at, peak)
    tl.store(places_ptr + at, tl.where(is_finite, place, -1 - tl.minimum(place, width - 1)))


@triton.jit
def _largest(peaks_ptr, places_ptr, tokens_ptr, is_finite_ptr, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    is_part = parts < num_parts
    peaks = tl.load(peaks_ptr + row * num_parts + parts, mask=is_part, other=-float("inf"))
    places = tl.load(places_ptr + row * num_parts + parts, mask=is_part, other=2**30)
    is_finite = tl.sum((places < 0).to(tl.int32), 0) == 0
    places = tl.where(places < 0, -1 - places, places)
    token = tl.min(tl.where(is_part & (peaks == tl.max(peaks, 0)), places, 2**30), 0)
    # a row without any number has no largest one
    tl.store(tokens_ptr + row, tl.where(token < 2**30, token, 0).to(tl.int64))
    tl.store(is_finite_ptr + row, is_finite)
