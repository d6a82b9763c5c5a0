"""Prefill steps of a server. It knows only the prompts that have arrived; a job, compared with it, knows all.

Each step takes waiting prompts in order until it is full. A long prompt runs in parts, one in each step, on the rank
that holds its KV; the other prompts are dealt so that tokens and attention work are as even as they can be made.
"""

# N prompts, R ranks, 2: new tokens and attention work

from collections import deque
from dataclasses import dataclass

import numpy as np

from batchinfer.balance.prefill import attention_work, place


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a prompt that the next step computes."""

    prompt: int
    done: int  # new tokens computed before
    tokens: int
    work: float


def step_loads(
    new_tokens: np.ndarray, cached_tokens: np.ndarray, *, num_ranks: int, tokens_per_rank: int, part_tokens: int
) -> np.ndarray:
    """Return new tokens and attention work of each step and rank while prompts wait, [S, R, 2].

    Args:
        new_tokens, cached_tokens: [N] int64, in order of arrival.
        tokens_per_rank: mean new tokens of a rank in a full step.
        part_tokens: most new tokens of a prompt in a step.
    """

    def part_of(prompt: int, done: int) -> _Part:
        tokens = min(part_tokens, int(new_tokens[prompt]) - done)
        start = np.array([cached_tokens[prompt] + done])
        return _Part(prompt, done, tokens, float(attention_work(np.array([tokens]), start)[0]))

    waiting = deque(range(len(new_tokens)))
    held: list[list[_Part]] = [[] for _ in range(num_ranks)]  # next parts of prompts whose KV a rank holds
    steps = []
    while waiting:
        loads_R2 = np.array([[sum(p.tokens for p in parts), sum(p.work for p in parts)] for parts in held], dtype=float)
        room, fresh = num_ranks * tokens_per_rank - loads_R2[:, 0].sum(), list[_Part]()
        while waiting and (part := part_of(waiting[0], 0)).tokens <= room:
            waiting.popleft()
            fresh.append(part)
            room -= part.tokens
        if not waiting:
            break  # the last step is not full
        sizes = np.array([(part.tokens, part.work) for part in fresh], dtype=float).reshape(-1, 2)
        mean_2 = np.maximum((loads_R2.sum(axis=0) + sizes.sum(axis=0)) / num_ranks, 1.0)
        order = np.argsort(-(sizes / mean_2).max(axis=1), kind="stable")
        scaled_R2 = loads_R2 / mean_2
        ranks = place(sizes[order] / mean_2, scaled_R2, np.ones((len(order), num_ranks), dtype=bool))
        steps.append(scaled_R2 * mean_2)
        for index, rank in zip(order.tolist(), ranks.tolist(), strict=True):
            held[rank].append(fresh[index])
        held = [
            [part_of(part.prompt, end) for part in parts if (end := part.done + part.tokens) < new_tokens[part.prompt]]
            for parts in held
        ]
    return np.array(steps).reshape(-1, num_ranks, 2)
