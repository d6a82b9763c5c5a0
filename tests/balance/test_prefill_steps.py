"""Prefill steps: equal tokens and attention work on all ranks in every step, each prefix before its followers."""

from __future__ import annotations

import numpy as np
import pytest

from batchinfer.balance.prefill import assign_prefill, attention_work
from batchinfer.balance.prefill_steps import PrefillSteps, max_over_mean, plan_rank_steps, plan_steps
from batchinfer.balance.prefix_groups import deal_prefixes, own_shared_tokens
from batchinfer.records import ConfigError
from batchinfer.sim.spec import load_spec
from batchinfer.sim.workload import make_workload
from support.paths import ROOT

PAGE = 64


def lognormal(rng, count, mean, sigma):
    return np.maximum(1, rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)).astype(np.int64)


def independent(seed, *, count, mean, sigma):
    """Prompts that share nothing."""
    lengths = lognormal(np.random.default_rng(seed), count, mean, sigma)
    return lengths, np.zeros(count, dtype=np.int64)


def documents(seed, *, count, questions, mean, sigma, longest, system=500):
    """Questions about documents behind one system prompt: prefixes in two levels."""
    rng = np.random.default_rng(seed)
    document = system + np.minimum(longest, lognormal(rng, count, mean, sigma))
    lengths = np.repeat(document, questions) + lognormal(rng, count * questions, 100, 0.8)
    shared = np.repeat(document, questions)
    shared[::questions] = system
    shared[0] = 0
    return lengths, shared


def run(lengths, shared, *, ranks, tokens):
    """The engine's deal and steps of one unit: (steps of each rank, shared tokens on the own rank)."""
    rank = deal_prefixes(lengths, shared, np.zeros(len(lengths)), num_ranks=ranks)
    own = own_shared_tokens(shared, rank)
    plans = plan_rank_steps(lengths, own, rank, num_ranks=ranks, most_tokens=tokens, page_tokens=PAGE)
    return plans, own, rank


def loads(plans: list[PrefillSteps]) -> np.ndarray:
    return np.stack([plan.loads() for plan in plans], axis=1)


def test_a_long_prompt_runs_beside_short_ones_in_every_step():
    # one prompt of 1,000 tokens (500,500 pairs) and forty of 25 (325 pairs each), 4 steps of 500 tokens: whichever
    # step has more of the long prompt's end has fewer of its tokens
    plan = plan_steps(np.array([1000] + [25] * 40), np.zeros(41, dtype=np.int64), num_steps=4)
    tokens, work = plan.loads().T
    assert tokens.max() <= 1.05 * 500
    assert work.max() <= 1.1 * work.mean()
    of_long = [plan.end_P[(plan.prompt_P == 0) & (plan.step_P == step)].max() for step in range(4)]
    assert of_long == sorted(of_long)
    assert of_long[-1] == 1000
    assert of_long[0] > 400  # a quarter of the pairs is half of the tokens


def published_day():
    """The published day's sample: lengths, cached tokens, and units of 25 steps on 32 ranks."""
    spec = load_spec(ROOT / "jobs" / "published_day.toml")
    work = make_workload(spec.workload)
    size = int(25 * 32 * 16_384 / work.new_tokens.mean())
    return [
        (work.prompt_tokens[first : first + size], work.cached_tokens[first : first + size])
        for first in range(0, len(work) - size + 1, size)
    ]


def in_order(lengths, cached, rank, tokens):
    """Loads of steps in which each rank takes its prompts in order, of equal sums and cut only where a step is full."""
    found = []
    for one in range(rank.max() + 1):
        new, before = (lengths - cached)[rank == one], cached[rank == one]
        starts = np.cumsum(new) - new
        # attention of every token, at its place in the queue
        work = np.concatenate([old + 1 + np.arange(count) for old, count in zip(before, new, strict=True)])
        step = (np.repeat(starts, new) + np.concatenate([np.arange(count) for count in new])) // tokens
        found.append(np.stack([np.bincount(step), np.bincount(step, work)], axis=1))
    loads_SR2 = np.zeros((max(map(len, found)), len(found), 2))
    for one, of_rank in enumerate(found):
        loads_SR2[: len(of_rank), one] = of_rank
    return loads_SR2


def test_published_days_steps_are_even_in_attention_and_tokens():
    found, plain = [], []
    for lengths, cached in published_day():
        rank = assign_prefill(lengths - cached, cached, num_ranks=32)
        plans = plan_rank_steps(lengths, cached, rank, num_ranks=32, most_tokens=16_384, are_stored=True)
        found.append(loads(plans))
        plain.append(in_order(lengths, cached, rank, 16_384))
    tokens, attention = max_over_mean(np.concatenate(found))
    before = max_over_mean(np.concatenate(plain))[1]
    print(
        f"published day, EP32: attention of the busiest rank {attention:.3f} of the mean, tokens {tokens:.3f}; "
        f"in order, without steps: attention {before:.3f}"
    )
    assert before > 2  # equal sums of a unit are not enough
    assert attention <= 1.15
    assert tokens <= 1.03


