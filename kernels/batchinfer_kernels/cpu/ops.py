"""The operations that have a C++ version; signatures and shapes as in the `reference` modules.

float32 and bfloat16 run in C++, with any widths. Sums are kept in float32, in another order than the reference's, and
a row has the same bits whatever rows are beside it, wherever it stands, however many threads run, and whichever
instructions the library was compiled for. Subnormal numbers count as zero. Everything else (another device, weights in
FP8 blocks) goes to the reference. A weight may be a plain tensor or packed (packed.py), with the same result.
"""

# T tokens (rows), D hidden, F intermediate, E experts, K experts per token, C rows of room per expert
# H heads, A query/key width, R rotary width, Z key (without rotary) and value width, W latent and rotary width
# V value width, B requests or batches, Q query tokens per request, P pages

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from batchinfer_kernels import reference
from batchinfer_kernels.cpu import packed
from batchinfer_kernels.cpu.layers import GATE_METHODS
from batchinfer_kernels.cpu.packed import Packed, PackedRouter, library, whole_pairs
from batchinfer_kernels.reference.block_scaled import BlockScaled
from batchinfer_kernels.reference.fp8 import dequantize_fp8_rows

Weight = torch.Tensor | Packed | BlockScaled


def pack(weight: torch.Tensor, *, eight_bit: bool = False, is_paired: bool = False) -> Weight:
    """A weight [N, M] or several [B, N, M] in the order of the tiles, where they take it; `eight_bit`: as integers."""
    if not _takes(weight) or (eight_bit and weight.dtype is not torch.bfloat16):
        return reference.pack(weight, eight_bit=eight_bit, is_paired=is_paired)
    return packed.pack(weight, is_int8=eight_bit, is_paired=is_paired)


def pack_router(weight_ED: torch.Tensor) -> torch.Tensor | PackedRouter:
    """A router's float32 weight in the order of its tiles."""
    return packed.pack_router(weight_ED) if weight_ED.device.type == "cpu" else reference.pack_router(weight_ED)


def linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    float32_out: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x · weightᵀ + bias: [T, in] and [out, in] to [T, out]; see `reference.linear`."""
    if not _takes(x, weight):
        return reference.linear(x, _unpacked(weight), bias, float32_out=float32_out, residual=residual)
    if not isinstance(weight, Packed):
        assert isinstance(weight, torch.Tensor)
        if x.shape[-1] != weight.shape[-1]:
            raise RuntimeError(f"x is {x.shape[-1]} wide, weight {weight.shape[-1]}")
        weight = packed.pack(weight)
    added = residual if bias is None else None
    y = library().linear(whole_pairs(x), weight.data, weight.num_columns, weight.depth, weight.kind, float32_out, added)
    if bias is None:
        return y
    return y + bias if residual is None else residual + (y + bias)


def batched_linear(x: torch.Tensor, weight: torch.Tensor | Packed) -> torch.Tensor:
    """x · weightᵀ for every batch: [B, T, M] and [B, N, M] to [B, T, N]."""
    if not _takes(x, weight):
        return reference.batched_linear(x, _plain(weight))
    weight = weight if isinstance(weight, Packed) else packed.pack(weight)
    return library().batched_linear(whole_pairs(x), weight.data, weight.num_columns, weight.depth, weight.kind)


def router(x: torch.Tensor, weight: torch.Tensor | PackedRouter) -> torch.Tensor:
    """Logits in float32: [T, D] and [E, D] to [T, E]."""
    if not _takes(x):
        assert isinstance(weight, torch.Tensor)
        return reference.router(x, weight)
    weight = weight if isinstance(weight, PackedRouter) else packed.pack_router(weight)
    return library().router(x, weight.data_PDN, weight.num_experts)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x ÷ root mean square over the last dim × weight; [..., D] and [D] to [..., D]."""
    if not _takes(x, weight) or x.shape[-1] == 0:
        return reference.rms_norm(x, weight, eps)
    if x.dim() == 2:
        return library().rms_norm(x, weight, eps)
    return library().rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) × up; both [T, F]. Rounded once, not after silu as in the reference."""
    if not _takes(gate, up) or gate.dim() != 2:
        return reference.silu_mul(gate, up)
    return library().silu_mul(gate, up)


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
    """Experts of each token [T, K] and their weights."""
    if logits_TE.device.type != "cpu":
        return reference.gate(
            logits_TE,
            bias_E,
            method=method,
            topk=topk,
            num_groups=num_groups,
            topk_groups=topk_groups,
            normalize=normalize,
            scale=scale,
        )
    bias_E = bias_E if method == "noaux_tc" else None
    number = GATE_METHODS.index(method)
    return library().gate(logits_TE.contiguous(), bias_E, number, topk, num_groups, topk_groups, normalize, scale)


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
    if not _takes(q_THA, latents_TW, pages) or not q_THA.is_contiguous():
        return reference.rope_and_cache(
            q_THA, latents_TW, norm_C, eps, cos, sin, pages, slots_T, interleaved=interleaved
        )
    library().rope_and_cache(q_THA, latents_TW.contiguous(), norm_C, eps, cos, sin, interleaved, slots_T, pages)
    return q_THA


def mlp(x: torch.Tensor, gate_up: Packed, down: Packed, *, residual: torch.Tensor | None = None) -> torch.Tensor:
    """SwiGLU, [T, D] to [T, D], the rounded result added to `residual`: what grouped_mlp gives for one expert.

    Args:
        x: [T, D].
        gate_up: packed in pairs.
    """
    operation, width, rows = library().mlp, gate_up.num_columns // 2, whole_pairs(x)
    if rows is not x:
        y = operation(rows, gate_up.data, down.data, width, gate_up.kind, None)[..., : x.shape[-1]]
        return y if residual is None else residual + y
    return operation(x, gate_up.data, down.data, width, gate_up.kind, residual)


def grouped_mlp(
    x: torch.Tensor,
    num_rows_E: torch.Tensor,
    gate_up_EFD: Weight,
    down_EDF: Weight,
    tokens_M: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """SwiGLU of several experts over rows sorted by expert, [rows, D] to [rows, D]; FP8 rows are dequantized."""
    if scales is not None and isinstance(gate_up_EFD, Packed):
        x, scales = dequantize_fp8_rows(x, scales, torch.bfloat16), None
    if not _takes(x, gate_up_EFD, down_EDF):
        return reference.grouped_mlp(x, num_rows_E, _unpacked(gate_up_EFD), _unpacked(down_EDF), tokens_M, scales)
    gate_up, down, width = _experts(gate_up_EFD, down_EDF)
    y = library().grouped_mlp(
        whole_pairs(x), num_rows_E.to(torch.int64).contiguous(), gate_up.data, down.data, tokens_M, width, gate_up.kind
    )
    return y[..., : x.shape[-1]]


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
    if scales is not None and isinstance(gate_up_EFD, Packed):
        x_ECD, scales = dequantize_fp8_rows(x_ECD, scales, torch.bfloat16), None
    if not _takes(x_ECD, gate_up_EFD, down_EDF):
        return reference.masked_mlp(x_ECD, num_rows_E, _unpacked(gate_up_EFD), _unpacked(down_EDF), scales)
    gate_up, down, width = _experts(gate_up_EFD, down_EDF)
    y = library().masked_mlp(
        whole_pairs(x_ECD).contiguous(), num_rows_E.to(torch.int64).contiguous(), gate_up.data, down.data, width,
        gate_up.kind,
    )  # fmt: skip
    return y[..., : x_ECD.shape[-1]]


def sort_by_expert(ids_M: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The entries sorted by expert: order [M], its inverse [M], and how many each expert has [E]."""
    if ids_M.device.type != "cpu":
        return reference.sort_by_expert(ids_M, num_experts)
    return library().sort_by_expert(ids_M.contiguous(), num_experts)


