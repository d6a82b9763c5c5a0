"""Disks that fail: the store switches itself off with one clear sentence, and nothing else happens to the job."""

import os
import shutil
import subprocess
import threading
import time
from contextlib import closing, contextmanager

import numpy as np
import pytest

from batchinfer.kv_store import disk
from batchinfer.kv_store.disk import DiskStore
from batchinfer.kv_store.reader import Reader
from batchinfer.kv_store.writer import Writer
from support.kv_stores import BIG, IDENTITY, block_files, chain_of, content_of, open_store, read_intact, write_chain
from support.other_user import NOBODY, as_user, give_away
from support.small_disks import remount
from support.tiers import first_in_make_test


@contextmanager
def mounted(folder, options):
    """Mount a file system in memory for the test."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(
            f"NOT TESTED: mounting a tmpfs needs root and a kernel that lets it: {done.stderr.decode().strip()}"
        )
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def sentence(store, *words):
    """The one thing that the store tells."""
    problem = store.take_problem()
    assert problem is not None
    assert store.take_problem() is None
    assert "\n" not in problem
    for word in (str(store.store.root), *words):
        assert word in problem, problem
    return problem


def test_a_full_disk_ends_writing_and_leaves_reading_on(tmp_path):
    with mounted(tmp_path / "small", "size=1m") as folder, closing(open_store(folder / "kv", BIG)) as store:
        chains = [chain_of(str(number), identity=BIG) for number in range(12)]
        num_written = sum(write_chain(store, chain) for chain in chains)
        assert 0 < num_written < 8
        sentence(store, "No space left", "free space", "still read", "cannot write")
        assert sum(read_intact(store, chain) for chain in chains) == num_written
        assert list((folder / "kv" / "writing").iterdir()) == []
        # room alone does not bring it back: the job goes on without
        shutil.rmtree(folder / "kv" / "quarantine")
        assert write_chain(store, chains[-1]) == 0
        assert store.take_problem() is None
        with closing(Writer(store)) as writer:
            assert writer.put(chains[-1], 0, content_of(chains[-1], BIG)) == 0


@pytest.mark.all  # make test: a full disk, above
def test_a_disk_that_fills_up_behind_the_computation_is_told_too(tmp_path):
    with mounted(tmp_path / "small", "size=1m") as folder, closing(open_store(folder / "kv", BIG)) as store:
        chain = chain_of(*map(str, range(12)), identity=BIG)
        with closing(Writer(store)) as writer:
            writer.put(chain, 0, content_of(chain, BIG))
            assert writer.flush(30)
        assert 0 <= store.find(chain) < 12
        assert read_intact(store, chain) == store.find(chain)
        sentence(store, "No space left")


def test_a_full_disk_at_opening_is_no_error_either(tmp_path):
    with mounted(tmp_path / "small", "size=64k") as folder:
        (folder / "filler").write_bytes(bytes(64 * 1024 - 4096))
        with closing(DiskStore(folder / "kv", IDENTITY)) as store:
            sentence(store, "No space left", "free space")
            assert write_chain(store, chain_of("a")) == 0
            assert store.find(chain_of("a")) == 0


def test_a_read_only_folder_is_read(tmp_path):
    with mounted(tmp_path / "disk", "size=8m") as folder:
        with closing(open_store(folder / "kv")) as store:
            write_chain(store, chain_of(*"ab"))
        for path in block_files(folder / "kv"):
            os.utime(path, (0, 0))
        remount(folder, "ro")
        with closing(DiskStore(folder / "kv", IDENTITY)) as store:
            sentence(store, "Read-only", "make it writable", "still read")
            assert read_intact(store, chain_of(*"abc")) == 2
            assert store.counters.untouched_files == 1
            assert write_chain(store, chain_of("x")) == 0
        # of this model nothing is there to read
        with closing(DiskStore(folder / "kv", BIG)) as store:
            sentence(store, "Read-only", "goes on without")
            assert store.find(chain_of("a", identity=BIG)) == 0
        with closing(DiskStore(folder / "new", IDENTITY)) as store:
            sentence(store, "Read-only")


def test_a_disk_that_becomes_read_only_while_it_is_used(tmp_path):
    with mounted(tmp_path / "disk", "size=8m") as folder, closing(open_store(folder / "kv")) as store:
        write_chain(store, chain_of("a"))
        remount(folder, "ro")
        assert write_chain(store, chain_of("b")) == 0
        sentence(store, "Read-only", "still read")
        assert read_intact(store, chain_of("a")) == 1
        remount(folder, "rw")


@pytest.mark.parametrize("first", first_in_make_test(["read", "write", "refresh", "background"], 2))
def test_a_folder_that_is_deleted_while_it_is_used(tmp_path, monkeypatch, first):
    monkeypatch.setattr(disk, "TEND_S", 0.05 if first == "background" else 60.0)
    with closing(open_store(tmp_path / "kv")) as store:
        write_chain(store, chain_of(*"ab"))
        shutil.rmtree(tmp_path / "kv", ignore_errors=True)
        shutil.rmtree(tmp_path / "kv", ignore_errors=True)  # the background may have written in between
        if first == "background":
            deadline = time.monotonic() + 30
            while store.session.is_readable:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        elif first == "refresh":
            store.refresh()
        elif first == "read":
            assert read_intact(store, chain_of(*"ab")) == 0
            assert not store.session.is_readable
        assert write_chain(store, chain_of("c")) == 0
        sentence(store, "leave the folder where it is", "goes on without it")
        assert read_intact(store, chain_of(*"ab")) == 0
        store.refresh()
        assert store.find(chain_of(*"ab")) == 0
        assert not (tmp_path / "kv" / "models").exists()


def test_files_that_may_not_be_read(everyones_folder):
    folder = everyones_folder / "kv"
    with closing(open_store(folder)) as store:
        write_chain(store, chain_of("a"))

    def check():
        with closing(DiskStore(folder, IDENTITY)) as store:
            sentence(store, "Permission denied", "readable and writable for this user", "goes on without")
            assert store.find(chain_of("a")) == 0
            assert read_intact(store, chain_of("a")) == 0
            assert write_chain(store, chain_of("b")) == 0

    assert as_user(check) == 0
    # one file alone
    give_away(folder, NOBODY)
    block_files(folder)[0].chmod(0)

    def check_file():
        with closing(open_store(folder)) as store, closing(Reader(store)) as reader:
            assert store.find(chain_of("a")) == 1
            load = reader.ask(chain_of("a"))
            assert len(load.wait()) == 0
            sentence(store, "Permission denied", "cannot read", block_files(folder)[0].name)
            assert store.find(chain_of("a")) == 0

    assert as_user(check_file) == 0


@pytest.mark.parametrize("what", ["a file", "a file above"])
def test_a_folder_that_cannot_be_one(tmp_path, what):
    (tmp_path / "kv").write_text("something else")
    folder = tmp_path / "kv" if what == "a file" else tmp_path / "kv" / "below"
    with closing(DiskStore(folder, IDENTITY)) as store:
        sentence(store, "goes on without")
        assert write_chain(store, chain_of("a")) == 0
    assert (tmp_path / "kv").read_text() == "something else"


def test_a_disk_that_does_not_answer_is_waited_for_only_so_long(tmp_path):
    goes_on = threading.Event()

    def allocate(shape):
        goes_on.wait(30)
        return np.empty(shape, np.uint8)

    with closing(open_store(tmp_path / "kv")) as store:
        write_chain(store, chain_of("a"))
        with closing(Reader(store, allocate=allocate)) as reader:
            assert len(reader.ask(chain_of("a")).wait(0.05)) == 0
            sentence(store, "no answer", "goes on without")
            assert store.find(chain_of("a")) == 0
            goes_on.set()


def test_a_defect_in_the_background_is_told_and_hangs_nobody(tmp_path):
    def allocate(shape):
        raise MemoryError("no pinned memory is left")

    with closing(open_store(tmp_path / "kv")) as store:
        write_chain(store, chain_of(*"ab"))
        with closing(Reader(store, allocate=allocate)) as reader:
            load = reader.ask(chain_of(*"ab"))
            deadline = time.monotonic() + 30
            while not load.is_done:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        sentence(store, "no pinned memory")
        assert store.find(chain_of("a")) == 0
    with closing(open_store(tmp_path / "kv")) as store, closing(Writer(store)) as writer:
        writer.put(chain_of("c"), 0, np.zeros((1, 3), np.uint8))  # no such block
        assert writer.flush(30)
        sentence(store, "goes on without")
