"""Sweeps: a list of steps passes each layer before any of them passes the next, so that a layer is read once for all.

              layer 0            layer 1                    after the last layer
step 0        points … LAYER     points … LAYER   …         logits
step 1        points … LAYER     points … LAYER   …         logits

Steps keep their order within a layer. So a step may read what an earlier one has written there: pages that prompts
share, and the first part of a prompt that is cut between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from batchinfer.model.moe import DenseMlp, MoeMlp, YieldPoint
from batchinfer.model.step import StepInput, StepOutput, StepTensors
from batchinfer.model.weight_stream import WeightStream
from batchinfer.parallel.overlap import Points
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog


class LayeredModel(Protocol):
    """The parts of a model that a sweep uses."""

    @property
    def device(self) -> torch.device: ...

    @property
    def layers(self) -> Sequence[Any]: ...

    def points(
        self, step: StepTensors, pages: torch.Tensor, spans: MicroBatchSpans, *, by_layer: bool
    ) -> Points[StepOutput]: ...


class SweptStep(NamedTuple):
    """The result of one step, the seconds in which it computed, and [L] rows of this rank's experts on the host."""

    output: StepOutput
    seconds: float
    expert_rows_L: np.ndarray


def run_sweep(
    model: LayeredModel,
    stream: WeightStream,
    steps: Sequence[StepInput],
    pages: torch.Tensor,
    logs: Sequence[SpanLog],
    should_leave: Callable[[], bool] = lambda: False,
) -> Iterator[SweptStep]:
    """Run steps layer by layer; yield their results in order, each made when the one before has been used.

    Ranks that exchange rows call this together, with as many steps of each kind: their rows travel layer by layer.

    Args:
        pages: as of Transformer.forward.
        logs: one per step.
        should_leave: asked before each layer; if true the sweep ends and yields nothing.

    Raises:
        ModelError: a layer cannot be read.
    """
    running = [
        _Running(model.points(StepTensors.of(step, model.device), pages, MicroBatchSpans(log), by_layer=True))
        for step, log in zip(steps, logs, strict=True)
    ]
    for one in running:
        one.to_next_layer()
    for layer in model.layers:
        if should_leave():
            stream.skip_sweep()
            return
        stream.wait()
        for one in running:
            one.pass_layer(layer.mlp)
        stream.release()
    for one in running:
        yield one.to_end()


class _Running:
    """A step between two layers."""

    def __init__(self, points: Points[StepOutput]) -> None:
        self._points: Points[StepOutput] | None = points
        self._seconds = 0.0
        self._expert_rows: list[int] = []  # of each MoE layer

    def pass_layer(self, mlp: DenseMlp | MoeMlp) -> None:
        """Run a layer, which has this MLP, and note the rows that its experts on this rank compute."""
        rows_before = mlp.num_local_rows if isinstance(mlp, MoeMlp) else 0
        self.to_next_layer()
        if isinstance(mlp, MoeMlp):
            self._expert_rows.append(mlp.num_local_rows - rows_before)

    def to_next_layer(self) -> None:
        """Run up to the next LAYER point; at other points rows that travel are waited for at once."""
        assert self._points is not None
        started_s = time.monotonic()
        while next(self._points) is not YieldPoint.LAYER:
            pass
        self._seconds += time.monotonic() - started_s

    def to_end(self) -> SweptStep:
        """Run the rest of the step and free its tensors."""
        assert self._points is not None
        started_s = time.monotonic()
        try:
            next(self._points)
        except StopIteration as end:
            self._points = None
            rows_L = np.array(self._expert_rows, dtype=np.int64)
            return SweptStep(end.value, self._seconds + time.monotonic() - started_s, rows_L)
        raise AssertionError("a step ends after its last layer")
