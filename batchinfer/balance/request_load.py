"""What a request costs a decode step, in KV tokens that a query attends to."""

from dataclasses import dataclass
from math import inf

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """The cost of all but attention, and how attention grows with the KV: by one per token, unless keys are chosen."""

    row: float = 0.0  # beside attention
    most_keys: float = inf  # that a query attends to
    scored_key: float = 0.0  # each key of a query that sees more, of which the best are chosen

    def of(self, kv_tokens: np.ndarray) -> np.ndarray:
        """[N] float64 loads of requests, by their KV tokens."""
        scored_N = np.where(kv_tokens > self.most_keys, kv_tokens * self.scored_key, 0.0)
        return self.row + np.minimum(kv_tokens, self.most_keys) + scored_N


ONE_PER_TOKEN = RequestLoad()
