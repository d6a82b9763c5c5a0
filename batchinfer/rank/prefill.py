"""Prefill steps: the tokens that the queue has packed run, and prompts that are complete get their first token."""

from __future__ import annotations

import time

import numpy as np

from batchinfer.model.sampling import sample
from batchinfer.model.step import StepHalves, StepInput, StepOutput
from batchinfer.parallel.spans import SpanLog
from batchinfer.rank.batch import Chunk, StepResult, prefill_step, sampling_rows, take_token
from batchinfer.rank.context import RankContext
from batchinfer.rank.micro_batches import halve_copies, halve_prefill
from batchinfer.rank.prefill_queue import PrefillQueue
from batchinfer.rank.prompt_pages import PromptPages
from batchinfer.rank.sequence import Sequence
from batchinfer.rank.stored_prefixes import StoredPrefixes
from batchinfer_kernels.transfer import wait_for


class Prefill:
    """The prefill steps of a rank, which learns from them how long tokens take."""

    def __init__(
        self, context: RankContext, queue: PrefillQueue, pages: PromptPages, stored: StoredPrefixes | None
    ) -> None:
        self._context, self._queue, self._pages, self._stored = context, queue, pages, stored

    def step(self, num_slots: int | None, log: SpanLog, *, in_pairs: bool) -> StepResult:
        """Run the next step (it may be empty: then only take part).

        Args:
            num_slots: prompts that may begin; None: no prompt of this rank may run.
        """
        chunks, copies = self._queue.next_step(num_slots) if num_slots is not None else ([], {})
        computing_s = time.time()
        output, complete = self._run(chunks, copies, log, in_pairs=in_pairs)
        if self._stored is not None:
            wait_for(self._context.model.device)
            self._stored.note_step(chunks, time.time() - computing_s)
        self._pages.end_step()
        if complete:
            num_new = np.zeros(len(complete), dtype=np.int64)
            sampled = sample(output.logits, sampling_rows(complete), num_new, self._context.model.logit_ops)
            for row, sequence in enumerate(complete):
                take_token(sequence, sampled, row, self._context.eos_token_ids)
        done_s = time.time()
        for sequence in complete:
            sequence.times.first_token_s = done_s
        return StepResult(
            output,
            done_s,
            finished=[sequence for sequence in complete if sequence.finish_reason is not None],
            started=[sequence for sequence in complete if sequence.finish_reason is None],
            num_requests=len(chunks),
            new_tokens=sum(chunk.num_tokens for chunk in chunks),
            # tokens found in memory are counted where the sequence's own prefill begins
            cached_tokens=sum(chunk.start for chunk in chunks if chunk.sequence.num_prefill_steps == 1),
            output_tokens=len(complete),
            kv_tokens=sum(chunk.end for chunk in chunks),
        )

    def _run(
        self, chunks: list[Chunk], copies: dict[int, int], log: SpanLog, *, in_pairs: bool
    ) -> tuple[StepOutput, list[Sequence]]:
        """Run the chunks; returns the output and the sequences whose prompt is complete, one per row of logits."""
        step: StepInput | StepHalves = prefill_step(chunks, copies)
        if in_pairs:
            first, second = halve_prefill(chunks)
            chunks = first + second
            halves = zip((first, second), halve_copies(copies, first), strict=True)
            step = StepHalves(*(prefill_step(*half) for half in halves))
        output = self._context.model.forward(step, self._context.pages, self._context.schedule, log)
        return output, [chunk.sequence for chunk in chunks if chunk.completes_prompt]
