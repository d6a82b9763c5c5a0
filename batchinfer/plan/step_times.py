"""Decode steps of an earlier run as a time per step, per request and per KV token, for jobs with other batches.

A small job's steps are mostly short of requests, and give fewer tokens per second than those of a larger job.
"""

# S steps

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from batchinfer.balance.decode_run import DecodeSeries

MIN_STEPS = 20
MIN_SPREAD = 1.5  # largest by smallest batch: steps of one batch say nothing of others


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a decode step by its busiest rank; all ranks step together."""

    step_s: float
    request_s: float
    kv_token_s: float

    def seconds(self, series: DecodeSeries) -> np.ndarray:
        """Return the seconds of one step of each turn of a simulated run, [S]."""
        requests_S = np.array([num_R.max() for num_R in series.num_requests])
        kv_S = np.array([kv_R.max() for kv_R in series.kv_tokens])
        return self.step_s + self.request_s * requests_S + self.kv_token_s * kv_S

    def sentence(self) -> str:
        """Return the times in words."""
        return (
            f"a decode step takes {1e3 * self.step_s:.3g} ms, {1e3 * self.request_s:.3g} ms more per request and "
            f"{1e6 * self.kv_token_s:.3g} ms per 1,000 KV tokens"
        )


def fitted(requests_S: np.ndarray, kv_tokens_S: np.ndarray, seconds_S: np.ndarray) -> StepTimes | None:
    """Return the times that fit recorded steps best, none of them negative; None if the steps are too few or alike.

    Args:
        requests_S, kv_tokens_S: of the rank with most.
        seconds_S: of the slowest rank.
    """
    if len(seconds_S) < MIN_STEPS or requests_S.max() < MIN_SPREAD * max(1, requests_S.min()):
        return None
    columns = np.stack([np.ones(len(seconds_S)), requests_S, kv_tokens_S], axis=1).astype(np.float64)
    best, least = np.zeros(3), np.inf
    for number in (1, 2, 3):
        for chosen in combinations(range(3), number):
            found = np.zeros(3)
            found[list(chosen)] = np.linalg.lstsq(columns[:, chosen], seconds_S, rcond=None)[0]
            error = float(((columns @ found - seconds_S) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = found, error
    # the sum of all steps is as recorded
    return StepTimes(*(best * seconds_S.sum() / (columns @ best).sum()).tolist())


def decode_tokens_per_s(times: StepTimes, series: DecodeSeries, num_tokens: float, num_ranks: int) -> float | None:
    """Return tokens per second of one rank in a job of which a simulated run is a sample; None without decode steps.

    Steps in which every slot is taken stand for all tokens that the sample lacks: a job begins and ends once.

    Args:
        num_tokens: to decode in the whole job.
    """
    tokens_S = np.array([num_R.sum() for num_R in series.num_requests]) * series.num_steps
    seconds_S = times.seconds(series) * series.num_steps
    if not len(tokens_S) or not tokens_S.sum():
        return None
    is_full_S = np.array(series.is_full, dtype=bool)
    bulk_S = is_full_S if is_full_S.any() else np.ones(len(tokens_S), dtype=bool)
    more_tokens = max(0.0, num_tokens - float(tokens_S.sum()))
    seconds = float(seconds_S.sum()) + more_tokens * float(seconds_S[bulk_S].sum() / tokens_S[bulk_S].sum())
    return (float(tokens_S.sum()) + more_tokens) / seconds / num_ranks
