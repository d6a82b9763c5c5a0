"""The KV store on disk: what goes in comes out, also of other processes and after a restart."""

import os
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from batchinfer.kv.memory import KvMemory
from batchinfer.kv_store import disk
from batchinfer.kv_store.block_file import HEADER_BYTES, MAX_BLOCKS, FileName, make_header
from batchinfer.kv_store.index import BlockIndex
from batchinfer.kv_store.reader import Reader
from batchinfer.kv_store.writer import Writer
from support.kv_stores import (
    BIG,
    BLOCK_BYTES,
    IDENTITY,
    block_files,
    chain_of,
    content_of,
    damage,
    open_store,
    quarantined,
    read_intact,
    write_chain,
)

LONG = [str(number) for number in range(40)]


def test_blocks_come_back_byte_for_byte_also_after_a_restart_and_in_other_processes(tmp_path, store):
    chain = chain_of(*LONG)
    assert store.find(chain) == 0
    assert write_chain(store, chain) == 40
    assert store.find(chain) == read_intact(store, chain) == 40
    with closing(open_store(tmp_path / "kv")) as other:
        assert other.find(chain) == read_intact(other, chain) == 40
    assert store.counters.hit_blocks == 40
    assert store.counters.written_bytes == 40 * BLOCK_BYTES


def test_chains_that_branch_share_their_common_blocks(store):
    #   a ── b ─┬─ c ── d
    #           └─ x
    assert write_chain(store, chain_of(*"abcd")) == 4
    branch = chain_of(*"abx")
    assert store.find(branch) == 2
    assert write_chain(store, branch) == 1
    assert read_intact(store, branch) == 3
    assert read_intact(store, chain_of(*"abcd")) == 4
    assert write_chain(store, branch) == 0  # nothing is stored twice


def test_a_look_up_ends_at_the_first_gap(store):
    chain = chain_of(*"abcdef")
    write_chain(store, chain[:2])
    assert write_chain(store, chain[:5], first=3) == 0  # the one before it is missing: it would not be found
    assert store.counters.dropped_blocks == 2
    assert store.find(chain) == 2
    assert store.find(chain_of("x", *"abc")) == 0
    assert store.find([]) == 0
    assert read_intact(store, []) == 0


def test_files_hold_many_small_blocks_and_few_large_ones(tmp_path, store):
    write_chain(store, chain_of(*LONG))
    assert [FileName.parse(path.name).first for path in block_files(tmp_path / "kv")] == [0, 29]
    large = replace(IDENTITY, num_layers=61, latent_dim=576)  # DeepSeek-V3: 4.5 MB in bfloat16
    assert large.block_bytes == 4_497_408
    with closing(open_store(tmp_path / "large", large)) as other:
        assert other._writer.blocks_per_file == 3


def test_a_file_ends_where_the_next_use_changes(tmp_path, store):
    chain = chain_of(*"abcde")
    store.set_next_uses({chain[0]: 3, chain[1]: 3, chain[2]: 9})
    write_chain(store, chain)
    assert [FileName.parse(path.name).first for path in block_files(tmp_path / "kv")] == [0, 2, 3]


def test_one_block_is_read_without_the_rest_of_its_file(tmp_path, store):
    chain = chain_of(*"abcd")
    write_chain(store, chain)
    (path,) = block_files(tmp_path / "kv")
    damage(path, HEADER_BYTES)  # block a
    damage(path, HEADER_BYTES + 3 * BLOCK_BYTES)  # block d
    (span,) = store.spans(chain)
    middle = type(span)(span.file, 1, 1, 3)
    out = np.empty((2, BLOCK_BYTES), np.uint8)
    assert store.read_span(middle, chain[1:3], out) == 2
    assert np.array_equal(out, content_of(chain[1:3]))


def test_a_block_in_two_files_is_found_until_both_are_gone(tmp_path):
    chain = chain_of(*"abcd")
    short, long = str(FileName.of(chain, 0, 2)), str(FileName.of(chain, 0, 4))
    for first, second in [(short, long), (long, short)]:
        for lost, left in [(short, 4), (long, 2)]:
            index = BlockIndex(tmp_path)
            index.add(first)
            index.add(second)
            index.remove(lost)
            assert index.count_leading(chain) == left
            index.remove(long if lost == short else short)
            assert index.count_leading(chain) == 0


def test_what_others_write_and_remove_is_learned_by_refreshing(tmp_path, store):
    with closing(open_store(tmp_path / "kv")) as other:
        for parts in ("a", "ab", "abc", "abcd"):  # one after another, within one tick of the folders' clock
            chain = chain_of(*parts)
            write_chain(other, chain, first=len(parts) - 1)
            store.refresh()
            assert store.find(chain) == read_intact(store, chain) == len(parts)
        block_files(tmp_path / "kv")[-1].unlink()
        store.refresh()
        assert store.find(chain) == 3


