"""Attention and MoE that are single C++ calls, where weights and widths allow it.

They do what mla.py and moe.py do with one operation after the other, in the same order and with the same bits; a step
of few tokens spends most of its time between operations otherwise. The C++ objects (csrc/layers.cpp) hold packed
weights and share their memory: a weight that is packed anew in place is seen there, too.
"""

# T tokens, D hidden, H heads, A query/key width, E routed experts

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from batchinfer.model.config import ModelConfig
from batchinfer.model.mla import LATENT_NORM_EPS, Attention
from batchinfer.model.mla_config import MlaConfig
from batchinfer.model.moe import MoeMlp, Routing, YieldPoint, gate_rule
from batchinfer.model.ops import Ops
from batchinfer.model.page_memory import copy_in_pages
from batchinfer.model.step import AttentionStep
from batchinfer.model.weights import MlaWeights, MoeWeights, Projection
from batchinfer.parallel.dispatch import Dispatcher, LocalDispatcher
from batchinfer.parallel.spans import MicroBatchSpans
from batchinfer_kernels.cpu.ops import GATE_METHODS
from batchinfer_kernels.cpu.packed import Packed, PackedRouter, library
from batchinfer_kernels.weight_format import Weight


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """mla.Attention with one C++ call for each of its two steps."""

    ops: Ops
    kernel: Any  # C++

    def project(
        self, hidden_TD: torch.Tensor, step: AttentionStep, pages: torch.Tensor, rows_S: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalise, write the latents to their pages, and return queries [T, H, A], or of some rows."""
        q_THA = self.kernel.project(hidden_TD, step.cos, step.sin, step.query_scale, step.slots, pages, rows_S)
        copy_in_pages(self.ops, step, pages)
        return q_THA

    def attend(
        self, hidden_TD: torch.Tensor, q_THA: torch.Tensor, step: AttentionStep, pages: torch.Tensor
    ) -> torch.Tensor:
        """Return core attention and output projection, added to the residual: [T, D]."""
        if len(q_THA) == 0:
            return hidden_TD
        if step.is_decode:
            return self.kernel.attend_decode(hidden_TD, q_THA, pages, step.page_table, step.kv_tokens, step.positions)
        return self.kernel.attend_prefill(
            hidden_TD, q_THA, pages, step.page_table, step.chunk_tokens, step.kv_tokens, step.positions
        )


class FusedMoe(MoeMlp):
    """moe.MoeMlp with one C++ call for the routing, and one for the rest if no row has to travel."""

    def __init__(
        self,
        ops: Ops,
        config: ModelConfig,
        weights: MoeWeights,
        norm_D: torch.Tensor,
        dispatcher: Dispatcher,
        kernel: Any,
    ):
        super().__init__(ops, config, weights, norm_D, dispatcher)
        self._kernel = kernel
        self._stays_here = isinstance(dispatcher, LocalDispatcher) and dispatcher.row_format is None

    @property
    def kernel_of_all(self) -> Any | None:
        """The C++ MoE if no row has to travel, else None."""
        return self._kernel if self._stays_here else None

    def route(
        self,
        hidden_TD: torch.Tensor,
        tokens_T: torch.Tensor,
        expert_counts_E: torch.Tensor,
        is_counted_T: torch.Tensor | None = None,
    ) -> Routing:
        """See MoeMlp."""
        assert is_counted_T is None, "on a CPU no batch is filled up"
        x_TD, ids_TK, weights_TK, counts_E = self._kernel.route(hidden_TD)
        expert_counts_E.add_(counts_E)
        return Routing(x_TD, ids_TK, weights_TK)

    def points(
        self, hidden_TD: torch.Tensor, routing: Routing, spans: MicroBatchSpans, *, shared_under: YieldPoint
    ) -> Generator[YieldPoint, None, torch.Tensor]:
        """See MoeMlp. Yield no point if no rows travel to other ranks: there is nothing to wait for."""
        if self._stays_here:
            self.num_local_rows += routing.ids_TK.numel()
            with spans.compute("MLP"):
                return self._kernel.run(hidden_TD, routing.x_TD, routing.ids_TK, routing.weights_TK)
        return (yield from super().points(hidden_TD, routing, spans, shared_under=shared_under))


def attention_of(
    ops: Ops, config: MlaConfig, weights: MlaWeights, norm_D: torch.Tensor, eps: float, layer: int
) -> Attention | FusedAttention:
    """Return attention, fused if all weights are packed, none has a bias, and rows are whole steps of a product.

    Attention over FP8 pages is not fused, as the C++ layer cannot read them.
    """
    projections = (weights.q, weights.kv_down, weights.out, *([] if weights.q_down is None else [weights.q_down]))
    held = all_packed(*(weights.key_up_HCN, weights.value_up_HVC, weights.kv_up_HZC), *map(plain_weight, projections))
    nope_dim, value_dim, heads = config.qk_nope_head_dim, config.v_head_dim, config.num_attention_heads
    widths = (len(norm_D), nope_dim, heads * value_dim, config.kv_lora_rank, config.q_lora_rank or 0)
    if held is None or ops.fp8_pages or not _has_whole_pairs(norm_D, *widths):
        return Attention(ops, config, weights, norm_D, eps)
    key_up, value_up, kv_up, q, kv_down, out, *q_down = (weight.plain for weight in held)
    kernel = library().classes.Attention(
        *(norm_D, eps, q_down[0] if q_down else None, weights.q_norm, q, kv_down),
        *(weights.kv_norm, LATENT_NORM_EPS, key_up, value_up, kv_up, out),
        *([heads, nope_dim, config.qk_rope_head_dim, value_dim], config.rope_interleave, config.softmax_scale),
    )
    return FusedAttention(ops, kernel)


def moe_of(ops: Ops, config: ModelConfig, weights: MoeWeights, norm_D: torch.Tensor, dispatcher: Dispatcher) -> MoeMlp:
    """Return a fused MoE if all weights are packed, without biases or a gate, and rows are whole steps of a product."""
    if config.expert_clamp is not None or weights.shared_gate_1D is not None:
        return MoeMlp(ops, config, weights, norm_D, dispatcher)
    shared = weights.shared
    of_shared = () if shared is None else (plain_weight(shared.gate_up), plain_weight(shared.down))
    held = all_packed(weights.gate_up_EFD, weights.down_EDF, *of_shared)
    router = weights.router_ED
    if not isinstance(router, PackedRouter) or held is None or not _has_whole_pairs(norm_D, len(norm_D)):
        return MoeMlp(ops, config, weights, norm_D, dispatcher)
    gate_up, down, *shared_held = (weight.plain for weight in held)
    method, *sizes, normalizes, scale = gate_rule(config)
    bias_E = weights.router_bias_E if method == "noaux_tc" else None
    kernel = library().classes.Mixture(
        *(norm_D, config.rms_norm_eps, router.data_PDN, bias_E, router.num_experts),
        *([GATE_METHODS.index(method), *sizes], normalizes, scale),
        *(gate_up, down, len(held[1].data), *(shared_held or (None, None))),
    )
    return FusedMoe(ops, config, weights, norm_D, dispatcher, kernel)


def _has_whole_pairs(norm: torch.Tensor, *widths: int) -> bool:
    """Return whether rows of these widths are whole steps of a product, in the dtype of this norm."""
    return norm.dtype is torch.float32 or not any(width % 2 for width in widths)


def plain_weight(projection: Projection) -> Weight | None:
    """Return the weight of a projection without bias."""
    return projection.weight if projection.bias is None else None


def all_packed(*weights: Weight | None) -> tuple[Packed, ...] | None:
    """Return the weights when all are packed, else None."""
    packed = tuple(weight for weight in weights if isinstance(weight, Packed))
    return packed if len(packed) == len(weights) else None
