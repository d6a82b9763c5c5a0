"""Sparse attention by DeepSeek's libraries for Hopper GPUs; the `reference` functions document the operations.

    choose_keys            deep_gemm, fp8_mqa_logits            of prompts, 32 or 64 heads of 32, 64 or 128 values
    mla_sparse             flash_mla, sparse prefill            64 or 128 heads of 512 + 64 latent values, in bfloat16

deep_gemm scores queries and keys in FP8, as DeepSeek's own code does (reference/index_fp8.py); the other candidates
score them in the model's dtype. In decode keys are scored in the pages, by another candidate: to round all keys of all
requests in every step would move more memory than their products in bfloat16 do, and fp8_paged_mqa_logits takes pages
of another layout (64 rounded keys, then their scales), in which a token's row could not be copied to another page.

flash_mla's sparse decode takes latents in FP8 alone. Its sparse prefill takes bfloat16 and one list of slots per query,
which is all that decode has: it serves both. A query's sums depend on nothing but its list, here and in deep_gemm.
Sources: csrc/apis/attention.hpp and sm90_fp8_mqa_logits.cuh of DeepGEMM, csrc/api/sparse_fwd of FlashMLA, in the
versions of libraries.py.
"""

# T queries, H heads, I width of an index key, X keys of all requests, K keys of a query, W latent and rotary width

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from batchinfer_kernels import reference
from batchinfer_kernels.hopper import libraries
from batchinfer_kernels.hopper.libraries import is_on_gpu
from batchinfer_kernels.implementation import implementation
from batchinfer_kernels.reference.mla import PAGE_TOKENS
from batchinfer_kernels.reference.sparse import IndexedKeys, IndexQueries
from batchinfer_kernels.transfer import in_one_copy

_SCHEDULE = "hopper indexer"  # key in a step's schedule
_MAX_SCORE_BYTES = 2**29  # held at once
_INDEX_HEADS, _INDEX_WIDTHS = (32, 64), (32, 64, 128)
_HEADS, _WIDTH, _LATENT_DIM = (64, 128), 576, 512
_KEYS_MULTIPLE = 128
_ROW_MULTIPLE = 8  # values: a row begins at a multiple of 16 bytes


class _StepKeys(NamedTuple):
    """The keys of a step's requests, whole pages one behind the other; the same in all layers."""

    source: torch.Tensor
    slots_X: torch.Tensor
    starts_B: torch.Tensor  # int32, the first key of each request
    most: int  # keys of one request


# ---- rejected arguments


def _scored(queries: IndexQueries, keys: IndexedKeys, **_: Any) -> str | None:
    """Reject keys in decode, other numbers of heads than 32 and 64, other widths than 32, 64 and 128, CPU tensors."""
    q_THI = queries.q_THI
    if not is_on_gpu(q_THI, keys.pages):
        return "tensors are not on a GPU"
    if keys.kv_tokens_B is None:
        return "in decode keys are scored where they lie in the pages"
    if not q_THI.dtype is keys.pages.dtype is torch.bfloat16:
        return "queries or pages are not in bfloat16"
    if q_THI.shape[1] not in _INDEX_HEADS or q_THI.shape[2] not in _INDEX_WIDTHS:
        return "the indexer has other heads than 32 or 64 of 32, 64 or 128 values"
    return None if libraries.deep_gemm(libraries.MQA_LOGITS) is not None else "deep_gemm has no fp8_mqa_logits"


def _chosen(
    q_THW: torch.Tensor, pages: torch.Tensor, slots_TK: torch.Tensor, *, latent_dim: int, **_: Any
) -> str | None:
    """Reject tensors that are not in bfloat16 on a GPU, other heads than 64 or 128 of 512 + 64, parts of 128 keys."""
    if not is_on_gpu(q_THW, pages):
        return "tensors are not on a GPU"
    if not q_THW.dtype is pages.dtype is torch.bfloat16:
        return "queries or pages are not in bfloat16"
    if (q_THW.shape[-1], latent_dim) != (_WIDTH, _LATENT_DIM) or q_THW.shape[1] not in _HEADS:
        return "there are not 64 or 128 heads of 512 + 64 latent values"
    if slots_TK.shape[1] % _KEYS_MULTIPLE or pages.stride(1) % _ROW_MULTIPLE:
        return "the number of keys is not a multiple of 128, or a row of a page is not one of 16 bytes"
    return None if hasattr(libraries.flash_mla(), "flash_mla_sparse_fwd") else "flash_mla has no sparse attention"