def sum_per_token(sorted_MD: torch.Tensor, inverse_M: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """[T, D] float32: each token's weighted sum, bit for bit that of the reference."""
    if not _takes(sorted_MD):
        return reference.sum_per_token(sorted_MD, inverse_M, weights_TK)
    return library().sum_per_token(sorted_MD.contiguous(), inverse_M, weights_TK.contiguous())


def add_sums(hidden_TD: torch.Tensor, sums_TD: torch.Tensor, added_TD: torch.Tensor | None) -> torch.Tensor:
    """hidden + (sums + added), rounded as in the reference."""
    if not _takes(hidden_TD):
        return reference.add_sums(hidden_TD, sums_TD, added_TD)
    return library().add_sums(
        hidden_TD.contiguous(), sums_TD.contiguous(), None if added_TD is None else added_TD.contiguous()
    )


def argmax(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row the largest of float32 logits, the first among equals, and whether all are finite."""
    if logits_SV.dtype is not torch.float32 or logits_SV.device.type != "cpu":
        return reference.argmax(logits_SV)
    return library().argmax(logits_SV.contiguous())


def cos_sin(angles: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of float32 angles, each times `scale`."""
    if not angles.is_cpu:
        return reference.cos_sin(angles, scale)
    return library().cos_sin(angles.contiguous(), scale)


def exponentials(logits_SV: torch.Tensor, temperature_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, V] float64, e to (logit - largest) / temperature, and their sums [S], each in one order."""
    if logits_SV.dtype is not torch.float32 or not logits_SV.is_cpu:
        return reference.exponentials(logits_SV, temperature_S)
    return library().exponentials(logits_SV.contiguous(), temperature_S.contiguous())


def log_sum_exp(logits_SV: torch.Tensor) -> torch.Tensor:
    """[S] float64, the logarithm of the sum of e to each logit."""
    if logits_SV.dtype is not torch.float32 or not logits_SV.is_cpu:
        return reference.log_sum_exp(logits_SV)
    return library().log_sum_exp(logits_SV.contiguous())


def mla_prefill(
    q_THA: torch.Tensor,
    pages: torch.Tensor,
    page_table_BP: torch.Tensor,
    num_tokens_B: torch.Tensor,
    context_tokens_B: torch.Tensor,
    positions_T: torch.Tensor,
    kv_b_HZC: torch.Tensor | Packed,
    *,
    v_dim: int,
    scale: float,
    schedule: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Causal attention of several requests' chunks in the plain form, [T, H, A] to [T, H, V].

    Softmax weights are rounded as in mla_decode. Keys and values are made once per page, for as many heads
    at a time as fit into 192 MiB.
    """
    if not _takes(q_THA, pages, kv_b_HZC):
        return reference.mla_prefill(
            q_THA,
            pages,
            page_table_BP,
            num_tokens_B,
            context_tokens_B,
            positions_T,
            _plain(kv_b_HZC),
            v_dim=v_dim,
            scale=scale,
        )
    kv_b = kv_b_HZC if isinstance(kv_b_HZC, Packed) else packed.pack(kv_b_HZC)
    rotary = q_THA.shape[-1] - (kv_b.num_columns - v_dim)
    return library().mla_prefill(
        q_THA.contiguous(),
        pages,
        page_table_BP.contiguous(),
        num_tokens_B.contiguous(),
        context_tokens_B.contiguous(),
        positions_T.contiguous(),
        kv_b.data,
        pages.shape[-1] - rotary,
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
    schedule: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Causal attention of many requests in the absorbed form, [B * Q, H, W] to [B * Q, H, C].

    Softmax weights are rounded to the dtype before they meet the latents and are divided by their rounded sum.
    A request without tokens gives zeros. Requests with the same first pages read these together.
    """
    if not _takes(q_THW, pages):
        return reference.mla_decode(
            q_THW, pages, page_table_BP, kv_tokens_B, positions_T, latent_dim=latent_dim, scale=scale
        )
    return library().mla_decode(
        q_THW.contiguous(),
        pages.contiguous(),
        page_table_BP.contiguous(),
        kv_tokens_B.contiguous(),
        positions_T.contiguous(),
        latent_dim,
        scale,
    )


def _takes(x: torch.Tensor, *operands: Weight) -> bool:
    """Whether these go together in C++: rows and weights on the CPU, all in bfloat16 or all in float32."""
    if x.dtype not in (torch.bfloat16, torch.float32) or not x.is_cpu:
        return False
    for operand in operands:
        if isinstance(operand, BlockScaled):
            return False
        if not (operand.takes(x) if isinstance(operand, Packed) else operand.is_cpu and operand.dtype is x.dtype):
            return False
    return True


def _plain(weight: torch.Tensor | Packed) -> torch.Tensor:
    """A weight that is not packed."""
    assert isinstance(weight, torch.Tensor), "a packed weight takes rows of its own kind on the CPU"
    return weight


def _unpacked(weight: Weight) -> torch.Tensor | BlockScaled:
    """The same where it may be in FP8 blocks."""
    return weight if isinstance(weight, BlockScaled) else _plain(weight)


def _experts(gate_up_EFD: Weight, down_EDF: Weight) -> tuple[Packed, Packed, int]:
    """Packed weights of experts, hidden width made even, and their intermediate width."""
    if isinstance(down_EDF, Packed):
        assert isinstance(gate_up_EFD, Packed)
        return gate_up_EFD, down_EDF, gate_up_EFD.num_columns // 2
    assert isinstance(gate_up_EFD, torch.Tensor)
    assert isinstance(down_EDF, torch.Tensor)
    hidden, width = down_EDF.shape[-2:]
    even = F.pad(down_EDF, (0, 0, 0, hidden % 2)) if down_EDF.dtype is torch.bfloat16 else down_EDF
    return packed.pack(gate_up_EFD, is_paired=True), packed.pack(even), width
