"""The operations that have a C++ version; the `reference` functions of the same names document them.

float32 and bfloat16 run in C++, with any widths. Sums are kept in float32, in another order than the reference's. A row
has the same bits in any batch and position, with any number of threads, and with any of the instruction sets.
Subnormal numbers count as zero. A weight may be a plain tensor or packed (packed.py), with the same result.
"""

# T tokens (rows), D hidden, F intermediate, E experts, K experts per token, C rows of room per expert
# H heads, A query/key width, R rotary width, Z key (without rotary) and value width, W latent and rotary width
# V value width, B requests or batches, Q query tokens per request, P pages

from typing import Any

import torch
import torch.nn.functional as F

from batchinfer_kernels.cpu import packed
from batchinfer_kernels.cpu.packed import Packed, PackedRouter, WeightKind, library, whole_pairs
from batchinfer_kernels.implementation import implementation, on_args
from batchinfer_kernels.reference.block_scaled import BlockScaled
from batchinfer_kernels.reference.compressed import EntryKeys, KeyRows, NewEntries
from batchinfer_kernels.reference.experts import ExpertBiases
from batchinfer_kernels.reference.fp4 import Fp4Scaled
from batchinfer_kernels.reference.fp8 import dequantize_fp8_rows
from batchinfer_kernels.reference.gating import GATE_METHODS, GateRule, count_experts
from batchinfer_kernels.reference.gqa import GqaForm, NewHeads
from batchinfer_kernels.reference.group_scaled import GroupScaled
from batchinfer_kernels.reference.hyper import StreamMix, StreamRule, num_streams_of
from batchinfer_kernels.reference.mla import PagedKeys
from batchinfer_kernels.reference.places import ExpertRows, PlacedRows
from batchinfer_kernels.reference.pointwise import SWIGLU, Activation
from batchinfer_kernels.reference.rows import NewKeys
from batchinfer_kernels.reference.sparse import IndexedKeys, IndexQueries, NewIndexKeys

Weight = torch.Tensor | Packed

_BIASED = ("noaux_tc", "topk_softmax")


# ---- rejected arguments


def _mismatch(x: torch.Tensor, *operands: Any) -> str | None:
    """Reject operands that are not all in bfloat16 or all in float32 on the CPU."""
    if not x.is_cpu:
        return "tensors are not on the CPU"
    if x.dtype is not torch.bfloat16 and x.dtype is not torch.float32:
        return f"rows are in {x.dtype}"
    for operand in operands:
        if isinstance(operand, Packed):
            if not operand.takes(x):
                return f"the weight is packed for other rows than {x.dtype}"
        elif isinstance(operand, BlockScaled):
            return "the weight is in FP8 blocks"
        elif isinstance(operand, GroupScaled | Fp4Scaled):
            return "the weight is in groups of the reference"
        elif operand.dtype is not x.dtype or not operand.is_cpu:
            return f"rows are in {x.dtype} on the CPU, other operands are not"
    return None


