"""Stand-ins for what deep_gemm and flash_mla have for sparse attention; see hopper_stand_ins.py.

Signatures and checks are those of DeepGEMM 2.6.1 and sgl-deep-gemm 0.1.2 (csrc/apis/attention.hpp and its wrapper), of
FlashMLA of 2026-04 (csrc/api/sparse_fwd, csrc/sm90/prefill/sparse) and sgl-flash-mla 1.0.0.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn


def mqa_logits(q, kv, weights, starts, ends, clean_logits, max_seqlen_k):
    """Check and compute as csrc/apis/attention.hpp does; scores that it does not write are NaN."""
    num_rows, num_heads, width = q.shape
    assert num_heads in (32, 64)
    assert width in (32, 64, 128)
    assert type(kv) is tuple
    keys, scales = kv
    for values in (q, keys):
        assert values.dtype == FP8
        assert values.is_contiguous()
    assert keys.shape == (len(keys), width)
    assert scales.shape == (len(keys),)
    assert scales.is_contiguous()
    assert scales.dtype == weights.dtype == torch.float32
    assert len(keys) % 4 == 0, "scales are read in steps of 16 bytes, beyond the last one"
    assert weights.is_contiguous()
    assert weights.shape == (num_rows, num_heads)
    for bounds in (starts, ends):
        assert bounds.dtype == torch.int32
        assert bounds.is_contiguous()
        assert bounds.shape == (num_rows,)
    assert (starts % 4 == 0).all(), "a tile would begin before a request's first key"
    assert max_seqlen_k > 0
    assert not clean_logits
    logits = torch.full((num_rows, -(-max_seqlen_k // 256) * 256), torch.nan)[:, :max_seqlen_k]
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        assert end <= len(keys)
        assert end - start <= max_seqlen_k
        products = q[row].float() @ keys[start:end].float().T
        logits[row, : end - start] = (weights[row] @ products.relu()) * scales[start:end]
    return logits


def sparse_prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    """Check and compute as csrc/api/sparse_fwd does for Hopper."""
    num_rows, num_heads, width = q.shape
    assert num_rows > 0
    assert num_heads in (64, 128)
    assert (width, d_v) == (576, 512)
    assert q.dtype == kv.dtype == torch.bfloat16
    assert kv.shape == (len(kv), 1, width)
    assert indices.dtype == torch.int32
    assert indices.shape == (num_rows, 1, indices.shape[2])
    assert indices.shape[2] % 128 == 0
    for tensor in (q, kv, indices):
        assert tensor.stride(-1) == 1
    assert kv.stride(0) * 2 % 16 == 0, "keys are copied 16 bytes at a time"
    assert attn_sink is topk_length is None
    out = torch.zeros(num_rows, num_heads, d_v)
    for row, slots in enumerate(indices[:, 0]):
        keys = kv[slots[(slots >= 0) & (slots < len(kv))].long(), 0].float()
        if len(keys):
            out[row] = torch.softmax(q[row].float() @ keys.T * sm_scale, dim=-1) @ keys[:, :d_v]
    statistics = torch.zeros(num_rows, num_heads)
    return out.bfloat16(), statistics, statistics


def sparse_fp8_decode(q, k_cache, indices, head_dim_v, softmax_scale):
    """Check and compute as csrc/api/sparse_decode does for Hopper and rows of DeepSeek-V3."""
    num_requests, num_queries, num_heads, width = q.shape
    assert num_requests > 0
    assert num_heads in (64, 128)
    assert (width, head_dim_v) == (576, 512)
    assert q.dtype == torch.bfloat16
    assert k_cache.dtype in (FP8, torch.int8, torch.uint8)
    assert k_cache.shape[2:] == (1, 656)
    assert k_cache.stride(1) == 656, "the whole block must be contiguous"
    assert indices.dtype == torch.int32
    assert indices.shape == (num_requests, num_queries, indices.shape[2])
    assert indices.shape[2] % 64 == 0
    for tensor in (q, k_cache, indices):
        assert tensor.stride(-1) == 1
    page_tokens = k_cache.shape[1]
    assert indices.max() < len(k_cache) * page_tokens, "slots are not bounded"
    assert indices.min() >= -1
    out = torch.zeros(num_requests, num_queries, num_heads, head_dim_v)
    for request in range(num_requests):
        for query in range(num_queries):
            slots = indices[request, query][indices[request, query] != -1].long()
            rows = k_cache[slots // page_tokens, slots % page_tokens, 0].view(torch.uint8)
            if len(rows) == 0:
                continue
            latents = rows[:, :512].contiguous().view(FP8).to(torch.bfloat16).unflatten(-1, (4, 128))
            scales = rows[:, 512:528].contiguous().view(torch.float32).to(torch.bfloat16)
            latents = (latents * scales[..., None]).flatten(1)  # in bfloat16
            keys = torch.cat([latents, rows[:, 528:].contiguous().view(torch.bfloat16)], dim=1).float()
            weights = torch.softmax(q[request, query].float() @ keys.T * softmax_scale, dim=-1)
            out[request, query] = weights @ keys[:, :head_dim_v]
    return out.bfloat16(), torch.zeros(num_requests, num_heads, num_queries)


def add_upstream_logits(module):
    """Add the function of DeepGEMM 2.6.1, which cleans logits by default."""

    def fp8_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0):
        return mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k)

    module.fp8_mqa_logits = fp8_mqa_logits


def add_sgl_logits(module):
    """sgl-deep-gemm 0.1.2's."""

    def fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=0):
        return mqa_logits(q, kv, weights, ks, ke, clean_logits, max_seqlen_k)

    module.fp8_mqa_logits = fp8_mqa_logits


def add_later_sparse(module):
    """FlashMLA's of 2026-04."""

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        return sparse_prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)

    module.flash_mla_sparse_fwd = flash_mla_sparse_fwd


def add_sgl_sparse(module):
    """sgl-flash-mla 1.0.0's, for Hopper only with use_legacy."""

    def flash_mla_sparse_fwd(
        q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, use_legacy=False, return_log2_lse=None
    ):
        assert use_legacy, "only the frozen kernels cover SM90"
        return sparse_prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)

    module.flash_mla_sparse_fwd = flash_mla_sparse_fwd
