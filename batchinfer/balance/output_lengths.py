"""Expected output lengths of prompt groups, learnt from finished answers."""

# N requests

from array import array
from collections.abc import Hashable

import numpy as np


class OutputLengths:
    """Expected output lengths by prompt group: the mean of finished answers, learnt during the run.

    The mean over all groups counts as one more answer of each, so that a new group starts with it. Early on, short
    answers are over-represented; that changes the order of groups little.
    """

    def __init__(self) -> None:
        self._num_answers = self._num_tokens = 0  # of finished answers
        self._number_of: dict[Hashable, int] = {}
        # by the group's number: finished answers and their tokens
        self._answers_of, self._tokens_of = array("d"), array("d")

    def number(self, group: Hashable) -> int:
        """Return a group's number, for `expected_each` and `remaining_each`."""
        number = self._number_of.setdefault(group, len(self._answers_of))
        if number == len(self._answers_of):
            self._answers_of.append(0.0)
            self._tokens_of.append(0.0)
        return number

    def finish(self, group: Hashable, num_tokens: int) -> None:
        """Record the length of a complete answer."""
        number = self.number(group)
        self._answers_of[number] += 1
        self._tokens_of[number] += num_tokens
        self._num_answers += 1
        self._num_tokens += num_tokens

    def expected(self, group: Hashable, max_tokens: int, earlier: float | None = None) -> float:
        """Return the expected length of an answer that has not begun; its limit `max_tokens` while nothing is known.

        Args:
            earlier: mean of the group in an earlier run; it counts as one answer, instead of the mean over all groups.
        """
        if earlier is None:
            if not self._num_answers:
                return float(max_tokens)
            earlier = self._num_tokens / self._num_answers
        number = self._number_of.get(group)
        if number is not None:
            earlier = (self._tokens_of[number] + earlier) / (self._answers_of[number] + 1)
        return float(min(max_tokens, earlier))

    def expected_each(self, number_N: np.ndarray, max_tokens_N: np.ndarray, earlier_N: np.ndarray) -> np.ndarray:
        """Return `expected` of groups by number, [N]; `earlier_N` is NaN where nothing is known."""
        mean = self._num_tokens / self._num_answers if self._num_answers else np.inf
        num_N, tokens_N = _values(self._answers_of)[number_N], _values(self._tokens_of)[number_N]
        return np.minimum(max_tokens_N, (tokens_N + np.where(np.isnan(earlier_N), mean, earlier_N)) / (num_N + 1))

    def remaining_each(
        self, number_N: np.ndarray, num_generated_N: np.ndarray, max_tokens_N: np.ndarray, earlier_N: np.ndarray
    ) -> np.ndarray:
        """Return the tokens still to come of running answers, [N].

        Short answers end first, so the mean of finished answers is too short. The tokens of running answers are added
        to those of finished ones, divided by the number of finished ones (the mean if answers end at any token with
        equal odds). An answer that has run for more than half of its expectation is expected to run as long again.
        """
        running = np.bincount(number_N, num_generated_N, len(self._answers_of))
        num_N, tokens_N = _values(self._answers_of)[number_N], (_values(self._tokens_of) + running)[number_N]
        mean = (self._num_tokens + running.sum()) / self._num_answers if self._num_answers else np.inf
        expected_N = np.where(
            np.isnan(earlier_N),
            (tokens_N + mean) / (num_N + 1),
            self.expected_each(number_N, max_tokens_N, earlier_N),
        )
        remaining_N = np.maximum(expected_N - num_generated_N, num_generated_N)
        return np.minimum(remaining_N, max_tokens_N - num_generated_N)


def _values(column: "array[float]") -> np.ndarray:
    """Return a view of a growing column; it must be gone when the column grows."""
    return np.frombuffer(column) if column else np.zeros(0)
