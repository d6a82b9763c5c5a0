"""Planned and finished tokens of a run and its speed, from its files and from the heartbeats of live sessions."""

# U units

from typing import Any

import numpy as np

from batchinfer.run.heartbeat import SessionStatus


def token_counts(
    plan_U2: np.ndarray, share_left_U: np.ndarray, durable: np.ndarray, workers: list[SessionStatus]
) -> dict[str, int]:
    """Return total and finished prompt and output tokens, by the names of Status.

    Args:
        plan_U2: planned prompt and output tokens per unit, see controller/planned_tokens.py.
        share_left_U: share of each unit's requests without a durable result.
        durable: [2] prompt and output tokens of requests with a durable result.
        workers: live sessions.
    """
    in_flight = np.zeros(2)
    for figures in work_figures(workers):
        in_flight += (figures["prompt_tokens_in_flight"], figures["output_tokens_in_flight"])
    planned = durable + (plan_U2 * np.maximum(share_left_U, 0.0)[:, None]).sum(axis=0)
    done = np.minimum(durable + in_flight, planned)  # tokens that were recomputed because pages were short count once
    (prompts, outputs), (prompts_done, outputs_done) = planned.round().astype(int), done.round().astype(int)
    return {
        "prompt_tokens": int(prompts),
        "prompt_tokens_done": int(prompts_done),
        "output_tokens": int(outputs),
        "output_tokens_done": int(outputs_done),
    }


def work_figures(workers: list[SessionStatus]) -> list[dict[str, Any]]:
    """Return the progress figures of working sessions (controller/work_progress.py); planning sessions have none."""
    return [figures for session in workers for figures in session.under_way if "own_tokens" in figures]


def tokens_per_s(workers: list[SessionStatus]) -> float | None:
    """Return the sum of all sessions' speeds; None if no session knows its speed yet."""
    known = [figures["tokens_per_s"] for figures in work_figures(workers) if figures["tokens_per_s"] is not None]
    return sum(known) if known else None


def left_s(workers: list[SessionStatus]) -> float | None:
    """Return the seconds until the run is done, from each session's own estimate for working alone.

    Return None if a session has no estimate.
    """
    alone_s = [figures["alone_s"] for figures in work_figures(workers)]
    return 1 / sum(1 / seconds for seconds in alone_s) if alone_s and all(alone_s) else None
