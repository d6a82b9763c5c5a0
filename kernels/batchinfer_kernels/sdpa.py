"""Prefill attention through PyTorch's scaled_dot_product_attention, on GPUs and only by name.

PyTorch has FlashAttention, cuDNN's attention and plainer forms behind this function, and takes the first that supports
the shapes. These cut the sums over keys by the number of queries: a token's last bits may depend on where its prompt
was cut, unlike those of Triton's version. So "auto" never takes this version. `reference.mla_prefill` documents the
operation.
"""

# T tokens, H heads, A query width, R rotary width, Z key (without rotary) and value width, V value width
# C latent width, X keys of a request, B requests, P pages, N key heads

import contextlib

import torch
import torch.nn.functional as F

from batchinfer_kernels.implementation import accepts_all, implementation
from batchinfer_kernels.reference.gqa import GqaForm
from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys

_MAX_KEY_BYTES = 2**30  # keys and values at a time
# cuDNN takes queries and keys that are wider than the values; the others follow where it does not
_ORDER = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def why_not_auto() -> str:
    """Return the reason why "auto" passes this version over."""
    return "a token's last bits may depend on where its prompt was cut, so only by name"


@implementation(rejects=accepts_all)
def mla_prefill(
    q_THA: torch.Tensor,
    keys: PagedKeys,
    kv_b_HZC: torch.Tensor,
    num_tokens_B: torch.Tensor,
    *,
    v_dim: int,
    scale: float,
) -> torch.Tensor:
    """Attend request by request, for as many heads at a time as fit.

    Positions are not read: a chunk is the last tokens of its context.
    """
    out_THV = q_THA.new_empty(*q_THA.shape[:2], v_dim)
    start = 0
    chunks = zip(keys.page_table_BP, num_tokens_B.tolist(), keys.kv_tokens_B.tolist(), strict=True)
    for pages_P, num_tokens, context in chunks:
        rows = slice(start, start + num_tokens)
        if num_tokens:
            latents_XW = keys.pages[pages_P[: -(-context // PAGE_TOKENS)]].flatten(0, 1)[:context]
            _attend_chunk(q_THA[rows], latents_XW, kv_b_HZC, out_THV[rows], scale)
        start += num_tokens
    return out_THV


def _plain_heads(_q: torch.Tensor, _keys: PagedKeys, _num_tokens: torch.Tensor, form: GqaForm) -> str | None:
    """Reject heads with a window or sinks."""
    is_plain = form.window is None and form.sinks_H is None
    return None if is_plain else "heads have a window or sinks"


@implementation(rejects=_plain_heads)
def gqa_prefill(q_THA: torch.Tensor, keys: PagedKeys, num_tokens_B: torch.Tensor, form: GqaForm) -> torch.Tensor:
    """Attend request by request. Positions are not read: a chunk is the last tokens of its context."""
    out_THA = torch.empty_like(q_THA)
    start = 0
    chunks = zip(keys.page_table_BP, num_tokens_B.tolist(), keys.kv_tokens_B.tolist(), strict=True)
    for pages_P, num_tokens, context in chunks:
        if num_tokens:
            rows = slice(start, start + num_tokens)
            kv_XW = keys.pages[pages_P[: -(-context // PAGE_TOKENS)]].flatten(0, 1)[:context]
            k_NXA, v_NXA = (x.unflatten(-1, (form.num_kv_heads, -1)).transpose(0, 1) for x in kv_XW.chunk(2, dim=-1))
            q_HTA = q_THA[rows].transpose(0, 1)
            out_THA[rows] = _attend(q_HTA, k_NXA, v_NXA, form.scale, enable_gqa=True).transpose(0, 1)
        start += num_tokens
    return out_THA


def _attend_chunk(
    q_THA: torch.Tensor, latents_XW: torch.Tensor, kv_b_HZC: torch.Tensor, out_THV: torch.Tensor, scale: float
) -> None:
    """Attend with one request's chunk and write the result to `out_THV`."""
    (_, num_heads, width), v_dim = q_THA.shape, out_THV.shape[-1]
    context, latent_dim = len(latents_XW), kv_b_HZC.shape[-1]
    k_rotary_XR = latents_XW[:, latent_dim:]
    heads_at_once = max(1, _MAX_KEY_BYTES // (context * (kv_b_HZC.shape[1] + width) * q_THA.element_size()))
    for first in range(0, num_heads, heads_at_once):
        heads = slice(first, first + heads_at_once)
        kv_b = kv_b_HZC[heads]
        kv_HXZ = F.linear(latents_XW[:, :latent_dim], kv_b.flatten(0, 1)).unflatten(-1, (len(kv_b), -1)).transpose(0, 1)
        k_nope_HXN, v_HXV = kv_HXZ.split([kv_HXZ.shape[-1] - v_dim, v_dim], dim=-1)
        k_HXA = torch.cat([k_nope_HXN, k_rotary_XR.expand(len(kv_b), -1, -1)], dim=-1)
        q_HTA = q_THA[:, heads].transpose(0, 1)
        out_THV[:, heads] = _attend(q_HTA, k_HXA, v_HXV, scale).transpose(0, 1)


def _attend(
    q_HTA: torch.Tensor, k_HXA: torch.Tensor, v_HXV: torch.Tensor, scale: float, *, enable_gqa: bool = False
) -> torch.Tensor:
    """Attend with the last T of X tokens, [H, T, V]."""
    # these imports load torch's compiler: at the top of the file they would delay every rank's start by over a second
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    operands = q_HTA[None], k_HXA[None], v_HXV[None]
    if q_HTA.shape[1] == k_HXA.shape[1]:
        order = [getattr(SDPBackend, name) for name in _ORDER]
        with sdpa_kernel(order, set_priority=True) if q_HTA.is_cuda else contextlib.nullcontext():
            return F.scaled_dot_product_attention(*operands, is_causal=True, scale=scale, enable_gqa=enable_gqa)[0]
    # the last query sees the last key
    mask = causal_lower_right(q_HTA.shape[1], k_HXA.shape[1])
    return F.scaled_dot_product_attention(*operands, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)[0]
