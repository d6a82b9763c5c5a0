"""The KV store on disk: what goes in comes out, what is damaged does not, what is worth least goes first."""

import functools
import itertools
import os
import shutil
import struct
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from batchinfer.kv import block_file, disk, space
from batchinfer.kv.block_file import HEADER_BYTES, MAX_BLOCKS, FileName, make_header
from batchinfer.kv.block_pages import blocks_from_pages, blocks_to_pages
from batchinfer.kv.index import BlockIndex
from batchinfer.kv.reader import Reader
from batchinfer.kv.space import open_books
from batchinfer.kv.writer import Writer
from kv_stores import (
    BIG,
    BLOCK_BYTES,
    FILE_BYTES,
    IDENTITY,
    block_files,
    chain_of,
    content_of,
    open_store,
    read_intact,
    total_bytes,
    write_chain,
)

LONG = [str(number) for number in range(40)]


def wait_until(happened, seconds=30):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


@pytest.fixture
def store(tmp_path):
    with closing(open_store(tmp_path / "kv")) as store:
        yield store


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
    assert write_chain(store, chain[:5], first=3) == 0  # the one before it is missing: nobody would find it
    assert store.counters.dropped_blocks == 2
    assert store.find(chain) == 2
    assert store.find(chain_of("x", *"abc")) == 0
    assert store.find([]) == 0
    assert len(store.read([])) == 0


def test_files_hold_many_small_blocks_and_few_large_ones(tmp_path, store):
    write_chain(store, chain_of(*LONG))
    assert [FileName.parse(path.name).first for path in block_files(tmp_path / "kv")] == [0, 29]
    large = replace(IDENTITY, num_layers=61, latent_dim=576)  # DeepSeek-V3: 4.5 MB in bfloat16
    assert large.block_bytes == 4_497_408
    with closing(open_store(tmp_path / "large", large)) as other:
        assert other.blocks_per_file == 3


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
            index.forget(lost)
            assert index.count_leading(chain) == left
            index.forget(long if lost == short else short)
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
    blocks = blocks_from_pages(pages, page_ids, num_blocks=2)
    assert blocks.shape == (2, 2 * 3 * 64 * 8 * dtype.itemsize)
    assert blocks.flags.c_contiguous
    # within a block page after page, as `block_shape` says
    second = torch.from_numpy(blocks[1].copy()).view(dtype).view(2, 3, 64, 8)
    assert torch.equal(second, torch.stack([pages[:, 9], pages[:, 0]]))
    other = torch.zeros_like(pages)
    blocks_to_pages(blocks, other, [1, 5, 3, 4])
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
    assert len(make_header(worst, chain, 10**6 - MAX_BLOCKS, content)) == HEADER_BYTES
    assert len(str(FileName.of(chain, 10**6 - MAX_BLOCKS, 10**6))) <= 255


# Damage


def damage(path, offset, bit=0):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def quarantined(folder):
    return sorted(path.name for path in (folder / "quarantine").iterdir())


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_with_flipped_bits_never_serves_what_they_touch(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("flip") / "kv"
    chain = chain_of(*"abcd")
    with closing(open_store(folder)) as store:
        write_chain(store, chain)
        (path,) = block_files(folder)
        size = path.stat().st_size
        flips = data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 7)), min_size=1, max_size=5))
        before = path.read_bytes()
        for offset, bit in flips:
            damage(path, offset, bit)
        if path.read_bytes() == before:  # the same bit twice
            return
        touched = [0 if at < HEADER_BYTES else (at - HEADER_BYTES) // BLOCK_BYTES for at, bit in flips]
        touched = min(block for block, flip in zip(touched, flips, strict=True) if flips.count(flip) % 2)
        assert read_intact(store, chain) == touched
        assert quarantined(folder) == [path.name]
        assert store.counters.damaged_files == 1
        assert store.find(chain) == 0
        assert write_chain(store, chain) == 4  # computed again, it is stored again
        assert read_intact(store, chain) == 4
    shutil.rmtree(folder)


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 5, -1])
def test_a_truncated_file_is_never_served(tmp_path, store, size):
    chain = chain_of(*"ab")
    write_chain(store, chain)
    (path,) = block_files(tmp_path / "kv")
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    assert read_intact(store, chain) == 0
    assert quarantined(tmp_path / "kv") == [path.name]


