"""Sweeps of a rank whose weights are streamed: all that can run passes through the layers together.

A sweep has one decode step for every running sequence, and prefill steps for all prompts for which there is room. Each
step of a sweep is reported as a step; the sweep's time is divided by the time that each step computed.
"""

from collections.abc import Callable
from typing import NamedTuple

from batchinfer.model.sweeps import run_sweep
from batchinfer.parallel.spans import SpanLog
from batchinfer.rank.admission import Admission
from batchinfer.rank.batch import StepResult
from batchinfer.rank.context import RankContext
from batchinfer.rank.decode import decode_parts, end_parts
from batchinfer.rank.drafted_table import DraftedTable
from batchinfer.rank.prefill import Prefill
from batchinfer.rank.step_vote import Kind


class SweptPart(NamedTuple):
    """A step of a sweep that has ended; all parts of decode are one."""

    kind: Kind
    ran: StepResult
    seconds: float  # in which it computed
    log: SpanLog


def run_parts(
    context: RankContext,
    prefill: Prefill,
    running: DraftedTable,
    admission: Admission,
    goes_on: Callable[[], bool],
) -> list[SweptPart]:
    """Run one sweep; return its steps, none if it was left because the job ends.

    Args:
        goes_on: asked between layers. A sweep that is left has changed the queue: nothing may run after it.

    Raises:
        ModelError: weights cannot be read.
    """
    assert context.model.stream is not None
    prompts = prefill.take_steps(
        lambda: admission.num_to_admit or 0, is_idle=not running.sequences, most=context.num_sweep_steps
    )
    answers = decode_parts(context, running)
    steps = [part.step for part in prompts] + [part.step for part in answers]
    logs = [SpanLog() for _ in steps]
    swept = run_sweep(context.model, context.model.stream, steps, context.pages, logs, lambda: not goes_on())
    ended: list[SweptPart] = []
    for part, log in zip(prompts, logs, strict=False):
        if (one := next(swept, None)) is None:
            return []
        ended.append(SweptPart(Kind.PREFILL, prefill.end(part, one), one.seconds, log))
    sampled, counts, seconds = [], None, 0.0
    for answer in answers:
        if (one := next(swept, None)) is None:
            return []
        sampled.append(answer.sample(one.output.logits, context.model.logit_ops))
        counts = one.output.expert_counts if counts is None else counts + one.output.expert_counts
        seconds += one.seconds
    if counts is not None:
        log = SpanLog([span for each in logs[len(prompts) :] for span in each.spans])
        ended.append(SweptPart(Kind.DECODE, end_parts(running, sampled, counts), seconds, log))
    return ended
