"""Places at which the states of prompts have to be kept, against a search through all pairs."""

import random
from itertools import pairwise

import numpy as np
import pytest

from batchinfer.balance.branch_points import MOST_POINTS, branch_points


def common(left, right):
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def searched(shared, begins, after):
    """By definition: prefixes of a prompt after which one goes on that begins later, or may be still to come."""
    count, found = len(shared), []
    for prompt in range(count):
        points = set()
        for other in range(count):
            low, high = sorted((prompt, other))
            is_on_path = min(shared[low + 1 : high + 1], default=10**9) >= shared[other]
            stays = min([*shared[other + 1 :], after]) >= shared[other]
            if is_on_path and (begins[other] > begins[prompt] or stays):
                points.add(shared[other])
        if min(shared[prompt + 1 :], default=10**9) >= after:
            points.add(after)
        found.append(tuple(sorted(points - {0}, reverse=True)))
    return found


@pytest.mark.parametrize("seed", range(300))
def test_points_are_those_of_a_search_through_all_pairs(seed):
    draw = random.Random(seed)
    prompts = sorted([draw.randint(0, 2) for _ in range(draw.randint(1, 8))] for _ in range(draw.randint(1, 9)))
    shared = [draw.randrange(len(prompts[0])), *(min(common(a, b), len(b) - 1) for a, b in pairwise(prompts))]
    begins, after = list(range(len(prompts))), draw.randint(0, len(prompts[-1]))
    if seed % 2:
        draw.shuffle(begins)
    found = branch_points(np.array(shared), np.array(begins), after_tokens=after)
    assert found == searched(shared, begins, after)


def test_a_prompt_with_very_many_branches_keeps_the_longest_prefixes():
    shared = np.arange(1000, 0, -1)
    found = branch_points(shared, np.arange(1000))
    assert found[0] == tuple(range(1000 - 1, 1000 - 1 - MOST_POINTS, -1))
    assert found[-2:] == [(1,), ()]


def test_no_prompts_have_no_points():
    assert branch_points(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)) == []
