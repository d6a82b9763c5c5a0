"""Drafting of the next tokens of a rank's running requests where it pays, which each step measures.

Drafting changes only the speed of a rank: a guess counts if the model, run at its place, picks the same token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from typing import Any

import numpy as np
import torch

from batchinfer.model.fused.speculation import Limits, RequestTensors, Speculated, speculate
from batchinfer.model.mtp import Draft
from batchinfer.model.transformer import Transformer
from batchinfer.rank.context import RankContext
from batchinfer.rank.draft_rule import DraftRule
from batchinfer.rank.draft_states import MOST_REQUESTS, DraftStates
from batchinfer.rank.drafted_table import DraftedTable
from batchinfer.rank.drafts import Drafts
from batchinfer.rank.sequence import Sequence

_MOST_PROMPTS = 16
MOST_STEPS = 8  # of one call
_MICROSECONDS = 2000  # after which a call begins no further step, so that the rank reads its messages


class Drafter:
    """The drafting of one rank.

    Args:
        draft: runs the model's layer for multi-token prediction.
        rule: chooses the number of tokens to draft.
        stack: runs steps with guesses in one call, see speculate; None: they run operation by operation.
    """

    def __init__(self, model: Transformer, draft: Draft, rule: DraftRule | None = None, stack: Any = None) -> None:
        self._model, self._draft, self._stack = model, draft, stack
        self._rule = rule or DraftRule()
        self._states = DraftStates(model)
        self._with_slots: RequestTensors | None = None  # of the requests whose slots are in their table
        self._keeps = True  # the states of the next step
        self._drafted_s = 0.0  # seconds of drafting for the next step
        self._ended_s: float | None = None  # when the latest decode step had ended; None: something else ran since

    @classmethod
    def of(cls, context: RankContext, rule: DraftRule | None = None) -> Drafter:
        """Return the fastest drafter for this rank."""
        return cls(context.model, context.draft, rule, context.stack)

    def wants_prompts(self, num_requests: int) -> bool:
        """Return whether prompts should keep their last states if this number of requests runs, starts and waits."""
        return 0 < num_requests <= _MOST_PROMPTS and self._rule.may_pay(num_requests)

    def choose(self, num_requests: int) -> int:
        """Return the guesses for each of `num_requests` in the next step; 0 if a step without guesses is better."""
        self._drafted_s = 0.0
        if not 0 < num_requests <= MOST_REQUESTS:
            self._keeps, self._ended_s = False, None
            return 0
        num_guesses = self._rule.choose(num_requests)
        self._keeps = num_guesses > 0 or self._rule.may_pay(num_requests)
        if not self._keeps:
            self._ended_s = None
        return num_guesses

    def speculate(self, table: DraftedTable, pages: torch.Tensor, num_guesses: int) -> Speculated | None:
        """Run several steps of all requests in one call; return None if they have to run step by step."""
        if self._stack is None or not table.are_told_tokens_alone:
            return None
        tensors = table.tensors
        if tensors is not self._with_slots:
            table.slots[:] = self._states.slots_of(table.sequences)
            self._with_slots = tensors
        least_running = (len(table.sequences) + 1) // 2
        limits = Limits(num_guesses, MOST_STEPS, _MICROSECONDS, least_running)
        return speculate(self._stack, self._model, tensors, self._states.tensors, pages, limits)

    def next_drafts(self, table: DraftedTable, num_guesses: int) -> Drafts | None:
        """Return guesses for the next step; None if no request has states to draft from."""
        started_s, count = time.perf_counter(), len(table.sequences)
        most = np.minimum(table.most_guesses, num_guesses)
        most[~self._states.are_known(table.sequences, table.kv_lengths - 1)] = 0
        chosen = np.flatnonzero(most)
        if len(chosen) == 0:
            return None
        if len(chosen) == count:
            given = self._states.next_input(table.sequences, table.sampling, table.num_new, num_guesses)
        else:
            sequences = [table.sequences[row] for row in chosen.tolist()]
            given = self._states.next_input(sequences, table.sampling.take(chosen), table.num_new[chosen], num_guesses)
        tokens = np.zeros((count, num_guesses), dtype=np.int64)
        tokens[chosen] = self._draft(self._model, given, self._states.pages).numpy().T
        self._drafted_s = time.perf_counter() - started_s
        return Drafts(tokens, most)

    @property
    def keeps_step(self) -> bool:
        """Whether to keep the states of the step for which `choose` was called last."""
        return self._keeps

    def keep(
        self,
        sequences: ListOf[Sequence],
        ends: np.ndarray,
        counts: np.ndarray,
        states: torch.Tensor,
        tokens: np.ndarray,
    ) -> None:
        """Keep a step's states, see DraftStates.keep."""
        self._states.keep(sequences, ends, counts, states, tokens)

    def pause(self) -> None:
        """Exclude the time until the next decode step from measurement, as another step runs."""
        self._ended_s = None

    def note_step(self, num_requests: int) -> None:
        """Take in a decode step without guesses that has ended."""
        if (seconds := self._since_last()) is not None:
            self._rule.note_step(num_requests, seconds)

    def note_drafts(self, drafts: Drafts, taken: np.ndarray, finished: np.ndarray) -> None:
        """Take in a decode step with guesses that has ended.

        Args:
            taken: [S] new tokens of each request.
            finished: [S] bool, whether each request has ended: guesses after its last token were not checked.
        """
        right = taken - 1
        tried, depths = np.where(finished, right, np.minimum(right + 1, drafts.counts)), range(drafts.tokens.shape[1])
        self._rule.note_right(*([int((counts > depth).sum()) for depth in depths] for counts in (tried, right)))
        self._note(len(taken), drafts.tokens.shape[1], 1, len(drafts.of_row), self._drafted_s)

    def note_speculated(self, num_requests: int, ran: Speculated) -> None:
        """Take in a call of several steps with guesses that has ended."""
        self._rule.note_right(ran.tried, ran.right)
        self._note(num_requests, len(ran.tried), ran.num_steps, ran.num_rows, ran.draft_s)

    def drop(self, sequences: Iterable[Sequence]) -> None:
        """Drop the states of sequences that left this rank."""
        self._states.drop(sequences)

    def _note(self, num_requests: int, num_guesses: int, num_steps: int, num_rows: int, draft_s: float) -> None:
        seconds = self._since_last()
        self._rule.note_drafts(num_requests, num_guesses, draft_s / num_steps)
        if seconds is not None:
            self._rule.note_drafted_step(num_rows // num_steps, (seconds - draft_s) / num_steps)

    def _since_last(self) -> float | None:
        before_s, self._ended_s = self._ended_s, time.perf_counter()
        return None if before_s is None else self._ended_s - before_s
