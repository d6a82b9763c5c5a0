"""One rank: its model, its pages and its step loop. The controller feeds it requests and takes what is finished."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from batchinfer.config import PAGE_TOKENS, JobConfig
from batchinfer.data.tokenizer import PromptTokenizer
from batchinfer.engine.batch import prefill_step, sampling_rows
from batchinfer.engine.decode import DecodeBatch, take_tokens
from batchinfer.engine.prefill import PrefillQueue
from batchinfer.engine.sequence import Sequence, pages_needed
from batchinfer.kv.pages import PagePool
from batchinfer.model.transformer import StepOutput, Transformer
from batchinfer.records import Completion, ConfigError, Request
from batchinfer.trace import Tracer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FREE_SHARE = 8  # prefill waits until this fraction (1/8) of the decode slots is free, so that its steps are not tiny
MEMORY_SHARE = 0.5  # of the memory that is free after loading, at most, goes to KV pages


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one model step did; a row of stats/steps."""

    step: int
    kind: str
    start_s: float
    duration_s: float
    num_requests: int
    new_tokens: int
    cached_tokens: int
    output_tokens: int
    kv_tokens: int
    pages_used: int


class Feed(Protocol):
    """The controller as the worker sees it."""

    def next_requests(self) -> list[Request]:
        """More requests in the plan's order; empty when there are none left."""

    def take(self, completions: list[Completion], record: StepRecord) -> None:
        """Called after every step; may commit to disk."""

    def stop_requested(self) -> bool:
        """Whether to leave the loop after this step; unfinished requests are dropped and run again later."""


