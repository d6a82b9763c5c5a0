"""Decode steps as CUDA graphs: recorded once per size, then started as a whole.

A graph works on fixed memory, where a step's tensors are written before it starts (sizes: graph_size.py). A size is met
for the first time in a plain step on that memory, which also makes libraries compile what they need; then the graph is
recorded, for the steps to come. Recording starts nothing on the GPU.

Ranks that share experts exchange rows inside the graph. All of them replay graphs of the same size in the same step, or
none does: a dispatch and a combine per layer and micro-batch have to meet those of the others, and a rank that records
keeps nobody waiting in a kernel. What each can do goes into the vote before the step (rank/step_vote.py). DeepEP uses
its two sets of flags in turn, call by call; a step makes an even number of calls, so each begins with the same set,
recorded or not. A recording that fails in the middle would leave this rank with the other one: it ends the rank.
"""

# B requests of the step, F filled up

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.fused.graph_size import DecodeBatch, GraphSize, filled_up
from batchinfer.model.schedules import Schedule
from batchinfer.model.step import StepHalves, StepInput, StepOutput, StepTensors
from batchinfer.parallel.overlap import run_decode_pair, run_to_end
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog

if TYPE_CHECKING:
    from batchinfer.model.transformer import Transformer

Work = Callable[[], StepOutput]
Recorder = Callable[[Work], Work]  # of work on fixed memory, the same to be started any number of times