def test_a_file_that_is_too_long_or_all_zeros_is_never_served(tmp_path, store):
    chains = [chain_of("a"), chain_of("b")]
    for chain in chains:
        write_chain(store, chain)
    for path, content in zip(
        block_files(tmp_path / "kv"), (lambda old: old + b"\0" * 8, lambda old: bytes(len(old))), strict=True
    ):
        path.write_bytes(content(path.read_bytes()))
    assert [read_intact(store, chain) for chain in chains] == [0, 0]
    assert len(quarantined(tmp_path / "kv")) == 2


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_what_is_no_file_at_all_is_never_served(tmp_path, store, kind):
    write_chain(store, chain_of("a"))
    (path,) = block_files(tmp_path / "kv")
    sound = path.rename(tmp_path / "sound")
    {"folder": path.mkdir, "link": lambda: path.symlink_to(sound), "pipe": lambda: os.mkfifo(path)}[kind]()
    assert read_intact(store, chain_of("a")) == 0
    assert quarantined(tmp_path / "kv") == [path.name]
    assert store.take_problem() is None


def with_header(content, **changes):
    """A file's content with other values in its header and a checksum that matches them."""
    magic, version, length, _ = block_file._PREFIX.unpack_from(content)
    fields = {"magic": magic, "version": version, "json": content[block_file._PREFIX.size :][:length]} | changes
    parts = fields["magic"], fields["version"], len(fields["json"])
    unsigned = (struct.pack("<8sII16s", *parts, bytes(16)) + fields["json"]).ljust(HEADER_BYTES, b"\0")
    return struct.pack("<8sII16s", *parts, xxh3_128_digest(unsigned)) + unsigned[32:] + content[HEADER_BYTES:]


@pytest.mark.parametrize(
    "changes", [{"version": 2}, {"magic": b"SOMEELSE"}, {"json": b"[]"}, {"json": b"{"}, {}], ids=str
)
def test_a_header_of_another_version_or_kind_is_never_served(tmp_path, store, changes):
    chain = chain_of("a")
    write_chain(store, chain)
    (path,) = block_files(tmp_path / "kv")
    path.write_bytes(with_header(path.read_bytes(), **changes))
    assert read_intact(store, chain) == (0 if changes else 1)
    assert quarantined(tmp_path / "kv") == ([path.name] if changes else [])


OTHERS = [
    replace(IDENTITY, weights="x"),
    replace(IDENTITY, config="x"),
    replace(IDENTITY, dtype="float16"),
    replace(IDENTITY, numerics="x"),
    replace(IDENTITY, salt="x"),
]


@pytest.mark.parametrize("other", OTHERS, ids=["weights", "config", "dtype", "numerics", "salt"])
def test_blocks_of_another_model_dtype_backend_or_salt_are_not_served(tmp_path, store, other):
    chain = chain_of("a")
    write_chain(store, chain)
    with closing(open_store(tmp_path / "kv", other)) as stranger:
        assert stranger.find(chain) == 0
        assert stranger.find(chain_of("a", identity=other)) == 0
        # not even when somebody moves the file to where it would be found
        (path,) = block_files(tmp_path / "kv")
        target = stranger.store.model(other) / path.parent.name
        target.mkdir()
        shutil.copy(path, target)
        stranger.refresh()
        assert stranger.find(chain) == 1
        assert read_intact(stranger, chain) == 0
        assert stranger.counters.damaged_files == 1
    assert read_intact(store, chain) == 1


