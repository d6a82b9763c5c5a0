"""Decode steps as CUDA graphs: recorded once per size, then started as a whole; for a lone rank's GPU.

A graph works on fixed memory. A step's tensors are written there before it starts, filled up to the next size that has
a graph with rows that attend to, and write to, a page that no request has:

    size 8     tokens a b c d e - - -        pages of "-": the filler page, a slot of it for each

Where attention is sparse, there is one graph more for steps in which all requests attend to chosen keys, and one for
steps in which some do: operations that no request needs are not started.

A size is met for the first time in a plain step, which also makes libraries compile what they need; then the graph is
recorded, for the steps to come.
"""

# B requests of the step, F filled up, P pages of the table

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.step import StepInput, StepOutput, StepTensors
from batchinfer.parallel.dispatch import LocalDispatcher
from batchinfer.parallel.overlap import run_to_end
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog

if TYPE_CHECKING:
    from batchinfer.model.transformer import Transformer

Work = Callable[[], StepOutput]
Recorder = Callable[[Work], Work]  # of work on fixed memory, the same to be started any number of times

_SMALL_SIZES = (1, 2, 4, 8)
_SIZE_STEP = 16  # at most this many filler rows: fewer than a page has slots
_LEAST_PAGES = 4


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded step and the memory that it reads."""

    tensors: StepTensors
    start: Work


class DecodeGraphs:
    """The graphs of one model over one page pool.

    Args:
        filler_page: a page that belongs to no request.
        record: makes a graph; another one in tests.
    """

    def __init__(self, filler_page: int, record: Recorder | None = None) -> None:
        self._filler_page = filler_page
        self._record = record or _CudaRecorder()
        self._graphs: dict[tuple[int, int, bool, bool], _Graph] = {}  # by F, P and what rows attend to

    def __call__(self, model: Transformer, step: StepInput, pages: torch.Tensor, log: SpanLog) -> StepOutput:
        """See schedules.WholeStep; the output is valid until the next step runs, the model and pages stay the same."""

        def plain(tensors: StepTensors) -> StepOutput:
            return run_to_end(model.points(tensors, pages, MicroBatchSpans(SpanLog())))

        num_requests = len(step.tokens)
        if num_requests == 0:
            return plain(StepTensors.of(step, model.device))
        with MicroBatchSpans(log).compute("DECODE"):
            filled, is_counted = filled_up(step, self._filler_page)
            assert filled.page_table is not None
            size = (len(filled.tokens), filled.page_table.shape[1], *model.reaches(step))
            graph = self._graphs.get(size)
            if graph is None:
                tensors = StepTensors.fixed(filled, is_counted, model.device, step.position_range())
                output = plain(tensors)
                self._graphs[size] = _Graph(tensors, self._record(lambda: plain(tensors)))
            else:
                graph.tensors.refill(filled, is_counted)
                output = graph.start()
        return StepOutput(output.logits[:num_requests], output.expert_counts)


def can_be_recorded(model: Transformer) -> bool:
    """Whether a CUDA graph can hold a decode step: on a GPU, with nothing in it that the host has to look at."""
    stays_here = all(isinstance(mlp.dispatcher, LocalDispatcher) for mlp in model.moe_mlps)
    reads_on_host = model.ops.reads_on_host or (model.config.indexer is not None and model.ops.chooses_on_host)
    return model.device.type == "cuda" and stays_here and not reads_on_host


def filled_up(step: StepInput, filler_page: int) -> tuple[StepInput, torch.Tensor]:
    """The step with filler rows up to the next size and pages up to the next power of two.

    Returns:
        The step, and [F] int64: 1 for its own rows, 0 for the filler's.
    """
    assert step.page_table is not None
    assert step.kv_tokens is not None
    num_requests, num_pages = step.page_table.shape
    num_rows = graph_size(num_requests)
    num_filler = num_rows - num_requests
    most_pages = max(_LEAST_PAGES, 1 << (num_pages - 1).bit_length())
    filled = replace(
        step,
        tokens=F.pad(step.tokens, (0, num_filler)),
        positions=F.pad(step.positions, (0, num_filler)),
        slots=torch.cat([step.slots, filler_page * PAGE_TOKENS + torch.arange(num_filler)]),
        logit_rows=torch.arange(num_rows),
        page_table=F.pad(step.page_table, (0, most_pages - num_pages, 0, num_filler), value=filler_page),
        kv_tokens=F.pad(step.kv_tokens, (0, num_filler), value=1),
    )
    return filled, F.pad(torch.ones(num_requests, dtype=torch.int64), (0, num_filler))


def graph_size(num_requests: int) -> int:
    """The next number of requests for which there is a graph: 1, 2, 4, 8, 16, 32, 48, 64 …"""
    small = next((size for size in _SMALL_SIZES if size >= num_requests), None)
    return small or -(-num_requests // _SIZE_STEP) * _SIZE_STEP


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
