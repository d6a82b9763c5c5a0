"""Prefill steps: run the tokens that the queue has packed, and sample the first token of each complete prompt."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from batchinfer.clock import unix_s
from batchinfer.config import PAGE_TOKENS
from batchinfer.model.sampling import sample
from batchinfer.model.step import StepHalves, StepInput, StepOutput
from batchinfer.model.sweeps import SweptStep
from batchinfer.parallel.spans import SpanLog
from batchinfer.rank.batch import (
    Chunk,
    StepResult,
    prefill_step,
    sampling_rows,
    state_counts,
    take_scores,
    take_token,
)
from batchinfer.rank.context import RankContext
from batchinfer.rank.draft_states import CONTEXT
from batchinfer.rank.drafter import Drafter
from batchinfer.rank.logit_rules import StepRules
from batchinfer.rank.prefill_queue import PrefillQueue
from batchinfer.rank.prompt_pages import PromptPages
from batchinfer.rank.sequence import Sequence
from batchinfer.rank.stored_prefixes import StoredPrefixes
from batchinfer_kernels.transfer import wait_for


class PrefillPart(NamedTuple):
    """A step of a sweep, and its chunks in the order of its rows."""

    step: StepInput
    chunks: list[Chunk]


class Prefill:
    """The prefill steps of a rank."""

    def __init__(
        self,
        context: RankContext,
        queue: PrefillQueue,
        pages: PromptPages,
        stored: StoredPrefixes | None,
        drafter: Drafter | None = None,
    ) -> None:
        self._context, self._queue, self._pages, self._stored = context, queue, pages, stored
        self._drafter = drafter

    def step(self, num_slots: int | None, log: SpanLog, *, in_pairs: bool) -> StepResult:
        """Run the next step; without chunks only take part in the group's step.

        Args:
            num_slots: prompts that may begin; None: no prompt of this rank may run.
        """
        if self._drafter is not None:
            self._drafter.pause()
        chunks, copies = self._queue.next_step(num_slots) if num_slots is not None else ([], {})
        computing_s = unix_s()
        step, chunks = self._built(chunks, copies, in_pairs=in_pairs)
        rules = self._begin_rules(chunks)
        output = self._context.model.forward(step, self._context.pages, self._context.schedule, log)
        if self._stored is not None:
            wait_for(self._context.model.device)
        return self._end(chunks, rules, output, unix_s() - computing_s)

    def take_steps(self, num_slots: Callable[[], int], *, most: int) -> list[PrefillPart]:
        """Take the next steps, all to run in one sweep.

        If no prompt can begin, partly computed ones run to their ends: the slots and pages that they hold would be of
        no use until running requests end.

        Args:
            num_slots: returns the number of prompts that may begin, those that these steps complete not counted.
            most: number of steps.
        """
        parts: list[PrefillPart] = []
        num_going_on = 0
        while len(parts) < most:
            num_free = num_slots() - num_going_on
            if not self._queue.can_run(num_free, must_go_on=True):
                break
            chunks, copies = self._queue.next_step(num_free)
            if not chunks:
                break
            parts.append(self._part(chunks, copies))
            num_going_on += sum(
                chunk.completes_prompt and chunk.sequence.request.goes_on_after_prefill for chunk in chunks
            )
        while self._context.prompts_alone and (chunks := self._queue.end_open()):
            parts.append(self._part(chunks, {}))
        return parts

    def empty_part(self) -> PrefillPart:
        """Return a step without tokens, for a sweep in which another rank has more steps."""
        return self._part([], {})

    def _part(self, chunks: list[Chunk], copies: dict[int, int]) -> PrefillPart:
        step, chunks = self._built(chunks, copies, in_pairs=False)
        assert isinstance(step, StepInput)
        return PrefillPart(step, chunks)

    def end(self, part: PrefillPart, swept: SweptStep) -> StepResult:
        """Give the sequences of a step of a sweep their results."""
        return self._end(part.chunks, self._begin_rules(part.chunks), swept.output, swept.seconds)

    def _begin_rules(self, chunks: list[Chunk]) -> StepRules:
        """Return the rules of the prompts that get their first token."""
        answering = [chunk.sequence for chunk in chunks if chunk.is_sampled]
        return self._context.rules.begin([(row, one.rules) for row, one in enumerate(answering) if one.rules])

    def _end(self, chunks: list[Chunk], rules: StepRules, output: StepOutput, compute_s: float) -> StepResult:
        """Keep blocks and scores of a step, and sample the first token of each complete prompt."""
        if output.scores is not None:
            take_scores(chunks, output.scores)
        complete = [chunk.sequence for chunk in chunks if chunk.completes_prompt]
        if self._stored is not None:
            self._stored.note_step(chunks, compute_s)
        self._pages.end_step()
        answering = [sequence for sequence in complete if sequence.request.sampling.max_tokens]
        if answering:
            num_new = np.zeros(len(answering), dtype=np.int64)
            ops = self._context.model.logit_ops
            sampled = sample(output.logits, sampling_rows(answering), num_new, ops, rules.changes())
            for row, sequence in enumerate(answering):
                take_token(sequence, sampled, row, self._context.eos_token_ids)
            self._keep_states(answering, chunks, output)
        done_s = unix_s()
        for sequence in complete:
            sequence.times.first_token_s = done_s
            if not sequence.request.sampling.max_tokens and sequence.finish_reason is None:
                sequence.finish_reason = "length"
        return StepResult(
            output.expert_counts,
            done_s,
            finished=[sequence for sequence in complete if sequence.finish_reason is not None],
            started=[sequence for sequence in complete if sequence.finish_reason is None],
            num_requests=len(chunks),
            new_tokens=sum(chunk.num_tokens for chunk in chunks),
            # tokens found in memory are counted where the sequence's own prefill begins
            cached_tokens=sum(chunk.start for chunk in chunks if chunk.sequence.num_prefill_steps == 1),
            output_tokens=len(answering),
            kv_tokens=sum(chunk.end for chunk in chunks),
            largest_kv_tokens=max((chunk.end for chunk in chunks), default=0),
            attention_work=sum(chunk.attention_work for chunk in chunks),
        )

    def _built(
        self, chunks: list[Chunk], copies: dict[int, int], *, in_pairs: bool
    ) -> tuple[StepInput | StepHalves, list[Chunk]]:
        """Return the step of these chunks, and the chunks in the order of its rows."""
        requests = [chunk.sequence.request for chunk in chunks]
        most = max((request.num_alternatives for request in requests if request.score_from), default=0)
        if in_pairs:
            first, second = _halve_chunks(chunks)
            halves = zip((first, second), _halve_copies(copies, first), strict=True)
            return StepHalves(*(prefill_step(*half, num_alternatives=most) for half in halves)), first + second
        return prefill_step(chunks, copies, num_alternatives=most, num_states=self._num_states), chunks

    @property
    def _num_states(self) -> int:
        """Number of last tokens of a prompt whose states are kept for drafting."""
        if self._drafter is None or self._context.model.stream is not None:
            return 0  # in sweeps tokens are drafted when few requests are left: their prompts ran long before
        num_requests = min(self._context.decode_requests, self._pages.num_running + len(self._queue.waiting))
        return CONTEXT if self._drafter.wants_prompts(num_requests) else 0

    def _keep_states(self, answering: list[Sequence], chunks: list[Chunk], output: StepOutput) -> None:
        """Keep the last states of the prompts that got their first token here, for drafting."""
        num_states = self._num_states
        if self._drafter is None or not num_states:
            return
        assert output.states is not None
        counts = state_counts(chunks, num_states)
        counts, ends = counts[counts > 0], np.array([sequence.num_prompt_tokens for sequence in answering])
        tokens = [
            [*sequence.request.token_ids, sequence.token_ids[0]][end - count + 1 :]
            for sequence, end, count in zip(answering, ends.tolist(), counts.tolist(), strict=True)
        ]
        states = output.states[len(output.states) - int(counts.sum()) :]
        self._drafter.keep(answering, ends, counts, states, np.concatenate(tokens))
        self._drafter.drop(sequence for sequence in answering if sequence.finish_reason is not None)


def _halve_chunks(chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
    """Return the earlier and the later half of a packed step; one prompt may be cut between them.

    A token's attention work is the number of tokens it attends to. Chunks keep their order, so whatever a chunk shares
    with an earlier one is written by the half that runs first.

    Returns:
        Micro-batch 1 (earlier) and micro-batch 0 (later); either may be empty.
    """
    done = np.concatenate([np.zeros(1, dtype=np.int64), *(np.arange(c.start, c.end) + 1 for c in chunks)]).cumsum()
    num_first = int(np.argmin(np.abs(done - done[-1] / 2)))  # rows whose work is nearest to half of all
    first: list[Chunk] = []
    second: list[Chunk] = []
    for chunk in chunks:
        cut = min(max(chunk.start + num_first, chunk.start), chunk.end)
        num_first -= cut - chunk.start
        if cut > chunk.start:
            first.append(Chunk(chunk.sequence, chunk.start, cut))
        if cut < chunk.end:
            second.append(Chunk(chunk.sequence, cut, chunk.end))
    return first, second


def _halve_copies(copies: dict[int, int], first: list[Chunk]) -> tuple[dict[int, int], dict[int, int]]:
    """Give each copy (KV slot to fill -> slot to copy from) to the micro-batch in which its sequence begins."""
    first_pages = {page for chunk in first for page in chunk.sequence.pages}
    earlier = {to: source for to, source in copies.items() if to // PAGE_TOKENS in first_pages}
    return earlier, {to: source for to, source in copies.items() if to not in earlier}
