"""The ways to run a step of the model. A rank chooses its schedule once (rank/context.py); steps need not know it.

operation by operation  `plain`: any step
fused                   decode in one C++ call, for a lone rank on the CPU (fused/stack.py)
graph                   decode as a recorded CUDA graph, whole or in halves, on a GPU (fused/graphs.py)
overlapped              a step that comes in halves: one computes while the other's rows travel (parallel/overlap.py)
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from batchinfer.model.moe import YieldPoint
from batchinfer.model.step import StepHalves, StepInput, StepOutput, StepTensors
from batchinfer.parallel.overlap import run_decode_pair, run_prefill_pair, run_to_end
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog


class StepModel(Protocol):
    """The parts of a model that running a step operation by operation uses."""

    @property
    def device(self) -> torch.device: ...

    def points(
        self, step: StepTensors, pages: torch.Tensor, spans: MicroBatchSpans
    ) -> Generator[YieldPoint, None, StepOutput]: ...


class WholeStep(Protocol):
    """A function that runs a whole step of a Transformer."""

    def __call__(self, model: Any, step: StepInput, pages: torch.Tensor, log: SpanLog) -> StepOutput: ...


class PairedStep(Protocol):
    """A function that runs a step of a Transformer in halves."""

    def __call__(self, model: Any, step: StepHalves, pages: torch.Tensor, log: SpanLog) -> StepOutput: ...


def plain(model: StepModel, step: StepInput, pages: torch.Tensor, log: SpanLog) -> StepOutput:
    """Run a step operation by operation, waiting for rows that travel."""
    return run_to_end(model.points(StepTensors.of(step, model.device), pages, MicroBatchSpans(log)))


def overlapped(model: StepModel, step: StepHalves, pages: torch.Tensor, log: SpanLog) -> StepOutput:
    """Run two micro-batches in turn; in prefill the earlier tokens are micro-batch 1, whose attention runs first."""
    run_pair, numbers = (run_decode_pair, (0, 1)) if step.first.is_decode else (run_prefill_pair, (1, 0))
    first, second = run_pair(
        *(
            model.points(StepTensors.of(half, model.device), pages, MicroBatchSpans(log, number))
            for half, number in zip((step.first, step.second), numbers, strict=True)
        )
    )
    output = StepOutput.joined(first, second)
    if step.first.wants_logits:
        return output
    assert first.states is not None, "operation by operation, states are returned"
    assert second.states is not None, "operation by operation, states are returned"
    return replace(output, states=torch.cat([first.states, second.states]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ways in which a rank's steps run."""

    decode: WholeStep = plain  # of whole steps
    decode_pair: PairedStep = overlapped  # of steps in halves

    def run(self, model: StepModel, step: StepInput | StepHalves, pages: torch.Tensor, log: SpanLog) -> StepOutput:
        """Run a step, see Transformer.forward."""
        if isinstance(step, StepHalves):
            run_halves = self.decode_pair if step.first.is_decode else overlapped
            return run_halves(model, step, pages, log)
        run_whole = self.decode if step.is_decode else plain
        return run_whole(model, step, pages, log)


PLAIN = Schedule()
