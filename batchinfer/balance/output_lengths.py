"""Expected output lengths of prompt groups, learnt from finished answers."""

# N requests

from collections.abc import Hashable

import numpy as np


class OutputLengths:
    """Expected output lengths by prompt group: the mean of finished answers, learnt during the run.

    The mean over all groups counts as one more answer of each, so that a new group starts with it. Early on, short
    answers are over-represented; that changes the order of groups little.
    """

    def __init__(self) -> None:
        self._total = np.zeros(2)  # finished answers and their tokens
        self._number_of: dict[Hashable, int] = {}
        self._of_group = np.zeros((16, 2))  # the same, by the group's number

    def number(self, group: Hashable) -> int:
        """Return a group's number, for `expected_each` and `remaining_each`."""
        number = self._number_of.setdefault(group, len(self._number_of))
        if number == len(self._of_group):
            self._of_group = np.concatenate([self._of_group, np.zeros_like(self._of_group)])
        return number

    def finish(self, group: Hashable, num_tokens: int) -> None:
        """Record the length of a complete answer."""
        number = self.number(group)
        self._of_group[number] += (1, num_tokens)
        self._total += (1, num_tokens)

    def expected(self, group: Hashable, max_tokens: int, earlier: float | None = None) -> float:
        """Return the expected length of an answer that has not begun; its limit `max_tokens` while nothing is known.

        Args:
            earlier: mean of the group in an earlier run; it counts as one answer, instead of the mean over all groups.
        """
        if earlier is None:
            if not self._total[0]:
                return float(max_tokens)
            earlier = self._total[1] / self._total[0]
        num, tokens = self._of_group[self._number_of[group]] if group in self._number_of else (0.0, 0.0)
        return float(min(max_tokens, (tokens + earlier) / (num + 1)))

    def expected_each(self, number_N: np.ndarray, max_tokens_N: np.ndarray, earlier_N: np.ndarray) -> np.ndarray:
        """Return `expected` of groups by number, [N]; `earlier_N` is NaN where nothing is known."""
        mean = self._total[1] / self._total[0] if self._total[0] else np.inf
        num_N, tokens_N = self._of_group[number_N].T
        return np.minimum(max_tokens_N, (tokens_N + np.where(np.isnan(earlier_N), mean, earlier_N)) / (num_N + 1))

    def remaining_each(
        self, number_N: np.ndarray, num_generated_N: np.ndarray, max_tokens_N: np.ndarray, earlier_N: np.ndarray
    ) -> np.ndarray:
        """Return the tokens still to come of running answers, [N].

        Short answers end first, so the mean of finished answers is too short. The tokens of running answers are added
        to those of finished ones, divided by the number of finished ones (the mean if answers end at any token with
        equal odds). An answer that has run for more than half of its expectation is expected to run as long again.
        """
        running = np.bincount(number_N, num_generated_N, len(self._of_group))
        num_N, tokens_N = (self._of_group + np.stack([0 * running, running], axis=1))[number_N].T
        mean = (self._total[1] + running.sum()) / self._total[0] if self._total[0] else np.inf
        expected_N = np.where(
            np.isnan(earlier_N),
            (tokens_N + mean) / (num_N + 1),
            self.expected_each(number_N, max_tokens_N, earlier_N),
        )
        remaining_N = np.maximum(expected_N - num_generated_N, num_generated_N)
        return np.minimum(remaining_N, max_tokens_N - num_generated_N)
