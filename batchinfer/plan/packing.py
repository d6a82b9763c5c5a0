"""Division of the ordered requests into work units of about equal work."""

import numpy as np

MIN_UNIT_TOKENS = 65_536  # below this, claiming and committing would cost more than they protect
MAX_UNIT_TOKENS = 4_000_000  # minutes on one node, so that a lost unit costs little
MAX_PROMPT_TOKENS = 1 << 24  # an open unit's whole prompts are in memory, shared or not: about 50 bytes per token
SMALL_GROUP, NODE = 2, 8  # ranks for which the least and the largest units are; larger groups need larger units
TARGET_UNITS = 256  # enough for many groups to end at about the same time


def cut_units(
    new_tokens: np.ndarray, max_tokens: np.ndarray, *, prompt_tokens: np.ndarray | None = None, num_ranks: int = 1
) -> np.ndarray:
    """Return the first request of each unit; the order of requests does not change.

    The work of a request is its prompt tokens to compute plus max_tokens. A unit ends with the request that reaches the
    target, so no unit is larger than the target plus one request. A unit ends sooner if its whole prompts reach
    MAX_PROMPT_TOKENS.

    Args:
        new_tokens: [Q] prompt tokens to compute per request, in the order of execution.
        max_tokens: [Q] most tokens that each request may generate.
        prompt_tokens: [Q] lengths of whole prompts; None: prompts share nothing.
        num_ranks: ranks of the group that works on a unit.

    Returns:
        [U + 1] int64, the first request of each unit, and Q at the end; [0] if there are no requests.
    """
    if len(new_tokens) == 0:
        return np.zeros(1, dtype=np.int64)
    work = np.add(new_tokens, max_tokens, dtype=np.int64)
    np.cumsum(work, out=work)
    held = np.cumsum(new_tokens if prompt_tokens is None else prompt_tokens, dtype=np.int64)
    nodes = max(1.0, num_ranks / NODE)
    least = MIN_UNIT_TOKENS * max(1.0, num_ranks / SMALL_GROUP)
    target = int(np.clip(work[-1] // TARGET_UNITS, least, MAX_UNIT_TOKENS * nodes))
    most_held = int(MAX_PROMPT_TOKENS * nodes)
    starts = [0]
    done = done_held = 0
    while True:
        # the first request at which this unit's work, or what it holds, reaches the target is its last
        last = int(min(np.searchsorted(work, done + target), np.searchsorted(held, done_held + most_held)))
        if last + 1 >= len(work):
            break
        starts.append(last + 1)
        done, done_held = int(work[last]), int(held[last])
    return np.array([*starts, len(work)], dtype=np.int64)
