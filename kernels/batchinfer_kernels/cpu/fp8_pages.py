"""FP8 pages on the CPU: rows are widened and rounded in PyTorch, value by value; all sums are those of C++.

C++ itself reads only pages in bfloat16 and float32. This module rounds only the rows that are written. So the bits are
those of C++ over bfloat16 pages with the widened rows, on any processor.
"""

import torch

from batchinfer_kernels.cpu import ops, packed
from batchinfer_kernels.cpu.packed import Packed
from batchinfer_kernels.implementation import implementation, on_args
from batchinfer_kernels.reference import fp8_pages, gqa
from batchinfer_kernels.reference.gqa import GqaForm, NewHeads
from batchinfer_kernels.reference.mla import PagedKeys
from batchinfer_kernels.reference.rows import NewKeys


def _rows(q: torch.Tensor) -> str | None:
    """Reject rows that are not in bfloat16 on the CPU."""
    return None if q.is_cpu and q.dtype is torch.bfloat16 else "rows are not in bfloat16 on the CPU"


def _rotation(q_THA: torch.Tensor, new: NewKeys) -> str | None:
    """Reject rows that are not in bfloat16 on the CPU; queries with gaps between them."""
    return _rows(q_THA) or _rows(new.latents_TW) or (None if q_THA.is_contiguous() else "queries are not contiguous")


def _prefill(
    q_THA: torch.Tensor, keys: PagedKeys, kv_b_HZC: torch.Tensor | Packed, *_: object, **__: object
) -> str | None:
    """Reject rows that are not in bfloat16 on the CPU; weights that are packed for others or held in 8 or 4 bits."""
    is_taken = kv_b_HZC.takes(q_THA) if isinstance(kv_b_HZC, Packed) else isinstance(kv_b_HZC, torch.Tensor)
    return _rows(q_THA) or (None if is_taken else "the weight is packed for other rows")


@implementation(rejects=_rotation)
def rope_and_cache_fp8(q_THA: torch.Tensor, new: NewKeys) -> torch.Tensor:
    latent_dim = len(new.norm_C)
    rotary = new.latents_TW.shape[-1] - latent_dim
    return fp8_pages.cache_via_bfloat16(ops.rope_and_cache.run, q_THA, new, latent_dim, rotary)


@implementation(rejects=_prefill)
def mla_prefill_fp8(
    q_THA: torch.Tensor,
    keys: PagedKeys,
    kv_b_HZC: torch.Tensor | Packed,
    num_tokens_B: torch.Tensor,
    *,
    v_dim: int,
    scale: float,
) -> torch.Tensor:
    kv_b = kv_b_HZC if isinstance(kv_b_HZC, Packed) else packed.pack(kv_b_HZC)
    wide = fp8_pages.widen_pages(keys, kv_b.depth)  # latents are of whole pairs
    return ops.mla_prefill.run(q_THA, wide, kv_b, num_tokens_B, v_dim=v_dim, scale=scale)


@implementation(rejects=on_args(_rows, 0))
def mla_decode_fp8(q_THW: torch.Tensor, keys: PagedKeys, *, latent_dim: int, scale: float) -> torch.Tensor:
    options = {"latent_dim": latent_dim, "scale": scale}
    return fp8_pages.decode_via_bfloat16(ops.mla_decode.run, q_THW, keys, latent_dim, **options)


@implementation(rejects=on_args(_rows, 0))
def gqa_rope_and_cache_fp8(qkv_TW: torch.Tensor, new: NewHeads) -> torch.Tensor:
    width = gqa.new_width(qkv_TW, new)
    return fp8_pages.cache_via_bfloat16(ops.gqa_rope_and_cache.run, qkv_TW, new, width, 0)


@implementation(rejects=on_args(_rows, 0))
def gqa_prefill_fp8(q_THA: torch.Tensor, keys: PagedKeys, num_tokens_B: torch.Tensor, form: GqaForm) -> torch.Tensor:
    wide = fp8_pages.widen_pages(keys, gqa.held_width(q_THA, form))
    return ops.gqa_prefill.run(q_THA, wide, num_tokens_B, form)


@implementation(rejects=on_args(_rows, 0))
def gqa_decode_fp8(q_THA: torch.Tensor, keys: PagedKeys, form: GqaForm) -> torch.Tensor:
    return fp8_pages.decode_via_bfloat16(ops.gqa_decode.run, q_THA, keys, gqa.held_width(q_THA, form), form)
