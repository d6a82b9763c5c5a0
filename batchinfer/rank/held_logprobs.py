"""Log-probabilities of the last steps' tokens, until their sequences get them: a token costs no Python."""

# S running sequences, R sequences that want log-probabilities, A most alternatives that one of them wants

import numpy as np

from batchinfer.model.sampling import Sampled
from batchinfer.records import TokenLogprobs

NO_PLACE = -1  # of a sequence that wants no log-probabilities


def add_logprobs(
    logprobs: TokenLogprobs,
    tokens: np.ndarray,
    of_tokens: np.ndarray,
    top_tokens: np.ndarray,
    top_logprobs: np.ndarray,
) -> None:
    """Add tokens with their log-probabilities and at least as many alternatives as `logprobs` has.

    Args:
        tokens: [N] integers.
        of_tokens: [N] float64.
        top_tokens: [N, A] integers.
        top_logprobs: [N, A] float64.
    """
    logprobs.add(
        tokens.astype(np.int32).tobytes(),
        of_tokens.tobytes(),
        top_tokens[:, : logprobs.num_top].astype(np.int32).tobytes(),
        top_logprobs[:, : logprobs.num_top].tobytes(),
    )


class HeldLogprobs:
    """Log-probabilities of up to `num_steps` steps.

    Sequences join and leave at nearly every step: their values stay in one row, and only the row numbers move.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._places = np.zeros(0, dtype=np.int64)  # [S]
        self._logprobs = np.zeros((0, num_steps))  # [R, num_steps]
        self._top_tokens = np.zeros((0, num_steps, 0), dtype=np.int64)  # [R, num_steps, A]
        self._top_logprobs = np.zeros((0, num_steps, 0))  # [R, num_steps, A]

    def add(self, num_top: list[int | None]) -> None:
        """Append sequences by their numbers of alternatives; None for a sequence without log-probabilities."""
        wanted = np.array([NO_PLACE if count is None else count for count in num_top], dtype=np.int64)
        rows = np.flatnonzero(wanted >= 0)
        places = np.full(len(wanted), NO_PLACE)
        if len(rows):
            free = np.setdiff1d(np.arange(len(self._logprobs)), self._places)
            if len(free) < len(rows) or wanted.max() > self._top_tokens.shape[2]:
                self._grow(len(self._logprobs) + max(len(rows) - len(free), 0), int(wanted.max()))
                free = np.setdiff1d(np.arange(len(self._logprobs)), self._places)
            places[rows] = free[: len(rows)]
        self._places = np.concatenate([self._places, places])

    def keep(self, rows: np.ndarray) -> None:
        """Keep only these rows, in this order."""
        self._places = self._places[rows]

    def put(self, step: int, sampled: Sampled) -> None:
        """Hold a step's log-probabilities."""
        if sampled.logprobs is None or sampled.top_tokens is None or sampled.top_logprobs is None:
            return
        rows = np.flatnonzero(self._places >= 0)
        places, num_top = self._places[rows], sampled.top_tokens.shape[1]
        self._logprobs[places, step] = sampled.logprobs[rows]
        self._top_tokens[places, step, :num_top] = sampled.top_tokens[rows]
        self._top_logprobs[places, step, :num_top] = sampled.top_logprobs[rows]

    def give(self, row: int, steps: slice, tokens: np.ndarray, logprobs: TokenLogprobs) -> None:
        """Copy the held log-probabilities of a sequence's tokens in these steps to `logprobs`.

        Args:
            row: the sequence.
            tokens: [number of steps] its tokens.
        """
        place = self._places[row]
        held = self._logprobs[place, steps], self._top_tokens[place, steps], self._top_logprobs[place, steps]
        add_logprobs(logprobs, tokens, *held)

    def _grow(self, num_places: int, num_top: int) -> None:
        num_places, num_top = max(num_places, 2 * len(self._logprobs)), max(num_top, self._top_tokens.shape[2])
        for name in ("_logprobs", "_top_tokens", "_top_logprobs"):
            held = getattr(self, name)
            grown = np.zeros((num_places, self._num_steps, num_top)[: held.ndim], dtype=held.dtype)
            grown[tuple(map(slice, held.shape))] = held
            setattr(self, name, grown)
