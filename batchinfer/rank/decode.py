"""Decode steps: all running sequences take a token per step, or several, and come and go between steps."""

import time
from dataclasses import dataclass

import numpy as np

from batchinfer.model.sampling import SamplingRows, sample
from batchinfer.model.step import StepHalves, StepInput
from batchinfer.parallel.spans import SpanLog
from batchinfer.rank.batch import StepResult
from batchinfer.rank.context import RankContext
from batchinfer.rank.decode_table import DecodeTable
from batchinfer.rank.drafter import Drafter
from batchinfer.rank.drafts import Drafts
from batchinfer.rank.logit_rules import LogitRules


def decode_step(
    context: RankContext, table: DecodeTable, log: SpanLog, *, in_pairs: bool, drafter: Drafter | None = None
) -> StepResult:
    """Generate one token for every running sequence (there may be none: then only take part), or several.

    Args:
        table: the running sequences; those that finish leave it.
        log: receives what was done when.
        in_pairs: run two micro-batches in turn.
        drafter: of a rank that drafts tokens; what it drafts is run beside the tokens that are due, and a guess that
            is what would have been picked anyway saves a step.
    """
    sequences, kv_lengths = list(table.sequences), table.kv_lengths.copy()
    count = len(sequences)
    drafts = drafter.next_drafts(table) if drafter is not None else None
    due = _due(table, in_pairs=in_pairs) if drafts is None else _due_with(drafts, table)
    rules = context.rules.begin(due.rules)
    output = context.model.forward(due.step, context.pages, context.schedule, log)
    finished, taken = [], np.ones(count, dtype=np.int64)
    if count:
        sampled = sample(output.logits, due.sampling, due.num_new, context.model.logit_ops, rules.changes())
        if drafts is None:
            finished = table.accept(sampled)
        else:
            finished, taken = table.accept_drafted(sampled, drafts)
        if drafter is not None:
            if drafter.keeps_step:
                rows = slice(None) if drafts is None else drafts.rows_of(taken)
                assert output.states is not None
                drafter.keep(sequences, kv_lengths + taken - 1, taken, output.states[rows], sampled.tokens[rows])
            drafter.forget(finished)
            has_ended = np.array([sequence.finish_reason is not None for sequence in sequences])
            drafter.note_step(drafts, taken, has_ended)
    num_new = int(taken.sum())
    return StepResult(
        output,
        time.time(),
        finished=finished,
        num_requests=count,
        new_tokens=num_new,
        output_tokens=num_new,
        kv_tokens=int((kv_lengths * taken + taken * (taken - 1) // 2).sum()),
        largest_kv_tokens=int(kv_lengths.max(initial=0)),
        drafted_tokens=0 if drafts is None else int(drafts.counts.sum()),
        accepted_tokens=num_new - count,
    )


@dataclass(frozen=True, slots=True)
class _Due:
    """A step to run, and how its rows are sampled."""

    step: StepInput | StepHalves
    sampling: SamplingRows
    num_new: np.ndarray  # index of each row's token in its output
    rules: list[tuple[int, LogitRules]]


def _due(table: DecodeTable, *, in_pairs: bool) -> _Due:
    step = table.next_halves() if in_pairs else table.next_step()
    return _Due(step, table.sampling, table.num_new, table.rules)


def _due_with(drafts: Drafts, table: DecodeTable) -> _Due:
    return _Due(
        table.next_drafted_step(drafts),
        table.sampling.take(drafts.of_row),
        table.num_new[drafts.of_row] + drafts.depths,
        [(int(drafts.first_rows[row]), rules) for row, rules in table.rules],
    )
