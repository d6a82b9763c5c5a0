"""States of running requests from which the layer for multi-token prediction drafts their next tokens.

The layer has separate keys. They are computed from a request's latest states when tokens are drafted for it, and kept
from then on in separate pages. A request's slot has

    states, tokens   of its latest CONTEXT places, each at its number modulo CONTEXT
    pages            the keys of places from `base` on; when they are full they restart with the latest CONTEXT

A place is a position of the text: the model's normed state there and the next token. The newest place is that of the
last but one of the tokens.
"""

# S requests, R places, D hidden

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListOf

import numpy as np
import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.fused.speculation import KeptTensors
from batchinfer.model.mtp import DraftInput
from batchinfer.model.sampling import SamplingRows
from batchinfer.model.transformer import Transformer
from batchinfer.rank.drafts import depths_of
from batchinfer.rank.sequence import Sequence

CONTEXT = 32  # places whose states are kept
MOST_REQUESTS = 64  # number of slots; with more requests running nothing is kept
_PAGES = 8  # of a slot


class DraftStates:
    """The slots, and the pages [num_pages, 64, row] of the layer."""

    def __init__(self, model: Transformer) -> None:
        self._slot_of: dict[Sequence, int] = {}
        self._states = torch.zeros(MOST_REQUESTS * CONTEXT, model.config.hidden_size, dtype=model.dtype)
        self._tokens = torch.zeros(MOST_REQUESTS * CONTEXT, dtype=torch.int64)
        # by slot: places [first, end) are known without a gap, [base, filled) have keys
        marks = np.zeros((4, MOST_REQUESTS), dtype=np.int64)
        self._first, self._end, self._base, self._filled = marks
        self._num_pages = _PAGES
        width = model.config.attention.row_width
        self.pages = torch.zeros(MOST_REQUESTS * _PAGES, PAGE_TOKENS, width, dtype=model.dtype)
        self.tensors = KeptTensors(self._states, self._tokens, torch.from_numpy(marks), self.pages)

    def keep(
        self,
        sequences: ListOf[Sequence],
        ends: np.ndarray,
        counts: np.ndarray,
        states: torch.Tensor,
        tokens: np.ndarray,
    ) -> None:
        """Keep the newest places of at most MOST_REQUESTS running sequences.

        Args:
            ends: [S] the position after the last place of each sequence.
            counts: [S] number of places of each sequence, at most CONTEXT.
            states: [R, D] in the order of sequences and places.
            tokens: [R] int64, the token after each place.
        """
        slots, starts = self.slots_of(sequences), ends - counts
        begins_anew = self._end[slots] != starts
        if begins_anew.any():
            self._first[slots[begins_anew]], self._filled[slots[begins_anew]] = starts[begins_anew], -1
        self._end[slots] = ends
        if len(tokens) == len(slots):  # most steps: one place each
            places = starts
        else:
            slots, places = np.repeat(slots, counts), np.repeat(starts, counts) + depths_of(counts)
        rows = torch.from_numpy(slots * CONTEXT + places % CONTEXT)
        self._states[rows] = states
        self._tokens[rows] = torch.from_numpy(tokens)

    def drop(self, sequences: Iterable[Sequence]) -> None:
        """Drop the states of sequences that left this rank."""
        for sequence in sequences:
            self._slot_of.pop(sequence, None)

    def are_known(self, sequences: ListOf[Sequence], ends: np.ndarray) -> np.ndarray:
        """Return [S] bool, whether the places of each sequence are known up to `ends`."""
        slots = np.array([self._slot_of.get(sequence, -1) for sequence in sequences], dtype=np.int64)
        return (slots >= 0) & (self._end[slots] == ends)

    def next_input(
        self, sequences: ListOf[Sequence], sampling: SamplingRows, num_new: np.ndarray, num_guesses: int
    ) -> DraftInput:
        """Return rows for the places of some sequences that have no keys yet, and for further guesses; all get keys."""
        slots = np.array([self._slot_of[sequence] for sequence in sequences], dtype=np.int64)
        ends, filled, base = self._end[slots], self._filled[slots], self._base[slots]
        oldest = np.maximum(self._first[slots], ends - CONTEXT)
        begins = (filled < oldest) | (ends - base + (num_guesses - 1) > self._num_pages * PAGE_TOKENS)
        if begins.any():
            base, filled = np.where(begins, oldest, base), np.where(begins, oldest, filled)
            self._base[slots] = base
        self._filled[slots] = ends
        counts = ends - filled
        last_rows = counts.cumsum() - 1
        # [N] rows with a state, then [B] rows for each further guess
        of_state = np.repeat(np.arange(len(slots)), counts)
        places = np.arange(len(of_state)) + (ends - 1 - last_rows)[of_state]
        rows = torch.from_numpy(slots[of_state] * CONTEXT + places % CONTEXT)
        further = [ends + guess for guess in range(num_guesses - 1)]
        positions = np.concatenate([places, *further])
        request = np.concatenate([of_state, *[np.arange(len(slots))] * len(further)])
        in_pages, first_pages = positions - base[request], slots[request] * self._num_pages
        num_pages = int((ends - base).max() + num_guesses - 2) // PAGE_TOKENS + 1
        return DraftInput(
            states=self._states[rows],
            tokens=self._tokens[rows],
            last_rows=torch.from_numpy(last_rows),
            positions=torch.from_numpy(positions),
            places=torch.from_numpy(in_pages),
            slots=torch.from_numpy(first_pages * PAGE_TOKENS + in_pages),
            page_table=torch.from_numpy(first_pages[:, None] + np.arange(num_pages)),
            sampling=sampling,
            num_new=num_new,
            num_guesses=num_guesses,
        )

    def slots_of(self, sequences: ListOf[Sequence]) -> np.ndarray:
        """Return [S] the slots of these sequences; give a free slot to each sequence without one."""
        missing = [sequence for sequence in sequences if sequence not in self._slot_of]
        free = sorted(set(range(MOST_REQUESTS)) - set(self._slot_of.values())) if missing else []
        for sequence, slot in zip(missing, free, strict=False):
            self._slot_of[sequence], self._end[slot] = slot, -1
        return np.array([self._slot_of[sequence] for sequence in sequences], dtype=np.int64)