def test_a_change_within_one_tick_of_a_coarse_clock_is_noticed(tmp_path, store):
    chain = chain_of(*"ab")
    with closing(open_store(tmp_path / "kv")) as other:
        write_chain(other, chain[:1])
        store.refresh()
        folder = store.store.model(IDENTITY) / FileName.of(chain, 1, 2).folder
        folder.mkdir(exist_ok=True)
        store.refresh()
        before_ns = folder.stat().st_mtime_ns
        write_chain(other, chain, first=1)
        os.utime(folder, ns=(before_ns, before_ns))
        store.refresh()
    assert store.find(chain) == 2


def test_a_block_that_was_evicted_meanwhile_is_not_there(tmp_path, store):
    chain = chain_of(*"ab")
    write_chain(store, chain[:1])
    write_chain(store, chain, first=1)
    block_files(tmp_path / "kv")[1].unlink()
    assert store.find(chain) == 2
    assert read_intact(store, chain) == 1
    assert store.find(chain) == 1
    assert store.counters.missing_blocks == 1
    assert store.take_problem() is None


def test_files_are_for_their_owner_only(tmp_path, store):
    previous = os.umask(0)
    try:
        with closing(open_store(tmp_path / "deep" / "kv")) as other:
            write_chain(other, chain_of("a"))
            for path in [tmp_path / "deep" / "kv", *(tmp_path / "deep" / "kv").rglob("*")]:
                assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    finally:
        os.umask(previous)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_go_to_blocks_and_back(dtype):
    pages = torch.randn(3, 10, 64, 8).to(dtype)  # L, P, 64, W
    page_ids = [7, 2, 9, 0]
    blocks = KvMemory(pages).take_blocks(page_ids, num_blocks=2)
    assert blocks.shape == (2, 2 * 3 * 64 * 8 * dtype.itemsize)
    assert blocks.flags.c_contiguous
    # within a block page after page, as `block_shape` says
    second = torch.from_numpy(blocks[1].copy()).view(dtype).view(2, 3, 64, 8)
    assert torch.equal(second, torch.stack([pages[:, 9], pages[:, 0]]))
    other = torch.zeros_like(pages)
    KvMemory(other).put_blocks(blocks, [1, 5, 3, 4])
    assert torch.equal(other[:, [1, 5, 3, 4]], pages[:, page_ids])
    assert not other[:, [0, 2, 6, 7, 8, 9]].any()


def test_two_blocks_of_one_short_name_are_told_apart_and_the_file_is_not_to_blame(tmp_path, store):
    chain = chain_of("a")
    write_chain(store, chain)
    clash = [chain[0][:-1] + bytes([chain[0][-1] ^ 1])]
    assert store.find(clash) == 1
    assert read_intact(store, clash) == 0
    assert store.counters.missing_blocks == 1
    assert quarantined(tmp_path / "kv") == []
    assert read_intact(store, chain) == 1


def test_the_longest_header_fits():
    worst = replace(IDENTITY, **dict.fromkeys(("model", "weights", "config", "numerics", "salt"), '"\n\u20ac' * 999))
    worst = replace(worst, block_tokens=2**20 * 64, num_layers=10**4, latent_dim=10**4)
    chain = [bytes(32)] * 10**6
    content = np.zeros((MAX_BLOCKS, 8), np.uint8)
    first, run = 10**6 - MAX_BLOCKS, "f" * 16
    assert len(make_header(worst, chain[first:], first, content, bytes(32), run)) == HEADER_BYTES
    assert len(str(FileName.of(chain, 10**6 - MAX_BLOCKS, 10**6))) <= 255


def test_large_blocks_through_reader_and_writer(tmp_path):
    chain = chain_of(*"abcdefgh", identity=BIG)
    with closing(open_store(tmp_path / "kv", BIG)) as store:
        with closing(Writer(store)) as writer:
            assert writer.put(chain, 0, content_of(chain, BIG)) == 8
        with closing(Reader(store)) as reader:
            assert np.array_equal(reader.ask(chain).wait(), content_of(chain, BIG))


def test_opening_a_store_leaves_other_peoples_files_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with closing(disk.DiskStore(tmp_path, IDENTITY)) as store:
        assert "not empty" in store.take_problem()
        assert store.take_problem() is None
        assert write_chain(store, chain_of("a")) == 0
        assert store.find(chain_of("a")) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("version", [1, 3])
def test_a_store_of_another_version_is_left_alone(tmp_path, store, version):
    write_chain(store, chain_of("a"))
    marker = tmp_path / "kv" / "store.json"
    marker.write_text(marker.read_text().replace('"version": 2', f'"version": {version}'))
    with closing(disk.DiskStore(tmp_path / "kv", IDENTITY)) as other:
        problem = other.take_problem()
        assert f"version {version}" in problem
        assert "delete the folder or name another" in problem
        assert "goes on without" in problem
        assert other.find(chain_of("a")) == 0
