"""Decode attention of flash_mla with cuts from cuts.py: a request's bits do not depend on the other requests.

By default flash_mla cuts a step's keys into equal shares, one per part of the GPU, and adds up a request's pieces
afterwards: the cuts of a request depend on all requests. The library also accepts cuts from its caller.
"""

# B requests, H heads, C latent width, W latent and rotary width, V places of pieces

import functools
from collections.abc import Callable
from typing import Any

import torch

from batchinfer_kernels import reference
from batchinfer_kernels.hopper import libraries, ops
from batchinfer_kernels.hopper.cuts import (
    PIECE_PAGES,
    Cuts,
    cut_between_requests,
    cut_into_pieces,
    max_requests_per_call,
)
from batchinfer_kernels.implementation import implementation
from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys

_HEADS_AT_ONCE = 64  # rows of queries that a multiprocessor works on
_PIECES = "hopper-invariant"  # key in a step's schedule


@functools.cache
def why_not() -> str | None:
    """Return why flash_mla cannot be given cuts here, or None; compare the library's own cuts with expected ones."""
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


@implementation(rejects=ops.rejects_decode, uses=("spread_queries", "merge_pieces"))
def mla_decode(
    q_THW: torch.Tensor,
    keys: PagedKeys,
    *,
    latent_dim: int,
    scale: float,
    spread_queries: Callable[..., torch.Tensor] = reference.spread_queries,
    merge_pieces: Callable[..., torch.Tensor] = reference.merge_pieces,
) -> torch.Tensor:
    """Decode as ops.mla_decode does, with cuts between requests, and inside those longer than PIECE_PAGES pages."""
    return decode_in_pieces(q_THW, keys, PIECE_PAGES, latent_dim, scale, spread_queries, merge_pieces)


def decode_in_pieces(
    q_THW: torch.Tensor,
    keys: PagedKeys,
    piece_pages: int,
    latent_dim: int,
    scale: float,
    spread_queries: Callable[..., torch.Tensor] = reference.spread_queries,
    merge_pieces: Callable[..., torch.Tensor] = reference.merge_pieces,
) -> torch.Tensor:
    """Decode with cuts between requests, and inside those longer than `piece_pages` pages.

    Requests with several queries are not cut inside: their bits are those of steps with as many queries.
    """
    num_requests, most_pages = keys.page_table_BP.shape
    if most_pages <= piece_pages or len(q_THW) != num_requests or num_requests == 0:
        return ops.decode(q_THW, keys, latent_dim, scale, _whole_requests)
    at_once = max_requests_per_call(most_pages, piece_pages)
    schedule = {} if keys.schedule is None else keys.schedule
    if _PIECES not in schedule:
        num_parts = _num_parts(q_THW.device, q_THW.shape[1])
        requests = zip(keys.kv_tokens_B.split(at_once), keys.page_table_BP.split(at_once), strict=True)
        cut = [cut_into_pieces(*some, num_parts, piece_pages) for some in requests]
        schedule[_PIECES] = keys.kv_tokens_B, [(pieces, _metadata(pieces.cuts)) for pieces in cut]
    source, cut_requests = schedule[_PIECES]
    assert source is keys.kv_tokens_B, "a schedule serves one step: another one has other lengths"
    merged = []
    for q_BHW, (pieces, metadata) in zip(q_THW.split(at_once), cut_requests, strict=True):
        q_V1HW = spread_queries(q_BHW, pieces.request_V)[:, None]
        parts_V1HC, log_sums_VH1 = ops.call_decode(
            q_V1HW, keys.pages, pieces.page_table_VW, pieces.kv_tokens_V, metadata, scale
        )
        merged.append(merge_pieces(parts_V1HC[:, 0], log_sums_VH1[..., 0], pieces.place_BK))
    return merged[0] if len(merged) == 1 else torch.cat(merged)


def _whole_requests(kv_tokens_B: torch.Tensor, rows_per_request: int) -> tuple[Any, None]:
    """Return cuts between requests in the library's form, for requests of `rows_per_request` queries times heads."""
    return _metadata(cut_between_requests(kv_tokens_B, _num_parts(kv_tokens_B.device, rows_per_request)))


def _metadata(cuts: Cuts) -> tuple[Any, None]:
    metadata, _ = libraries.flash_mla().get_mla_metadata()
    metadata.tile_scheduler_metadata, metadata.num_splits = cuts
    return metadata, None


def _num_parts(device: torch.device, rows_per_request: int) -> int:
    """Return the parts of the GPU for requests of `rows_per_request` queries times heads, as flash_mla counts them."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, num_sms // -(-rows_per_request // _HEADS_AT_ONCE))


def _has_known_cuts(rows_per_request: int) -> bool:
    """Return whether the library cuts one request per part as `cut_between_requests` does."""
    device = _device()
    num_parts = _num_parts(device, rows_per_request)
    lengths = torch.full((num_parts,), PAGE_TOKENS, dtype=torch.int32, device=device)
    q_BQHW = torch.zeros(num_parts, 1, rows_per_request, ops.WIDTH, dtype=torch.bfloat16, device=device)
    pages = torch.zeros(1, PAGE_TOKENS, ops.WIDTH, dtype=torch.bfloat16, device=device)
    table = torch.zeros(num_parts, 1, dtype=torch.int32, device=device)
    metadata, splits = libraries.flash_mla().get_mla_metadata()
    ops.call_decode(q_BQHW, pages, table, lengths, (metadata, splits), 1.0)
    expected = cut_between_requests(lengths, num_parts)
    own_P8, own_B = metadata.tile_scheduler_metadata, metadata.num_splits
    return (
        own_P8.shape == expected.parts_P8.shape
        and own_B.shape == expected.pieces_B.shape
        and torch.equal(own_P8[:, :7], expected.parts_P8[:, :7])
        and torch.equal(own_B, expected.pieces_B)
    )


def _device() -> torch.device:
    """Return the GPU on which the library is tried: this process's current one."""
    return torch.device("cuda", torch.cuda.current_device())
