"""Order of scored prompts, which compute tokens again that are in memory, because log-probabilities need them."""

# Q requests, in the order of execution

from dataclasses import replace
from itertools import pairwise

import numpy as np

from batchinfer.balance.prefix_order import whole_first
from batchinfer.plan.requests import PlannedRequests

MOST_PART_TOKENS = 1 << 26  # a part with more prompt tokens keeps its order: to change it, all must be in memory


def scored_first(
    planned: PlannedRequests, prompt_tokens: np.ndarray, part_starts: np.ndarray
) -> tuple[PlannedRequests, np.ndarray]:
    """Order the requests so that in each part, below each node of the prefix tree, the one that runs most comes first.

    Args:
        planned: requests in prefix order.
        prompt_tokens: [Q] int64.
        part_starts: [P + 1] int64, first request of each part of the job, and Q.

    Returns:
        The requests in their new order, and [Q] int64, the previous place of each.
    """
    order = np.arange(len(prompt_tokens))
    most_cached = np.where(planned.score_from > 0, planned.score_from, prompt_tokens) - 1
    shared = planned.shared_tokens.copy()
    for first, end in pairwise(part_starts.tolist()):
        part = slice(first, end)
        if not planned.score_from[part].any() or prompt_tokens[part].sum() > MOST_PART_TOKENS:
            continue
        with_next = int(planned.shared_tokens[end]) if end < len(order) else 0
        places, shared[part] = whole_first(
            planned.shared_tokens[part],
            most_cached[part],
            before_tokens=int(planned.shared_tokens[first]),
            after_tokens=with_next,
        )
        order[part] = first + places
    return replace(
        planned,
        row_index=planned.row_index[order],
        place=planned.place[order],
        sample=planned.sample[order],
        cached_tokens=np.minimum(shared, most_cached[order]),
        score_from=planned.score_from[order],
        shared_tokens=shared,
        group_depth=planned.group_depth[order],
    ), order


def tokens_scored_again(planned: PlannedRequests, prompt_tokens: np.ndarray) -> int:
    """Return the number of common tokens that scored prompts must compute again in every order.

    Args:
        planned: requests in prefix order.
        prompt_tokens: [Q] int64.
    """
    scored = np.flatnonzero(planned.score_from)
    if len(scored) == 0:
        return 0
    with_last = np.minimum.reduceat(planned.shared_tokens[: scored[-1] + 1], scored[:-1] + 1)
    again = 0
    covered: list[tuple[int, int]] = []  # [from, to) of the latest prompt that were run for a scored one, ascending
    lengths, starts = prompt_tokens[scored].tolist(), (planned.score_from[scored] - 1).tolist()
    for length, start, common in zip(lengths, starts, [0, *with_last.tolist()], strict=True):
        while covered and covered[-1][1] > common:
            begin, _ = covered.pop()
            if begin < common:
                covered.append((begin, common))
        first = start
        while covered and covered[-1][1] >= start:
            begin, end = covered.pop()
            again += end - max(begin, start)
            first = min(first, begin)
        covered.append((first, length))
    return again
