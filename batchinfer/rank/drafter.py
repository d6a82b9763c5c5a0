"""Drafts the next tokens of a rank's running requests where that pays, and learns from each step whether it does.

Only the speed of a rank depends on it: a guess counts where the model, run behind it, picks the same token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as ListOf

import numpy as np
import torch

from batchinfer.model.mtp import Draft
from batchinfer.model.transformer import Transformer
from batchinfer.rank.decode_table import DecodeTable
from batchinfer.rank.draft_rule import DraftRule
from batchinfer.rank.draft_states import MOST_REQUESTS, DraftStates
from batchinfer.rank.drafts import Drafts
from batchinfer.rank.sequence import Sequence

_MOST_PROMPTS = 16


class Drafter:
    """Of one rank.

    Args:
        draft: runs the model's layer for multi-token prediction.
        rule: says how many tokens to draft.
    """

    def __init__(self, model: Transformer, draft: Draft, rule: DraftRule | None = None) -> None:
        self._model, self._draft = model, draft
        self._rule = rule or DraftRule()
        self._states = DraftStates(model)
        self._keeps = True  # the states of the coming step
        self._drafted_s = 0.0  # for the step to come
        self._ended_s: float | None = None  # when the latest decode step had ended; None: something else ran since

    def wants_prompts(self, num_requests: int) -> bool:
        """Whether prompts are to leave the states of their last tokens when so many requests run, start and wait."""
        return num_requests <= _MOST_PROMPTS

    def next_drafts(self, table: DecodeTable) -> Drafts | None:
        """Guesses for the coming step; None: a plain one is better, or nothing is known yet."""
        self._drafted_s, started_s = 0.0, time.perf_counter()
        count = len(table.sequences)
        self._keeps = 0 < count <= MOST_REQUESTS and self._rule.may_pay(count)
        num_guesses = self._rule.choose(count) if self._keeps else 0
        if num_guesses == 0:
            return None
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
        self._rule.note_drafts(count, num_guesses, self._drafted_s)
        return Drafts(tokens, most)

    @property
    def keeps_step(self) -> bool:
        """Whether the states of the step for which `next_drafts` was asked are wanted."""
        return self._keeps

    def keep(
        self,
        sequences: ListOf[Sequence],
        ends: np.ndarray,
        counts: np.ndarray,
        states: torch.Tensor,
        tokens: np.ndarray,
    ) -> None:
        """See DraftStates."""
        self._states.keep(sequences, ends, counts, states, tokens)

    def pause(self) -> None:
        """Something else than decode steps runs."""
        self._ended_s = None

    def note_step(self, drafts: Drafts | None, taken: np.ndarray, finished: np.ndarray) -> None:
        """A decode step has ended.

        Args:
            taken: [S] new tokens of each request.
            finished: [S] bool, whether it has ended: guesses behind its last token were not looked at.
        """
        before_s, self._ended_s = self._ended_s, time.perf_counter()
        num_rows = len(taken) if drafts is None else len(drafts.of_row)
        self._rule.note_step(num_rows, None if before_s is None else self._ended_s - before_s - self._drafted_s)
        if drafts is None:
            return
        right = taken - 1
        for num_tried, num_right in zip(np.where(finished, right, drafts.counts).tolist(), right.tolist(), strict=True):
            self._rule.note_right(num_tried, num_right)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """They do not run here any more."""
        self._states.forget(sequences)
