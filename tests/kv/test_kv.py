"""Pages and the prefix tree: holders of pages, matches of prompts, and pages that may be freed."""

import random
from itertools import chain
from pathlib import Path

import pytest
import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.kv.memory import KvMemory
from batchinfer.kv.pages import PagePool, pages_for
from batchinfer.kv.prefix_tree import PrefixTree
from batchinfer.kv.transfer import read_transfer, write_transfer
from batchinfer.records import ConfigError, PeerLostError
from support.open_files import no_more_open_files
from support.prompt_corpus import common
from support.small_disks import SmallDisk, small_disk

__all__ = ["small_disk"]


def test_pages_for_rounds_up():
    assert [pages_for(count) for count in (0, 1, 64, 65)] == [0, 1, 1, 2]


def test_a_page_is_free_when_its_last_holder_lets_go():
    pool = PagePool(2)
    (page,) = pool.reserve(1)
    pool.share(page)
    pool.release(page)
    assert pool.num_free == 1
    pool.release(page)
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(page)


def prompt(*parts):
    """Tokens of parts like ("s", 100): 100 tokens that only the part called s has."""
    return [hash((name, place)) % 2**31 for name, count in parts for place in range(count)]


def insert(tree, pool, tokens):
    pages = pool.reserve(pages_for(len(tokens)))
    tree.insert(tokens, pages)
    return pages


def found(tree, tokens):
    """Return the match of a prompt whose last token has to run."""
    return tree.match(tokens, len(tokens) - 1)


def test_matches_are_found_by_token_but_never_whole_prompts():
    #   system (100 tokens) = one full page + 36 tokens
    pool = PagePool(16)
    tree = PrefixTree(pool)
    first = prompt(("system", 100), ("a", 10))
    pages = insert(tree, pool, first)

    match = found(tree, prompt(("system", 100), ("b", 10)))
    assert [node.page for node in match.full] == pages[:1]
    assert (match.branch.page, match.num_branch_tokens) == (pages[1], 36)
    assert match.num_tokens == 100

    again = found(tree, first)  # all but the last token, which must run
    assert again.num_tokens == 109
    assert found(tree, prompt(("other", 50))).num_tokens == 0
    whole_page = prompt(("system", 64))
    assert found(tree, whole_page).num_tokens == 63


def test_room_is_made_leaves_first_and_never_from_running_sequences():
    pool = PagePool(4)
    tree = PrefixTree(pool)
    first = prompt(("system", 64), ("a", 64))
    second = prompt(("system", 64), ("b", 64))
    held = insert(tree, pool, first)
    # the second prompt shares the system page and brings one more page
    match = found(tree, second)
    pages = tree.hold(match) + pool.reserve(1)
    tree.insert(second, pages)
    tree.release(held)  # the first sequence has finished

    assert pool.num_free == 1
    assert tree.make_room(2)  # gives back a's page
    assert pool.num_free == 2
    assert found(tree, second).num_tokens == 127
    assert not tree.make_room(3)  # system and b are held by the second sequence
    tree.release(pages)
    assert tree.make_room(4)
    assert pool.num_free == 4


@pytest.mark.parametrize("seed", range(30))
def test_random_use_never_loses_or_doubles_a_page(seed):
    rng = random.Random(seed)
    pool = PagePool(40)
    tree = PrefixTree(pool)
    running, known = [], []
    for _ in range(200):
        if running and rng.random() < 0.45:
            tree.release(running.pop(rng.randrange(len(running))))
            continue
        tokens = prompt((f"s{rng.randrange(3)}", rng.randrange(0, 150)), (f"u{rng.randrange(6)}", rng.randrange(1, 80)))
        match = found(tree, tokens)
        limit = len(tokens) - 1
        oracle = max((common(tokens, other) for other in known), default=0)
        assert match.num_tokens <= min(oracle, limit)
        need = pages_for(len(tokens)) - len(match.full)
        if not tree.make_room(need, keep=(*match.full, match.branch)):
            continue
        pages = tree.hold(match) + pool.reserve(need)
        tree.insert(tokens, pages)
        running.append(pages)
        known.append(tokens)
    for pages in running:
        tree.release(pages)
    assert tree.make_room(40)
    assert pool.num_free == 40
    assert PAGE_TOKENS == 64


def test_no_more_tokens_are_matched_than_may_be():
    pool = PagePool(8)
    tree = PrefixTree(pool)
    tokens = prompt(("p", 200))
    insert(tree, pool, tokens)
    assert [tree.match(tokens, limit).num_tokens for limit in (0, 1, 63, 64, 65, 199)] == [0, 1, 63, 64, 65, 199]


