"""Tokens of a run that are planned and done, and how fast it goes: from its files and from what living sessions say."""

# U units

from typing import Any

import numpy as np

from batchinfer.run.heartbeat import Sign


def token_counts(
    plan_U2: np.ndarray, share_left_U: np.ndarray, durable: np.ndarray, workers: list[Sign]
) -> dict[str, int]:
    """Prompt and output tokens, by the names of Status.

    Args:
        plan_U2: see controller/planned_tokens.py.
        share_left_U: of each unit's requests, those without a durable result.
        durable: [2] tokens of the requests that have one.
        workers: sessions that are alive.
    """
    in_flight = np.zeros(2)
    for figures in work_figures(workers):
        in_flight += (figures["prompt_tokens_in_flight"], figures["output_tokens_in_flight"])
    planned = durable + (plan_U2 * np.maximum(share_left_U, 0.0)[:, None]).sum(axis=0)
    done = np.minimum(durable + in_flight, planned)  # what was computed again for want of pages counts once
    (prompts, outputs), (prompts_done, outputs_done) = planned.round().astype(int), done.round().astype(int)
    return {
        "prompt_tokens": int(prompts),
        "prompt_tokens_done": int(prompts_done),
        "output_tokens": int(outputs),
        "output_tokens_done": int(outputs_done),
    }


def work_figures(workers: list[Sign]) -> list[dict[str, Any]]:
    """What meters of work say (controller/work_progress.py); a session that still plans has none."""
    return [figures for sign in workers for figures in sign.under_way if "own_tokens" in figures]


def tokens_per_s(workers: list[Sign]) -> float | None:
    """Of all sessions together; None: none of them knows yet."""
    known = [figures["tokens_per_s"] for figures in work_figures(workers) if figures["tokens_per_s"] is not None]
    return sum(known) if known else None


def left_s(workers: list[Sign]) -> float | None:
    """Seconds until all is done: each session says how long it would take alone. None: one of them does not know."""
    alone_s = [figures["alone_s"] for figures in work_figures(workers)]
    return 1 / sum(1 / seconds for seconds in alone_s) if alone_s and all(alone_s) else None
