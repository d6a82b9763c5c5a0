"""Decode steps: every running sequence takes one token or several; sequences join and leave between steps."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from batchinfer.clock import unix_s
from batchinfer.model.fused.graph_size import GraphSize
from batchinfer.model.sampling import LogitOps, Sampled, SamplingRows, sample
from batchinfer.model.step import StepHalves, StepInput
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog
from batchinfer.rank.batch import StepResult
from batchinfer.rank.context import RankContext
from batchinfer.rank.drafted_table import DraftedTable
from batchinfer.rank.drafter import Drafter
from batchinfer.rank.drafts import Drafts
from batchinfer.rank.logit_rules import LogitRules, StepRules
from batchinfer.rank.sequence import Sequence


def decode_step(
    context: RankContext,
    table: DraftedTable,
    log: SpanLog,
    *,
    in_pairs: bool,
    drafter: Drafter | None = None,
    graph: GraphSize | None = None,
) -> StepResult:
    """Generate one token or several for every running sequence; without sequences only take part in the group's step.

    Args:
        table: the running sequences; those that finish leave it.
        log: receives the spans of the step.
        in_pairs: run two micro-batches in turn.
        drafter: drafts tokens, if this rank does; guesses run in the same step as the due tokens, and a guess that
            equals the sampled token saves a step.
        graph: run the step as a graph of this size; None: as plain operations.
    """
    drafts = None
    if drafter is not None and (num_guesses := drafter.choose(len(table.sequences))):
        ran = _speculate(context, table, log, drafter, num_guesses)
        if ran is not None:
            return ran
        drafts = drafter.next_drafts(table, num_guesses)
    if not in_pairs and drafts is None and context.model.device.type == "cuda":
        table.arrange()
    due = _due(table, in_pairs=in_pairs) if drafts is None else _due_with(drafts, table)
    rules = context.rules.begin(due.rules)
    schedule = context.schedule
    if graph is not None:
        assert context.graphs is not None
        assert drafts is None, "steps with guesses are not recorded"
        schedule = context.graphs.schedule(graph)
    head, screened = context.screened_head, None
    if head is not None and table.sequences:
        screened = head.choose_rows(due.sampling, (row for row, rules in due.rules if rules.has_values))
    step = due.step if screened is None else due.step.without_logits
    output = context.model.forward(step, context.pages, schedule, log)
    if not table.sequences:
        return empty_step(output.expert_counts)
    if head is not None and screened is not None:
        assert output.states is not None, "a step without logits returns its states"
        sampled = head.sample(output.states, screened, due.sampling, due.num_new, rules.changes())
    else:
        sampled = sample(output.logits, due.sampling, due.num_new, context.model.logit_ops, rules.changes())
    return end_step(table, sampled, output.expert_counts, output.states, drafter, drafts)


def end_step(
    table: DraftedTable,
    sampled: Sampled,
    expert_counts: torch.Tensor,
    states: torch.Tensor | None,
    drafter: Drafter | None,
    drafts: Drafts | None,
) -> StepResult:
    """Give all running sequences the tokens of a step, and the drafter its states.

    Args:
        states: of each row; None: the drafter does not keep them.
        drafts: guesses that ran in the step; None: there were none.
    """
    sequences, kv_lengths = table.sequences, table.kv_lengths.copy()
    finished, taken = [], np.ones(len(sequences), dtype=np.int64)
    if drafts is None:
        finished = table.accept(sampled)
    else:
        finished, taken = table.accept_drafted(sampled, drafts)
    if drafter is not None:
        if drafter.keeps_step:
            rows = slice(None) if drafts is None else drafts.rows_of(taken)
            assert states is not None
            drafter.keep(sequences, kv_lengths + taken - 1, taken, states[rows], sampled.tokens[rows])
            _note(drafter, drafts, sequences, taken)
        drafter.drop(finished)
    num_drafted = 0 if drafts is None else int(drafts.counts.sum())
    return _result(expert_counts, finished, kv_lengths, taken, num_drafted)


class DecodePart(NamedTuple):
    """A step of a sweep for some rows of the table."""

    step: StepInput
    sampling: SamplingRows
    num_new: np.ndarray
    rules: StepRules

    def sample(self, logits: torch.Tensor, ops: LogitOps) -> Sampled:
        """Return the next token of each row."""
        return sample(logits, self.sampling, self.num_new, ops, self.rules.changes())


def choose_drafts(context: RankContext, table: DraftedTable, drafter: Drafter) -> Drafts | None:
    """Return guesses for the next sweep if they pay; they run only if one step has all running sequences."""
    count = len(table.sequences)
    num_guesses = drafter.choose(count if count <= context.decode_requests else 0)
    return drafter.next_drafts(table, num_guesses) if num_guesses else None


def decode_parts(context: RankContext, table: DraftedTable, drafts: Drafts | None) -> list[DecodePart]:
    """Return the next step of all running sequences as steps of at most `decode_requests` rows; one with guesses."""
    if drafts is not None:
        due = _due_with(drafts, table)
        assert isinstance(due.step, StepInput)
        return [DecodePart(due.step, due.sampling, due.num_new, context.rules.begin(due.rules))]
    parts = []
    for first in range(0, len(table.sequences), context.decode_requests):
        rows = slice(first, first + context.decode_requests)
        numbers = np.arange(len(table.sequences))[rows]
        rules = [(row - first, rules) for row, rules in table.rules if first <= row < rows.stop]
        parts.append(
            DecodePart(
                table.next_step(rows), table.sampling.take(numbers), table.num_new[rows], context.rules.begin(rules)
            )
        )
    return parts


def empty_step(expert_counts: torch.Tensor) -> StepResult:
    """Return the result of a step in which only other ranks of the group had sequences."""
    return _result(expert_counts, [], np.zeros(0, dtype=np.int64), np.ones(0, dtype=np.int64), 0)


def _speculate(
    context: RankContext, table: DraftedTable, log: SpanLog, drafter: Drafter, num_guesses: int
) -> StepResult | None:
    """Run several steps with guesses in one call, which count as one step; return None if this is not possible."""
    kv_lengths = table.kv_lengths.copy()
    with MicroBatchSpans(log).compute("DECODE"):
        ran = drafter.speculate(table, context.pages, num_guesses)
    if ran is None:
        return None
    finished, taken = table.accept_steps(ran.outcome)
    drafter.drop(finished)
    drafter.note_speculated(len(taken), ran)
    num_dropped = sum(row[0] for row in ran.outcome) - int(taken.sum())  # after a stop string
    return _result(ran.expert_counts, finished, kv_lengths, taken, ran.num_drafted, sum(ran.right) - num_dropped)


def _result(
    expert_counts: torch.Tensor,
    finished: list[Sequence],
    kv_lengths: np.ndarray,
    taken: np.ndarray,
    num_drafted: int,
    num_accepted: int | None = None,
) -> StepResult:
    """Return the result of a step that has just ended.

    Args:
        kv_lengths: [S] KV tokens of each request before the step.
        taken: [S] tokens that each request took.
    """
    count, num_new = len(taken), int(taken.sum())
    return StepResult(
        expert_counts,
        unix_s(),
        finished=finished,
        num_requests=count,
        new_tokens=num_new,
        output_tokens=num_new,
        kv_tokens=int((kv_lengths * taken + taken * (taken - 1) // 2).sum()),
        largest_kv_tokens=int(kv_lengths.max(initial=0)),
        drafted_tokens=num_drafted,
        accepted_tokens=num_new - count if num_accepted is None else num_accepted,
    )


def _note(drafter: Drafter, drafts: Drafts | None, sequences: list[Sequence], taken: np.ndarray) -> None:
    """Report the step that has just ended to the drafter."""
    if drafts is None:
        drafter.note_step(len(sequences))
    else:
        drafter.note_drafts(drafts, taken, np.array([sequence.finish_reason is not None for sequence in sequences]))


@dataclass(frozen=True, slots=True)
class _Due:
    """The next step, and the sampling of its rows."""

    step: StepInput | StepHalves
    sampling: SamplingRows
    num_new: np.ndarray  # index of each row's token in its output
    rules: list[tuple[int, LogitRules]]


def _due(table: DraftedTable, *, in_pairs: bool) -> _Due:
    step = table.next_halves() if in_pairs else table.next_step()
    return _Due(step, table.sampling, table.num_new, table.rules)


def _due_with(drafts: Drafts, table: DraftedTable) -> _Due:
    return _Due(
        table.next_drafted_step(drafts),
        table.sampling.take(drafts.of_row),
        table.num_new[drafts.of_row] + drafts.depths,
        [(int(drafts.first_rows[row]), rules) for row, rules in table.rules],
    )
