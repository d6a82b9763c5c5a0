"""The second half of a layer: one dense MLP, or routed experts that exchange rows with other ranks (MoE).

The MoE is a generator: it yields while rows travel, so that a scheduler can put another micro-batch's work there
(parallel/overlap.py). DeepSeek-V3 report section 2.1.2.
"""

# T tokens, K experts per token, E routed experts, D hidden, F intermediate

from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from batchinfer.model.config import ModelConfig
from batchinfer.model.ops import Ops, meets_fp8, normed
from batchinfer.model.weights import MlpWeights, MoeWeights
from batchinfer.parallel.dispatch import Dispatcher, ExpertInput, LocalDispatcher
from batchinfer.parallel.spans import MicroBatchSpans
from batchinfer_kernels.cpu import ops as cpu_ops
from batchinfer_kernels.cpu.packed import Packed
from batchinfer_kernels.reference.experts import ExpertBiases
from batchinfer_kernels.reference.fp8 import ScaledRows
from batchinfer_kernels.reference.gating import GateRule
from batchinfer_kernels.reference.places import ExpertRows
from batchinfer_kernels.reference.pointwise import GEGLU_TANH, SWIGLU, Activation, sigmoid

_ACTIVATIONS = {"silu": SWIGLU, "gelu_pytorch_tanh": GEGLU_TANH}


class YieldPoint(Enum):
    """The event that a layer waits for when it yields."""

    QUERIES = "queries"  # decode only: projections are done, core attention is next
    DISPATCH = "dispatch"  # rows are on their way to the experts
    COMBINE = "combine"  # results are on their way back
    LAYER = "layer"  # sweeps only: the next layer's weights, or after the last one the head


