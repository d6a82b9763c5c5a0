"""Pages whose latents are in FP8 E4M3: layout, writing and reading of a token's row, in plain PyTorch.

    row of a page   [ latent C x e4m3 | scales ceil(C / 128) x float32 | rotary key R x bfloat16 ]

The layout is the FP8 cache of FlashMLA's kernels (github.com/deepseek-ai/FlashMLA: README, "FP8 with scale", and its
tests, which round to it): 656 bytes for C = 512 and R = 64, where bfloat16 takes 1152. Scales are powers of two, so a
widened latent is a bfloat16 without further rounding. So attention over such pages equals attention over bfloat16 pages
with the widened rows, to the bit: an implementation may widen rows first or while it reads them.
"""

# T tokens, H heads, A query width, C latent width, R rotary width, W = C + R, J tiles of 128 latent values
# B requests, P pages, N pages that are widened, Y bytes of a row

from collections.abc import Callable
from typing import Any

import torch

from batchinfer_kernels.reference import mla, rows
from batchinfer_kernels.reference.fp8 import FP8, divided
from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys
from batchinfer_kernels.reference.rows import NewKeys

TILE = 128  # values that share a scale
LARGEST = 448.0  # of E4M3
LEAST_SCALE = 1e-4  # before it is made a power of two
_SCALE_BYTES, _ROTARY_BYTES = 4, 2
_MOST_PAGES = 1024  # widened at once in decode: 75 MB of DeepSeek-V3's, unless one request has more