def test_a_file_under_another_ones_name_is_not_served(tmp_path, store):
    for name in "ab":
        write_chain(store, chain_of(name))
    left, right = block_files(tmp_path / "kv")
    left.write_bytes(right.read_bytes())
    found = sorted(read_intact(store, chain_of(name)) for name in "ab")
    assert found == [0, 1]
    assert quarantined(tmp_path / "kv") == [left.name]


def test_quarantine_keeps_the_latest_few(tmp_path, store, monkeypatch):
    monkeypatch.setattr(disk, "QUARANTINED_FILES", 3)
    names = []
    for part in "abcdef":
        write_chain(store, chain_of(part))
        (path,) = block_files(tmp_path / "kv")
        damage(path, HEADER_BYTES)
        assert read_intact(store, chain_of(part)) == 0
        names.append(path.name)
        time.sleep(0.01)  # the clock of change times ticks some hundred times a second
    assert quarantined(tmp_path / "kv") == sorted(names[-3:])
    assert store.counters.damaged_files == 6


# The bound


def path_of(folder, *parts):
    """The file that holds the last block of a chain."""
    (path,) = (path for path in block_files(folder) if chain_of(*parts)[-1][:6] in FileName.parse(path.name).blocks)
    return path


def optimal_hits(sequence, capacity):
    """The most hits that any order of eviction reaches, where a block need not be kept: all of them are tried."""

    @functools.cache
    def best(at, kept):
        if at == len(sequence):
            return 0
        block = sequence[at]
        if block in kept:
            return 1 + best(at + 1, kept)
        choices = [kept]
        candidates = kept | {block}
        if len(candidates) <= capacity:
            choices.append(candidates)
        else:
            choices += [candidates - {victim} for victim in kept]
        return max(best(at + 1, choice) for choice in choices)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_inside_a_run_eviction_is_as_good_as_any_could_be(tmp_path, seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 4))
    sequence = [f"block {number}" for number in rng.integers(0, 5, 14)]
    hits = 0
    with closing(open_store(tmp_path / "kv", max_bytes=capacity * FILE_BYTES)) as store:
        for at, part in enumerate(sequence):
            chain = chain_of(part)
            later = [next_at for next_at in range(at + 1, len(sequence)) if sequence[next_at] == part]
            store.set_next_uses({chain[0]: later[0] if later else None})
            if read_intact(store, chain):
                hits += 1
            else:
                write_chain(store, chain)
            assert total_bytes(tmp_path / "kv") <= capacity * FILE_BYTES
    assert hits == optimal_hits(tuple(sequence), capacity)


@pytest.mark.parametrize("seed", range(5))
def test_no_block_is_ever_without_those_before_it_whatever_is_evicted(tmp_path, seed):
    rng = np.random.default_rng(seed)
    chains = [chain_of(*parts) for parts in itertools.product("ab", repeat=4)]
    with closing(open_store(tmp_path / "kv", max_bytes=7 * FILE_BYTES)) as store:
        for at in range(60):
            chain = chains[rng.integers(len(chains))][: rng.integers(1, 5)]
            store.set_next_uses(
                {block: at + int(rng.integers(1, 9)) if rng.random() < 0.5 else None for block in chain}
            )
            write_chain(store, chain, first=read_intact(store, chain))
            names = [FileName.parse(path.name) for path in block_files(tmp_path / "kv")]
            stored = {block for name in names for block in name.blocks}
            assert all(name.first == 0 or name.parent in stored for name in names)
            assert total_bytes(tmp_path / "kv") <= 7 * FILE_BYTES
        assert store.counters.evicted_files > 0


