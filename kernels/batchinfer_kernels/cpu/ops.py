"""The operations that have a C++ version; signatures and shapes as in `reference` and `reference_mla`.

bfloat16 runs in C++. Sums are kept in float32 (products of a vector of 32 values at a time, so not in the order of the
reference), and a row has the same bits whatever rows are beside it, wherever it stands and however many threads run.
Subnormal numbers count as zero. Everything else (float32, another device, an odd shape) goes to the reference.
"""

# T tokens (rows), D hidden, F intermediate, E experts, C rows of room per expert (latent width in mla_decode)
# H heads, A query/key width, Z key (without rotary) and value width, W = latent and rotary width, V value width
# B requests, Q query tokens per request, P pages, X keys of whole pages

from __future__ import annotations

from typing import Any

import torch

from batchinfer_kernels import reference, reference_mla
from batchinfer_kernels.cpu import build

_VALUE_MULTIPLE = 16


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x · weightᵀ + bias: [T, in] and [out, in] to [T, out]."""
    if not _takes(x, weight):
        return reference.linear(x, weight, bias)
    y = _library().linear(x, weight)
    return y if bias is None else y + bias


def batched_matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x · y for every batch: [B, T, M] and [B, M, N] to [B, T, N]; a transposed y is not copied."""
    if not _takes(x, y):
        return reference.batched_matmul(x, y)
    return _library().batched_matmul(x, y)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x ÷ root mean square over the last dim × weight; [..., D] and [D] to [..., D]."""
    if not _takes(x, weight) or x.shape[-1] == 0:
        return reference.rms_norm(x, weight, eps)
    return _library().rms_norm(x.reshape(-1, x.shape[-1]), weight.contiguous(), eps).view(x.shape)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) × up; both [T, F]. Rounded once, not after silu as in the reference."""
    if not _takes(gate, up) or gate.dim() != 2:
        return reference.silu_mul(gate, up)
    return _library().silu_mul(gate, up)


def grouped_mlp(
    x: torch.Tensor, num_rows_E: torch.Tensor, gate_up_EFD: torch.Tensor, down_EDF: torch.Tensor
) -> torch.Tensor:
    """SwiGLU of several experts over rows sorted by expert, [rows, D] to [rows, D]."""
    if not _takes(x, gate_up_EFD, down_EDF):
        return reference.grouped_mlp(x, num_rows_E, gate_up_EFD, down_EDF)
    return _library().grouped_mlp(x.contiguous(), *_experts(num_rows_E, gate_up_EFD, down_EDF))


def masked_mlp(
    x_ECD: torch.Tensor, num_rows_E: torch.Tensor, gate_up_EFD: torch.Tensor, down_EDF: torch.Tensor
) -> torch.Tensor:
    """SwiGLU of several experts, each over the first rows of its block; the same as grouped_mlp bit for bit."""
    if not _takes(x_ECD, gate_up_EFD, down_EDF):
        return reference.masked_mlp(x_ECD, num_rows_E, gate_up_EFD, down_EDF)
    return _library().masked_mlp(x_ECD.contiguous(), *_experts(num_rows_E, gate_up_EFD, down_EDF))


def mla_prefill(
    q_THA: torch.Tensor,
    pages: torch.Tensor,
    page_ids_P: torch.Tensor,
    positions_T: torch.Tensor,
    kv_b_HZC: torch.Tensor,
    *,
    context_tokens: int,
    v_dim: int,
    scale: float,
) -> torch.Tensor:
    """Causal attention of one request's chunk in the plain form, [T, H, A] to [T, H, V].

    Softmax weights are rounded to bfloat16 as in mla_decode. Keys and values of the whole context are held at once.
    """
    if not _takes(q_THA, pages, kv_b_HZC) or not _fits(q_THA.shape[-1], v_dim):
        return reference_mla.mla_prefill(
            q_THA, pages, page_ids_P, positions_T, kv_b_HZC, context_tokens=context_tokens, v_dim=v_dim, scale=scale
        )
    latent_XW = pages[page_ids_P].flatten(0, 1)
    kv_XZ = _library().linear(latent_XW[:, : kv_b_HZC.shape[-1]], kv_b_HZC.flatten(0, 1))
    return _library().mla_prefill(
        q_THA.contiguous(),
        latent_XW,
        kv_XZ.unflatten(-1, (q_THA.shape[1], -1)),
        positions_T.contiguous(),
        context_tokens,
        v_dim,
        scale,
    )


def mla_decode(
    q_THW: torch.Tensor,
    pages: torch.Tensor,
    page_table_BP: torch.Tensor,
    kv_tokens_B: torch.Tensor,
    positions_T: torch.Tensor,
    *,
    latent_dim: int,
    scale: float,
) -> torch.Tensor:
    """Causal attention of many requests in the absorbed form, [B * Q, H, W] to [B * Q, H, C].

    Softmax weights are rounded to bfloat16 before they meet the latents and are divided by their rounded sum.
    A request without tokens gives zeros.
    """
    if not _takes(q_THW, pages) or not _fits(q_THW.shape[-1], latent_dim):
        return reference_mla.mla_decode(
            q_THW, pages, page_table_BP, kv_tokens_B, positions_T, latent_dim=latent_dim, scale=scale
        )
    return _library().mla_decode(
        q_THW.contiguous(),
        pages.contiguous(),
        page_table_BP.contiguous(),
        kv_tokens_B.contiguous(),
        positions_T.contiguous(),
        latent_dim,
        scale,
    )


def _takes(*tensors: torch.Tensor) -> bool:
    return all(tensor.dtype is torch.bfloat16 and tensor.device.type == "cpu" for tensor in tensors)


def _fits(width: int, value_dim: int) -> bool:
    """Whether attention takes these widths: queries in pairs of values, results in whole vectors."""
    return width % 2 == 0 and value_dim > 0 and value_dim % _VALUE_MULTIPLE == 0


def _experts(
    num_rows_E: torch.Tensor, gate_up_EFD: torch.Tensor, down_EDF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return num_rows_E.to(torch.int64).contiguous(), gate_up_EFD.contiguous(), down_EDF.contiguous()


def _library() -> Any:
    """The loaded C++ operations.

    Raises:
        BuildError: they cannot run here, with the reason.
    """
    reason = build.why_not()
    if reason is not None:
        raise build.BuildError(reason)
    return torch.ops.batchinfer_cpu
