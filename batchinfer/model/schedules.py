"""The ways to run a step of the model. A rank chooses its schedule once; whoever makes steps need not know which.

operation by operation  `plain`: any step
fused                   decode in one C++ call, for a lone rank on the CPU (fused/stack.py)
graph                   decode as a recorded CUDA graph, for a lone rank on a GPU (fused/graphs.py)
overlapped              a step that comes in halves: one computes while the other's rows travel (parallel/overlap.py)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from batchinfer.model.fused.graphs import DecodeGraphs
from batchinfer.model.fused.stack import FusedDecode
from batchinfer.model.step import StepHalves, StepInput, StepOutput, StepTensors
from batchinfer.parallel.overlap import run_decode_pair, run_prefill_pair, run_to_end
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog

if TYPE_CHECKING:
    from batchinfer.model.transformer import Transformer


class WholeStep(Protocol):
    """Runs a step that was not cut."""

    def __call__(self, model: Transformer, step: StepInput, pages: torch.Tensor, log: SpanLog) -> StepOutput: ...


def plain(model: Transformer, step: StepInput, pages: torch.Tensor, log: SpanLog) -> StepOutput:
    """Operation by operation, waiting for rows that travel."""
    return run_to_end(model.points(StepTensors.of(step, model.device), pages, MicroBatchSpans(log)))


def overlapped(model: Transformer, step: StepHalves, pages: torch.Tensor, log: SpanLog) -> StepOutput:
    """Two micro-batches in turn; in prefill the earlier tokens are number 1, whose attention goes first."""
    run_pair, numbers = (run_decode_pair, (0, 1)) if step.first.is_decode else (run_prefill_pair, (1, 0))
    first, second = run_pair(
        *(
            model.points(StepTensors.of(half, model.device), pages, MicroBatchSpans(log, number))
            for half, number in zip((step.first, step.second), numbers, strict=True)
        )
    )
    return StepOutput(torch.cat([first.logits, second.logits]), first.expert_counts + second.expert_counts)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the steps of a rank run."""

    decode: WholeStep = plain  # of steps that come whole

    def run(self, model: Transformer, step: StepInput | StepHalves, pages: torch.Tensor, log: SpanLog) -> StepOutput:
        """See Transformer.forward."""
        if isinstance(step, StepHalves):
            return overlapped(model, step, pages, log)
        run_whole = self.decode if step.is_decode else plain
        return run_whole(model, step, pages, log)


PLAIN = Schedule()


def quickest_schedule(model: Transformer, filler_page: int | None = None) -> Schedule:
    """The quickest way to run this rank's steps.

    Args:
        filler_page: a page that no request has, where decode steps can be recorded as graphs (else None).
    """
    if filler_page is not None:
        return Schedule(decode=DecodeGraphs(filler_page))
    return Schedule(decode=FusedDecode.of(model) or plain)
