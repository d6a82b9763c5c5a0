"""Prefixes of prompts whose requests have states: computed once where a state is kept, and to the last bit alike."""

import random
import shutil
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch

from batchinfer.balance.output_lengths import OutputLengths
from batchinfer.config import PAGE_TOKENS, SamplingConfig
from batchinfer.config.rank_layout import RankPlace
from batchinfer.controller.rank_queues import RankQueues
from batchinfer.controller.waiting_pieces import RankRoom
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.kv.memory import KvMemory
from batchinfer.kv_store.blocks import KvIdentity
from batchinfer.kv_store.disk import DiskStore
from batchinfer.model.transformer import Transformer
from batchinfer.plan.prefix import plan_prefixes
from batchinfer.protocol.feed import Inbox
from batchinfer.rank.batch import Chunk
from batchinfer.rank.context import RankContext
from batchinfer.rank.sequence import Sequence, pages_needed
from batchinfer.rank.state_pages import StatePages
from batchinfer.rank.stored_states import StoredStates
from batchinfer.records import Request, RequestKey, RequestTimes
from support.compressed_models import published_tensors, random_model, write_compressed
from support.one_rank import Feed, GivingAway, Taking, run_rank
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
    shared = zip(requests, cached, [*cached[1:], 0], strict=True)
    return [
        msgspec.structs.replace(one, cached_tokens=count, kept_tokens=max(count, after)) for one, count, after in shared
    ], plan


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
        self.store = {}

    def send_store(self, counters, problems):
        assert not problems
        self.store = counters

    def receive(self, wait_s=0.0):
        handed = self.inbox.pop() if self.inbox else Inbox()
        return replace(handed, leave=len(self.done) == self.num_requests)


def run(
    model,
    tokenizer,
    requests,
    *,
    num_slots=64,
    prefill_tokens=2048,
    num_pages=None,
    num_batches=1,
    shares=True,
    open_prefixes=None,
):
    room = RankRoom(prefill_tokens, 64, num_pages, keeps_states=True)
    sizes = {"prefill_tokens": prefill_tokens, "num_pages": num_pages or 400, "share_prefixes": shares}
    feed = DealtFeed(requests, room, num_batches)
    run_rank(model, tokenizer, requests, feed=feed, num_slots=num_slots, open_prefixes=open_prefixes, **sizes)
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


class OftenGivingAway(GivingAway):
    every = 3


@pytest.mark.parametrize("role", ["both", "decode"])
def test_running_requests_that_go_to_another_rank_take_their_state_along(model, tokenizer, few, role):
    requests, _, unshared = few
    place = RankPlace(rank=1, role=role, group_rank=0, group_size=1)

    def go_on(adoptions):
        # room for few of them: the others wait until slots and pages come free
        taken = [adoption.request for adoption in adoptions]
        sizes = {"num_slots": 2, "num_pages": 2 * max(map(pages_needed, requests)), "place": place}
        return run_rank(model, tokenizer, taken, feed=Taking(adoptions), **sizes)

    feed = OftenGivingAway(requests, go_on)
    run_rank(model, tokenizer, requests, feed=feed, num_slots=64, prefill_tokens=150)
    assert results(feed) == unshared
    assert feed.num_given > 4


BLOCK = 128


def with_store(model, folder, persist="all"):
    """Return how a rank opens the KV store in a folder."""

    def open_prefixes(memory):
        attention = model.config.attention
        assert memory.state_bytes == attention.state_bytes(4)
        assert memory.stored_bytes == attention.state_bytes(4, stored=True)
        size = BLOCK // PAGE_TOKENS * memory.page_bytes
        identity = KvIdentity("m", "w", "c", "float32", "n", "", BLOCK, 4, 1, own_bytes=size)
        stores = DiskStore(folder, identity), DiskStore(folder, identity.of_states(memory.stored_bytes))
        return StoredStates(*stores, memory, persist=persist, reuse="always", wait_s=120.0)

    return open_prefixes


def files_of(folder):
    """Return the files of blocks and the files of states in a store."""
    files = sorted((folder / "models").rglob("*.kv"))
    sizes = sorted({file.parent.parent.name for file in files}, key=lambda name: "state" in label(folder, name))
    return [[file for file in files if file.parent.parent.name == name] for name in sizes]


def label(folder, name):
    return (folder / "models" / name / "identity.json").read_text()


