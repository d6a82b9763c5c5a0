"""The operations that have a Triton version; signatures and shapes as in the `reference` modules.

bfloat16 runs in Triton, also with FP8 block-scaled weights; everything else (float32, a tensor on the CPU unless
Triton's interpreter is on) goes to the reference. A row has the same bits whatever rows are beside it. Triton is
imported by the first operation that runs.
"""

# T tokens (rows), D hidden, F intermediate, E experts, K experts per token, C rows of room per expert
# H heads, A query/key width, R rotary width, Z key (without rotary) and value width, W latent and rotary width
# V value width or vocabulary, B requests or batches, Q query tokens per request, P pages, S rows of logits

from __future__ import annotations

from typing import Any

import torch

from batchinfer_kernels import reference
from batchinfer_kernels.reference.block_scaled import BlockScaled
from batchinfer_kernels.triton import probe

Weight = torch.Tensor | BlockScaled


def pack(weight: torch.Tensor, *, eight_bit: bool = False, is_paired: bool = False) -> Weight:
    """A weight [N, M] or several [B, N, M] without gaps between its values, or in FP8 blocks.

    Raises:
        RuntimeError: the GPU cannot multiply E4M3.
    """
    reason = probe.why_no_fp8() if eight_bit and _runs_on(weight) else None
    if reason is not None:
        raise RuntimeError(reason)
    return reference.pack(weight.contiguous(), eight_bit=eight_bit, is_paired=is_paired)


def pack_router(weight_ED: torch.Tensor) -> torch.Tensor:
    """A router's float32 weight as three bfloat16 ones, [3, E, D]."""
    if not _runs_on(weight_ED):
        return reference.pack_router(weight_ED)
    from batchinfer_kernels.triton import router as routers

    return routers.pack_router(weight_ED)


def linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    float32_out: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x · weightᵀ + bias: [T, in] and [out, in] to [T, out]; `float32_out`: not rounded; `residual`: added to it."""
    if not _takes(x, weight):
        return reference.linear(x, weight, bias, float32_out=float32_out, residual=residual)
    from batchinfer_kernels.triton import gemm, quantize

    num_columns = (weight.values if isinstance(weight, BlockScaled) else weight).shape[0]
    out = torch.empty(len(x), num_columns, dtype=torch.float32 if float32_out else x.dtype, device=x.device)
    scales = None
    if isinstance(weight, BlockScaled):
        x, scales = quantize.quantize_rows(_dense(x), by_column=True)
    return gemm.product(_dense(x), _dense_weight(weight), scales, out=out, bias=bias, residual=residual)


def batched_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x · weightᵀ for every batch: [B, T, M] and [B, N, M] to [B, T, N], batches beside each other in memory."""
    if not _takes(x, weight):
        return reference.batched_linear(x, weight)
    from batchinfer_kernels.triton import gemm

    out = torch.empty(x.shape[1], x.shape[0], weight.shape[1], dtype=x.dtype, device=x.device).transpose(0, 1)
    return gemm.product(_dense(x), _dense(weight), out=out)


def router(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits in float32: [T, D] and [E, D] (or packed) to [T, E]."""
    if not _takes(x):
        return reference.router(x, weight if weight.dim() == 2 else weight.float().sum(0))
    from batchinfer_kernels.triton import router as routers

    return routers.router(x, weight if weight.dim() == 3 else routers.pack_router(weight))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x ÷ root mean square over the last dim × weight; [..., D] and [D] to [..., D]."""
    if not _takes(x, weight):
        return reference.rms_norm(x, weight, eps)
    from batchinfer_kernels.triton import rows

    return rows.rms_norm(x, weight, eps)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) × up; both [T, F]."""
    if not _takes(gate, up):
        return reference.silu_mul(gate, up)
    from batchinfer_kernels.triton import silu

    return silu.silu_mul(_dense(gate), _dense(up))


def silu_mul_blocks(
    gate_up_ECF: torch.Tensor, num_rows_E: torch.Tensor | None = None, *, fp8: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """silu(gate) × up of the first rows of each expert's block, [E, C, 2 * F] to [E, C, F], also in FP8 with scales."""
    if not _takes(gate_up_ECF):
        return reference.silu_mul_blocks(gate_up_ECF, num_rows_E, fp8=fp8)
    from batchinfer_kernels.triton import silu

    return silu.silu_mul_blocks(gate_up_ECF.contiguous(), num_rows_E, fp8=fp8)