def _foreign(x: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Reject tensors that are not on the CPU."""
    return None if x.is_cpu else "tensors are not on the CPU"


def _float32(x: torch.Tensor, *_: Any) -> str | None:
    """Reject values that are not in float32 on the CPU."""
    return None if x.is_cpu and x.dtype is torch.float32 else "values are not in float32 on the CPU"


def _gated(logits_TE: torch.Tensor, bias_E: torch.Tensor | None, rule: GateRule, *_: Any, **__: Any) -> str | None:
    """Reject logits or biases that are not in float32 on the CPU, or a method without C++."""
    if rule.method not in GATE_METHODS:
        return f"the gate's method {rule.method} is computed in plain PyTorch"
    return _float32(logits_TE) or (None if bias_E is None else _float32(bias_E))


def _drawn(logits_SV: torch.Tensor, temperature_S: torch.Tensor, top_k_S: torch.Tensor, *shares: Any) -> str | None:
    """Reject logits that are not in float32 on the CPU; settings in other than the reference's dtypes."""
    if top_k_S.dtype is not torch.int64 or any(share.dtype is not torch.float64 for share in (temperature_S, *shares)):
        return "settings are not in float64 and int64"
    return _float32(logits_SV)


def _side_by_side(rows_NW: torch.Tensor, *_: Any) -> str | None:
    """Reject tensors that are not on the CPU; rows that have gaps between their values."""
    if rows_NW.shape[1] > 1 and rows_NW.stride(1) != 1:
        return "values of a row are not side by side"
    return _foreign(rows_NW)


def _weight(weight: torch.Tensor, *, eight_bit: bool = False, four_bit: bool = False, **_: Any) -> str | None:
    """Reject weights that are not in bfloat16 or float32 on the CPU; float32 for 8 or 4 bits."""
    if (eight_bit or four_bit) and weight.dtype is not torch.bfloat16:
        return f"{8 if eight_bit else 4} bits are rounded from bfloat16, not from {weight.dtype}"
    return _mismatch(weight)


def _summed(rows: ExpertRows, _: torch.Tensor, weights_TK: torch.Tensor) -> str | None:
    """Reject rows not in bfloat16 or float32 on the CPU, or not one for each weight without gaps; other weights."""
    if isinstance(rows, PlacedRows) or len(rows) != weights_TK.numel():
        return "there is not one row for each token and expert, without gaps"
    return _mismatch(rows) or _float32(weights_TK)


def _added(hidden_TD: torch.Tensor, sums_TD: torch.Tensor, added_TD: torch.Tensor | None) -> str | None:
    """Reject operands that are not all in bfloat16 or all in float32 on the CPU; sums that are not in float32."""
    others = () if added_TD is None else (added_TD,)
    return _mismatch(hidden_TD, *others) or _float32(sums_TD)


def _norm(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> str | None:
    """Reject rows that are not in bfloat16 or float32 on the CPU, or without values; other weights than these rows'."""
    return _mismatch(x, *_narrow(weight)) or (None if x.shape[-1] else "rows have no values")


def _narrow(*norms: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the weights of norms that are not in float32 on the CPU, as those may be with rows in bfloat16, too."""
    return [norm for norm in norms if norm is not None and _float32(norm) is not None]


def _activation(gate: torch.Tensor, up: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Reject operands that are not all in bfloat16 or all in float32 on the CPU, or not of two dims."""
    return _mismatch(gate, up) or (None if gate.dim() == 2 else "gate is not of two dims")


def _rotation(q_THA: torch.Tensor, new: NewKeys) -> str | None:
    """Reject operands that are not all in bfloat16 or all in float32 on the CPU; queries with gaps between them."""
    reason = _mismatch(q_THA, new.latents_TW, new.pages)
    return reason or (None if q_THA.is_contiguous() else "queries are not contiguous")


def _grouped(
    x: torch.Tensor,
    _: Any,
    gate_up: Any,
    down: Any,
    tokens_M: Any = None,
    scales: Any = None,
    *,
    tile_rows: int = 1,
    biases: ExpertBiases | None = None,
    **_others: Any,
) -> str | None:
    """Reject operands not all in bfloat16 or all in float32 on the CPU; FP8 rows for weights that are not packed."""
    if tile_rows > 1:
        return "there are gaps between experts' rows"
    if biases is not None and scales is None and (reason := _mismatch(x, *biases)):
        return reason
    if scales is None or not isinstance(gate_up, Packed):
        return _mismatch(x, gate_up, down)
    return None if x.is_cpu and gate_up.kind is not WeightKind.FLOAT32 else "FP8 rows for a weight in float32"


def _masked(
    x: torch.Tensor, _: Any, gate_up: Any, down: Any, scales: Any = None, *, expected_rows: Any = None, **forms: Any
) -> str | None:
    """Reject operands not all in bfloat16 or all in float32 on the CPU; FP8 rows for weights that are not packed."""
    return _grouped(x, _, gate_up, down, None, scales, **forms)


def _attention(q: torch.Tensor, keys: PagedKeys, *kv_b_and_more: Any, **_: Any) -> str | None:
    """Reject operands that are not all in bfloat16 or all in float32 on the CPU."""
    return _mismatch(q, keys.pages, *kv_b_and_more[:1])


def _grouped_heads(q: torch.Tensor, keys: PagedKeys, *_: Any) -> str | None:
    """Reject operands that are not all in bfloat16 or all in float32 on the CPU."""
    return _mismatch(q, keys.pages)


def _new_heads(qkv_TW: torch.Tensor, new: NewHeads) -> str | None:
    """Reject operands that are not all in bfloat16 or all in float32 on the CPU; norms may be in float32."""
    return _mismatch(qkv_TW, new.pages, *_narrow(new.norm_q, new.norm_k))


def _index_keys(new: NewIndexKeys) -> str | None:
    """Reject operands that are not all in bfloat16 or all in float32 on the CPU."""
    return _mismatch(new.keys_TI, new.norm_I, new.pages)


def _scored(queries: IndexQueries, keys: IndexedKeys, **_: Any) -> str | None:
    """Reject operands that are not all in bfloat16 or all in float32 on the CPU."""
    return _mismatch(queries.q_THI, keys.pages)


def _new_entries(new: NewEntries) -> str | None:
    """Reject pages that are not in bfloat16 or float32 on the CPU; other operands that are not in float32 there."""
    wide = (new.values_TV, new.gates_TV, new.bias_MV, new.norm_C, new.waiting)
    return _mismatch(new.pages) or next(filter(None, map(_float32, wide)), None)


def _chosen_entries(q_THI: torch.Tensor, weights_TH: torch.Tensor, keys: EntryKeys, **_: Any) -> str | None:
    """Reject operands that are not all in bfloat16 or all in float32 on the CPU; weights that are not in float32."""
    return _mismatch(q_THI, keys.pages) or _float32(weights_TH)


def _entries(
    q_THC: torch.Tensor, window: KeyRows, entries: KeyRows | None, sinks_H: torch.Tensor, *_: Any
) -> str | None:
    """Reject operands that are not all in bfloat16 or all in float32 on the CPU; sinks that are not in float32."""
    keys = [window.values] if entries is None else [window.values, entries.values]
    return _mismatch(q_THC, *keys) or _float32(sinks_H)


# ---- the operations


@implementation(rejects=_weight)
def pack(weight: torch.Tensor, *, eight_bit: bool = False, four_bit: bool = False, is_paired: bool = False) -> Packed:
    """Pack the weight in the order of the tiles; `eight_bit` and `four_bit`: as integers."""
    return packed.pack(weight, is_int8=eight_bit, is_int4=four_bit, is_paired=is_paired)


@implementation(rejects=_foreign)
def pack_router(weight_ED: torch.Tensor) -> PackedRouter:
    return packed.pack_router(weight_ED)


@implementation(rejects=on_args(_mismatch, 0, 1))
def linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    float32_out: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    if not isinstance(weight, Packed):
        if x.shape[-1] != weight.shape[-1]:
            raise RuntimeError(f"x is {x.shape[-1]} wide, weight {weight.shape[-1]}")
        weight = packed.pack(weight)
    added = residual if bias is None else None
    y = library().linear(whole_pairs(x), *weight.plain, float32_out, added)
    if bias is None:
        return y
    return y + bias if residual is None else residual + (y + bias)


@implementation(rejects=on_args(_mismatch, 0, 1))
def batched_linear(x: torch.Tensor, weight: torch.Tensor | Packed, out: torch.Tensor | None = None) -> torch.Tensor:
    weight = weight if isinstance(weight, Packed) else packed.pack(weight)
    y = library().batched_linear(whole_pairs(x), *weight.plain)
    return y if out is None else out.copy_(y)


@implementation(rejects=on_args(_mismatch, 0))
def router(x: torch.Tensor, weight: torch.Tensor | PackedRouter) -> torch.Tensor:
    weight = weight if isinstance(weight, PackedRouter) else packed.pack_router(weight)
    return library().router(x, weight.data_PDN, weight.num_experts)


@implementation(rejects=_norm)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dim() == 2:
        return library().rms_norm(x, weight.contiguous(), eps)
    return library().rms_norm(x.reshape(-1, x.shape[-1]), weight.contiguous(), eps).view(x.shape)


@implementation(rejects=_activation)
def silu_mul(gate: torch.Tensor, up: torch.Tensor, activation: Activation = SWIGLU) -> torch.Tensor:
    """Round once; the reference also rounds after silu."""
    return library().silu_mul(gate, up, *activation)


@implementation(rejects=_gated)
def gate(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    rule: GateRule,
    counts_E: torch.Tensor | None = None,
    is_counted_T: torch.Tensor | None = None,
    chosen_TK: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert chosen_TK is None, "only a method that _gated rejects has chosen experts"
    bias_E = bias_E.contiguous() if bias_E is not None and rule.method in _BIASED else None
    ids_TK, weights_TK = library().gate(logits_TE.contiguous(), bias_E, GATE_METHODS.index(rule.method), *rule[1:])
    if counts_E is not None:
        count_experts(ids_TK, counts_E, is_counted_T)
    return ids_TK, weights_TK


@implementation(rejects=_rotation)
def rope_and_cache(q_THA: torch.Tensor, new: NewKeys) -> torch.Tensor:
    latents_TW, norm_C, eps, cos, sin, pages, slots_T, interleaved = new
    library().rope_and_cache(q_THA, latents_TW.contiguous(), norm_C, eps, cos, sin, interleaved, slots_T, pages)
    return q_THA


def mlp(
    x: torch.Tensor,
    gate_up: Packed,
    down: Packed,
    *,
    residual: torch.Tensor | None = None,
    activation: Activation = SWIGLU,
) -> torch.Tensor:
    """Compute SwiGLU as grouped_mlp does for one expert, [T, D] to [T, D], and add the rounded result to `residual`.

    Args:
        x: [T, D].
        gate_up: packed in pairs.
    """
    operation, width, rows = library().mlp, gate_up.num_columns // 2, whole_pairs(x)
    if rows is not x:
        y = operation(rows, gate_up.data, down.data, width, gate_up.kind, None, *activation)[..., : x.shape[-1]]
        return y if residual is None else residual + y
    return operation(x, gate_up.data, down.data, width, gate_up.kind, residual, *activation)


@implementation(rejects=_grouped)
def grouped_mlp(
    x: torch.Tensor,
    num_rows_E: torch.Tensor,
    gate_up_EFD: Weight,
    down_EDF: Weight,
    tokens_M: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    tile_rows: int = 1,
    activation: Activation = SWIGLU,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    assert tile_rows == 1, "refused"
    if scales is not None:
        x = dequantize_fp8_rows(x, scales, torch.bfloat16)
    gate_up, down, width = _experts(gate_up_EFD, down_EDF)
    sources = None if tokens_M is None else tokens_M.contiguous()
    y = library().grouped_mlp(
        whole_pairs(x), num_rows_E.to(torch.int64).contiguous(), gate_up.data, down.data, sources, width, gate_up.kind,
        *activation, *_biases(biases),
    )  # fmt: skip
    return y[..., : x.shape[-1]]


@implementation(rejects=_masked)
def masked_mlp(
    x_ECD: torch.Tensor,
    num_rows_E: torch.Tensor,
    gate_up_EFD: Weight,
    down_EDF: Weight,
    scales: torch.Tensor | None = None,
    *,
    expected_rows: int | None = None,
    activation: Activation = SWIGLU,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    if scales is not None:
        x_ECD = dequantize_fp8_rows(x_ECD, scales, torch.bfloat16)
    gate_up, down, width = _experts(gate_up_EFD, down_EDF)
    y = library().masked_mlp(
        whole_pairs(x_ECD).contiguous(), num_rows_E.to(torch.int64).contiguous(), gate_up.data, down.data, width,
        gate_up.kind, *activation, *_biases(biases),
    )  # fmt: skip
    return y[..., : x_ECD.shape[-1]]


@implementation(rejects=_foreign)
def sort_by_expert(ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return library().sort_by_expert(ids_TK.contiguous(), num_experts)


@implementation(rejects=_summed)
def sum_per_token(sorted_MD: torch.Tensor, inverse_M: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Give the reference's result, bit for bit."""
    return library().sum_per_token(sorted_MD.contiguous(), inverse_M.contiguous(), weights_TK.contiguous())


@implementation(rejects=_added)
def add_sums(hidden_TD: torch.Tensor, sums_TD: torch.Tensor, added_TD: torch.Tensor | None) -> torch.Tensor:
    return library().add_sums(
        hidden_TD.contiguous(), sums_TD.contiguous(), None if added_TD is None else added_TD.contiguous()
    )


@implementation(rejects=_foreign)
def gather_rows(rows_NW: torch.Tensor, index_T: torch.Tensor) -> torch.Tensor:
    return library().gather_rows(rows_NW, index_T.contiguous())


@implementation(rejects=_side_by_side)
def copy_rows(rows_NW: torch.Tensor, from_M: torch.Tensor, to_M: torch.Tensor) -> None:
    library().copy_rows(rows_NW, from_M.contiguous(), to_M.contiguous())


@implementation(rejects=_float32)
def argmax(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return library().argmax(logits_SV.contiguous())


@implementation(rejects=_float32)
def cos_sin(angles: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    return library().cos_sin(angles.contiguous(), scale)


@implementation(rejects=_drawn)
def draw(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    min_p_S: torch.Tensor,
    uniform_S: torch.Tensor,
) -> torch.Tensor:
    settings = temperature_S, top_k_S, top_p_S, min_p_S, uniform_S
    return library().draw(logits_SV.contiguous(), *(values.contiguous() for values in settings))


@implementation(rejects=_float32)
def log_sum_exp(logits_SV: torch.Tensor) -> torch.Tensor:
    return library().log_sum_exp(logits_SV.contiguous())


@implementation(rejects=_float32)
def most_likely(logits_SV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return library().most_likely(logits_SV.contiguous(), count)


@implementation(rejects=_float32)
def apply_token_bitmask(logits_SV: torch.Tensor, rows_M: torch.Tensor, allowed_MW: torch.Tensor) -> None:
    library().apply_token_bitmask(logits_SV, rows_M, allowed_MW)


@implementation(rejects=_attention)
def mla_prefill(
    q_THA: torch.Tensor, keys: PagedKeys, kv_b_HZC: Weight, num_tokens_B: torch.Tensor, *, v_dim: int, scale: float
) -> torch.Tensor:
    """Round softmax weights as mla_decode does.

    Keys and values are made once per page, for as many heads at a time as fit into 192 MiB.
    """
    kv_b = kv_b_HZC if isinstance(kv_b_HZC, Packed) else packed.pack(kv_b_HZC)
    rotary = q_THA.shape[-1] - (kv_b.num_columns - v_dim)
    lists = map(torch.Tensor.contiguous, (keys.page_table_BP, num_tokens_B, keys.kv_tokens_B, keys.positions_T))
    latent_dim = keys.pages.shape[-1] - rotary
    return library().mla_prefill(q_THA.contiguous(), keys.pages, *lists, kv_b.data, latent_dim, v_dim, scale)


@implementation(rejects=_attention)
def mla_decode(q_THW: torch.Tensor, keys: PagedKeys, *, latent_dim: int, scale: float) -> torch.Tensor:
    """Round softmax weights to the dtype before they meet the latents, and divide by the sum of the rounded weights.

    A request without tokens gives zeros. Requests with the same first pages read these pages together.
    """
    lists = map(torch.Tensor.contiguous, keys[1:4])
    return library().mla_decode(q_THW.contiguous(), keys.pages, *lists, latent_dim, scale)


@implementation(rejects=_new_heads)
def gqa_rope_and_cache(qkv_TW: torch.Tensor, new: NewHeads) -> torch.Tensor:
    num_heads, num_kv_heads, norm_q, norm_k, eps, cos, sin, pages, slots_T = new
    norms = (None if norm is None else norm.contiguous() for norm in (norm_q, norm_k))
    return library().gqa_rope_and_cache(qkv_TW, num_heads, num_kv_heads, *norms, eps, cos, sin, slots_T, pages)


@implementation(rejects=_grouped_heads)
def gqa_prefill(q_THA: torch.Tensor, keys: PagedKeys, num_tokens_B: torch.Tensor, form: GqaForm) -> torch.Tensor:
    """Round softmax weights as mla_decode does."""
    lists = map(torch.Tensor.contiguous, (keys.page_table_BP, num_tokens_B, keys.kv_tokens_B, keys.positions_T))
    return library().gqa_prefill(q_THA.contiguous(), keys.pages, *lists, *_form(form))


@implementation(rejects=_grouped_heads)
def gqa_decode(q_THA: torch.Tensor, keys: PagedKeys, form: GqaForm) -> torch.Tensor:
    """Round softmax weights as mla_decode does, and read first pages together.

    With windows, each request reads its pages alone.
    """
    lists = map(torch.Tensor.contiguous, keys[1:4])
    return library().gqa_decode(q_THA.contiguous(), keys.pages, *lists, *_form(form))


@implementation(rejects=_index_keys)
def index_cache(new: NewIndexKeys) -> None:
    keys_TI, norm_I, bias_I, eps, cos, sin, pages, slots_T, interleaved = new
    library().index_cache(keys_TI.contiguous(), norm_I, bias_I, eps, cos, sin, interleaved, slots_T, pages)


@implementation(rejects=_scored)
def choose_keys(queries: IndexQueries, keys: IndexedKeys, *, topk: int, scale: float) -> torch.Tensor:
    """Multiply the scale into the weights of heads before they are rounded; sum scores in float32."""
    q_THI, weights_TH, cos, sin, interleaved = queries
    lists = map(torch.Tensor.contiguous, keys[1:4])
    return library().choose_keys(
        q_THI.contiguous(), weights_TH * scale, cos, sin, interleaved, keys.pages, *lists, topk
    )


@implementation(rejects=on_args(_mismatch, 0, 1))
def mla_sparse(
    q_THW: torch.Tensor, pages: torch.Tensor, slots_TK: torch.Tensor, *, latent_dim: int, scale: float
) -> torch.Tensor:
    """Give the bits of mla_decode over the keys in these slots."""
    return library().mla_sparse(q_THW.contiguous(), pages, slots_TK.contiguous(), latent_dim, scale)


@implementation(rejects=on_args(_mismatch, 0))
def rotate_heads(
    x_TW: torch.Tensor, num_heads: int, norm_A: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    norm = None if norm_A is None else norm_A.contiguous()
    return library().rotate_heads(x_TW, num_heads, norm, eps, cos.contiguous(), sin.contiguous())


@implementation(rejects=_new_entries)
def pool_entries(new: NewEntries) -> None:
    """Compute the softmax over gates in float32."""
    values, gates, bias, norm, eps, cos, sin, positions, requests, starts, slots, waiting, pages, page_table = new
    lists = map(torch.Tensor.contiguous, (cos, sin, positions, requests, starts, slots))
    parts = values.contiguous(), gates.contiguous(), bias.contiguous(), norm.contiguous()
    library().pool_entries(*parts, eps, *lists, waiting, pages, page_table.contiguous())


@implementation(rejects=_chosen_entries)
def choose_entries(
    q_THI: torch.Tensor, weights_TH: torch.Tensor, keys: EntryKeys, *, topk: int, scale: float
) -> torch.Tensor:
    """Multiply the scale into the weights of heads before they are rounded; sum scores in float32."""
    lists = map(torch.Tensor.contiguous, keys[1:])
    return library().choose_entries(q_THI.contiguous(), weights_TH * scale, keys.pages, *lists, topk)


@implementation(rejects=_entries)
def attend_entries(
    q_THC: torch.Tensor,
    window: KeyRows,
    entries: KeyRows | None,
    sinks_H: torch.Tensor,
    scale: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Round softmax weights as mla_decode does."""
    keys = window.rows, window.ids_TKL.contiguous()
    more = (None, None) if entries is None else (entries.rows, entries.ids_TKL.contiguous())
    return library().attend_entries(
        q_THC.contiguous(), *keys, *more, sinks_H.contiguous(), scale, cos.contiguous(), -sin
    )


@implementation(rejects=on_args(_mismatch, 0))
def stream_products(streams_TND: torch.Tensor, mixing: PackedRouter, eps: float) -> torch.Tensor:
    """Multiply the streams as they are; the norm's factor comes last."""
    streams_TND = streams_TND.contiguous()
    products_TX = router.run(streams_TND.flatten(1), mixing)
    library().norm_products(streams_TND, products_TX, eps)
    return products_TX


@implementation(rejects=_float32)
def stream_mix(mixed_TX: torch.Tensor, scale: torch.Tensor, base_X: torch.Tensor, rule: StreamRule) -> StreamMix:
    operands = mixed_TX.contiguous(), scale.contiguous(), base_X.contiguous()
    return StreamMix(*library().stream_mix(*operands, num_streams_of(base_X), *rule))


@implementation(rejects=on_args(_mismatch, 0))
def join_streams(streams_TND: torch.Tensor, factors_TN: torch.Tensor) -> torch.Tensor:
    """Give the reference's result, bit for bit."""
    return library().join_streams(streams_TND.contiguous(), factors_TN.contiguous())


@implementation(rejects=on_args(_mismatch, 0, 2))
def leave_streams(streams_TND: torch.Tensor, mix: StreamMix, y_TD: torch.Tensor) -> torch.Tensor:
    """Give the reference's result, bit for bit."""
    factors = mix.after_TN.contiguous(), mix.past_TNN.contiguous()
    return library().leave_streams(streams_TND.contiguous(), *factors, y_TD.contiguous())


def _biases(biases: ExpertBiases | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the biases as C++ takes them: the hidden width is that of x, which is even in bfloat16."""
    if biases is None:
        return None, None
    return biases.gate_up_EF.contiguous(), whole_pairs(biases.down_ED).contiguous()


def _form(form: GqaForm) -> tuple[int, float, int, torch.Tensor | None]:
    """Return the form as C++ takes it: no window is 0, sinks are contiguous."""
    sinks_H = None if form.sinks_H is None else form.sinks_H.contiguous()
    return form.num_kv_heads, form.scale, form.window_or_0, sinks_H


def _experts(gate_up_EFD: Weight, down_EDF: Weight) -> tuple[Packed, Packed, int]:
    """Pack the experts' weights, their hidden width made even; return both and the intermediate width."""
    if isinstance(down_EDF, Packed):
        assert isinstance(gate_up_EFD, Packed)
        return gate_up_EFD, down_EDF, gate_up_EFD.num_columns // 2
    assert isinstance(gate_up_EFD, torch.Tensor)
    assert isinstance(down_EDF, torch.Tensor)
    hidden, width = down_EDF.shape[-2:]
    even = F.pad(down_EDF, (0, 0, 0, hidden % 2)) if down_EDF.dtype is torch.bfloat16 else down_EDF
    return packed.pack(gate_up_EFD, is_paired=True), packed.pack(even), width
