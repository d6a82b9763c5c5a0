"""The evenness of decode as one number, for steps of a recorded or simulated run."""

# S entries, each of one or more steps that are alike

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Balance:
    """Work of the busiest rank by the mean, and the lower bound of this ratio for any plan."""

    max_over_mean: float
    bound: float


EVEN = Balance(1.0, 1.0)


def balance_of_steps(
    busiest_S: np.ndarray, mean_S: np.ndarray, at_least_S: np.ndarray, num_steps_S: np.ndarray | float = 1.0
) -> Balance | None:
    """Return the busiest rank's load by the mean, each step counted with its load; None if there was no load.

    In a step some rank has at least the mean, and at least the largest request: the bound holds for any assignment of
    the running requests.

    Args:
        busiest_S: KV tokens or requests of the rank with most.
        mean_S: mean over all decode ranks, also those without a request.
        at_least_S: the least that one rank must have: KV tokens of the largest request; the mean of requests, rounded
            up.
        num_steps_S: steps of each entry.
    """
    whole = float((np.asarray(mean_S) * num_steps_S).sum())
    if whole == 0:
        return None
    least_S = np.maximum(mean_S, at_least_S)
    return Balance(float((busiest_S * num_steps_S).sum()) / whole, float((least_S * num_steps_S).sum()) / whole)
