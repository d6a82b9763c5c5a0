"""One rank's view of the KV store: what it reads ahead, copies, writes and claims, and when it gives a disk up."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.kv.memory import KvMemory
from batchinfer.kv_store.blocks import KvIdentity
from batchinfer.kv_store.disk import DiskStore
from batchinfer.rank.batch import Chunk
from batchinfer.rank.sequence import Sequence
from batchinfer.rank.stored_prefixes import StoredPrefixes, finite_blocks
from batchinfer.records import Request, RequestKey, RequestTimes, Sampling

GREEDY = Sampling(4, 0.0, 1.0, 0, 0.0, 1, 0, (), (), False, None)
LAYERS, WIDTH, POOL = 2, 8, 64


class SlowStore(DiskStore):
    """A store on a disk that takes its time."""

    seconds_per_file = 0.0

    def read_span(self, span, blocks, out):
        time.sleep(self.seconds_per_file)
        return super().read_span(span, blocks, out)


def identity(latent_dim: int = WIDTH, block_tokens: int = PAGE_TOKENS) -> KvIdentity:
    return KvIdentity("m", "w", "c", "float32", "n", "", block_tokens, LAYERS, latent_dim)


def pool(latent_dim: int = WIDTH) -> torch.Tensor:
    return torch.zeros(LAYERS, POOL, PAGE_TOKENS, latent_dim)


def open_prefixes(folder: Path, pages: torch.Tensor, *, block_tokens=PAGE_TOKENS, **how):
    store = SlowStore(folder, identity(pages.shape[3], block_tokens))
    return store, StoredPrefixes(store, KvMemory(pages), **{"persist": "all", "reuse": "always", "wait_s": 5.0} | how)


def request(tokens: list[int], row: int = 0, **more) -> Request:
    return Request(RequestKey(0, row, 0), more.pop("unit", 0), tokens, GREEDY, 0, **more)


def compute(prefixes: StoredPrefixes, asked: Request, pages: torch.Tensor, page_ids: list[int], start: int = 0) -> None:
    """Write values in place of a prefill step; each value identifies its token."""
    for token, place in zip(asked.token_ids[start:], range(start, len(asked.token_ids)), strict=True):
        pages[:, page_ids[place // PAGE_TOKENS], place % PAGE_TOKENS] = token
    sequence = Sequence(asked, page_ids, len(asked.token_ids), RequestTimes(), None)
    prefixes.note_step([Chunk(sequence, start, len(asked.token_ids))], compute_s=1e-6)


def store_one(folder: Path, asked: Request, latent_dim: int = WIDTH, **how) -> None:
    pages = pool(latent_dim)
    _, prefixes = open_prefixes(folder, pages, **how)
    prefixes.read_ahead([asked])
    assert prefixes.fill(asked, 0, list(range(20))) == 0
    compute(prefixes, asked, pages, list(range(20)))
    prefixes.close()


@pytest.mark.parametrize("block_tokens", [64, 128, 256])
@pytest.mark.parametrize("num_known_pages", [0, 1, 2, 3])
def test_what_memory_has_not_comes_from_the_disk(tmp_path, block_tokens, num_known_pages):
    asked = request(list(range(1000, 1000 + 600)), shared_tokens=num_known_pages * PAGE_TOKENS)
    store_one(tmp_path / "store", asked, block_tokens=block_tokens)
    pages, page_ids = pool(), list(range(30, 50))
    _, prefixes = open_prefixes(tmp_path / "store", pages, block_tokens=block_tokens)
    prefixes.read_ahead([asked])
    num_tokens = prefixes.fill(asked, num_known_pages, page_ids)
    assert num_tokens == 600 // block_tokens * block_tokens
    for place in range(num_tokens):
        page, slot = page_ids[place // PAGE_TOKENS], place % PAGE_TOKENS
        expected = 0 if place < num_known_pages * PAGE_TOKENS else 1000 + place
        assert (pages[:, page, slot] == expected).all()
    prefixes.close()


def test_blocks_of_this_run_are_told_from_those_that_were_there_before(tmp_path):
    """Blocks count so after any number of reads, in any session; blocks without a run's name are older."""
    prompt = list(range(300))
    for num_tokens, run in [(64, ""), (128, "other"), (300, "mine")]:
        store, pages = DiskStore(tmp_path / "store", identity(), run=run), pool()
        prefixes = StoredPrefixes(store, KvMemory(pages), persist="all", reuse="always", wait_s=5.0)
        asked = request(prompt[:num_tokens])
        prefixes.read_ahead([asked])
        compute(prefixes, asked, pages, list(range(20)), start=prefixes.fill(asked, 0, list(range(20))))
        prefixes.close()
    for run, expected in [("mine", 128), ("other", 192), ("", 256)]:
        prefixes = StoredPrefixes(
            DiskStore(tmp_path / "store", identity(), run=run),
            KvMemory(pool()),
            persist="all",
            reuse="always",
            wait_s=5.0,
        )
        asked = request(prompt)
        prefixes.read_ahead([asked])
        assert prefixes.fill(asked, 0, list(range(20))) == 256
        assert prefixes.older_tokens(asked, 0, 256) == expected
        assert prefixes.older_tokens(asked, 10, 256) == expected - 10
        prefixes.close()


