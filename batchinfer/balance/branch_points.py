"""Branch points of prompts: how many leading tokens of a prompt later prompts of its rank share.

A model whose requests keep a state has to keep it there.

prompt 0    a b c d e f g          state kept after   c, e
prompt 1    a b c d e x            goes on after e;   c
prompt 2    a b c y                goes on after c
"""

# N prompts of one rank, neighbours in the prefix tree

import numpy as np

MOST_POINTS = 256  # of one prompt, the longest prefixes; ranks have no more slots


def branch_points(shared_tokens: np.ndarray, begins: np.ndarray, *, after_tokens: int = 0) -> list[tuple[int, ...]]:
    """Return, per prompt, the numbers of its leading tokens after which prompts that begin later go on, falling.

    Args:
        shared_tokens: [N] integers, tokens shared with the prompt before it.
        begins: [N] the place of each prompt in the order in which they begin.
        after_tokens: tokens that the last prompt shares with prompts of which nothing else is known yet: prefixes of
            these tokens stay needed.
    """
    shared = [*np.asarray(shared_tokens).tolist(), after_tokens]
    count = len(shared) - 1
    first_of, end_of = _stretches(shared)
    # by prefix, which is (its first prompt, its length): when the last prompt that shares it begins
    last_use: dict[tuple[int, int], int] = {}
    for prompt, begin in enumerate(np.asarray(begins).tolist()):
        prefix = first_of[prompt], shared[prompt]
        last_use[prefix] = max(last_use.get(prefix, -1), begin)
    found = []
    for prompt in range(count):
        points: list[int] = []
        # the longest prefix that it shares with a neighbour, then from each prefix to the one around it
        at = prompt if shared[prompt] >= shared[prompt + 1] else prompt + 1
        while (tokens := shared[at]) > 0 and len(points) < MOST_POINTS:
            if end_of[at] == len(shared) or last_use[first_of[at], tokens] > begins[prompt]:
                points.append(tokens)
            around = [place for place in (first_of[at], end_of[at]) if place <= count and shared[place] < tokens]
            if not around:
                break
            at = max(around, key=shared.__getitem__)
        found.append(tuple(points))
    return found


def _stretches(shared: list[int]) -> tuple[list[int], list[int]]:
    """Return the stretch of prompts that have the shared tokens of each prompt: first prompt, and the one behind it."""
    first_of, end_of = [0] * len(shared), [len(shared)] * len(shared)
    path: list[int] = []
    for prompt, tokens in enumerate(shared):
        while path and shared[path[-1]] > tokens:
            end_of[path.pop()] = prompt
        same = path and shared[path[-1]] == tokens
        # the prompt before which fewer tokens are shared has this prefix, too
        first_of[prompt] = first_of[path[-1]] if same else (path[-1] if path else 0)
        path.append(prompt)
    return first_of, end_of