def some_pages(num_pages=4):
    """A pool [L, P, 64, W] of numbers that all differ."""
    shape = (2, num_pages, PAGE_TOKENS, 8)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_pages_arrive_as_they_were_by_file_and_by_memory(tmp_path):
    pages = some_pages()
    for file in (tmp_path / "rank-0" / "0-1-0.kv", None):
        transfer = write_transfer(KvMemory(pages), [3, 1], file=file)
        assert transfer.num_bytes == 2 * pages[:, 0].nbytes
        received = torch.zeros_like(pages)
        read_transfer(transfer.path, KvMemory(received), [0, 2], first_page=0)
        assert torch.equal(received[:, [0, 2]], pages[:, [3, 1]])
        transfer.close()
    assert not list((tmp_path / "rank-0").iterdir())


def test_no_changed_byte_of_a_transfer_between_hosts_reaches_the_pages(tmp_path):
    pages = some_pages()
    transfer = write_transfer(KvMemory(pages), [3, 1], file=tmp_path / "0-1-0.kv")
    sound, received = Path(transfer.path).read_bytes(), torch.zeros_like(pages)
    places = [*range(len(sound) - 2 * pages[:, 0].nbytes), -2 * pages[:, 0].nbytes, -pages[:, 0].nbytes, -1]
    for place in places:  # the length, the header, a byte of each page
        content = bytearray(sound)
        content[place] ^= 0x10
        Path(transfer.path).write_bytes(content)
        with pytest.raises(PeerLostError, match=r"0-1-0\.kv"):
            read_transfer(transfer.path, KvMemory(received), [0, 2], first_page=0)
    Path(transfer.path).write_bytes(sound[: -pages[:, 0].nbytes] + bytes(pages[:, 0].nbytes))  # of a lost write
    with pytest.raises(PeerLostError, match="its checksums do not match"):
        read_transfer(transfer.path, KvMemory(received), [0, 2], first_page=1)
    assert not received.any()
    transfer.close()


@pytest.mark.parametrize("first_page", [0, 1, 2])
def test_pages_of_layers_that_differ_and_a_state_arrive_as_they_were(first_page):
    def memory(fill):
        # three layers: values of 3 and 5, of none, of 2 in a page; states of other dtypes and odd sizes
        pages = tuple(fill(4, width).bfloat16() for width in (3, 5, 2))
        slots = [(fill(3, 2, 3).bfloat16(), fill(3, 1)), (fill(3, 1, 1).bfloat16(),), (fill(3, 5), fill(3, 2))]
        return KvMemory(pages, tuple(slots), (slots[0][:1], (), slots[2]))

    sent, received = memory(torch.rand), memory(torch.zeros)
    transfer = write_transfer(sent, [3, 1], 2, file=None, leaves_host=True)
    assert transfer.num_bytes == 2 * 10 * 2 + (6 * 2 + 4 + 2 + 5 * 4 + 2 * 4)
    assert (sent.page_bytes, sent.state_bytes, sent.stored_bytes) == (20, 46, 40)
    read_transfer(transfer.path, received, [0, 2], 1, first_page=first_page)
    for ours, theirs in zip(sent.pages, received.pages, strict=True):
        assert torch.equal(ours[[3, 1][first_page:]], theirs[[0, 2][first_page:]])
        assert not theirs[[*[0, 2][:first_page], 1, 3]].any()
    for ours, theirs in zip(chain(*sent.slots), chain(*received.slots), strict=True):
        assert torch.equal(ours[2], theirs[1])
        assert not theirs[[0, 2]].any()
    with pytest.raises(PeerLostError, match="a state of 46 bytes"):
        read_transfer(write_transfer(sent, [3, 1], file=None).path, received, [0, 2], 1, first_page=0)
    transfer.close()


def test_a_transfer_at_the_limit_of_open_files_is_no_fault_of_its_request():
    memory = KvMemory(some_pages())
    sent = write_transfer(memory, [3, 1], file=None)
    with no_more_open_files():
        with pytest.raises(ConfigError, match=r"cannot hand over KV: no file descriptor is left .*raise the limit"):
            write_transfer(memory, [3, 1], file=None)
        with pytest.raises(ConfigError, match=r"cannot take over KV: no file descriptor is left .*raise the limit"):
            read_transfer(sent.path, memory, [0, 2], first_page=0)
    sent.close()


@pytest.mark.parametrize("trouble", ["full", "read only"])
def test_a_transfer_for_which_the_disk_has_no_room_is_no_fault_of_its_request(small_disk: SmallDisk, trouble):
    file = small_disk.folder / "rank-0" / "0-1-0.kv"
    file.parent.mkdir()
    if trouble == "full":
        small_disk.fill(but_bytes=4096)
        reason = "No space left on device; free space"
    else:
        small_disk.set_read_only(True)
        reason = "Read-only file system; choose another folder"
    with pytest.raises(ConfigError, match=f"cannot write {file}: {reason}"):
        write_transfer(KvMemory(some_pages()), [3, 1], file=file)
