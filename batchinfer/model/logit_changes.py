"""Changes of a step's logits before tokens are picked, made for all rows at once.

First biases, then penalties, then tokens that may not come, which neither brings back: so the tokens are those of
vLLM's sampler, which forbids first.
"""

# S rows of logits, V vocabulary, C changed logits, M rows of which some tokens may not come, W = ceil(V / 32) words

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from batchinfer_kernels.transfer import to_device

Bitmask = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Single logits of a step, none twice, with a number for each.

    rows, tokens: [C] int64.
    values: [C] float32.
    """

    rows: np.ndarray
    tokens: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, rows: list[int], tokens: list[np.ndarray], values: list[np.ndarray]) -> TokenValues:
        """Join the tokens and values of several rows, which are all different.

        Args:
            values: of each row one for each token, or in all rows one for all its tokens.
        """
        if not rows:
            return NO_VALUES
        counts = [len(part) for part in tokens]
        is_for_all = all(len(part) == 1 for part in values)
        joined = np.concatenate(values)
        return cls(np.repeat(rows, counts), np.concatenate(tokens), np.repeat(joined, counts) if is_for_all else joined)

    def of_rows(self, place_S: np.ndarray) -> TokenValues:
        """Return the values of some rows, renumbered.

        Args:
            place_S: [S] each row's new number; rows with a negative one are left out.
        """
        places = place_S[self.rows]
        kept = places >= 0
        return TokenValues(places[kept], self.tokens[kept], self.values[kept])

    def change(self, logits_SV: torch.Tensor, by: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """Replace each of the logits by `by(logits, values)`, in place."""
        if len(self.rows):
            columns = (self.rows, self.tokens, self.values)
            rows, tokens, values = (to_device(torch.from_numpy(column), logits_SV.device) for column in columns)
            logits_SV[rows, tokens] = by(logits_SV[rows, tokens], values)


NO_VALUES = TokenValues(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32))


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """Changes of some rows of a step.

    biases: added to logits.
    repetition_penalties: negative logits are multiplied with them, others divided by them.
    frequency_penalties, presence_penalties: subtracted from logits.
    masked_rows: [M] int64, rows of which some tokens may not come, none twice.
    allowed: [M, W] uint32, tokens that may come, as in `apply_token_bitmask`.
    """

    biases: TokenValues = NO_VALUES
    repetition_penalties: TokenValues = NO_VALUES
    frequency_penalties: TokenValues = NO_VALUES
    presence_penalties: TokenValues = NO_VALUES
    masked_rows: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    allowed: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.uint32))

    @property
    def are_none(self) -> bool:
        return not len(self.masked_rows) and not any(len(values.rows) for values in self._of_tokens)

    @property
    def _of_tokens(self) -> tuple[TokenValues, ...]:
        return self.biases, self.repetition_penalties, self.frequency_penalties, self.presence_penalties

    def apply(self, logits_SV: torch.Tensor, apply_token_bitmask: Bitmask) -> None:
        """Change the logits of the step in place.

        Args:
            apply_token_bitmask: the operation of this name.
        """
        self.biases.change(logits_SV, torch.add)
        self.repetition_penalties.change(logits_SV, _repeated)
        self.frequency_penalties.change(logits_SV, torch.sub)
        self.presence_penalties.change(logits_SV, torch.sub)
        if len(self.masked_rows):
            allowed = torch.from_numpy(self.allowed.view(np.int32))
            rows = to_device(torch.from_numpy(self.masked_rows), logits_SV.device)
            apply_token_bitmask(logits_SV, rows, to_device(allowed, logits_SV.device))

    def allowed_in(self, rows: np.ndarray) -> torch.Tensor | None:
        """Return [len(rows), W] int32, the tokens that may come in these rows; None if all may come in all of them."""
        places = np.flatnonzero(np.isin(self.masked_rows, rows))
        if not len(places):
            return None
        if np.array_equal(self.masked_rows, rows):
            allowed = self.allowed
        else:
            allowed = np.full((len(rows), self.allowed.shape[1]), 2**32 - 1, dtype=np.uint32)
            allowed[np.searchsorted(rows, self.masked_rows[places])] = self.allowed[places]
        return torch.from_numpy(allowed.view(np.int32))

    def of_rows(self, rows: np.ndarray, num_rows: int) -> LogitChanges:
        """Return the changes of these rows, which become rows 0, 1, … of a step.

        Args:
            num_rows: of the step that these changes are for.
        """
        place_S = np.full(num_rows, -1)
        place_S[rows] = np.arange(len(rows))
        kept = place_S[self.masked_rows] >= 0
        return LogitChanges(
            self.biases.of_rows(place_S),
            self.repetition_penalties.of_rows(place_S),
            self.frequency_penalties.of_rows(place_S),
            self.presence_penalties.of_rows(place_S),
            masked_rows=place_S[self.masked_rows[kept]],
            allowed=self.allowed[kept],
        )


def _repeated(logits_C: torch.Tensor, penalties_C: torch.Tensor) -> torch.Tensor:
    return torch.where(logits_C < 0, logits_C * penalties_C, logits_C / penalties_C)
