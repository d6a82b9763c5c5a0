"""In which order prompts run: down one branch of the prefix tree after the other, long answers first. No I/O here.

A walk through the tree branch by branch computes each shared prefix once, whatever the order of the branches. So that
order is free, and an offline job uses it for its end: answers that take long begin early.
"""

# N requests, neighbours in the plan's order

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from batchinfer.records import ConfigError


@dataclass(slots=True)
class _Branch:
    """A node of the prefix tree: its prompts share `depth` tokens; a leaf is one request."""

    depth: int
    children: list[_Branch] = field(default_factory=list)
    request: int = -1
    longest: float = 0.0  # output tokens to expect, at most, below it
    holds_first: bool = False
    holds_last: bool = False


def longest_first(
    shared_tokens: np.ndarray, expected_tokens: np.ndarray, *, before_tokens: int = 0, after_tokens: int = 0
) -> np.ndarray:
    """Order the branches below each node by the longest answer to expect in them; equal ones keep their order.

    Args:
        shared_tokens: [N] integers, tokens that a prompt shares with the one before it; the first entry is not read.
        expected_tokens: [N] output tokens to expect.
        before_tokens: what the first prompt shares with the one that runs before all of these: so far down, the
            branches that it lies on stay first.
        after_tokens: what the last prompt shares with the one that runs after all of these: so far down, its branches
            stay last.

    Returns:
        [N] int64, the request to run k-th.

    Raises:
        ConfigError: arrays of different lengths.
    """
    if len(shared_tokens) != len(expected_tokens):
        raise ConfigError(
            f"expected_tokens has {len(expected_tokens)} entries for {len(shared_tokens)} requests; give one for each"
        )
    if len(shared_tokens) == 0:
        return np.zeros(0, dtype=np.int64)
    order: list[int] = []
    left = [_tree(shared_tokens, expected_tokens)]
    while left:
        branch = left.pop()
        if branch.request >= 0:
            order.append(branch.request)
            continue
        left += _sorted_children(branch, before_tokens, after_tokens)[::-1]
    return np.array(order, dtype=np.int64)


def _sorted_children(branch: _Branch, before_tokens: int, after_tokens: int) -> list[_Branch]:
    def place(child: _Branch) -> tuple[bool, bool, float]:
        stays_first = child.holds_first and branch.depth < before_tokens
        stays_last = child.holds_last and branch.depth < after_tokens
        return not stays_first, stays_last, -child.longest

    return sorted(branch.children, key=place)


def _tree(shared_tokens: np.ndarray, expected_tokens: np.ndarray) -> _Branch:
    """The prefix tree of prompts in the plan's order, from what neighbours share."""
    path = [_Branch(-1)]  # from the root down to the latest prompt, whose subtree is `done`
    num_requests = len(shared_tokens)
    done = _leaf(0, num_requests, expected_tokens)
    for request in range(1, num_requests):
        depth = int(shared_tokens[request])
        while path[-1].depth > depth:
            done = _close(path.pop(), done)
        if path[-1].depth < depth:
            path.append(_Branch(depth))
        _add(path[-1], done)
        done = _leaf(request, num_requests, expected_tokens)
    while path:
        done = _close(path.pop(), done)
    return done


def _leaf(request: int, num_requests: int, expected_tokens: np.ndarray) -> _Branch:
    return _Branch(
        0,
        request=request,
        longest=float(expected_tokens[request]),
        holds_first=request == 0,
        holds_last=request == num_requests - 1,
    )


def _close(branch: _Branch, last_child: _Branch) -> _Branch:
    _add(branch, last_child)
    return branch


def _add(branch: _Branch, child: _Branch) -> None:
    branch.children.append(child)
    branch.longest = max(branch.longest, child.longest)
    branch.holds_first = branch.holds_first or child.holds_first
    branch.holds_last = branch.holds_last or child.holds_last
