"""The KV store on disk: reading ahead and writing behind."""

import time
from contextlib import closing

import numpy as np

from batchinfer.kv_store import space_ledger
from batchinfer.kv_store.block_file import HEADER_BYTES
from batchinfer.kv_store.reader import Reader
from batchinfer.kv_store.space_ledger import open_ledger
from batchinfer.kv_store.writer import Writer
from support.kv_stores import (
    BLOCK_BYTES,
    block_files,
    chain_of,
    content_of,
    damage,
    quarantined,
    read_intact,
    wait_until,
    write_chain,
)


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


LONG = [str(number) for number in range(40)]


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
        with open_ledger(store.store):  # another process keeps the lock
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
    monkeypatch.setattr(space_ledger, "LOCK_S", 0.05)
    with open_ledger(store.store):
        assert write_chain(store, chain_of("a")) == 0
    assert store.counters.lock_timeouts in (1, 2)  # files are counted in the background as well
    assert store.take_problem() is None
    assert write_chain(store, chain_of("a")) == 1


def test_closing_a_writer_in_time_leaves_the_rest_and_counts_it(store):
    writer = Writer(store, num_threads=1)
    with open_ledger(store.store):
        for part in "abc":
            assert writer.put(chain_of(part), 0, content_of(chain_of(part))) == 1
        writer.close(timeout_s=0.05)
    assert store.counters.dropped_blocks == 2  # one was being written
    assert writer.put(chain_of("d"), 0, content_of(chain_of("d"))) == 0