class RankWorker:
    """Runs prefill and decode steps in turn on one rank (colocated)."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: PromptTokenizer,
        *,
        num_pages: int,
        prefill_tokens: int,
        decode_requests: int,
        tracer: Tracer | None = None,
        share_prefixes: bool = True,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._pages = model.new_pages(num_pages)
        self._pool = PagePool(num_pages)
        self._queue = PrefillQueue(self._pool, tokenizer, max_step_tokens=prefill_tokens, share_prefixes=share_prefixes)
        self._decode = DecodeBatch(tokenizer.eos_token_ids)
        self._decode_requests = decode_requests
        self._tracer = tracer or Tracer(enabled=False)
        self._num_steps = 0
        config = model.config
        self.moe_layers = np.array(
            [layer for layer in range(config.num_hidden_layers) if config.is_moe_layer(layer)], int
        )
        self.expert_tokens = {
            phase: np.zeros((model.num_moe_layers, config.n_routed_experts), dtype=np.int64)
            for phase in ("prefill", "decode")
        }

    def run(self, feed: Feed) -> None:
        """Step until the feed is empty and every request has finished, or a stop is requested."""
        exhausted = False
        while not feed.stop_requested():
            if not exhausted and len(self._queue.waiting) < self._decode_requests:
                more = feed.next_requests()
                exhausted = not more
                self._queue.waiting.extend(more)
                continue
            step = self._next_step()
            if step is None:
                return
            feed.take(*step)

    def _next_step(self) -> tuple[list[Completion], StepRecord] | None:
        if self._should_prefill():
            return self._prefill()
        if self._decode.sequences:
            return self._decode_once()
        if self._queue.waiting:
            request = self._queue.waiting[0]
            raise ConfigError(
                f"row {request.key.row} of shard {request.key.shard} needs {pages_needed(request)} KV pages, but the "
                f"budget holds {self._pool.num_pages}; raise cluster.page_bytes or lower max_tokens"
            )
        return None

    def _should_prefill(self) -> bool:
        if self._queue.has_cut_prompt:
            return True
        num_free = self._decode_requests - len(self._decode.sequences)
        enough_free = num_free * FREE_SHARE >= self._decode_requests or not self._decode.sequences
        return enough_free and num_free > 0 and self._queue.can_admit()

    def _prefill(self) -> tuple[list[Completion], StepRecord]:
        start = time.time()
        chunks, copies = self._queue.next_step(self._decode_requests - len(self._decode.sequences))
        with self._tracer.span("prefill", "rank 0", requests=len(chunks)):
            output = self._model.forward(prefill_step(chunks, copies), self._pages)
            self._queue.end_step()
            complete = [chunk.sequence for chunk in chunks if chunk.completes_prompt]
            if complete:
                take_tokens(
                    complete,
                    output.logits,
                    sampling_rows(complete),
                    np.zeros(len(complete), dtype=np.int64),
                    self._tokenizer.eos_token_ids,
                )
        now = time.time()
        for sequence in complete:
            sequence.times.first_token_s = now
        self._decode.add([sequence for sequence in complete if sequence.finish_reason is None])
        record = self._record(
            "prefill",
            start,
            output,
            num_requests=len(chunks),
            new_tokens=sum(chunk.end - chunk.start for chunk in chunks),
            # tokens found in memory are counted where the sequence's own prefill begins
            cached_tokens=sum(chunk.start for chunk in chunks if chunk.sequence.num_prefill_steps == 1),
            output_tokens=len(complete),
            kv_tokens=sum(chunk.end for chunk in chunks),
        )
        return self._finish([sequence for sequence in complete if sequence.finish_reason is not None], now), record

    def _decode_once(self) -> tuple[list[Completion], StepRecord]:
        start = time.time()
        count = len(self._decode.sequences)
        with self._tracer.span("decode", "rank 0", requests=count):
            finished, output, kv_tokens = self._decode.step(self._model, self._pages)
        record = self._record(
            "decode",
            start,
            output,
            num_requests=count,
            new_tokens=count,
            cached_tokens=0,
            output_tokens=count,
            kv_tokens=kv_tokens,
        )
        return self._finish(finished, time.time()), record

    def _record(self, kind: str, start: float, output: StepOutput, **counts: int) -> StepRecord:
        self.expert_tokens[kind] += output.expert_counts.numpy()
        self._num_steps += 1
        return StepRecord(
            step=self._num_steps - 1,
            kind=kind,
            start_s=start,
            duration_s=time.time() - start,
            pages_used=self._pool.num_used,
            **counts,
        )

    def _finish(self, sequences: Iterable[Sequence], now: float) -> list[Completion]:
        completions = []
        for sequence in sequences:
            sequence.times.finished_s = now
            self._queue.release(sequence)
            completions.append(sequence.completion(self._tokenizer))
        return completions


def load_worker(
    job: JobConfig, tokenizer: PromptTokenizer, *, most_tokens: int, largest_tokens: int, tracer: Tracer
) -> RankWorker:
    """Load the model and size the page pool.

    Args:
        most_tokens: KV tokens of all requests together; more pages than these need would never be used.
        largest_tokens: KV tokens of the largest request.

    Raises:
        ModelError: the weights do not fit the config or are damaged.
        ConfigError: the largest request does not fit the page budget.
    """
    with tracer.span("load", "rank 0"):
        model = Transformer.load(Path(job.model.path), dtype=DTYPES[job.model.dtype], backend=job.cluster.backend)
    page_bytes = PAGE_TOKENS * model.config.kv_bytes_per_token(model.dtype.itemsize)
    budget = job.cluster.page_bytes or int(free_memory_bytes() * MEMORY_SHARE)
    # unset: no more than two full decode batches of the largest request, which leaves room for shared prefixes
    useful = (
        most_tokens if job.cluster.page_bytes else min(most_tokens, 2 * job.cluster.decode_requests * largest_tokens)
    )
    num_pages = min(budget // page_bytes, -(-useful // PAGE_TOKENS))
    if num_pages * PAGE_TOKENS < largest_tokens:
        raise ConfigError(
            f"the largest request needs {largest_tokens:,} tokens of KV, but memory for KV pages holds "
            f"{num_pages * PAGE_TOKENS:,}; lower max_tokens, use a smaller dtype or free memory"
        )
    return RankWorker(
        model,
        tokenizer,
        num_pages=num_pages,
        prefill_tokens=job.cluster.prefill_tokens,
        decode_requests=job.cluster.decode_requests,
        tracer=tracer,
    )


def free_memory_bytes() -> int:
    """Memory that can be taken without swapping, within this process's control group (Linux), else a careful guess."""
    try:
        available = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        available = None
    free = int(available[1]) * 1024 if available else 4 * 2**30
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return min(free, max(limit - used, 0))
    except (OSError, ValueError):
        return free  # no control group, or one without a limit ("max")
