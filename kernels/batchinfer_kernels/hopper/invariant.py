"""Decode attention of flash_mla with cuts of our own (cuts.py): a request's bits do not depend on what is beside it.

Left to itself flash_mla cuts a step's keys into equal shares, one per part of the GPU, and adds up a request's pieces
afterwards: where a request is cut depends on all of them. It also takes the cuts from outside.
"""

# B requests, H heads, C latent width, W latent and rotary width, V places of pieces

import functools
from collections.abc import Callable
from typing import Any

import torch

from batchinfer_kernels import reference
from batchinfer_kernels.hopper import libraries, ops
from batchinfer_kernels.hopper.cuts import PIECE_PAGES, Cuts, own_pieces, requests_at_once, whole_requests
from batchinfer_kernels.implementation import refusing
from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys

_HEADS_AT_ONCE = 64  # rows of queries that a multiprocessor works on
_PIECES = "hopper-invariant"  # what it keeps in a step's schedule


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


@refusing(ops.refuses_decode, uses=("spread_queries", "merge_pieces"))
def mla_decode(
    q_THW: torch.Tensor,
    keys: PagedKeys,
    *,
    latent_dim: int,
    scale: float,
    spread_queries: Callable[..., torch.Tensor] = reference.spread_queries,
    merge_pieces: Callable[..., torch.Tensor] = reference.merge_pieces,
) -> torch.Tensor:
    """As ops.mla_decode with cuts between requests, and within those longer than PIECE_PAGES pages.

    Requests with several queries are not cut: their bits are those of steps with as many.
    """
    num_requests, most_pages = keys.page_table_BP.shape
    if most_pages <= PIECE_PAGES or len(q_THW) != num_requests or num_requests == 0:
        return ops.decode(q_THW, keys, latent_dim, scale, _whole_requests)
    at_once = requests_at_once(most_pages)
    schedule = {} if keys.schedule is None else keys.schedule
    if _PIECES not in schedule:
        num_parts = _num_parts(q_THW.device, q_THW.shape[1])
        requests = zip(keys.kv_tokens_B.split(at_once), keys.page_table_BP.split(at_once), strict=True)
        cut = [own_pieces(*some, num_parts) for some in requests]
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
    """In the library's own form, for requests of so many queries times heads."""
    return _metadata(whole_requests(kv_tokens_B, _num_parts(kv_tokens_B.device, rows_per_request)))


def _metadata(cuts: Cuts) -> tuple[Any, None]:
    metadata, _ = libraries.flash_mla().get_mla_metadata()
    metadata.tile_scheduler_metadata, metadata.num_splits = cuts
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
    expected = whole_requests(lengths, num_parts)
    own_P8, own_B = metadata.tile_scheduler_metadata, metadata.num_splits
    return (
        own_P8.shape == expected.parts_P8.shape
        and own_B.shape == expected.pieces_B.shape
        and torch.equal(own_P8[:, :7], expected.parts_P8[:, :7])
        and torch.equal(own_B, expected.pieces_B)
    )


def _device() -> torch.device:
    """The GPU on which the library is tried: this process's current one."""
    return torch.device("cuda", torch.cuda.current_device())
