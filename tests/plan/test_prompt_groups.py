"""Prompt groups: which prompts are expected to get answers of like length."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from batchinfer.plan.prefix import plan_prefixes
from batchinfer.plan.prompt_groups import DEPTH_STEP, MIN_PROMPTS, group_depths, group_id, group_ids


def in_order(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(flat token ids, offsets, shared tokens) in prefix order."""
    flat = np.array([token for prompt in prompts for token in prompt])
    offsets = np.concatenate([[0], np.cumsum([len(prompt) for prompt in prompts])])
    plan = plan_prefixes(flat, offsets, block_tokens=64)
    ordered = [prompts[place] for place in plan.order]
    flat = np.array([token for prompt in ordered for token in prompt])
    offsets = np.concatenate([[0], np.cumsum([len(prompt) for prompt in ordered])])
    return flat, offsets, plan.shared_tokens[plan.order]


def groups_of(prompts: list[list[int]], known: dict[int, float] | None = None) -> tuple[list[int], list[float]]:
    """Group and expected length of each prompt, in input order."""
    flat, offsets, shared = in_order(prompts)
    ids, expected = group_ids(flat, offsets, group_depths(shared), shared, known or {})
    by_prompt = {tuple(flat[a:b]): place for place, (a, b) in enumerate(itertools.pairwise(offsets))}
    places = [by_prompt[tuple(prompt)] for prompt in prompts]
    return [int(ids[place]) for place in places], [float(expected[place]) for place in places]


def brute_force_depth(prompts: list[list[int]], prompt: list[int]) -> int:
    """The longest start, in steps, that enough prompts have."""
    for depth in range(len(prompt) - len(prompt) % DEPTH_STEP, 0, -DEPTH_STEP):
        if sum(other[:depth] == prompt[:depth] for other in prompts) >= MIN_PROMPTS:
            return depth
    return 0


@pytest.mark.parametrize("seed", range(8))
def test_a_group_is_the_longest_start_that_enough_prompts_have(seed):
    rng = np.random.default_rng(seed)
    prompts = {tuple(rng.integers(0, 2, rng.integers(1, 40)).tolist()) for _ in range(300)}
    tasks = [rng.integers(0, 9, rng.integers(5, 60)).tolist() for _ in range(6)]
    prompts |= {(*task, *rng.integers(0, 99, 5).tolist()) for task in tasks for _ in range(rng.integers(2, 60))}
    listed = [list(prompt) for prompt in sorted(prompts)]
    flat, offsets, shared = in_order(listed)
    ordered = [flat[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert group_depths(shared).tolist() == [brute_force_depth(listed, prompt) for prompt in ordered]
    ids, expected = group_ids(flat, offsets, group_depths(shared), shared, {})
    assert ids.tolist() == [group_id(np.array(prompt), brute_force_depth(listed, prompt)) for prompt in ordered]
    assert np.isnan(expected).all()


def test_another_job_with_the_same_instructions_has_the_same_groups():
    task = list(range(100, 150))
    first, _ = groups_of([[*task, 7, number] for number in range(20)])
    second, _ = groups_of([[*task, 8, number, 1] for number in range(200, 230)] + [[1, number] for number in range(9)])
    assert set(first) == {first[0]}
    assert set(second) == {first[0], 0}
    assert 0 < first[0] < 2**63


def test_a_larger_job_finds_lengths_under_the_start_that_the_smaller_one_knew():
    task = list(range(100, 148))
    small, _ = groups_of([[*task, *[number] * 9] for number in range(20)])
    assert set(small) == {group_id(np.array(task), 48)}
    known = {small[0]: 12.5}
    # here three variants of the task are groups of their own, deeper ones
    large = [[*task, *[variant] * 9, number] for variant in range(3) for number in range(30)]
    ids, expected = groups_of([*large, *([5, number] for number in range(3))], known)
    assert len(set(ids)) == 4
    assert not set(ids) & set(small)
    assert expected[:90] == [12.5] * 90
    assert np.isnan(expected[90:]).all()
    _, expected = groups_of([*large, *([5, number] for number in range(3))], {**known, 0: 7.0})
    assert expected == [12.5] * 90 + [7.0] * 3


@pytest.mark.parametrize("count", [0, 1, MIN_PROMPTS - 1])
def test_few_prompts_are_no_group(count):
    assert group_depths(np.full(count, 100)).tolist() == [0] * count
