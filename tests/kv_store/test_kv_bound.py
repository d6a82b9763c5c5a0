"""The KV store on disk: it stays below its bound, and what is worth least goes first."""

import functools
import itertools
import os
import time
from contextlib import closing

import numpy as np
import pytest

from batchinfer.kv_store import disk
from batchinfer.kv_store.block_file import HEADER_BYTES, FileName
from support.kv_stores import (
    BLOCK_BYTES,
    FILE_BYTES,
    block_files,
    chain_of,
    damage,
    open_store,
    quarantined,
    read_intact,
    total_bytes,
    wait_until,
    write_chain,
)


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
    monkeypatch.setattr(disk, "TEND_S", 0.02)
    folder, bound = tmp_path / "kv", 2 * FILE_BYTES
    needed, others = chain_of("needed"), [chain_of(str(number)) for number in range(4)]
    with closing(open_store(folder, max_bytes=bound)) as other:
        run = open_store(folder, max_bytes=bound)
        write_chain(run, needed)
        run.set_next_uses({needed[0]: 5})
        claim = folder / "claims" / run.session.name
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
        claim = folder / "claims" / store.session.name
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