def test_across_runs_the_least_recently_used_block_goes_first(tmp_path):
    folder, bound = tmp_path / "kv", 3 * FILE_BYTES
    with closing(open_store(folder, max_bytes=bound)) as store:
        for age, part in enumerate("abc"):
            write_chain(store, chain_of(part))
            os.utime(path_of(folder, part), (time.time() - 1000 * (1 + age),) * 2)
    with closing(open_store(folder, max_bytes=bound)) as later:
        assert read_intact(later, chain_of("c")) == 1  # the oldest one is used again
        write_chain(later, chain_of("d"))
        assert [later.find(chain_of(part)) for part in "abcd"] == [1, 0, 1, 1]
        write_chain(later, chain_of("e"))
        assert [later.find(chain_of(part)) for part in "abcde"] == [0, 0, 1, 1, 1]


def test_what_a_live_run_needs_goes_last_and_only_as_long_as_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "TEND_SECONDS", 0.02)
    folder, bound = tmp_path / "kv", 2 * FILE_BYTES
    needed, others = chain_of("needed"), [chain_of(str(number)) for number in range(4)]
    with closing(open_store(folder, max_bytes=bound)) as other:
        run = open_store(folder, max_bytes=bound)
        write_chain(run, needed)
        run.set_next_uses({needed[0]: 5})
        claim = folder / "claims" / run.session
        wait_until(claim.exists)
        for chain in others[:2]:
            assert write_chain(other, chain) == 1
            other.refresh()
            assert other.find(needed) == 1
        # what this one needs sooner may take its place, what it needs later may not
        other.set_next_uses({others[1][0]: 4, others[2][0]: 6})
        assert write_chain(other, others[2]) == 0
        assert other.counters.refused_blocks == 1
        run.close()
        assert not claim.exists()
        assert write_chain(other, others[2]) == 1
        assert other.find(needed) == 0


def test_the_claims_of_a_killed_run_run_out(tmp_path, store):
    folder, bound = tmp_path / "kv", FILE_BYTES
    needed = chain_of("needed")
    write_chain(store, needed)
    store.set_next_uses({needed[0]: 5})
    store._claims.publish()
    with closing(open_store(folder, max_bytes=bound)) as other:
        assert write_chain(other, chain_of("a")) == 0
        claim = folder / "claims" / store.session
        os.utime(claim, (time.time() - 3600,) * 2)
        assert write_chain(other, chain_of("a")) == 1
        assert not claim.exists()


def test_a_block_larger_than_the_bound_is_not_written(tmp_path):
    with closing(open_store(tmp_path / "kv", max_bytes=BLOCK_BYTES)) as store:
        assert write_chain(store, chain_of("a")) == 0
        assert store.counters.refused_blocks == 1
        assert total_bytes(tmp_path / "kv") == 0


def test_damaged_files_are_the_first_to_go(tmp_path):
    with closing(open_store(tmp_path / "kv", max_bytes=2 * FILE_BYTES)) as store:
        for part in "ab":
            write_chain(store, chain_of(part))
        damage(path_of(tmp_path / "kv", "b"), HEADER_BYTES)
        assert read_intact(store, chain_of("b")) == 0
        write_chain(store, chain_of("c"))
        assert quarantined(tmp_path / "kv") == []
        assert [store.find(chain_of(part)) for part in "abc"] == [1, 0, 1]


def test_a_large_store_is_ranked_once_for_many_evictions_and_stays_below_its_bound(tmp_path):
    bound = 200 * FILE_BYTES
    with closing(open_store(tmp_path / "kv", max_bytes=bound)) as store:
        for number in range(320):
            write_chain(store, chain_of(str(number)))
        assert store.counters.evicted_files == 120
        assert total_bytes(tmp_path / "kv") == bound


def test_what_is_claimed_after_a_ranking_is_passed_over(tmp_path):
    chains = [chain_of(str(number)) for number in range(132)]
    with closing(open_store(tmp_path / "kv", max_bytes=130 * FILE_BYTES)) as store:
        for age, chain in enumerate(chains[:130]):
            write_chain(store, chain)
            os.utime(store._index.path(store.spans(chain)[0].file), (1000 + age, 1000 + age))
        write_chain(store, chains[130])  # ranks all: the first one goes, the second would be next
        store.set_next_uses({chains[1][0]: 5})
        write_chain(store, chains[131])
        assert [store.find(chain) for chain in chains[:4]] == [0, 1, 0, 1]
        assert store.counters.evicted_files == 2