class Routing(NamedTuple):
    """Tokens on their way to experts: the residual normed, ids of the experts [T, K] int64, weights [T, K] float32.

    rounded: the first in FP8, where the experts' weights are.
    is_counted_T: [T] int64, 0 for tokens whose results nobody wants; None: all are wanted.
    """

    x_TD: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    rounded: ScaledRows | None = None
    is_counted_T: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """Norm and MLP of a dense layer."""

    ops: Ops
    config: ModelConfig
    weights: MlpWeights
    norm_D: torch.Tensor | None

    def add_to(self, base_TD: torch.Tensor, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Return [T, D], the base with the MLP of hidden added."""
        x_TD = normed(self.ops, hidden_TD, self.norm_D, self.config.rms_norm_eps, self.weights.gate_up.weight)
        activation = _ACTIVATIONS[self.config.hidden_act]
        return swiglu(self.ops, x_TD, self.weights, residual=base_TD, activation=activation)


class MoeMlp:
    """Norm, router, routed and shared experts of one layer."""

    def __init__(
        self, ops: Ops, config: ModelConfig, weights: MoeWeights, norm_D: torch.Tensor, dispatcher: Dispatcher
    ):
        self.ops = ops
        self.config = config
        self.weights = weights
        self.norm_D = norm_D
        self.dispatcher = dispatcher
        self.num_local_rows = 0  # (token, expert) rows computed so far, those counted on the device not among them
        # [] int64 of rows whose number only the device knows, or that a captured graph computes: its memory stays
        self.num_device_rows = torch.zeros((), dtype=torch.int64, device=norm_D.device)
        self.counts_on_device = norm_D.device.type != "cpu"
        self._form = _expert_form(config, weights)

    def points(
        self,
        hidden_TD: torch.Tensor,
        routing: Routing,
        spans: MicroBatchSpans,
        *,
        shared_under: YieldPoint,
    ) -> Generator[YieldPoint, None, torch.Tensor]:
        """Send tokens to their experts and bring the results back.

        Args:
            hidden_TD: the residual, to which the results are added.
            routing: the tokens and their experts, from `route`.
            shared_under: the exchange that hides the shared expert (dispatch in decode, combine in prefill).

        Yields:
            YieldPoint.DISPATCH and YieldPoint.COMBINE, while the exchange is under way.

        Returns:
            The new residual; routed and shared parts are added in float32 and rounded once before they are added to it.
        """
        with spans.send("DISPATCH"):
            handle = self.dispatcher.dispatch(
                self._sent(routing), routing.ids_TK, routing.weights_TK, routing.is_counted_T
            )
        shared_TD = self._shared_expert(routing, spans) if shared_under is YieldPoint.DISPATCH else None
        yield YieldPoint.DISPATCH

        received = spans.receive("DISPATCH", handle)
        with spans.compute("MLP"):
            y = self._routed_experts(received)
        with spans.send("COMBINE"):
            future = self.dispatcher.combine(y, handle)
        yield YieldPoint.COMBINE

        if shared_under is YieldPoint.COMBINE:
            shared_TD = self._shared_expert(routing, spans)
        routed_TD = spans.receive("COMBINE", future)
        return self.ops.add_sums(hidden_TD, routed_TD, shared_TD)

    def route(
        self,
        hidden_TD: torch.Tensor,
        tokens_T: torch.Tensor,
        expert_counts_E: torch.Tensor,
        is_counted_T: torch.Tensor | None = None,
    ) -> Routing:
        """Norm the residual and choose the experts of each token; logits are float32 in any dtype.

        Args:
            tokens_T: [T] int64, by which some layers choose.
            expert_counts_E: [E] int64, to which is added how many of these tokens each expert got.
            is_counted_T: [T] int64, 0 for tokens that it leaves out; None: all count.
        """
        x_TD, rounded = self._normed(hidden_TD)
        logits_TE = self.ops.router(x_TD, self.weights.router_ED)
        bias_E, table_VK, rule = self.weights.router_bias_E, self.weights.experts_VK, gate_rule(self.config)
        chosen = () if table_VK is None else (table_VK[tokens_T],)
        ids_TK, weights_TK = self.ops.gate(logits_TE, bias_E, rule, expert_counts_E, is_counted_T, *chosen)
        return Routing(x_TD, ids_TK, weights_TK, rounded, is_counted_T)

    def _sent(self, routing: Routing) -> Any:
        """Return the rows to dispatch; a dispatcher whose rows travel rounds them into the form that travels."""
        stays_fp8 = isinstance(self.dispatcher, LocalDispatcher) and self.dispatcher.takes_fp8
        return routing.rounded if stays_fp8 and routing.rounded is not None else routing.x_TD

    def _normed(self, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, ScaledRows | None]:
        """Return the normed rows for the router, and the same rows in FP8 if the experts are in FP8, else None."""
        eps = self.config.rms_norm_eps
        if meets_fp8(hidden_TD, self.weights.gate_up_EFD):
            return self.ops.rms_norm_fp8(hidden_TD, self.norm_D, eps, keeps=True)
        return self.ops.rms_norm(hidden_TD, self.norm_D, eps), None

    def _routed_experts(self, received: ExpertInput) -> ExpertRows:
        """Return the experts' results for the received rows, in their order; FP8 rows are used without widening."""
        x, weights, scales = received.x, self.weights, received.scales
        # adding up on the device, and reading the sum only after the step, does not make the host wait
        has_gaps = received.layout == "masked" or received.tile_rows > 1
        self.counts_on_device |= has_gaps
        num_rows = len(x) if received.tokens_M is None else len(received.tokens_M)
        if self.counts_on_device:
            self.num_device_rows += received.num_rows_E.sum() if has_gaps else num_rows
        else:
            self.num_local_rows += num_rows
        if received.layout == "contiguous":
            return self.ops.grouped_mlp(
                x,
                received.num_rows_E,
                weights.gate_up_EFD,
                weights.down_EDF,
                received.tokens_M,
                scales=scales,
                tile_rows=received.tile_rows,
                **self._form,
            )
        return self.ops.masked_mlp(
            x,
            received.num_rows_E,
            weights.gate_up_EFD,
            weights.down_EDF,
            scales=scales,
            expected_rows=self._expected_rows(x.shape[1]),
            **self._form,
        )

    def _expected_rows(self, room: int) -> int:
        """Return the likely rows of an expert with room for all ranks' tokens: its even share and a fifth more."""
        share = room * self.config.num_experts_per_tok / self.config.n_routed_experts
        return max(1, min(room, round(1.2 * share)))

    def _shared_expert(self, routing: Routing, spans: MicroBatchSpans) -> torch.Tensor | None:
        weights = self.weights
        if weights.shared is None:
            return None
        x_TD = routing.x_TD if routing.rounded is None else routing.rounded
        with spans.compute("SHARED"):
            y_TD = swiglu(self.ops, x_TD, weights.shared, activation=self._form.get("activation", SWIGLU))
            if weights.shared_gate_1D is None:
                return y_TD
            # in float64, rounded once: a library's float32 sigmoid may depend on a value's place
            factor_T1 = sigmoid(self.ops.router(routing.x_TD, weights.shared_gate_1D).double()).float()
            return (y_TD * factor_T1).to(y_TD.dtype)


def _expert_form(config: ModelConfig, weights: MoeWeights) -> dict[str, Any]:
    """Return the activation and biases of the experts as keyword arguments; {} for plain SwiGLU without biases."""
    form: dict[str, Any] = {}
    if config.expert_clamp is not None:
        form["activation"] = Activation(*config.expert_clamp)
    if weights.gate_up_bias_EF is not None:
        assert weights.down_bias_ED is not None
        form["biases"] = ExpertBiases(weights.gate_up_bias_EF, weights.down_bias_ED)
    return form


def gate_rule(config: ModelConfig) -> GateRule:
    """Return the rule by which this model chooses experts."""
    return GateRule(
        method=config.topk_method,
        topk=config.num_experts_per_tok,
        num_groups=config.n_group,
        topk_groups=config.topk_group,
        normalize=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )


def swiglu(
    ops: Ops,
    x_TD: torch.Tensor | ScaledRows,
    weights: MlpWeights,
    *,
    residual: torch.Tensor | None = None,
    activation: Activation = SWIGLU,
) -> torch.Tensor:
    """Return down(activation(gate(x), up(x))), [T, D] to [T, D], added to the residual if there is one."""
    gate_up, down = weights.gate_up, weights.down
    if isinstance(gate_up.weight, Packed) and gate_up.weight.is_paired:
        assert isinstance(down.weight, Packed)
        assert isinstance(x_TD, torch.Tensor)
        return cpu_ops.mlp(x_TD, gate_up.weight, down.weight, residual=residual, activation=activation)
    gate_up_TF = ops.linear(x_TD, *gate_up)
    if meets_fp8(gate_up_TF, down.weight) and activation == SWIGLU:
        values, scales = ops.silu_mul_blocks(gate_up_TF[None], fp8=True)
        return ops.linear(ScaledRows(values[0], scales[0]), *down, residual=residual)
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return ops.linear(ops.silu_mul(gate_TF, up_TF, activation), *down, residual=residual)
