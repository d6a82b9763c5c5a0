"""Decode attention of flash_mla that works on each request in one piece: its bits do not depend on what is beside it.

Left to itself flash_mla cuts a step's keys into equal shares, one per part of the GPU, and adds up a request's pieces
afterwards: where a request is cut depends on all of them. It also takes the cuts from outside. Here a part gets whole
requests, those whose middle lies in its share; a step waits for the part that has most. Sums within a request are then
those of its keys in order, whatever else is decoded.

Layout of the cuts: DecodingSchedMeta and get_mla_metadata_kernel of FlashMLA, version of 2026-04.
"""

# T tokens, B requests, H heads, W latent and rotary width, P parts of the GPU

import functools
from typing import Any

import torch

from batchinfer_kernels.hopper import libraries, ops
from batchinfer_kernels.implementation import refusing
from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys

_HEADS_AT_ONCE = 64  # rows of queries that a multiprocessor works on
_OVERHEAD_PAGES = 5  # what a request costs beside its pages, as flash_mla counts it


@functools.cache
def why_not() -> str | None:
    """None where cuts can be given, else the reason; the library is asked for some of its own first."""
    reason = libraries.why_not_flash_mla()
    if reason is not None:
        return reason
    named = f"flash_mla {libraries.version('flash_mla')}"
    try:
        is_known = libraries.makes_own_metadata() and all(_has_known_cuts(tiles * _HEADS_AT_ONCE) for tiles in (1, 2))
    except Exception as error:  # of the library, which asserts, or of CUDA
        message = " ".join(str(error).split()) or "no message"
        return f"{named} cannot be asked for its cuts here ({type(error).__name__}: {message})"
    return None if is_known else f"{named} describes its cuts otherwise; another version is needed, see docs/gpus.md"


@refusing(ops.refuses_decode)
def mla_decode(q_THW: torch.Tensor, keys: PagedKeys, *, latent_dim: int, scale: float) -> torch.Tensor:
    """As ops.mla_decode with cuts between requests alone, made once per `schedule`."""
    return ops.decode(q_THW, keys, latent_dim, scale, _cuts)


def whole_requests(kv_tokens_B: torch.Tensor, num_parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The cuts, and where each request's pieces begin.

    Args:
        kv_tokens_B: integers on any device; nothing of them is read on the host.

    Returns:
        [P, 8] int32 (first and last request, first page of the one and page behind the other, number of the first
        piece, whether first and last are cut, nothing; a part without requests begins behind the last one) and
        [B + 1] int32.
    """
    num_requests, device = len(kv_tokens_B), kv_tokens_B.device
    pages_B = (kv_tokens_B.long() + PAGE_TOKENS - 1) // PAGE_TOKENS
    cost_B = pages_B.clamp_min(1) + _OVERHEAD_PAGES
    behind_B = cost_B.cumsum(0)
    part_B = (2 * behind_B - cost_B) * num_parts // (2 * behind_B[-1:])  # where the middle lies
    parts_P = torch.arange(num_parts, device=device)
    first_P = torch.searchsorted(part_B, parts_P)
    behind_P = torch.searchsorted(part_B, parts_P, right=True)
    is_empty_P = first_P == behind_P
    last_P = (behind_P - 1).clamp_min(0)
    first_P = first_P.masked_fill(is_empty_P, num_requests)
    nothing_P = torch.zeros_like(first_P)
    cuts_P8 = torch.stack([first_P, last_P, nothing_P, pages_B[last_P], *4 * [nothing_P]], dim=1)
    return cuts_P8.int(), torch.arange(num_requests + 1, dtype=torch.int32, device=device)


def _cuts(kv_tokens_B: torch.Tensor, rows_per_request: int) -> tuple[Any, None]:
    """In the library's own form, for requests of so many queries times heads."""
    metadata, _ = libraries.flash_mla().get_mla_metadata()
    num_parts = _num_parts(kv_tokens_B.device, rows_per_request)
    metadata.tile_scheduler_metadata, metadata.num_splits = whole_requests(kv_tokens_B, num_parts)
    return metadata, None


def _num_parts(device: torch.device, rows_per_request: int) -> int:
    """Parts of the GPU for requests of so many queries times heads, as flash_mla counts them."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, num_sms // -(-rows_per_request // _HEADS_AT_ONCE))


def _has_known_cuts(rows_per_request: int) -> bool:
    """Whether the library cuts as many equal requests as there are parts as `whole_requests` does: one for each."""
    device = _device()
    num_parts = _num_parts(device, rows_per_request)
    lengths = torch.full((num_parts,), PAGE_TOKENS, dtype=torch.int32, device=device)
    q_BQHW = torch.zeros(num_parts, 1, rows_per_request, ops.WIDTH, dtype=torch.bfloat16, device=device)
    pages = torch.zeros(1, PAGE_TOKENS, ops.WIDTH, dtype=torch.bfloat16, device=device)
    table = torch.zeros(num_parts, 1, dtype=torch.int32, device=device)
    metadata, splits = libraries.flash_mla().get_mla_metadata()
    ops.call_decode(q_BQHW, pages, table, lengths, (metadata, splits), 1.0)
    cuts_P8, splits_B = whole_requests(lengths, num_parts)
    own_P8, own_B = metadata.tile_scheduler_metadata, metadata.num_splits
    return (
        own_P8.shape == cuts_P8.shape
        and own_B.shape == splits_B.shape
        and torch.equal(own_P8[:, :7], cuts_P8[:, :7])
        and torch.equal(own_B, splits_B)
    )


def _device() -> torch.device:
    """The GPU on which the library is tried: this process's current one."""
    return torch.device("cuda", torch.cuda.current_device())
