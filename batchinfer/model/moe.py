"""The second half of a layer: one dense MLP, or a mixture of experts that exchanges rows with other ranks.

The mixture is a generator: it yields where rows have just started to travel, so that a scheduler can put another
micro-batch's work there. DeepSeek-V3 report section 2.1.2.
"""

# T tokens, K experts per token, E routed experts, D hidden, F intermediate

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum

import torch

from batchinfer.model.config import ModelConfig
from batchinfer.model.ops import Ops
from batchinfer.model.weights import MlpWeights, MoeWeights
from batchinfer.parallel.dispatch import Dispatcher, count_rows


class Point(Enum):
    """Where a layer stands when it yields."""

    DISPATCH = "dispatch"  # rows are on their way to the experts
    COMBINE = "combine"  # results are on their way back


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """down(silu(gate(x)) × up(x)): the MLP of a dense layer, and the shared expert of a mixture."""

    ops: Ops
    weights: MlpWeights

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] to [T, D]."""
        gate_TF, up_TF = self.ops.linear(x_TD, *self.weights.gate_up).chunk(2, dim=-1)
        return self.ops.linear(self.ops.silu_mul(gate_TF, up_TF), *self.weights.down)


class MoeMlp:
    """Routed and shared experts of one layer."""

    def __init__(self, ops: Ops, config: ModelConfig, weights: MoeWeights, dispatcher: Dispatcher):
        self.ops = ops
        self.config = config
        self.weights = weights
        self.dispatcher = dispatcher
        self.shared = None if weights.shared is None else DenseMlp(ops, weights.shared)

    def points(
        self, x_TD: torch.Tensor, expert_counts_E: torch.Tensor, *, shared_under: Point
    ) -> Generator[Point, None, torch.Tensor]:
        """Send tokens to their experts and bring the results back.

        Args:
            x_TD: normed hidden states.
            expert_counts_E: [E] int64, receives how many of these tokens each expert got.
            shared_under: the exchange that hides the shared expert (dispatch in decode, combine in prefill).

        Yields:
            Point.DISPATCH and Point.COMBINE, each after the exchange was started.

        Returns:
            [T, D] in the dtype of x; routed and shared parts are added in float32 and rounded once.
        """
        ids_TK, weights_TK = self.route(x_TD)
        expert_counts_E.copy_(count_rows(ids_TK.flatten(), self.config.n_routed_experts))
        handle = self.dispatcher.dispatch(x_TD, ids_TK, weights_TK)
        yield Point.DISPATCH

        shared_TD = self._shared_expert(x_TD) if shared_under is Point.DISPATCH else None
        received = handle.wait()
        assert received.layout == "contiguous", received.layout
        y = self.ops.grouped_mlp(received.x, received.num_rows_E, self.weights.gate_up_EFD, self.weights.down_EDF)
        future = self.dispatcher.combine(y, handle)
        yield Point.COMBINE

        if shared_under is Point.COMBINE:
            shared_TD = self._shared_expert(x_TD)
        routed_TD = future.wait()
        return (routed_TD if shared_TD is None else routed_TD + shared_TD.float()).to(x_TD.dtype)

    def route(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts of each token: ids [T, K] int64 and weights [T, K] float32; logits are float32 in any dtype."""
        logits_TE = self.ops.linear(x_TD.float(), self.weights.router_ED)
        return self.ops.gate(
            logits_TE,
            self.weights.router_bias_E,
            method=self.config.topk_method,
            topk=self.config.num_experts_per_tok,
            num_groups=self.config.n_group,
            topk_groups=self.config.topk_group,
            normalize=self.config.norm_topk_prob,
            scale=self.config.routed_scaling_factor,
        )

    def _shared_expert(self, x_TD: torch.Tensor) -> torch.Tensor | None:
        return None if self.shared is None else self.shared.forward(x_TD)