@pytest.mark.parametrize(
    ("workload", "ranks", "tokens"),
    [
        (independent(0, count=600, mean=300, sigma=1.1), 4, 4096),
        (independent(1, count=400, mean=800, sigma=0.8), 8, 4096),
        (independent(2, count=1600, mean=2000, sigma=0.5), 16, 8192),
        (independent(3, count=6000, mean=1500, sigma=0.6), 64, 8192),
        (independent(4, count=9000, mean=600, sigma=1.2), 8, 16_384),
        (documents(5, count=60, questions=8, mean=2000, sigma=1.0, longest=8000), 4, 4096),
        (documents(6, count=200, questions=3, mean=2000, sigma=1.0, longest=8000), 8, 4096),
        (documents(7, count=300, questions=6, mean=2000, sigma=1.0, longest=8000), 16, 8192),
        (documents(8, count=900, questions=10, mean=2000, sigma=1.0, longest=8000), 32, 16_384),
        (documents(9, count=1500, questions=4, mean=2000, sigma=1.0, longest=8000), 64, 8192),
    ],
)
def test_other_workloads_are_even_in_attention(workload, ranks, tokens):
    lengths, shared = workload
    largest = attention_work(lengths - shared, shared).max()
    plans, own, _ = run(lengths, shared, ranks=ranks, tokens=tokens)
    fair = sum(plan.loads()[:, 1].sum() for plan in plans) / ranks
    assert largest <= fair, "a prompt that is more than a rank's share cannot be balanced"
    of_tokens, of_attention = max_over_mean(loads(plans))
    print(f"{ranks} ranks: attention {of_attention:.3f}, tokens {of_tokens:.3f}")
    assert of_attention <= 1.25
    assert of_tokens <= 1.10
    assert (lengths - own).sum() <= 1.02 * (lengths - shared).sum()  # little is computed by several ranks


@pytest.mark.parametrize("seed", range(12))
def test_every_token_runs_once_in_order_and_behind_its_prefix(seed):
    rng = np.random.default_rng(seed)
    lengths, shared = documents(
        seed, count=int(rng.integers(3, 40)), questions=int(rng.integers(1, 9)), mean=700, sigma=1.2, longest=6000
    )
    plans, own, rank = run(lengths, shared, ranks=int(rng.integers(1, 5)), tokens=int(rng.integers(300, 3000)))
    reached = own.copy()
    for one, plan in enumerate(plans):
        assert (np.diff(plan.step_P) >= 0).all()
        assert set(plan.prompt_P.tolist()) == set(np.flatnonzero(rank == one).tolist())
        known = np.zeros(len(lengths), dtype=np.int64)  # tokens that others find: whole pages of a cut prompt
        for prompt, start, end in zip(plan.prompt_P.tolist(), plan.start_P.tolist(), plan.end_P.tolist(), strict=True):
            assert start == reached[prompt] < end
            if start == own[prompt] > 0:
                assert any(known[other] >= start for other in sharing(prompt, start, own, rank == one))
            reached[prompt] = end
            known[prompt] = end if end == lengths[prompt] else end // PAGE * PAGE
    assert (reached == lengths).all()


def sharing(prompt, tokens, own, on_rank):
    """Prompts of the same rank, earlier in the prefix tree, that begin with the same number of tokens."""
    for other in range(prompt, -1, -1):
        if on_rank[other]:
            if other != prompt:
                yield other
            if own[other] < tokens:
                return


def test_prompts_with_longer_answers_run_earlier():
    lengths = np.full(64, 100)
    answers = np.where(np.arange(64) % 4 == 3, 500, 5)
    plan = plan_steps(lengths, np.zeros(64, dtype=np.int64), num_steps=8, answer_tokens=answers)
    first_half = plan.prompt_P[plan.step_P < 4]
    assert (answers[first_half] == 500).sum() > 12


def test_steps_that_have_no_tokens_and_no_prompts():
    none = np.zeros(0, dtype=np.int64)
    assert plan_steps(none, none, num_steps=3).loads().tolist() == [[0, 0]] * 3
    plans = plan_rank_steps(np.array([5]), np.array([0]), np.array([1]), num_ranks=3, most_tokens=4)
    assert [len(plan.prompt_P) for plan in plans] == [0, 2, 0]
    assert max_over_mean(np.zeros((2, 3, 2))).tolist() == [1.0, 1.0]


def test_wrong_arguments_are_named():
    with pytest.raises(ConfigError, match="num_steps is 0"):
        plan_steps(np.ones(1), np.zeros(1), num_steps=0)
    with pytest.raises(ConfigError, match="2 prompt lengths and 1 shared"):
        plan_steps(np.ones(2), np.zeros(1), num_steps=1)