ON_HOST = "the rank computes on a CPU"
SWITCHED_OFF = "cluster.graphs is 'off'"
STREAMED = "the weights are streamed"
_LEAST_FREE_SHARE = 0.02  # of the GPU's memory: with less, no further graph is recorded


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded step and the memory that it reads, of each micro-batch."""

    tensors: list[StepTensors]
    start: Work


class DecodeGraphs:
    """The graphs of one model over one page pool.

    Args:
        filler_page: the first of the pages that belong to no request (num_filler_pages of them).
        record: makes a graph; another one in tests.
        most_rows: of the largest graph; None: any number.
        has_memory: whether there is memory for another graph.
    """

    def __init__(
        self,
        filler_page: int,
        record: Recorder | None = None,
        *,
        most_rows: int | None = None,
        has_memory: Callable[[], bool] = lambda: True,
    ) -> None:
        self._filler_page = filler_page
        self._most_rows = most_rows
        self._record = record or _CudaRecorder()
        self._has_memory = has_memory
        self._captures: bool | None = None  # whether there was memory when it was asked last; None: not since a graph
        self._graphs: dict[GraphSize, _Graph] = {}

    def __call__(self, model: Transformer, step: StepInput, pages: torch.Tensor, log: SpanLog) -> StepOutput:
        """See schedules.WholeStep; of a rank alone, in the smallest size with room for the step."""
        assert step.kv_tokens is not None
        size = self.size_for([self.batch(model, step.kv_tokens.numpy())], in_pairs=False)
        assert size is not None
        return self._run(model, step, pages, log, size)

    def batch(self, model: Transformer, kv_lengths: np.ndarray) -> DecodeBatch:
        """Return the graph size for requests of these KV lengths, the new token included; there may be no request."""
        if self._captures is None:
            self._captures = self._has_memory()
        captures = int(self._captures)
        if len(kv_lengths) == 0:
            return DecodeBatch(replays=1, captures=captures)
        shortest, longest = int(kv_lengths.min()), int(kv_lengths.max())
        sees_all, chooses = map(int, model.reaches(shortest - 1, longest - 1))
        num_pages = -(-longest // PAGE_TOKENS)
        return DecodeBatch(len(kv_lengths), num_pages, sees_all, chooses, replays=1, captures=captures)

    def size_for(self, batches: Sequence[DecodeBatch], *, in_pairs: bool) -> GraphSize | None:
        """Return the size in which the batches of all ranks of the group run; None if one of them is too large."""
        return GraphSize.of_group(batches, in_pairs=in_pairs, most_rows=self._most_rows)

    def has(self, size: GraphSize) -> bool:
        """Return whether a graph of this size is recorded."""
        return size in self._graphs

    def schedule(self, size: GraphSize) -> Schedule:
        """Return a schedule that runs decode steps of at most this size as its graph, recorded after the first step.

        A step's output is valid until the next one runs; the model and the pages stay the same.
        """
        run = partial(self._run, size=size)
        return Schedule(decode=run, decode_pair=run)

    def clear(self) -> None:
        """Drop all graphs after experts have moved: they would send rows to the old places."""
        self._graphs.clear()

    def _run(
        self, model: Transformer, step: StepInput | StepHalves, pages: torch.Tensor, log: SpanLog, size: GraphSize
    ) -> StepOutput:
        parts = (step.first, step.second) if isinstance(step, StepHalves) else (step,)
        assert len(parts) == 1 + size.in_pairs
        with MicroBatchSpans(log).compute("DECODE"):
            filled, num_used = [], 0
            for part in parts:
                filled.append(filled_up(part, size.num_rows, size.num_pages, self._filler_page, num_used))
                num_used += size.num_rows - len(part.tokens)
            graph = self._graphs.get(size)
            if graph is None:
                graph, output = self._new(model, filled, pages, size)
            else:
                for tensors, (part, is_counted) in zip(graph.tensors, filled, strict=True):
                    tensors.refill(part, is_counted)
                output = graph.start()
        if not all(mlp.dispatcher.stays_here for mlp in model.moe_mlps):
            log.knows_waiting = False  # a graph's inside cannot be observed
        own = [
            output.logits[first : first + len(part.tokens)]
            for first, part in zip((0, size.num_rows), parts, strict=False)
        ]
        return StepOutput(own[0] if len(own) == 1 else torch.cat(own), output.expert_counts)

    def _new(
        self, model: Transformer, filled: list[tuple[StepInput, torch.Tensor]], pages: torch.Tensor, size: GraphSize
    ) -> tuple[_Graph, StepOutput]:
        """Return a graph of this size, and the output of the first step, which runs as plain operations."""
        tensors = [
            StepTensors.fixed(part, is_counted, model.device, size.position_range(model.config.attention.most_keys))
            for part, is_counted in filled
        ]

        def work() -> StepOutput:
            points = [
                model.points(of_part, pages, MicroBatchSpans(SpanLog(), number))
                for number, of_part in enumerate(tensors)
            ]
            return StepOutput.joined(*run_decode_pair(*points)) if size.in_pairs else run_to_end(points[0])

        output = work()
        graph = self._graphs[size] = _Graph(tensors, self._record(work))
        self._captures = None
        return graph, output


def why_not_recorded(model: Transformer, *, switched_off: bool = False) -> str | None:
    """Return why this rank's decode steps are not recorded as CUDA graphs; None if they are.

    Neither operations nor the exchange of rows may read a value on the host in a recorded step.
    """
    if switched_off:
        return SWITCHED_OFF
    if (reason := _why_no_graphs_on(model.device)) is not None:
        return reason
    if model.stream is not None:
        return STREAMED
    for mlp in model.moe_mlps:
        if mlp.dispatcher.why_not_recorded is not None:
            return mlp.dispatcher.why_not_recorded
    if model.ops.reads_on_host:
        return "the experts' operations here read on the host how many rows each expert has"
    if model.config.attention.most_keys < math.inf and model.ops.chooses_on_host:
        return "the choice of keys here reads values on the host"
    return None


def has_memory(device: torch.device) -> bool:
    """Return whether a GPU has memory for another graph; True on the host, where none is recorded."""
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    return free >= _LEAST_FREE_SHARE * total


def _why_no_graphs_on(device: torch.device) -> str | None:
    return None if device.type == "cuda" else ON_HOST


class _CudaRecorder:
    """Records CUDA graphs that share their working memory, since only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        # other threads (KV on its way to disk) may talk to the GPU meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()

        def start() -> StepOutput:
            graph.replay()
            return output

        return start