def row_bytes(latent_dim: int, rotary: int) -> int:
    """Return Y, the bytes of a token's row in one layer.

    Raises:
        ValueError: scales and rotary keys would be misaligned.
    """
    if latent_dim % _SCALE_BYTES or rotary % 2:
        raise ValueError(f"latents of {latent_dim} and rotary keys of {rotary} values are not whole steps of 4 and 2")
    return latent_dim + _SCALE_BYTES * -(-latent_dim // TILE) + _ROTARY_BYTES * rotary


def rotary_start(latent_dim: int) -> int:
    """Return the byte of a row at which its rotary key begins."""
    return row_bytes(latent_dim, 0)


def narrow(rows_TW: torch.Tensor, latent_dim: int) -> torch.Tensor:
    """Convert rows to those of FP8 pages, [T, Y] uint8.

    Args:
        rows_TW: bfloat16, latent and rotary key.
        latent_dim: C.
    """
    num_rows, rotary = len(rows_TW), rows_TW.shape[-1] - latent_dim
    num_tiles = -(-latent_dim // TILE)
    out_TY = torch.empty(num_rows, row_bytes(latent_dim, rotary), dtype=torch.uint8, device=rows_TW.device)
    if num_rows == 0:  # no rows cannot be viewed in other widths
        return out_TY
    padded = rows_TW.new_zeros(num_rows, num_tiles * TILE, dtype=torch.float32)
    padded[:, :latent_dim] = rows_TW[:, :latent_dim]
    tiles_TJV = padded.unflatten(-1, (num_tiles, TILE))
    scales_TJ = scales_of(tiles_TJV.abs().amax(-1))
    values_TC = (tiles_TJV / scales_TJ[..., None]).to(FP8).flatten(1)[:, :latent_dim]
    out_TY[:, :latent_dim] = values_TC.view(torch.uint8)
    start = rotary_start(latent_dim)
    out_TY[:, latent_dim:start] = scales_TJ.view(torch.uint8)
    out_TY[:, start:] = rows_TW[:, latent_dim:].contiguous().view(torch.uint8)
    return out_TY


def scales_of(amax: torch.Tensor) -> torch.Tensor:
    """Return the smallest powers of two that scale `amax` to 448 at most, float32; NaN where amax is not finite."""
    least = divided(amax, LARGEST).clamp_min(LEAST_SCALE)
    mantissa, exponent = torch.frexp(least)  # a mantissa of 1/2 is a power of two
    scales = torch.ldexp(torch.ones_like(least), exponent - (mantissa == 0.5).int())
    return torch.where(torch.isfinite(amax), scales, torch.nan)


def widen(rows_TY: torch.Tensor, latent_dim: int) -> torch.Tensor:
    """Convert rows of FP8 pages [..., Y] uint8 to bfloat16 [..., W], without rounding."""
    start = rotary_start(latent_dim)
    latent = rows_TY[..., :latent_dim].contiguous().view(FP8).float()
    scales = rows_TY[..., latent_dim:start].contiguous().view(torch.float32)
    rotary = rows_TY[..., start:].contiguous().view(torch.bfloat16)
    latent *= scales.repeat_interleave(TILE, dim=-1)[..., :latent_dim]
    return torch.cat([latent.bfloat16(), rotary], dim=-1)


def widen_pages(keys: PagedKeys, latent_dim: int) -> PagedKeys:
    """Return the keys in bfloat16: each page of the table once, widened, and a table of the new pages."""
    ids_N, places_BP = torch.unique(keys.page_table_BP, return_inverse=True)
    return keys._replace(pages=widen(keys.pages[ids_N], latent_dim), page_table_BP=places_BP)


def cache_via_bfloat16(
    write: Callable[..., torch.Tensor], x_TW: torch.Tensor, new: Any, latent_dim: int, rotary: int
) -> torch.Tensor:
    """Run an operation `write(x, new)` that writes bfloat16 pages: into temporary ones, whose rows are narrowed.

    Args:
        new: has `pages` and `slots_T`, as NewKeys.
        latent_dim, rotary: C and R of the rows that are written.
    """
    num_tokens, width = len(x_TW), latent_dim + rotary
    num_pages = -(-num_tokens // PAGE_TOKENS)
    wide = torch.empty(num_pages, PAGE_TOKENS, width, dtype=torch.bfloat16, device=x_TW.device)
    places_T = torch.arange(num_tokens, device=wide.device)
    q_THA = write(x_TW, new._replace(pages=wide, slots_T=places_T))
    new.pages.view(-1, new.pages.shape[-1])[new.slots_T] = narrow(wide.view(-1, width)[:num_tokens], latent_dim)
    return q_THA


def decode_via_bfloat16(
    decode: Callable[..., torch.Tensor], q_THW: torch.Tensor, keys: PagedKeys, held_dim: int, *more: Any, **options: Any
) -> torch.Tensor:
    """Run an operation `decode(q, keys, *more, **options)` that reads bfloat16 pages, some requests at a time.

    Args:
        held_dim: C of the rows in pages.
    """
    num_requests, num_pages = keys.page_table_BP.shape
    num_queries = len(q_THW) // max(1, num_requests)
    piece = max(1, _MOST_PAGES // max(1, num_pages))
    out = []
    for start in range(0, max(1, num_requests), piece):
        requests, of_rows = slice(start, start + piece), slice(start * num_queries, (start + piece) * num_queries)
        some = keys._replace(
            page_table_BP=keys.page_table_BP[requests],
            kv_tokens_B=keys.kv_tokens_B[requests],
            positions_T=keys.positions_T[of_rows],
            schedule=None,
        )
        out.append(decode(q_THW[of_rows], widen_pages(some, held_dim), *more, **options))
    return torch.cat(out)


# ---- the operations


def rope_and_cache_fp8(q_THA: torch.Tensor, new: NewKeys) -> torch.Tensor:
    """Run rows.rope_and_cache in bfloat16, then round the rows into pages [num_pages, 64, Y] uint8."""
    latent_dim = len(new.norm_C)
    return cache_via_bfloat16(rows.rope_and_cache, q_THA, new, latent_dim, new.latents_TW.shape[-1] - latent_dim)


def mla_prefill_fp8(
    q_THA: torch.Tensor,
    keys: PagedKeys,
    kv_b_HZC: torch.Tensor,
    num_tokens_B: torch.Tensor,
    *,
    v_dim: int,
    scale: float,
) -> torch.Tensor:
    """Run mla.mla_prefill over the widened rows of pages [num_pages, 64, Y] uint8."""
    wide = widen_pages(keys, kv_b_HZC.shape[-1])
    return mla.mla_prefill(q_THA, wide, kv_b_HZC, num_tokens_B, v_dim=v_dim, scale=scale)


def mla_decode_fp8(q_THW: torch.Tensor, keys: PagedKeys, *, latent_dim: int, scale: float) -> torch.Tensor:
    """Run mla.mla_decode over the widened rows of pages [num_pages, 64, Y] uint8."""
    return decode_via_bfloat16(mla.mla_decode, q_THW, keys, latent_dim, latent_dim=latent_dim, scale=scale)
