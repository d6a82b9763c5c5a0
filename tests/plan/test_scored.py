"""Scored prompts run first among prompts with the same start, so that the others find the start in memory."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from batchinfer.config import SamplingConfig
from batchinfer.controller.dealer import Dealer
from batchinfer.plan.prefix import plan_prefixes
from batchinfer.plan.requests import PlannedRequests
from batchinfer.plan.scored import scored_first, tokens_scored_again
from batchinfer.records import Request, RequestKey
from support.prompt_corpus import common


def planned_requests(prompts, score_from):
    """Prompts in prefix order, as plan_requests leaves them."""
    offsets = np.cumsum([0, *map(len, prompts)])
    plan = plan_prefixes(np.array([token for prompt in prompts for token in prompt]), offsets, block_tokens=1)
    number, lengths = np.arange(len(prompts)), np.diff(offsets)
    assert plan.order.tolist() == number.tolist()
    most_cached = np.where(score_from > 0, score_from, lengths) - 1
    planned = PlannedRequests(
        row_index=number,
        place=number,
        sample=0 * number,
        cached_tokens=np.minimum(plan.cached_tokens, most_cached),
        score_from=score_from,
        shared_tokens=plan.shared_tokens,
        group_depth=0 * number,
        duplicate_row=number[:0],
        duplicate_sample=number[:0],
        original_row=number[:0],
        distinct_tokens=plan.distinct_tokens,
    )
    return planned, lengths


def test_worked_example():
    # three documents of two rows each; of the second and third one row is scored whole:
    #   aaax aaay | bbbx bbby* | cccx* cccy
    prompts = [[1, 1, 1, 8], [1, 1, 1, 9], [2, 2, 2, 8], [2, 2, 2, 9], [3, 3, 3, 8], [3, 3, 3, 9]]
    planned, lengths = planned_requests(prompts, np.array([0, 0, 0, 1, 1, 0]))
    assert planned.cached_tokens.tolist() == [0, 3, 0, 0, 0, 3]
    found, order = scored_first(planned, lengths, np.array([0, 6]))
    # prompts 2 and 3 have changed places; the branch of one that is scored begins, although the root shares nothing
    assert [prompts[place] for place in order] == [prompts[place] for place in found.row_index]
    assert found.row_index.tolist() == [0, 1, 3, 2, 4, 5]
    assert found.cached_tokens.tolist() == [0, 3, 0, 3, 0, 3]
    # parts of three requests: what is scored stays in its own part
    found, _ = scored_first(planned, lengths, np.array([0, 3, 6]))
    assert found.row_index.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(100))
def test_the_least_to_compute_counts_a_token_for_each_prompt_that_is_scored_there(seed):
    rng = random.Random(seed)
    prompts = sorted(tuple(rng.choices(range(2), k=rng.randint(1, 9))) for _ in range(rng.randint(1, 40)))
    score_from = np.array([rng.choice([0, 0, 1, rng.randint(1, len(prompt))]) for prompt in prompts])
    planned, lengths = planned_requests(prompts, score_from)
    runs = Counter()
    for prompt, scored in zip(prompts, score_from.tolist(), strict=True):
        runs.update({prompt[: end + 1]: int(0 < scored <= end + 1) for end in range(len(prompt))})
    least = sum(max(1, number) for number in runs.values())
    assert planned.distinct_tokens + tokens_scored_again(planned, lengths) == least


@pytest.mark.parametrize("seed", range(100))
def test_what_runs_is_what_the_plan_says_and_what_is_replicated(seed):
    """Ranks compute the same tokens as the plan's order for any lengths of answers, if some prompts are scored."""
    rng = random.Random(seed)
    prompts = sorted({tuple(rng.choices(range(3), k=rng.randint(2, 12))) for _ in range(60)})
    score_from = np.array([rng.choice([0, 0, 1, rng.randint(1, len(prompt) - 1)]) for prompt in prompts])
    planned, lengths = planned_requests(prompts, score_from)
    starts = np.array(sorted({0, len(prompts), *rng.sample(range(1, len(prompts)), rng.randint(0, 3))}))
    found, order = scored_first(planned, lengths, starts)
    assert sorted(order.tolist()) == list(range(len(prompts)))
    assert found.cached_tokens.sum() >= planned.cached_tokens.sum()

    ranks = range(rng.randint(1, 3))
    dealer, known, computed, replicated = Dealer(ranks), {rank: [] for rank in ranks}, 0, 0
    for unit, (first, end) in enumerate(itertools.pairwise(starts.tolist())):
        requests = [
            Request(
                key=RequestKey(0, int(found.row_index[place]), 0),
                unit=unit,
                token_ids=list(prompts[found.row_index[place]]),
                sampling=SamplingConfig(max_tokens=rng.randint(1, 50)).to_sampling(),
                sampling_key=0,
                cached_tokens=int(found.cached_tokens[place]),
                score_from=int(found.score_from[place]),
            )
            for place in range(first, end)
        ]
        after = int(found.shared_tokens[end]) if end < len(prompts) else 0
        dealer.add_unit(unit, requests, is_fresh=True, after_tokens=after)
        for rank in ranks:
            for item in dealer.take(rank, len(prompts)).requests:
                shared = max((common(other, item.token_ids) for other in known[rank]), default=0)
                shared = min(shared, item.most_cached_tokens)
                computed += len(item.token_ids) - shared
                replicated += min(item.replicated_tokens, item.shared_tokens - shared)
                known[rank].append(item.token_ids)
                dealer.finish(item.unit, item.key)
    assert dealer.num_unfinished == 0
    assert computed == lengths.sum() - found.cached_tokens.sum() + replicated