@pytest.fixture(scope="module")
def stored(model, tokenizer, few, tmp_path_factory):
    """The store of a run that found none."""
    requests, plan, unshared = few
    folder = tmp_path_factory.mktemp("kv") / "store"
    feed = run(model, tokenizer, requests, prefill_tokens=150, open_prefixes=with_store(model, folder))
    assert results(feed) == unshared
    assert computed(feed) <= 1.02 * plan.distinct_tokens
    assert feed.store["dropped_blocks"] == 0
    blocks, states = files_of(folder)
    ends = {
        tuple(one.token_ids[:end]) for one in requests for end in [(len(one.token_ids) - 1) // BLOCK * BLOCK] if end
    }
    assert len(states) >= len(ends), "a state after the last whole block of each prompt"
    assert feed.store["written_blocks"] >= len(states) + len(blocks)
    return folder


def longest_rest(requests):
    """Tokens that are left of each prompt behind its last whole block."""
    return sum(len(one.token_ids) - (len(one.token_ids) - 1) // BLOCK * BLOCK for one in requests)


@pytest.mark.parametrize("prefill_tokens", [70, 2048])
def test_a_warm_store_spares_whole_blocks_and_changes_no_bit(model, tokenizer, few, stored, prefill_tokens):
    requests, _, unshared = few
    feed = run(model, tokenizer, requests, prefill_tokens=prefill_tokens, open_prefixes=with_store(model, stored))
    assert results(feed) == unshared
    assert computed(feed) <= longest_rest(requests)
    assert feed.store["hit_blocks"] > 0
    assert feed.store["missing_blocks"] == 0
    assert sum(done.cached_disk_tokens for done in feed.done.values()) > 0


def flip(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("kind", [0, 1], ids=["blocks", "states"])
@pytest.mark.parametrize("harm", ["damaged", "missing", "foreign", "short"])
def test_what_is_damaged_is_computed_again(model, tokenizer, few, stored, tmp_path, kind, harm):
    requests, _, unshared = few
    folder = tmp_path / "store"
    shutil.copytree(stored, folder)
    of_kind = files_of(folder)[kind]
    for number, file in enumerate(of_kind[::2]):
        if harm == "damaged":
            flip(file)
        elif harm == "foreign":
            shutil.copy(of_kind[(2 * number + 1) % len(of_kind)], file)
        elif harm == "short":
            file.write_bytes(file.read_bytes()[:-1])
    opened = with_store(model, folder)

    def open_prefixes(memory):
        prefixes = opened(memory)
        if harm == "missing":
            for file in of_kind[::2]:
                file.unlink()
        return prefixes

    feed = run(model, tokenizer, requests, prefill_tokens=150, open_prefixes=open_prefixes)
    assert results(feed) == unshared
    assert feed.store["missing_blocks"] > 0
    assert (feed.store["damaged_files"] > 0) == (harm != "missing")


def test_only_what_prompts_share_is_kept(model, tokenizer, few, tmp_path):
    requests, _, unshared = few
    folder = tmp_path / "store"
    for _ in range(2):
        feed = run(model, tokenizer, requests, prefill_tokens=150, open_prefixes=with_store(model, folder, "shared"))
        assert results(feed) == unshared
    assert feed.store["hit_blocks"] > 0
    blocks, states = files_of(folder)
    points = {tuple(one.token_ids[: one.kept_tokens // BLOCK * BLOCK]) for one in requests} - {()}
    assert 0 < len(states) <= 2 * len(points)
    assert len(blocks) > 0


def test_a_store_of_other_numbers_is_not_used(model, tokenizer, few, stored):
    requests, _, unshared = few
    opened = with_store(model, stored)

    def open_prefixes(memory):
        prefixes = opened(memory)
        prefixes.close()
        other = replace(prefixes._store.identity, weights="others")
        stores = DiskStore(stored, other), DiskStore(stored, other.of_states(memory.stored_bytes))
        return StoredStates(*stores, memory, persist="none", reuse="always", wait_s=120.0)

    feed = run(model, tokenizer, requests, open_prefixes=open_prefixes)
    assert results(feed) == unshared
    assert feed.store["hit_blocks"] == 0


def test_a_state_from_disk_is_read_once_for_all_that_go_on_there(model, tokenizer, tmp_path):
    prefix = [2 + place % 90 for place in range(2 * BLOCK)]
    requests = [
        Request(RequestKey(0, row, 0), 0, prefix + [5 + row] * 9, SAMPLING, 0, kept_tokens=len(prefix))
        for row in range(4)
    ]
    requests = requests[:1] + [msgspec.structs.replace(one, cached_tokens=len(prefix)) for one in requests[1:]]
    unshared = results(run(model, tokenizer, requests, shares=False))
    found = []
    for _ in range(2):
        feed = run(model, tokenizer, requests, prefill_tokens=80, open_prefixes=with_store(model, tmp_path, "shared"))
        assert results(feed) == unshared
        found.append((computed(feed), feed.store["hit_blocks"]))
    assert found == [(len(prefix) + 36, 0), (36, 3)], "two blocks and a state, once"


@pytest.mark.parametrize("value", [1.0, torch.inf, torch.nan])
def test_states_are_needed_as_long_as_their_blocks_and_written_if_they_are_finite(tmp_path, value):
    ring = torch.zeros(2, 4)
    memory = KvMemory((torch.zeros(8, 8),), ((ring,),), ((ring,),))
    of_blocks = KvIdentity("m", "w", "c", "float32", "n", "", BLOCK, 1, 1, own_bytes=2 * memory.page_bytes)
    of_states = of_blocks.of_states(memory.stored_bytes)
    stores, told = [DiskStore(tmp_path, one) for one in (of_blocks, of_states)], [{}, {}]
    for store, uses in zip(stores, told, strict=True):
        store.set_next_uses = uses.update
    prefixes = StoredStates(*stores, memory, persist="all", reuse="always", wait_s=5.0)
    asked = Request(RequestKey(0, 0, 0), 0, list(range(300)), SAMPLING, 0, last_units=(2, 1))
    sequence = Sequence(asked, list(range(5)), 0, RequestTimes(), None)
    prefixes.read_ahead([asked])
    assert prefixes.fill_sequence(sequence, 0) == 0
    names = of_blocks.chain(asked.token_ids)
    states = list(map(of_states.name_of_state, names))
    assert told == [dict.fromkeys(names, 1), dict.fromkeys(states, 1)]
    assert not set(names) & set(states)
    prefixes.prepare(sequence, 255)
    assert not sequence.stored_states
    prefixes.prepare(sequence, 300)
    sequence.stored_states[256][0][0].fill_(1.0)[2] = value
    prefixes.note_step([Chunk(sequence, 0, 300)], compute_s=1e-6)
    prefixes.close()
    with closing(DiskStore(tmp_path, of_blocks)) as blocks, closing(DiskStore(tmp_path, of_states)) as written:
        assert blocks.find(names) == 2
        assert [written.find([state]) for state in states] == [0, int(value == 1.0)]
