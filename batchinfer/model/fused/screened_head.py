"""Tokens of decode steps from the states behind the last layer, without the logits of all words.

Products in 8 bits rule out nearly all words, and the others' logits are exact, so tokens are those from all logits.
That goes for greedy rows and for those that draw from few words (top_k, or min_p without top_p). Words that a grammar
forbids are left out. Rows that need all logits (other draws, log-probabilities, biases and penalties) get them. The
head in 8 bits takes half the memory of one in bfloat16, a quarter of one in float32; it is made when some steps have
shown that the job wants it.
"""

# S rows, D hidden, V vocabulary, K words that some row's token may be

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from batchinfer.model.logit_changes import LogitChanges
from batchinfer.model.sampling import Sampled, SamplingRows, sample
from batchinfer_kernels.cpu.packed import Packed
from batchinfer_kernels.cpu.screened import Screen, can_screen

if TYPE_CHECKING:
    from batchinfer.model.transformer import Transformer

LEAST_VALUES = 2**22  # of a head that is worth screening: reading a smaller one takes less time than Python here
BYTES_BESIDE = 16  # of each word: scale, norm, error and start
STEPS_BEFORE = 16  # steps with all logits before the screen is made; making it costs what it saves in them
LEAST_BESIDE = 16  # rows next to rows that need all logits: for these the whole head is read anyway
MOST_TOP_K = 256  # of which the groups with the best words are a small part of all
TRIED_ROWS = 1024  # after which screening ends if most of the rows were not certain; greedy and drawn ones apart


class ScreenedHead:
    """The screened output head of one model.

    Args:
        model: on a CPU.
        head: the model's, one that `can_screen`.
    """

    def __init__(self, model: Transformer, head: Packed) -> None:
        self._model, self._head = model, head
        self._screen: Screen | None = None
        self._num_steps = 0
        self._is_off = np.zeros(2, dtype=np.bool_)  # for greedy rows; for drawn ones
        self._num_rows, self._num_certain = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)

    @classmethod
    def of(cls, model: Transformer) -> ScreenedHead | None:
        """Return the head of a model; None if screening is not possible here, or not worth its memory."""
        head = model.weights.lm_head
        return cls(model, head) if isinstance(head, Packed) and cls.num_bytes(model) else None

    @staticmethod
    def num_bytes(model: Transformer) -> int:
        """Return the memory of a model's head in 8 bits; 0: the head is not screened."""
        head = model.weights.lm_head
        if model.stream is not None or not isinstance(head, Packed) or not can_screen(head):
            return 0
        num_values = head.num_columns * head.depth
        return num_values + BYTES_BESIDE * head.num_columns if num_values >= LEAST_VALUES else 0

    def choose_rows(self, rows: SamplingRows, changed: Iterable[int]) -> np.ndarray | None:
        """Return the rows of the next step that are screened, ascending; None if the step takes all logits.

        Args:
            rows: of the step.
            changed: numbers of rows in which tokens have biases or penalties.
        """
        is_drawn = rows.temperature > 0
        has_few = ((rows.top_k > 0) & (rows.top_k <= MOST_TOP_K)) | ((rows.min_p > 0) & (rows.top_p >= 1))
        is_screened = (~is_drawn | has_few) & (rows.num_logprobs < 0) & ~self._is_off[is_drawn.astype(np.int64)]
        is_screened[list(changed)] = False
        count = int(is_screened.sum())
        if not count or (count < len(is_screened) and count < LEAST_BESIDE):
            return None
        self._num_steps += 1
        if self._num_steps <= STEPS_BEFORE:
            return None
        if self._screen is None:
            self._screen = Screen.of(self._head)
            self._is_off[:] = self._screen is None
        return None if self._screen is None else np.flatnonzero(is_screened)

    def sample(
        self,
        states_SD: torch.Tensor,
        screened: np.ndarray,
        rows: SamplingRows,
        positions: np.ndarray,
        changes: LogitChanges,
    ) -> Sampled:
        """Pick one token per row, as `sample` does from the logits of these states.

        Args:
            screened: of `choose_rows`.
        """
        assert self._screen is not None
        positions, is_all = np.asarray(positions), len(screened) == len(states_SD)
        some = rows if is_all else rows.take(screened)
        columns_SK, logits_SK, is_certain = self._screen.candidates(
            states_SD if is_all else states_SD[torch.from_numpy(screened)],
            torch.from_numpy(some.temperature),
            torch.from_numpy(some.top_k),
            torch.from_numpy(some.top_p),
            torch.from_numpy(some.min_p),
            changes.allowed_in(screened),
        )
        certain = is_certain.numpy()
        self._note(certain, some.temperature > 0)
        places = sample(logits_SK, some, positions[screened], self._model.logit_ops).tokens
        tokens = columns_SK.numpy()[np.arange(len(places)), places]
        if is_all and certain.all():
            return Sampled(tokens, certain)
        found = screened[certain]
        others = np.setdiff1d(np.arange(len(states_SD)), found)
        exact = sample(
            self._model.ops.linear(states_SD[torch.from_numpy(others)], self._head, float32_out=True),
            rows.take(others),
            positions[others],
            self._model.logit_ops,
            changes.of_rows(others, len(states_SD)),
        )
        both = Sampled.joined([Sampled(tokens[certain], certain[certain]), exact])
        return both.take(np.argsort(np.concatenate([found, others])))

    def _note(self, certain: np.ndarray, is_drawn: np.ndarray) -> None:
        for kind, of_kind in enumerate((~is_drawn, is_drawn)):
            self._num_rows[kind] += int(of_kind.sum())
            self._num_certain[kind] += int(certain[of_kind].sum())
        self._is_off |= (self._num_rows >= TRIED_ROWS) & (2 * self._num_certain < self._num_rows)
        if self._is_off.all():
            self._screen = None