def test_a_lower_bound_is_kept_from_the_start(tmp_path):
    with closing(open_store(tmp_path / "kv")) as store:
        for part in "abcde":
            write_chain(store, chain_of(part))
    with closing(open_store(tmp_path / "kv", max_bytes=2 * FILE_BYTES)):
        wait_until(lambda: total_bytes(tmp_path / "kv") == 2 * FILE_BYTES)


def test_files_deleted_by_hand_leave_room(tmp_path):
    with closing(open_store(tmp_path / "kv", max_bytes=3 * FILE_BYTES)) as store:
        for part in "abc":
            write_chain(store, chain_of(part))
        for path in block_files(tmp_path / "kv"):
            path.unlink()
        for part in "def":
            write_chain(store, chain_of(part))
        store.refresh()
        assert [store.find(chain_of(part)) for part in "abcdef"] == [0, 0, 0, 1, 1, 1]


# Reading ahead


def test_loads_are_read_in_the_order_asked_for(store):
    chains = [chain_of(*"abcdef"[: length + 1]) for length in range(6)]
    write_chain(store, chains[-1])
    lengths = []

    def allocate(shape):
        lengths.append(shape[0])
        return np.empty(shape, np.uint8)

    with closing(Reader(store, num_threads=1, allocate=allocate)) as reader:
        loads = [reader.ask(chain) for chain in chains]
        for load, chain in zip(loads, chains, strict=True):
            assert np.array_equal(load.wait(), content_of(chain))
    assert lengths == [1, 2, 3, 4, 5, 6]
    assert store.counters.hit_blocks == 21
    assert store.counters.hit_bytes == 21 * BLOCK_BYTES


def test_reading_ahead_stays_within_its_budget_and_what_is_waited_for_comes_all_the_same(store):
    chains = [chain_of(str(number)) for number in range(5)]
    for chain in chains:
        write_chain(store, chain)
    with closing(Reader(store, ahead_bytes=2 * BLOCK_BYTES)) as reader:
        loads = [reader.ask(chain) for chain in chains]
        wait_until(lambda: loads[0].is_done and loads[1].is_done)
        time.sleep(0.05)
        assert not any(load.is_done for load in loads[2:])
        loads[0].close()
        wait_until(lambda: loads[2].is_done)
        assert not loads[3].is_done
        # all memory is held by the caller, who wants the last one
        assert np.array_equal(loads[4].wait(), content_of(chains[4]))
        assert not loads[3].is_done
        loads[3].close()  # not wanted any more: never read
        for load in loads:
            load.close()
    assert store.counters.hit_blocks == 1


def test_a_load_ends_before_the_first_block_that_is_damaged(tmp_path, store):
    chain = chain_of(*LONG)
    write_chain(store, chain)
    damage(block_files(tmp_path / "kv")[0], HEADER_BYTES + 20 * BLOCK_BYTES + 17)
    with closing(Reader(store)) as reader:
        load = reader.ask(chain)
        assert np.array_equal(load.wait(), content_of(chain[:20]))
        again = reader.ask(chain)
        assert len(again.wait()) == 0
        nothing = reader.ask(chain_of("x"))
        assert nothing.is_done
        assert nothing.wait().shape == (0, BLOCK_BYTES)
    assert store.counters.hit_blocks == 20


def test_what_follows_damage_is_not_read_any_more(tmp_path, store):
    chain = chain_of(*LONG)
    write_chain(store, chain)
    for path in block_files(tmp_path / "kv"):
        damage(path, HEADER_BYTES)
    with closing(Reader(store, num_threads=1)) as reader:
        assert len(reader.ask(chain).wait()) == 0
    assert len(quarantined(tmp_path / "kv")) == 1


