"""One decoder layer, written once: a generator that yields while rows travel between ranks (parallel/overlap.py)."""

# T tokens of a step, S rows whose logits are wanted, D hidden, E routed experts

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from batchinfer.model.moe import DenseMlp, MoeMlp, YieldPoint
from batchinfer.model.step import AttentionStep
from batchinfer.parallel.spans import MicroBatchSpans


class LayerAttention(Protocol):
    """mla.Attention or another implementation; the result of `project` is for the same object's `attend`."""

    def project(
        self, hidden_TD: torch.Tensor, step: AttentionStep, pages: torch.Tensor, rows_S: torch.Tensor | None = None
    ) -> Any: ...

    def attend(
        self, hidden_TD: torch.Tensor, queries: Any, step: AttentionStep, pages: torch.Tensor, /
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention, then an MLP, each on normed input and added to the residual."""

    attention: LayerAttention
    mlp: DenseMlp | MoeMlp

    def points(
        self,
        hidden_TD: torch.Tensor,
        step: AttentionStep,
        pages: torch.Tensor,
        expert_counts_E: torch.Tensor | None,
        spans: MicroBatchSpans,
        wanted: AttentionStep | None = None,
    ) -> Generator[YieldPoint, None, torch.Tensor]:
        """Run the layer over one step; return the new hidden states.

        Args:
            hidden_TD: the residual.
            pages: [num_pages, 64, kv_dim] of this layer; what is kept of the step's tokens is written to them.
            expert_counts_E: [E] int64, to which the tokens per expert are added; None for a dense layer.
            wanted: the rows to finish, `step.logit_rows` alone; None: all.

        Yields:
            While rows travel, and in decode before core attention; a dense layer has nothing to yield for.
        """
        if isinstance(self.mlp, DenseMlp):
            with spans.compute("DENSE"):
                return self.mlp.add_to(self._attended(hidden_TD, step, pages, wanted))
        assert expert_counts_E is not None
        if step.is_decode:
            with spans.compute("ATTN-0"):
                queries = self.attention.project(hidden_TD, step, pages)
            yield YieldPoint.QUERIES
            with spans.compute("ATTN-1"):
                hidden_TD = self.attention.attend(hidden_TD, queries, step, pages)
                routing = self.mlp.route(hidden_TD, expert_counts_E, step.is_counted)
            return (yield from self.mlp.points(hidden_TD, routing, spans, shared_under=YieldPoint.DISPATCH))
        with spans.compute("ATTN"):
            hidden_TD = self._attended(hidden_TD, step, pages, wanted)
            routing = self.mlp.route(hidden_TD, expert_counts_E)
        return (yield from self.mlp.points(hidden_TD, routing, spans, shared_under=YieldPoint.COMBINE))

    def _attended(
        self, hidden_TD: torch.Tensor, step: AttentionStep, pages: torch.Tensor, wanted: AttentionStep | None
    ) -> torch.Tensor:
        """Return the wanted rows of the residual after attention; the latents of all tokens go to the pages."""
        if wanted is None:
            return self.attention.attend(hidden_TD, self.attention.project(hidden_TD, step, pages), step, pages)
        queries = self.attention.project(hidden_TD, step, pages, step.logit_rows)
        wanted_SD = self.mlp.ops.gather_rows(hidden_TD, step.logit_rows)
        return self.attention.attend(wanted_SD, queries, wanted, pages)
