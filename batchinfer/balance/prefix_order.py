"""The order in which prompts run: down one branch of the prefix tree after the other, long answers first. No I/O here.

A walk through the tree branch by branch computes each shared prefix once, for any order of the branches. So that order
is free, and an offline job uses it for its end: answers that take long begin early. Only a prompt that is scored runs
its tokens even if they are in memory: of the branches below a node the one with such a prompt begins, and the others
reuse its KV.
"""

# N requests, neighbours in the plan's order

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

import numpy as np

from batchinfer.records import ConfigError


@dataclass(slots=True)
class _Branch:
    """A node of the prefix tree: its prompts share `depth` tokens; a leaf is one request."""

    depth: int
    children: list[_Branch] = field(default_factory=list)
    request: int = -1
    longest: float = 0.0  # output tokens to expect, at most, below it
    most_cached: float = inf  # the fewest leading tokens that a prompt below it may take from memory
    holds_first: bool = False
    holds_last: bool = False


_longest = attrgetter("longest")


def longest_first(
    shared_tokens: np.ndarray,
    expected_tokens: np.ndarray,
    *,
    most_cached_tokens: np.ndarray | None = None,
    before_tokens: int = 0,
    after_tokens: int = 0,
) -> np.ndarray:
    """Order the branches below each node by the longest answer to expect in them; equal ones keep their order.

    Args:
        shared_tokens: [N] integers, tokens that a prompt shares with the one before it; the first entry is not read.
        expected_tokens: [N] output tokens to expect.
        most_cached_tokens: [N] leading tokens that a prompt may find in memory (records.Request); None: all. Below a
            node, the branch begins whose prompts may take the fewest of the shared tokens from memory.
        before_tokens: tokens that the first prompt shares with the one that runs before all of these; down to this
            depth its branches stay first.
        after_tokens: tokens that the last prompt shares with the one that runs after all of these; down to this depth
            its branches stay last.

    Returns:
        [N] int64, the request to run k-th.

    Raises:
        ConfigError: arrays of different lengths.
    """
    if len(shared_tokens) != len(expected_tokens):
        raise ConfigError(
            f"expected_tokens has {len(expected_tokens)} entries for {len(shared_tokens)} requests; give one for each"
        )
    most_cached = np.full(len(shared_tokens), inf) if most_cached_tokens is None else most_cached_tokens
    return _walk(shared_tokens, expected_tokens, most_cached, before_tokens, after_tokens)[0]


def whole_first(
    shared_tokens: np.ndarray, most_cached_tokens: np.ndarray, *, before_tokens: int = 0, after_tokens: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Order branches as `longest_first` does with unknown answers; also return the tokens shared in that order.

    Returns:
        ([N] int64, the request to run k-th; [N] int64, tokens that the k-th shares with the one before it).
    """
    return _walk(shared_tokens, np.zeros(len(shared_tokens)), most_cached_tokens, before_tokens, after_tokens)


def _walk(
    shared_tokens: np.ndarray,
    expected_tokens: np.ndarray,
    most_cached: np.ndarray,
    before_tokens: int,
    after_tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
    order: list[int] = []
    shared: list[int] = []
    left = [(_tree(shared_tokens, expected_tokens, most_cached), before_tokens)] if len(shared_tokens) else []
    while left:
        branch, with_before = left.pop()
        if branch.request >= 0:
            order.append(branch.request)
            shared.append(with_before)
            continue
        first, *others = _sorted_children(branch, before_tokens, after_tokens)
        left += [(child, branch.depth) for child in reversed(others)]
        left.append((first, with_before))
    return np.array(order, dtype=np.int64), np.array(shared, dtype=np.int64)


def _sorted_children(branch: _Branch, before_tokens: int, after_tokens: int) -> list[_Branch]:
    stays = (branch.holds_first and branch.depth < before_tokens) or (branch.holds_last and branch.depth < after_tokens)
    if not stays and branch.most_cached >= branch.depth:  # of nearly all: only the lengths count
        return sorted(branch.children, key=_longest, reverse=True)

    def stays_last(child: _Branch) -> bool:
        return child.holds_last and branch.depth < after_tokens

    def runs_most(child: _Branch) -> tuple[bool, float, float]:
        return stays_last(child), min(child.most_cached, branch.depth), -child.longest

    begins = min(branch.children, key=runs_most)

    def place(child: _Branch) -> tuple[bool, bool, bool, float]:
        stays_first = child.holds_first and branch.depth < before_tokens
        return not stays_first, stays_last(child), child is not begins, -child.longest

    return sorted(branch.children, key=place)


def _tree(shared_tokens: np.ndarray, expected_tokens: np.ndarray, most_cached: np.ndarray) -> _Branch:
    """Build the prefix tree of prompts in the plan's order from the tokens that neighbours share."""
    path = [_Branch(-1)]  # from the root down to the latest prompt, whose subtree is `done`
    leaves = [
        _Branch(0, [], request, longest, most)
        for request, (longest, most) in enumerate(zip(expected_tokens.tolist(), most_cached.tolist(), strict=True))
    ]
    leaves[0].holds_first = leaves[-1].holds_last = True
    done = leaves[0]
    for leaf, depth in zip(leaves[1:], shared_tokens[1:].tolist(), strict=True):
        while path[-1].depth > depth:
            done = _close(path.pop(), done)
        if path[-1].depth < depth:
            path.append(_Branch(depth))
        _add(path[-1], done)
        done = leaf
    while path:
        done = _close(path.pop(), done)
    return done


def _close(branch: _Branch, last_child: _Branch) -> _Branch:
    _add(branch, last_child)
    return branch


def _add(branch: _Branch, child: _Branch) -> None:
    branch.children.append(child)
    branch.longest = max(branch.longest, child.longest)
    branch.most_cached = min(branch.most_cached, child.most_cached)
    branch.holds_first = branch.holds_first or child.holds_first
    branch.holds_last = branch.holds_last or child.holds_last
