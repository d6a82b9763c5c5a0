"""Prompts of a work unit spread over ranks: equal work, and what is shared on one rank as far as that goes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.balance.prefix_groups import cut_groups, deal_prefixes, own_shared_tokens, request_sizes
from batchinfer.records import ConfigError
from support.prompt_corpus import common


def few_shot_tree(rng, num_tasks=12, system=300):
    """Prompt lengths and shared tokens of a job: a system prompt, tasks with examples, questions; in prefix order."""
    lengths, shared = [], []
    for task in range(num_tasks):
        examples = int(rng.integers(50, 600))
        for question in range(int(rng.integers(5, 80))):
            lengths.append(system + examples + int(rng.integers(5, 120)))
            shared.append(system + examples if question else system if task else 0)
    return np.array(lengths), np.array(shared)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_work_is_even_and_little_is_computed_twice(seed, num_ranks):
    rng = np.random.default_rng(seed)
    lengths, shared = few_shot_tree(rng)
    outputs = rng.exponential(60, len(lengths))
    rank = deal_prefixes(lengths, shared, outputs, num_ranks=num_ranks)
    own = own_shared_tokens(shared, rank)
    loads = np.stack([np.bincount(rank, size, num_ranks) for size in request_sizes(lengths, own, outputs).T])
    replicated = (shared - own).sum()
    tokens, attention, output, _ = loads.max(axis=1) / loads.mean(axis=1)
    assert tokens <= 1.10
    assert attention <= 1.16
    assert output <= 1.26
    # each rank has to have the system prompt and one task's examples more than it would alone
    assert replicated <= (num_ranks - 1) * (300 + 2 * 600)


def test_whole_tasks_when_they_fit():
    # eight tasks of equal work: two ranks need not share any
    lengths, shared = np.tile([110, 110, 110], 8), np.tile([0, 100, 100], 8)
    rank = deal_prefixes(lengths, shared, np.zeros(24), num_ranks=2)
    assert (own_shared_tokens(shared, rank) == shared).all()
    assert np.bincount(rank).tolist() == [12, 12]


def test_a_task_too_large_for_a_rank_is_cut_where_least_is_shared():
    # one task with two halves of examples: 10 tokens for all, 200 more for each half
    lengths, shared = np.full(20, 230), np.array([0, *[210] * 9, 10, *[210] * 9])
    rank = deal_prefixes(lengths, shared, np.zeros(20), num_ranks=2)
    assert len(set(rank[:10])) == len(set(rank[10:])) == 1
    assert rank[0] != rank[10]
    assert (shared - own_shared_tokens(shared, rank)).sum() == 10


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("waits", [False, True])
def test_short_prompts_are_even_beside_one_whose_attention_is_most_of_all(num_ranks, waits):
    # 100,000 tokens are 5e9 pairs, the others 1e8 together: its rank is far above the mean in any case
    rng = np.random.default_rng(num_ranks)
    lengths = rng.integers(10, 500, 4000)
    load = np.zeros((num_ranks, 2))
    if waits:
        load[0] = 100_000, 5e9
    else:
        lengths[77] = 100_000
    shared = np.append(0, np.minimum(lengths[1:], lengths[:-1]) // 3)
    rank = deal_prefixes(lengths, shared, np.zeros(4000), num_ranks=num_ranks, load_of_rank=load)
    tokens = load[:, 0] + np.bincount(rank, lengths - own_shared_tokens(shared, rank), num_ranks)
    assert tokens.max() <= 1.03 * max(tokens.mean(), 100_000)


def test_ranks_with_a_backlog_get_less():
    lengths, shared = np.full(40, 100), np.zeros(40, dtype=np.int64)
    load = np.array([[2000.0, 20 * 5050.0], [0.0, 0.0]])
    rank = deal_prefixes(lengths, shared, np.zeros(40), num_ranks=2, load_of_rank=load)
    assert np.bincount(rank).tolist() == [10, 30]


def test_tokens_to_generate_count_as_work():
    # two long answers and many short ones, prompts alike
    outputs = np.array([500.0, 500.0, *[1.0] * 40])
    rank = deal_prefixes(np.full(42, 20), np.zeros(42, dtype=np.int64), outputs, num_ranks=2)
    assert rank[0] != rank[1]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.floats(0, 1), st.integers(0, 300)), max_size=60),
    st.integers(1, 9),
)
def test_every_request_has_a_rank(requests, num_ranks):
    lengths = np.array([length for length, _, _ in requests], dtype=np.int64)
    shared = (lengths * [0.0 if i == 0 else part for i, (_, part, _) in enumerate(requests)]).astype(np.int64)
    shared = np.minimum(np.minimum(shared, np.append(0, lengths)[:-1]), np.maximum(lengths - 1, 0))
    rank = deal_prefixes(lengths, shared, np.array([out for *_, out in requests]), num_ranks=num_ranks)
    assert rank.shape == lengths.shape
    assert ((rank >= 0) & (rank < num_ranks)).all()
    own = own_shared_tokens(shared, rank)
    assert (own <= shared).all()


@given(st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), max_size=30, unique=True), st.data())
def test_what_a_rank_has_of_its_own_is_what_its_prompts_share(prompts, data):
    prompts = sorted(prompts)
    shared = np.array([0, *(common(*pair) for pair in itertools.pairwise(prompts))][: len(prompts)], dtype=np.int64)
    rank = np.array([data.draw(st.integers(0, 3)) for _ in prompts], dtype=np.int64)
    own = own_shared_tokens(shared, rank)
    for which in range(4):
        places = np.flatnonzero(rank == which)
        for before, place in itertools.pairwise(places):
            assert own[place] == common(prompts[before], prompts[place])


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0.01, 0.4)), min_size=1, max_size=60), st.floats(0.1, 1.0))
def test_groups_are_stretches_of_at_most_the_size_asked_for(requests, largest):
    shared = np.array([tokens for tokens, _ in requests])
    sizes = np.array([[size, size / 2] for _, size in requests])
    group = cut_groups(shared, sizes, largest=largest)
    assert group[0] == 0
    assert set(np.diff(group)) <= {0, 1}
    for which in range(group[-1] + 1):
        members = np.flatnonzero(group == which)
        assert len(members) == 1 or sizes[members].sum(axis=0).max() <= largest * (1 + 1e-6)


def test_arrays_that_do_not_match_are_refused():
    with pytest.raises(ConfigError, match="2 prompt lengths, 1 shared and 2 output lengths"):
        deal_prefixes(np.ones(2), np.ones(1), np.ones(2), num_ranks=2)
