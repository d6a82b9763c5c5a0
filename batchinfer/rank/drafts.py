"""Guesses for the next tokens of running requests, and the rows of the step that tries them."""

# S running requests, J guesses, R = S + all guesses that are tried

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Drafts:
    """The guesses of one step, whose rows are ordered by request."""

    tokens: np.ndarray  # [S, J] int64
    counts: np.ndarray  # [S] int64, number of guesses that are tried; 0 for requests without guesses

    @cached_property
    def of_row(self) -> np.ndarray:
        """[R] the request of each row."""
        return np.repeat(np.arange(len(self.counts)), self.counts + 1)

    @cached_property
    def depths(self) -> np.ndarray:
        """[R] number of the guess that a row runs, from 1 in each request; 0: the token that was sampled."""
        return depths_of(self.counts + 1)

    @cached_property
    def first_rows(self) -> np.ndarray:
        """[S] the first row of each request."""
        return (self.counts + 1).cumsum() - self.counts - 1

    @property
    def are_tried(self) -> np.ndarray:
        """[S, J] bool, whether each draft is tried."""
        return np.arange(self.tokens.shape[1]) < self.counts[:, None]

    def rows_of(self, taken: np.ndarray) -> np.ndarray:
        """Return the first `taken` [S] rows of each request."""
        return np.repeat(self.first_rows, taken) + depths_of(taken)


def depths_of(counts: np.ndarray) -> np.ndarray:
    """Return 0 .. count - 1 for each count, concatenated."""
    return np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)