# ---- the operations


@implementation(rejects=_scored, uses=("rotated_queries", "hadamard_fp8", "best_slots"))
def choose_keys(
    queries: IndexQueries,
    keys: IndexedKeys,
    *,
    topk: int,
    scale: float,
    rotated_queries: Callable[..., torch.Tensor] = reference.rotated_queries,
    hadamard_fp8: Callable[..., tuple[torch.Tensor, torch.Tensor]] = reference.hadamard_fp8,
    best_slots: Callable[..., torch.Tensor] = reference.best_slots,
) -> torch.Tensor:
    """Multiply the scales of queries and scores into the weights of heads; round keys once per step and layer."""
    num_rows, num_heads, width = queries.q_THI.shape
    slots_TK = torch.empty(num_rows, topk, dtype=torch.int32, device=queries.q_THI.device)
    if num_rows == 0:
        return slots_TK
    step = _step_keys(keys)
    q8, q_scales = hadamard_fp8(rotated_queries(queries).flatten(0, 1))
    weights_TH = queries.weights_TH * scale * q_scales.view(num_rows, num_heads)
    rounded_keys = hadamard_fp8(keys.pages.view(-1, width), step.slots_X)
    starts_T = step.starts_B[keys.requests_T]
    ends_T = starts_T + keys.positions_T.to(torch.int32) + 1
    mqa_logits = libraries.deep_gemm(libraries.MQA_LOGITS)
    assert mqa_logits is not None, "asked before it is called"
    piece = max(1, _MAX_SCORE_BYTES // (4 * step.most))
    for start in range(0, num_rows, piece):
        rows = slice(start, start + piece)
        scores_TX = mqa_logits(
            q8.view(num_rows, num_heads, width)[rows],
            rounded_keys,
            weights_TH[rows],
            starts_T[rows],
            ends_T[rows],
            clean_logits=False,
            max_seqlen_k=step.most,
        )
        own = keys._replace(requests_T=keys.requests_T[rows], positions_T=keys.positions_T[rows])
        slots_TK[rows] = best_slots(scores_TX, own, topk=topk)
    return slots_TK


@implementation(rejects=_chosen)
def mla_sparse(
    q_THW: torch.Tensor, pages: torch.Tensor, slots_TK: torch.Tensor, *, latent_dim: int, scale: float
) -> torch.Tensor:
    """Give zeros for a query without slots, which flash_mla takes for one without keys."""
    if len(q_THW) == 0:
        return q_THW.new_empty(0, q_THW.shape[1], latent_dim)
    out_THC: torch.Tensor = libraries.flash_mla().flash_mla_sparse_fwd(
        q_THW.contiguous(),
        pages.view(-1, pages.shape[-1])[:, None],  # one head of keys for all
        slots_TK[:, None],
        scale,
        d_v=latent_dim,
        **({"use_legacy": True} if "use_legacy" in libraries.sparse_parameters() else {}),
    )[0]
    return out_THC


def _step_keys(keys: IndexedKeys) -> _StepKeys:
    """Locate the keys, once per `schedule`, which belongs to one step (and micro-batch)."""
    assert keys.kv_tokens_B is not None, "refused before"
    schedule = {} if keys.schedule is None else keys.schedule
    if _SCHEDULE not in schedule:
        num_pages_B = (keys.kv_tokens_B + PAGE_TOKENS - 1) // PAGE_TOKENS
        firsts_B = num_pages_B.cumsum(0) - num_pages_B
        request_P = torch.repeat_interleave(num_pages_B)
        page_P = torch.arange(len(request_P)) - firsts_B[request_P]
        on_device = in_one_copy([request_P, page_P, firsts_B * PAGE_TOKENS], keys.pages.device)
        page_ids = keys.page_table_BP[on_device[0], on_device[1]]
        slots_X = (page_ids[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=page_ids.device)).flatten()
        most = int(num_pages_B.max()) * PAGE_TOKENS
        schedule[_SCHEDULE] = _StepKeys(keys.kv_tokens_B, slots_X, on_device[2].to(torch.int32), most)
    found: _StepKeys = schedule[_SCHEDULE]
    assert found.source is keys.kv_tokens_B, "a schedule serves one step: another one has other lengths"
    return found
