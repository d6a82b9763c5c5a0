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
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from batchinfer.model.moe import DenseMlp, MoeMlp, YieldPoint
from batchinfer.model.step import StepInput, StepOutput, StepTensors
from batchinfer.model.weight_stream import LayerStream
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
    """The result of one step, the clock of its computing, and [L] rows of this rank's experts on the host."""

    output: StepOutput
    clock: Clock
    expert_rows_L: np.ndarray

    @property
    def seconds(self) -> float:
        """Seconds in which it computed; on a GPU this waits for its end."""
        return self.clock.seconds


class Clock:
    """Adds up the seconds of several stretches of work, the device's if it is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._stretches: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the work that is started in this block."""
        if self._on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._stretches.append((begin, end))
        else:
            started_s = time.monotonic()
            yield
            self._seconds += time.monotonic() - started_s

    @property
    def seconds(self) -> float:
        """Seconds so far; on a GPU this waits for the end of the work."""
        for begin, end in self._stretches:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        self._stretches.clear()
        return self._seconds


def run_sweep(
    model: LayeredModel,
    stream: LayerStream,
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
        _Running(
            model.points(StepTensors.of(step, model.device), pages, MicroBatchSpans(log), by_layer=True),
            Clock(model.device),
        )
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

    def __init__(self, points: Points[StepOutput], clock: Clock) -> None:
        self._points: Points[StepOutput] | None = points
        self._clock = clock
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
        with self._clock.running():
            while next(self._points) is not YieldPoint.LAYER:
                pass

    def to_end(self) -> SweptStep:
        """Run the rest of the step and free its tensors."""
        assert self._points is not None
        with self._clock.running():
            try:
                next(self._points)
            except StopIteration as end:
                self._points, output = None, end.value
            else:
                raise AssertionError("a step ends after its last layer")
        return SweptStep(output, self._clock, np.array(self._expert_rows, dtype=np.int64))
