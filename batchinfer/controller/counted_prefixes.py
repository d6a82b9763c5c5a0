"""Prompt tokens that results have counted already when requests are dealt again, so that reports count each token once.

A result counts the part of its prompt that no other result has counted:

    result A   [ counts itself                  )
    result B   [ counted by A  )[ counts itself           )
    request    [ shared, as dealt )[ by B )[ new               )
                                          ^ counted
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

STRETCH = 128  # tokens compared at once


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """A prompt with a result, or the prefix of one that an earlier unit has counted."""

    token_ids: list[int]
    first: int  # index of the first token that it counts itself


def counted_tokens(prompts: list[list[int]], shared: list[int], results: list[CountedPrompt]) -> list[int]:
    """Return, per prompt, the leading tokens that earlier prompts and results have counted without a gap.

    Args:
        shared: per prompt, the tokens that prompts dealt before it count.
    """
    if not results:
        return shared
    every = [result.token_ids for result in results] + prompts
    order = sorted(range(len(every)), key=every.__getitem__)  # two prompts have in common the least of any two between
    place_of = np.argsort(order)
    common = np.array([common_tokens(every[one], every[other]) for one, other in pairwise(order)])
    results_at, firsts = place_of[: len(results)], np.array([result.first for result in results])
    found = []
    for prompt, counted_before in zip(place_of[len(results) :], shared, strict=True):
        with_any = np.full(len(every), len(every[order[prompt]]))
        with_any[prompt + 1 :] = np.minimum.accumulate(common[prompt:])
        with_any[:prompt] = np.minimum.accumulate(common[:prompt][::-1])[::-1]
        ends, counted = with_any[results_at], counted_before
        while (further := ends[(firsts <= counted) & (ends > counted)]).size:
            counted = int(further.max())
        found.append(counted)
    return found


def common_tokens(first: list[int], second: list[int], most: int | None = None) -> int:
    """Return the number of leading tokens that two prompts have in common, at most `most`."""
    end = min(len(first), len(second) if most is None else most)
    begin = 0
    # a stretch at a time: prompts with long common starts would take seconds token by token
    while begin + STRETCH <= end and first[begin : begin + STRETCH] == second[begin : begin + STRETCH]:
        begin += STRETCH
    for index in range(begin, end):
        if first[index] != second[index]:
            return index
    return end
