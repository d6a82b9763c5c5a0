"""Prefixes of prompts whose requests have states: computed once where a state is kept, and to the last bit alike."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from batchinfer.balance.output_lengths import OutputLengths
from batchinfer.config import PAGE_TOKENS, SamplingConfig
from batchinfer.config.rank_layout import RankPlace
from batchinfer.controller.rank_queues import RankQueues
from batchinfer.controller.waiting_pieces import RankRoom
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.model.transformer import Transformer
from batchinfer.plan.prefix import plan_prefixes
from batchinfer.protocol.feed import Inbox
from batchinfer.rank.context import RankContext
from batchinfer.rank.sequence import pages_needed
from batchinfer.rank.state_pages import StatePages
from batchinfer.records import Request, RequestKey, RequestTimes
from support.compressed_models import published_tensors, random_model, write_compressed
from support.one_rank import Feed, run_rank
from support.paths import RANDOM_MODEL

SAMPLING = SamplingConfig(max_tokens=4, logprobs=1).to_sampling()
CHANGES = {"sliding_window": 8, "index_topk": 3, "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_compressed(tmp_path_factory.mktemp("model"), published_tensors(random_model(**CHANGES)), **CHANGES)
    return Transformer.load(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(RANDOM_MODEL)


def make_requests(num_prefixes, num_branches, longest, tail):
    """Prompts that leave each of some prefixes at arbitrary places, in the order of the prefix tree, and their plan."""
    draw = random.Random(7)
    prompts = []
    for _ in range(num_prefixes):
        prefix = [draw.randrange(2, 96) for _ in range(draw.randint(longest // 2, longest))]
        for _ in range(num_branches):
            cut = draw.choice([len(prefix), draw.randint(1, len(prefix))])
            prompts.append(prefix[:cut] + [draw.randrange(2, 96) for _ in range(draw.randint(1, tail))])
    prompts += [prompts[1] + [5, 6], prompts[1]]  # one that goes on where another one ends, and an equal one
    lengths = [len(prompt) for prompt in prompts]
    plan = plan_prefixes(np.concatenate(prompts), np.cumsum([0, *lengths]), block_tokens=PAGE_TOKENS)
    requests = [Request(RequestKey(0, row, 0), 0, prompts[row], SAMPLING, 0) for row in plan.order]
    cached = plan.cached_tokens[plan.order].tolist()
    return [replace(one, cached_tokens=count) for one, count in zip(requests, cached, strict=True)], plan


class DealtFeed(Feed):
    """Hands over requests as a controller deals them to a rank, in batches."""

    def __init__(self, requests, room, num_batches=1):
        super().__init__(requests)
        queues = RankQueues([0], OutputLengths(), room)
        starts = np.linspace(0, len(requests), num_batches + 1).astype(int).tolist()
        for number, (start, end) in enumerate(pairwise(starts)):
            after = requests[end].cached_tokens if number < num_batches - 1 else 0
            queues.add(requests[start:end], after_tokens=after)
        taken = queues.take(0, len(requests))
        self.inbox = [Inbox(requests=taken.requests, pieces=taken.pieces)]

    def receive(self, wait_s=0.0):
        handed = self.inbox.pop() if self.inbox else Inbox()
        return replace(handed, leave=len(self.done) == self.num_requests)


def run(model, tokenizer, requests, *, num_slots=64, prefill_tokens=2048, num_pages=None, num_batches=1, shares=True):
    room = RankRoom(prefill_tokens, 64, num_pages, keeps_states=True)
    sizes = {"prefill_tokens": prefill_tokens, "num_pages": num_pages or 400, "share_prefixes": shares}
    feed = DealtFeed(requests, room, num_batches)
    run_rank(model, tokenizer, requests, feed=feed, num_slots=num_slots, **sizes)
    return feed


def results(feed):
    return {key: (done.token_ids, done.logprobs, done.text) for key, done in feed.done.items()}


def computed(feed):
    return sum(record.new_tokens for record in feed.records if record.kind == "prefill")


@pytest.fixture(scope="module")
def few(model, tokenizer):
    """Requests, their plan, and their results without any sharing."""
    requests, plan = make_requests(4, 5, longest=300, tail=70)
    unshared = run(model, tokenizer, requests, shares=False)
    assert computed(unshared) == sum(len(one.token_ids) for one in requests)
    return requests, plan, results(unshared)


@pytest.mark.parametrize("sizes", [{}, {"prefill_tokens": 97}, {"prefill_tokens": 300, "num_slots": 65}], ids=str)
def test_shared_prefixes_are_computed_once_and_change_no_bit(model, tokenizer, few, sizes):
    requests, plan, unshared = few
    feed = run(model, tokenizer, requests, **sizes)
    assert results(feed) == unshared
    assert computed(feed) <= 1.02 * plan.distinct_tokens


@pytest.mark.parametrize(
    ("num_slots", "spare_pages", "num_batches"),
    [(1, 400, 1), (4, 400, 1), (64, 0, 1), (64, 3, 1), (64, 400, 3)],
    ids=["one-slot", "four-slots", "no-page", "three-pages", "three-units"],
)
def test_what_was_not_kept_is_computed_again_and_counted(model, tokenizer, few, num_slots, spare_pages, num_batches):
    requests, plan, unshared = few
    sizes = {"num_slots": num_slots, "num_pages": max(map(pages_needed, requests)) + spare_pages}
    feed = run(model, tokenizer, requests, prefill_tokens=150, num_batches=num_batches, **sizes)
    assert results(feed) == unshared
    again = sum(done.recomputed_tokens for done in feed.done.values())
    repeats = int(sum(plan.shared_tokens - plan.cached_tokens))  # last tokens of repeated prompts run again
    assert computed(feed) == plan.distinct_tokens + repeats + again
    assert again > 0 or num_slots > 1


def test_forty_prefixes_that_branch_anywhere_take_at_most_two_percent_more(model, tokenizer):
    requests, plan = make_requests(40, 6, longest=120, tail=20)
    feed = run(model, tokenizer, requests, prefill_tokens=1024, num_slots=128)
    assert computed(feed) <= 1.02 * plan.distinct_tokens
    assert sum(len(one.token_ids) for one in requests) > 2 * plan.distinct_tokens


def test_a_rank_that_only_decodes_shares_pages_that_no_later_token_changes(model, tokenizer):
    context = RankContext(
        model,
        tokenizer,
        num_pages=20,
        num_slots=3,
        prefill_tokens=64,
        decode_requests=3,
        place=RankPlace(rank=1, role="decode", group_rank=0, group_size=1),
    )
    pages, prompt = StatePages(context), list(range(300))
    requests = [Request(RequestKey(0, row, 0), 0, prompt + [row] * row, SAMPLING, 0) for row in range(4)]
    adopted = []
    for request in requests[:3]:
        match = pages.match_adopted(request)
        adopted.append(pages.adopt(request, match, RequestTimes()))
        assert len(match.full) == (0 if len(adopted) == 1 else 4), "an entry of 128 tokens lies in two pages"
    assert len({one.state_slot for one in adopted}) == 3
    assert all(one.num_computed == one.num_prompt_tokens for one in adopted)
    first, second, third = (one.pages for one in adopted)
    assert first[:4] == second[:4] == third[:4]
    assert not set(first[4:]) & set(second[4:]) | set(second[4:]) & set(third[4:])
    assert pages.match_adopted(requests[3]) is None, "no slot is free"
    for one in adopted:
        pages.release(one)
    assert pages.match_adopted(requests[3]) is not None