def test_blocks_are_read_from_any_place_of_a_chain_on(store):
    chain = chain_of(*LONG)
    write_chain(store, chain)
    with closing(Reader(store)) as reader:
        for start in (1, 28, 29, 30, 39):
            assert store.find(chain[start:]) == 40 - start
            assert np.array_equal(reader.ask(chain[start:]).wait(), content_of(chain[start:]))


def test_closing_a_reader_ends_every_wait(store):
    chains = [chain_of(str(number)) for number in range(50)]
    for chain in chains:
        write_chain(store, chain)
    reader = Reader(store, ahead_bytes=BLOCK_BYTES)
    loads = [reader.ask(chain) for chain in chains]
    reader.close()
    for load, chain in zip(loads, chains, strict=True):
        content = load.wait()
        assert np.array_equal(content, content_of(chain[: len(content)]))
    assert len(loads[-1].wait()) == 0
    assert reader.ask(chains[0]).is_done


# Writing behind


def test_what_is_put_is_stored_in_the_background(store):
    chain = chain_of(*LONG)
    with closing(Writer(store)) as writer:
        assert writer.put(chain[:10], 0, content_of(chain[:10])) == 10
        assert writer.put(chain[:30], 10, content_of(chain[10:30])) == 20
        assert writer.put(chain[:30], 20, content_of(chain[20:30])) == 10  # on its way already
        assert writer.flush(30)
        assert read_intact(store, chain) == 30
        assert writer.put(chain, 25, content_of(chain[25:])) == 15
    assert read_intact(store, chain) == 40
    assert store.counters.written_blocks == 40
    assert store.counters.dropped_blocks == 0


def test_a_full_buffer_drops_the_ends_of_chains_and_never_waits(tmp_path, store):
    chains = [chain_of(part, *"abcd") for part in "xyz"]
    with closing(Writer(store, buffer_bytes=8 * BLOCK_BYTES)) as writer:
        with open_books(store.store):  # another process keeps the lock
            taken = [writer.put(chain, 0, content_of(chain)) for chain in chains]
            assert taken == [5, 3, 0]
            # what follows a dropped block would never be found
            assert writer.put(chains[2], 3, content_of(chains[2][3:])) == 0
            assert not writer.flush(0.05)
        assert writer.flush(30)
        assert writer.put(chains[2], 3, content_of(chains[2][3:])) == 0  # also when there is room
    assert [read_intact(store, chain) for chain in chains] == [5, 3, 0]
    assert store.counters.dropped_blocks == 2 + 5 + 2 + 2


def test_a_lock_that_is_never_given_back_costs_blocks_and_no_more(store, monkeypatch):
    monkeypatch.setattr(space, "LOCK_SECONDS", 0.05)
    with open_books(store.store):
        assert write_chain(store, chain_of("a")) == 0
    assert store.counters.lock_timeouts in (1, 2)  # files are counted in the background as well
    assert store.take_problem() is None
    assert write_chain(store, chain_of("a")) == 1


def test_closing_a_writer_in_time_leaves_the_rest_and_counts_it(store):
    writer = Writer(store, num_threads=1)
    with open_books(store.store):
        for part in "abc":
            assert writer.put(chain_of(part), 0, content_of(chain_of(part))) == 1
        writer.close(timeout_s=0.05)
    assert store.counters.dropped_blocks == 2  # one was being written
    assert writer.put(chain_of("d"), 0, content_of(chain_of("d"))) == 0


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


def test_a_store_of_a_newer_version_is_left_alone(tmp_path, store):
    write_chain(store, chain_of("a"))
    marker = tmp_path / "kv" / "store.json"
    marker.write_text(marker.read_text().replace('"version": 1', '"version": 2'))
    with closing(disk.DiskStore(tmp_path / "kv", IDENTITY)) as other:
        problem = other.take_problem()
        assert "version 2" in problem
        assert "goes on without" in problem
        assert other.find(chain_of("a")) == 0