def test_memory_that_holds_less_than_expected_is_made_up_for(tmp_path):
    asked = request(list(range(300)), shared_tokens=200)
    store_one(tmp_path / "store", asked)
    pages = pool()
    _, prefixes = open_prefixes(tmp_path / "store", pages)
    prefixes.read_ahead([asked])  # from block 3 on
    assert prefixes.fill(asked, 1, list(range(10))) == 256
    assert (pages[0, :4, 0, 0] == torch.tensor([0.0, 64.0, 128.0, 192.0])).all()
    prefixes.close()


def test_the_last_token_of_a_prompt_is_never_taken_from_the_disk(tmp_path):
    asked = request(list(range(128)))
    store_one(tmp_path / "store", asked)
    _, prefixes = open_prefixes(tmp_path / "store", pool())
    prefixes.read_ahead([asked])
    assert prefixes.fill(asked, 0, list(range(10))) == 64
    prefixes.close()


@pytest.mark.parametrize(("persist", "expected"), [("all", 4), ("shared", 2), ("none", 0)])
def test_what_is_written(tmp_path, persist, expected):
    asked = request(list(range(300)), kept_tokens=130)
    store_one(tmp_path / "store", asked, persist=persist)
    store = DiskStore(tmp_path / "store", identity())
    assert store.find(store.identity.chain(asked.token_ids)) == expected
    store.close()


def test_what_is_not_finite_is_not_written(tmp_path):
    asked, pages = request(list(range(300))), pool()
    _, prefixes = open_prefixes(tmp_path / "store", pages)
    prefixes.read_ahead([asked])
    prefixes.fill(asked, 0, list(range(20)))
    pages[:, :2] = 1
    pages[1, 2, 5, 0] = torch.inf
    prefixes.note_step([Chunk(Sequence(asked, list(range(20)), 300, RequestTimes(), None), 0, 300)], compute_s=1e-6)
    prefixes.close()
    store = DiskStore(tmp_path / "store", identity())
    assert store.find(store.identity.chain(asked.token_ids)) == 2
    store.close()
    narrow = KvMemory(pages.bfloat16()).take_blocks([0, 2, 1], 3)
    assert finite_blocks(narrow, torch.bfloat16) == 1
    assert finite_blocks(narrow, torch.uint8) == 3


def test_blocks_that_later_units_need_are_claimed_until_then(tmp_path):
    pages = pool()
    store, prefixes = open_prefixes(tmp_path / "store", pages)
    first = request(list(range(300)), last_units=(2, 1), unit=0)
    names = store.identity.chain(first.token_ids)
    told = {}
    store.set_next_uses = told.update
    prefixes.read_ahead([first])
    prefixes.fill(first, 0, list(range(10)))
    assert told == {names[0]: 1, names[1]: 1}
    for unit, expected in [(1, {names[0]: 2, names[1]: None}), (2, {names[0]: None, names[1]: None})]:
        later = request([*range(64), *range(500, 600)], row=unit, unit=unit)
        prefixes.read_ahead([later])
        prefixes.fill(later, 0, list(range(10)))
        assert told == expected
    prefixes.close()


def test_a_disk_that_is_slower_than_computing_is_not_read_for_long(tmp_path):
    width = 1 << 15  # a block is 16.8 MB, so that four of them are a trial
    asked = [request([row, *range(99)], row=row) for row in range(7)]
    for each in asked:
        store_one(tmp_path / "store", each, width)
    for reuse, expected in [("auto", 4), ("always", 6)]:
        pages = pool(width)
        store, prefixes = open_prefixes(tmp_path / "store", pages, reuse=reuse)
        store.seconds_per_file = 0.02
        prefixes.read_ahead(asked[:1])
        compute(prefixes, asked[0], pages, [0, 1])  # a microsecond
        loaded = 0
        for each in asked[1:]:
            prefixes.read_ahead([each])
            loaded += prefixes.fill(each, 0, [0, 1]) > 0
        assert loaded == expected
        problems = prefixes.take_problems()
        assert len(problems) == (reuse == "auto")
        assert all("is slower than computing it: nothing more is read" in problem for problem in problems)
        assert prefixes.take_problems() == []
        prefixes.close()


def test_a_disk_that_does_not_answer_is_given_up(tmp_path):
    asked = request(list(range(100)))
    store_one(tmp_path / "store", asked)
    store, prefixes = open_prefixes(tmp_path / "store", pool(), wait_s=0.05)
    store.seconds_per_file = 1.0
    prefixes.read_ahead([asked])
    assert prefixes.fill(asked, 0, [0, 1]) == 0
    (problem,) = prefixes.take_problems()
    assert "no answer for 0 s" in problem
    other = request(list(range(100)), row=1)
    prefixes.read_ahead([other])
    assert prefixes.fill(other, 0, [0, 1]) == 0
    prefixes.close()
