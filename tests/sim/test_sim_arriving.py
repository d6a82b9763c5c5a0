"""Prefill steps of a server, which deals prompts as they arrive."""

import numpy as np
import pytest

from batchinfer.balance.prefill import attention_work
from batchinfer.balance.prefill_steps import max_over_mean
from batchinfer.sim.arriving import step_loads
from batchinfer.sim.dealing import Deals
from batchinfer.sim.workload import Workload


def loads_of(new, cached=None, *, ranks=2, tokens=8, part=4):
    new = np.array(new)
    cached = np.zeros(len(new), dtype=np.int64) if cached is None else np.array(cached)
    return step_loads(new, cached, num_ranks=ranks, tokens_per_rank=tokens, part_tokens=part)


def test_a_long_prompt_runs_in_parts_on_one_rank_next_to_those_that_came_meanwhile():
    # rank 0: 4 of the long prompt's 12 in each of three steps, and a prompt of 4 next to it; rank 1: prompts of 4
    loads = loads_of([12, *[4] * 20])
    assert loads[:, :, 0].tolist() == [[8.0, 8.0]] * len(loads)
    long = [attention_work(np.array([4]), np.array([start]))[0] for start in (0, 4, 8)]
    short = attention_work(np.array([4]), np.array([0]))[0]
    assert loads[:3, :, 1] == pytest.approx(np.array([[part + short, 2 * short] for part in long]))


def test_each_token_runs_once_and_a_step_holds_no_more_than_its_tokens():
    rng = np.random.default_rng(3)
    new = rng.integers(1, 60, 300)
    loads = loads_of(new, rng.integers(0, 50, 300), ranks=4, tokens=40, part=16)
    assert loads[:, :, 0].sum() <= new.sum()
    assert loads[:, :, 0].sum(axis=1).max() <= 160
    # but for the parts of the last prompts, everything has run
    assert loads[:, :, 0].sum() >= new.sum() - 2 * 160


def test_no_prompt_and_prompts_that_fill_no_step():
    assert loads_of([]).shape == (0, 2, 2)
    assert loads_of([3]).shape == (0, 2, 2)


def test_a_job_that_knows_its_prompts_has_more_even_steps_than_a_server():
    rng = np.random.default_rng(0)
    prompts = np.minimum(65_536, np.maximum(1, rng.lognormal(7.8, 1.0, 6000).astype(np.int64)))
    deals = Deals(Workload(prompts, 0 * prompts, np.ones_like(prompts), np.zeros(len(prompts))), 1)
    server, job = deals.arriving(8, 16_384), deals.prefill(8, 16_384)
    assert server.attention > 1.3
    assert job.attention < 1.1
    # the price: its prompts are cut into more parts, each of which expands the keys and values before it
    assert job.expanded > 1 == server.expanded


@pytest.mark.parametrize("part", [1, 3, 100])
def test_parts_of_any_size_keep_the_attention_work_of_the_prompts_that_ran_whole(part):
    loads = loads_of([5, 5, 5, 5, 1, 1, 1, 1], ranks=1, tokens=20, part=part)
    ratio = max_over_mean(loads) if len(loads) else np.ones(2)
    assert ratio.tolist() == [1.0, 1.0]  # one rank is always even
