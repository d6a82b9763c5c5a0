"""One decoder layer, written once: a generator that yields while rows travel between ranks (parallel/overlap.py)."""

# T tokens of a step, S rows whose logits are wanted, D hidden, E routed experts

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from batchinfer.model.attention_kind import LayerAttention
from batchinfer.model.moe import DenseMlp, MoeMlp, YieldPoint
from batchinfer.model.residual import Residual
from batchinfer.model.step import AttentionStep
from batchinfer.parallel.spans import MicroBatchSpans


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention, then an MLP, each on normed input and added to the residual."""

    attention: LayerAttention
    mlp: DenseMlp | MoeMlp
    residuals: tuple[Residual, Residual]  # around attention, around the MLP

    def points(
        self,
        state: Any,
        step: AttentionStep,
        pages: Any,
        expert_counts_E: torch.Tensor | None,
        spans: MicroBatchSpans,
        wanted: AttentionStep | None = None,
    ) -> Generator[YieldPoint, None, Any]:
        """Run the layer over one step; return the residual's new state.

        Args:
            state: of the residual, by its kind.
            pages: [num_pages, 64, row] of this layer, or its memory by the attention kind; what is kept of the step's
                tokens is written there.
            expert_counts_E: [E] int64, to which the tokens per expert are added; None for a dense layer.
            wanted: the rows to finish, `step.logit_rows` alone; None: all.

        Yields:
            While rows travel, and in decode before core attention; a dense layer has nothing to yield for.
        """
        before, after = self.residuals
        if isinstance(self.mlp, DenseMlp):
            with spans.compute("DENSE"):
                x_TD, past = after.enter(self._attended(state, step, pages, wanted))
                return after.leave(past, self.mlp.add_to(after.base(past), x_TD))
        assert expert_counts_E is not None
        if step.is_decode:
            with spans.compute("ATTN-0"):
                x_TD, past = before.enter(state)
                queries = self.attention.project(x_TD, step, pages)
            yield YieldPoint.QUERIES
            with spans.compute("ATTN-1"):
                sum_TD = self.attention.attend(before.base(past), queries, step, pages)
                x_TD, past = after.enter(before.leave(past, sum_TD))
                routing = self.mlp.route(x_TD, step.tokens, expert_counts_E, step.is_counted)
            hidden_by = YieldPoint.DISPATCH
        else:
            with spans.compute("ATTN"):
                x_TD, past = after.enter(self._attended(state, step, pages, wanted))
                routing = self.mlp.route(x_TD, (wanted or step).tokens, expert_counts_E)
            hidden_by = YieldPoint.COMBINE
        sum_TD = yield from self.mlp.points(after.base(past), routing, spans, shared_under=hidden_by)
        return after.leave(past, sum_TD)

    def _attended(self, state: Any, step: AttentionStep, pages: Any, wanted: AttentionStep | None) -> Any:
        """Return the residual's state after attention, of the wanted rows; rows of all tokens go to the pages."""
        residual, attention = self.residuals[0], self.attention
        x_TD, past = residual.enter(state)
        if wanted is None:
            queries = attention.project(x_TD, step, pages)
            return residual.leave(past, attention.attend(residual.base(past), queries, step, pages))
        queries = attention.project(x_TD, step, pages, step.logit_rows)
        past = residual.take(self.mlp.ops, past, step.logit_rows)
        return residual.leave(past, attention.attend(residual.base(past), queries, wanted, pages))
