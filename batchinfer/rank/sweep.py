"""Sweeps of a rank whose weights are streamed: all that can run passes through the layers together.

A sweep has one decode step for every running sequence, and prefill steps for all prompts for which there is room. Each
step of a sweep is reported as a step; the sweep's time is divided by the time that each step computed.

If requests wait for others to end, a sweep takes only the prompts whose products last as long as its reads: they come
for nothing beside these, while prompts of many requests at once would leave the disk idle, and again when all of these
requests end together.

Ranks that exchange rows of experts sweep together. Each reads its own experts, and a rank with fewer steps of a kind
than another one runs empty steps.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from batchinfer.model.sampling import Sampled
from batchinfer.model.sweeps import run_sweep
from batchinfer.model.weight_stream import LayerStream
from batchinfer.parallel.spans import SpanLog
from batchinfer.rank.admission import Admission
from batchinfer.rank.batch import StepResult
from batchinfer.rank.context import RankContext
from batchinfer.rank.decode import choose_drafts, decode_parts, empty_step, end_step
from batchinfer.rank.drafted_table import DraftedTable
from batchinfer.rank.drafter import Drafter
from batchinfer.rank.prefill import Prefill
from batchinfer.rank.step_vote import Kind


class SweptPart(NamedTuple):
    """A step of a sweep that has ended; all parts of decode are one."""

    kind: Kind
    ran: StepResult
    seconds: float  # in which it computed
    log: SpanLog
    expert_rows_L: np.ndarray  # [L] of this rank's experts


class PromptPace:
    """The prompts that a sweep can compute while its weights are read, as measured in the sweeps before it."""

    def __init__(self, stream: LayerStream, step_tokens: int) -> None:
        self._stream, self._step_tokens = stream, step_tokens
        self._tokens, self._seconds = 0, 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Add a prefill step to the measurements of a sweep."""
        self._tokens += num_tokens
        self._seconds += seconds

    @property
    def num_steps(self) -> int:
        """Number of prefill steps; one at least, and in the first sweep."""
        read_s = self._stream.sweep_read_s
        if not self._tokens or not read_s:
            return 1
        return max(1, int(read_s * self._tokens / max(self._seconds, 1e-9) / self._step_tokens))


def run_parts(
    context: RankContext,
    prefill: Prefill,
    running: DraftedTable,
    admission: Admission,
    goes_on: Callable[[], bool],
    pace: PromptPace,
    drafter: Drafter | None = None,
) -> list[SweptPart]:
    """Run one sweep; return its steps, none if it was left because the job ends.

    Args:
        goes_on: asked between layers. A sweep that is left has changed the queue: nothing may run after it.
        pace: bounds the prompts if the context spreads them.
        drafter: drafts tokens for the last requests, which do not fill a step; None: this rank does not.

    Raises:
        ModelError: weights cannot be read.
    """
    assert context.model.stream is not None
    most = context.num_sweep_steps
    if context.spreads_prompts:
        most = min(most, pace.num_steps)
    prompts = prefill.take_steps(lambda: admission.num_to_admit or 0, most=most)
    drafts = None if drafter is None else choose_drafts(context, running, drafter)
    answers = decode_parts(context, running, drafts)
    most_prompts, most_answers = map(max, zip(*context.mesh.agree([len(prompts), len(answers)]), strict=True))
    prompts += [prefill.empty_part() for _ in range(most_prompts - len(prompts))]
    steps = [*(part.step for part in prompts), *(part.step for part in answers)]
    steps += [running.next_step(slice(0, 0)) for _ in range(most_answers - len(answers))]
    logs = [SpanLog() for _ in steps]

    def should_leave() -> bool:
        # ranks are told one after the other, and all must leave between the same layers
        return any(leaves for (leaves,) in context.mesh.agree([not goes_on()]))

    swept = run_sweep(context.model, context.model.stream, steps, context.pages, logs, should_leave)
    ended: list[SweptPart] = []
    for part, log in zip(prompts, logs, strict=False):
        if (one := next(swept, None)) is None:
            return []
        ended.append(SweptPart(Kind.PREFILL, prefill.end(part, one), one.seconds, log, one.expert_rows_L))
        if part.chunks:
            pace.note(len(part.step.tokens), one.seconds)
    sampled, counts, states, seconds = [], None, None, 0.0
    rows_L = np.zeros(context.model.num_moe_layers, dtype=np.int64)
    for number in range(most_answers):
        if (one := next(swept, None)) is None:
            return []
        counts = one.output.expert_counts if counts is None else counts + one.output.expert_counts
        seconds, rows_L = seconds + one.seconds, rows_L + one.expert_rows_L
        if number < len(answers):
            sampled.append(answers[number].sample(one.output.logits, context.model.logit_ops))
            states = one.output.states
    if counts is not None:
        log = SpanLog([span for each in logs[len(prompts) :] for span in each.spans])
        if drafter is not None and prompts:
            drafter.pause()  # the sweep's time is not that of its answers
        ran = empty_step(counts)
        if sampled:
            ran = end_step(running, Sampled.joined(sampled), counts, states, drafter, drafts)
        ended.append(SweptPart(Kind.DECODE, ran, seconds, log, rows_L))
    return ended
