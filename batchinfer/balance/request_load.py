"""The cost of a request in a decode step, in KV tokens that a query attends to."""

from dataclasses import dataclass
from math import inf

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """The cost of everything except attention, and the growth of attention with the KV.

    Attention costs one per token, unless an indexer chooses keys.
    """

    row: float = 0.0  # without attention
    most_keys: float = inf  # that a query attends to
    scored_key: float = 0.0  # each key of a query that sees more, of which the best are chosen

    def of(self, kv_tokens: np.ndarray) -> np.ndarray:
        """Return the loads of requests by their KV tokens, [N] float64."""
        scored_N = np.where(kv_tokens > self.most_keys, kv_tokens * self.scored_key, 0.0)
        return self.row + np.minimum(kv_tokens, self.most_keys) + scored_N


ONE_PER_TOKEN = RequestLoad()