def gate(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    *,
    method: str,
    topk: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token [T, K] and their weights, by any of the three methods."""
    run = reference.gate
    if _runs_on(logits_TE):
        from batchinfer_kernels.triton import gate as gates

        run = gates.gate
    return run(
        logits_TE,
        bias_E,
        method=method,
        topk=topk,
        num_groups=num_groups,
        topk_groups=topk_groups,
        normalize=normalize,
        scale=scale,
    )


def rope_and_cache(
    q_THA: torch.Tensor,
    latents_TW: torch.Tensor,
    norm_C: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pages: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """Queries rotated, in place; norm and rotary key of the latents are written to the pages."""
    run = reference.rope_and_cache
    if _takes(q_THA, latents_TW, pages):
        from batchinfer_kernels.triton import rows

        run = rows.rope_and_cache
    return run(q_THA, latents_TW, norm_C, eps, cos, sin, pages, slots_T, interleaved=interleaved)


def grouped_mlp(
    x: torch.Tensor,
    num_rows_E: torch.Tensor,
    gate_up_EFD: Weight,
    down_EDF: Weight,
    tokens_M: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """SwiGLU of several experts over rows sorted by expert, [rows, D] to [rows, D]; reads nothing on the host."""
    if not _takes(gate_up_EFD, down_EDF) or (scales is None and not _takes(x)):
        return reference.grouped_mlp(x, num_rows_E, gate_up_EFD, down_EDF, tokens_M, scales)
    from batchinfer_kernels.triton import experts

    return experts.grouped_mlp(_dense(x), num_rows_E, gate_up_EFD, down_EDF, tokens_M, scales)


def masked_mlp(
    x_ECD: torch.Tensor,
    num_rows_E: torch.Tensor,
    gate_up_EFD: Weight,
    down_EDF: Weight,
    scales: torch.Tensor | None = None,
    *,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """SwiGLU of several experts, each over the first rows of its block; the same as grouped_mlp bit for bit."""
    if not _takes(gate_up_EFD, down_EDF) or (scales is None and not _takes(x_ECD)):
        return reference.masked_mlp(x_ECD, num_rows_E, gate_up_EFD, down_EDF, scales)
    from batchinfer_kernels.triton import experts

    return experts.masked_mlp(x_ECD.contiguous(), num_rows_E, gate_up_EFD, down_EDF, scales)


def sort_by_expert(ids_M: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The entries sorted by expert: order [M], its inverse [M], and how many each expert has [E]."""
    if not _runs_on(ids_M):
        return reference.sort_by_expert(ids_M, num_experts)
    from batchinfer_kernels.triton import sorting

    return sorting.sort_by_expert(ids_M, num_experts)


def sum_per_token(sorted_MD: torch.Tensor, inverse_M: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """[T, D] float32: each token's weighted sum over its experts, one after the other."""
    if not _takes(sorted_MD):
        return reference.sum_per_token(sorted_MD, inverse_M, weights_TK)
    from batchinfer_kernels.triton import rows

    return rows.sum_per_token(sorted_MD, inverse_M, weights_TK)


def add_sums(hidden_TD: torch.Tensor, sums_TD: torch.Tensor, added_TD: torch.Tensor | None) -> torch.Tensor:
    """hidden + (sums + added), rounded as in the reference."""
    if not _takes(hidden_TD):
        return reference.add_sums(hidden_TD, sums_TD, added_TD)
    from batchinfer_kernels.triton import rows

    return rows.add_sums(hidden_TD, sums_TD, added_TD)


def argmax(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row the largest of float32 logits, the first among equals, and whether all are finite."""
    if logits_SV.dtype is not torch.float32 or not _runs_on(logits_SV):
        return reference.argmax(logits_SV)
    from batchinfer_kernels.triton import argmax as largest

    return largest.argmax(logits_SV)


def mla_prefill(
    q_THA: torch.Tensor,
    pages: torch.Tensor,
    page_table_BP: torch.Tensor,
    num_tokens_B: torch.Tensor,
    context_tokens_B: torch.Tensor,
    positions_T: torch.Tensor,
    kv_b_HZC: torch.Tensor,
    *,
    v_dim: int,
    scale: float,
    schedule: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Causal attention of several requests' chunks in the plain form, [T, H, A] to [T, H, V].

    How the chunks are cut into tiles is found out once per `schedule`, which is that of one step (and micro-batch).
    """
    run = reference.mla_prefill
    if _takes(q_THA, pages, kv_b_HZC):
        from batchinfer_kernels.triton import prefill

        run = prefill.mla_prefill
    return run(
        q_THA,
        pages,
        page_table_BP,
        num_tokens_B,
        context_tokens_B,
        positions_T,
        kv_b_HZC,
        v_dim=v_dim,
        scale=scale,
        schedule=schedule,
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
    schedule: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Causal attention of many requests in the absorbed form, [B * Q, H, W] to [B * Q, H, C]; keeps no schedule."""
    arguments = (q_THW, pages, page_table_BP, kv_tokens_B, positions_T)
    if not _takes(q_THW, pages):
        return reference.mla_decode(*arguments, latent_dim=latent_dim, scale=scale)
    from batchinfer_kernels.triton import decode

    return decode.mla_decode(*arguments, latent_dim=latent_dim, scale=scale)


def quantize_fp8_block(weight: torch.Tensor, block: tuple[int, int] = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to FP8 E4M3 with one scale per block, bit for bit as the reference does on the CPU."""
    if not _runs_on(weight):
        return reference.quantize_fp8_block(weight, block)
    from batchinfer_kernels.triton import quantize

    if block == (1, quantize.ROW_BLOCK):
        return quantize.quantize_rows(_dense(weight))
    return quantize.quantize_blocks(weight, block)


def quantize_fp8_rows(x: torch.Tensor, num_rows_E: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows [T, M] or [E, C, M] to FP8 E4M3 with a scale per 128 values, scales column by column."""
    if not _runs_on(x):
        return reference.quantize_fp8_rows(x, num_rows_E)
    from batchinfer_kernels.triton import quantize

    return quantize.quantize_rows(_dense(x) if x.dim() == 2 else x.contiguous(), num_rows_E, by_column=True)


def dequantize_fp8_block(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block: tuple[int, int] = (128, 128)
) -> torch.Tensor:
    """weight × its block's scale, rounded once to `dtype`."""
    if not _runs_on(weight) or dtype not in (torch.bfloat16, torch.float32):
        return reference.dequantize_fp8_block(weight, scale, dtype, block)
    from batchinfer_kernels.triton import quantize

    return quantize.dequantize_blocks(weight, scale, dtype, block)


def _runs_on(x: torch.Tensor) -> bool:
    """Whether kernels can be started on the tensor's device."""
    return not x.is_cpu or probe.interprets()


def _takes(*operands: Weight) -> bool:
    """Whether all are in bfloat16 (weights: or in FP8 blocks) where kernels can be started."""
    for operand in operands:
        tensor = operand.values if isinstance(operand, BlockScaled) else operand
        is_fitting = isinstance(operand, BlockScaled) or operand.dtype is torch.bfloat16
        if not is_fitting or not _runs_on(tensor):
            return False
    return True


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x without gaps between the values of its last dim."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense_weight(weight: Weight) -> Weight:
    return weight if isinstance(weight, BlockScaled) else _dense(weight)
