"""Decode attention over FP8 pages by flash_mla; `reference.fp8_pages` documents the operation and the layout of rows.

    mla_decode_fp8         flash_mla, sparse decode             64 or 128 heads of 512 + 64 latent values

Rows of 656 bytes are those of flash_mla's sparse decode, byte for byte: 512 values in E4M3, a float32 scale per 128 of
them, 64 in bfloat16. It widens a row as it reads it, to the reference's values, since scales are powers of two. It
takes a list of slots per query: here all tokens that the query sees.

Lists have one length, so a request costs as many keys as the longest request of its step, or as its graph has room for.
So "auto" leaves decode to Triton, which ends at each request's own length; this version runs only by name. flash_mla
splits a request's keys by the number of requests, so that the last bits of a row may depend on its batch.

flash_mla's other decode over FP8 (`fwd_kvcache_mla_fp8` of sgl-flash-mla) does not fit: it takes queries and all 576
values of a key in E4M3, with one scale for all queries and one for all keys.
Sources: csrc/api/sparse_decode and csrc/sm90/decode/sparse_fp8 of FlashMLA, in the versions of libraries.py.
"""

# T rows, B requests, Q query tokens per request, H heads, W latent and rotary width, C latent width, P pages
# X = 64 * P keys of a list

from typing import Any

import torch

from batchinfer_kernels.hopper import libraries
from batchinfer_kernels.hopper.libraries import is_on_gpu
from batchinfer_kernels.implementation import implementation
from batchinfer_kernels.reference.fp8_pages import row_bytes
from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys
from batchinfer_kernels.reference.sparse import NO_SLOT

_SCHEDULE = "hopper FP8 pages"  # key in a step's schedule
_HEADS, _WIDTH, _LATENT_DIM = (64, 128), 576, 512


def why_not_auto() -> str:
    """Return the reason why "auto" does not choose this implementation."""
    return "a request costs as many keys as the longest one of its step, so only by name"


def _decode(q_THW: torch.Tensor, keys: PagedKeys, *, latent_dim: int, **_: Any) -> str | None:
    """Reject CPU tensors, queries that are not in bfloat16, other heads than 64 or 128 of 512 + 64 latent values."""
    pages = keys.pages
    if not is_on_gpu(q_THW, pages):
        return "tensors are not on a GPU"
    if q_THW.dtype is not torch.bfloat16:
        return "queries are not in bfloat16"
    if (q_THW.shape[-1], latent_dim) != (_WIDTH, _LATENT_DIM) or q_THW.shape[1] not in _HEADS:
        return "there are not 64 or 128 heads of 512 + 64 latent values"
    if pages.stride(1) != row_bytes(_LATENT_DIM, _WIDTH - _LATENT_DIM):
        return "rows of pages have gaps between them"
    has_lists = "indices" in libraries.decode_parameters() and libraries.makes_own_metadata()
    return None if has_lists else "flash_mla has no sparse decode"


@implementation(rejects=_decode)
def mla_decode_fp8(q_THW: torch.Tensor, keys: PagedKeys, *, latent_dim: int, scale: float) -> torch.Tensor:
    """Give zeros for a request without tokens; make the lists once per `schedule`, which belongs to one step."""
    num_requests, (num_rows, num_heads, _) = len(keys.page_table_BP), q_THW.shape
    if num_rows == 0:
        return q_THW.new_empty(0, num_heads, latent_dim)
    q_BQHW = q_THW.contiguous().unflatten(0, (num_requests, -1))
    library, schedule = libraries.flash_mla(), {} if keys.schedule is None else keys.schedule
    if _SCHEDULE not in schedule:
        metadata, _ = library.get_mla_metadata()
        schedule[_SCHEDULE] = keys.kv_tokens_B, _seen_slots(keys, q_BQHW.shape[1]), metadata
    source, slots_BQX, metadata = schedule[_SCHEDULE]
    assert source is keys.kv_tokens_B, "a schedule serves one step: another one has other lengths"
    out_BQHC, _ = library.flash_mla_with_kvcache(
        q_BQHW,
        keys.pages[:, :, None],  # one head of keys for all
        None,
        None,
        latent_dim,
        metadata,
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=slots_BQX,
        **({"use_legacy": True} if "use_legacy" in libraries.decode_parameters() else {}),
    )
    return out_BQHC.flatten(0, 1)


def _seen_slots(keys: PagedKeys, num_queries: int) -> torch.Tensor:
    """Return the slots of the tokens that each query sees, then NO_SLOT; [B, Q, X] int32."""
    table_BP = keys.page_table_BP
    in_page = torch.arange(PAGE_TOKENS, device=table_BP.device)
    slots_BX = (table_BP[:, :, None] * PAGE_TOKENS + in_page).flatten(1)
    seen_BQ = torch.minimum(keys.positions_T.view(-1, num_queries) + 1, keys.kv_tokens_B[:, None])
    is_seen_BQX = torch.arange(slots_BX.shape[1], device=table_BP.device) < seen_BQ[..., None]
    return torch.where(is_seen_BQX, slots_BX[:, None], NO_SLOT).to(torch.int32)
