"""Steps of a layer, or of all layers, as one C++ call each: the operations of ops.py in order, so the same bits.

The objects hold packed weights and share their memory: a weight that is packed anew in place is seen here, too.
"""

# T tokens, D hidden, H heads, N query/key width without position, R rotary width, V value width, C latent width
# A = N + R, E experts, K experts per token

from dataclasses import dataclass
from typing import Any

import torch

from batchinfer_kernels.cpu.packed import Packed, PackedRouter, library

GATE_METHODS = ("noaux_tc", "greedy", "group_limited_greedy")  # numbers as in csrc/kernels.h


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Widths of latent attention, and where queries are rotated."""

    num_heads: int
    nope_dim: int  # N
    rotary_dim: int  # R
    value_dim: int  # V
    is_interleaved: bool
    scale: float


@dataclass(frozen=True, slots=True)
class GateRule:
    """How a token's experts are chosen (`reference.gate`)."""

    method: str
    topk: int
    num_groups: int
    topk_groups: int
    normalize: bool
    scale: float


def attention(
    shape: AttentionShape,
    *,
    norm_D: torch.Tensor,
    eps: float,
    q_down: Packed | None,
    q_norm: torch.Tensor | None,
    q: Packed,
    kv_down: Packed,
    kv_norm_C: torch.Tensor,
    latent_eps: float,
    key_up: Packed,
    value_up: Packed,
    kv_up: Packed,
    out: Packed,
) -> Any | None:
    """Latent attention of one layer, or None where the widths need the operations one by one.

    Returns an object with
        project(hidden_TD, cos, sin, slots_T, pages, rows_S or None) -> q_THA, or q_SHA of these rows
        attend_decode(hidden_TD, q_THA, pages, page_table_BP, kv_tokens_B, positions_T) -> hidden_TD
        attend_prefill(hidden_TD, q_THA, pages, page_table_BP, num_tokens_B, context_tokens_B, positions_T) -> hidden_TD
    """
    widths = [len(norm_D), shape.nope_dim, shape.num_heads * shape.value_dim, len(kv_norm_C)]
    if not _has_whole_pairs(norm_D, *widths, 0 if q_norm is None else len(q_norm)):
        return None
    return library().Attention(
        norm_D,
        eps,
        None if q_down is None else _plain(q_down),
        q_norm,
        _plain(q),
        _plain(kv_down),
        kv_norm_C,
        latent_eps,
        _plain(key_up),
        _plain(value_up),
        _plain(kv_up),
        _plain(out),
        [shape.num_heads, shape.nope_dim, shape.rotary_dim, shape.value_dim],
        shape.is_interleaved,
        shape.scale,
    )


def moe(
    rule: GateRule,
    *,
    norm_D: torch.Tensor,
    eps: float,
    router: PackedRouter,
    bias_E: torch.Tensor | None,
    gate_up: Packed,
    down: Packed,
    shared: tuple[Packed, Packed] | None,
) -> Any | None:
    """The experts of one layer with their router, or None where the widths need the operations one by one.

    Returns an object with
        route(hidden_TD) -> x_TD normed, ids_TK, weights_TK, counts_E
        run(hidden_TD, x_TD, ids_TK, weights_TK) -> hidden_TD, for a rank that holds all experts in order
    """
    if not _has_whole_pairs(norm_D, len(norm_D)):
        return None
    return library().Mixture(
        norm_D,
        eps,
        router.data_PDN,
        bias_E,
        router.num_experts,
        [GATE_METHODS.index(rule.method), rule.topk, rule.num_groups, rule.topk_groups],
        rule.normalize,
        rule.scale,
        _plain(gate_up),
        _plain(down),
        len(down.data),
        None if shared is None else _plain(shared[0]),
        None if shared is None else _plain(shared[1]),
    )


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """Attention (from `attention`) and a dense MLP."""

    attention: Any
    norm_D: torch.Tensor
    gate_up: Packed
    down: Packed


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """Attention (from `attention`) and experts (from `moe`), all of them on this rank."""

    attention: Any
    moe: Any


def stack(
    layers: list[DenseLayer | MoeLayer],
    *,
    embedding: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    head: Packed,
) -> Any:
    """A whole model. Returns an object with

    decode(tokens_T, cos, sin, positions_T, slots_T, page_table_BP, kv_tokens_B, logit_rows_S, pages)
        -> logits_SV in float32, a list of counts_E, one per MoeLayer
    """
    held = library().Stack(embedding, norm_D, eps, _plain(head))
    for layer in layers:
        if isinstance(layer, DenseLayer):
            held.add_dense(layer.attention, layer.norm_D, eps, _plain(layer.gate_up), _plain(layer.down))
        else:
            held.add_mixture(layer.attention, layer.moe)
    return held


def _has_whole_pairs(norm: torch.Tensor, *widths: int) -> bool:
    """Whether rows of these widths are whole steps of a product, in the dtype of this norm."""
    return norm.dtype is torch.float32 or not any(width % 2 for width in widths)


def _plain(packed: Packed) -> tuple[torch.Tensor, int, int, int]:
    return packed.data, packed.num_columns, packed.depth, packed.kind
