"""The KV store on disk: what is damaged, or of another model or version, is never served."""

import os
import shutil
import struct
import time
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinfer.kv_store import block_file, store_dir
from batchinfer.kv_store.block_file import HEADER_BYTES
from support.kv_stores import (
    BLOCK_BYTES,
    IDENTITY,
    block_files,
    chain_of,
    damage,
    open_store,
    quarantined,
    read_intact,
    write_chain,
)


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


def with_header(content, key, **changes):
    """A file's content with other values in its header and a checksum by this key that matches them."""
    magic, version, length, _ = block_file._PREFIX.unpack_from(content)
    fields = {"magic": magic, "version": version, "json": content[block_file._PREFIX.size :][:length]} | changes
    parts = fields["magic"], fields["version"], len(fields["json"])
    unsigned = (struct.pack("<8sII16s", *parts, bytes(16)) + fields["json"]).ljust(HEADER_BYTES, b"\0")
    return struct.pack("<8sII16s", *parts, block_file._sign(unsigned, key)) + unsigned[32:] + content[HEADER_BYTES:]


@pytest.mark.parametrize(
    "changes", [{"version": 3}, {"magic": b"SOMEELSE"}, {"json": b"[]"}, {"json": b"{"}, {}], ids=str
)
def test_a_header_of_another_version_or_kind_is_never_served(tmp_path, store, changes):
    chain = chain_of("a")
    write_chain(store, chain)
    (path,) = block_files(tmp_path / "kv")
    path.write_bytes(with_header(path.read_bytes(), store.session.key, **changes))
    assert read_intact(store, chain) == (0 if changes else 1)
    assert quarantined(tmp_path / "kv") == ([path.name] if changes else [])


OTHERS = [
    replace(IDENTITY, weights="x"),
    replace(IDENTITY, config="x"),
    replace(IDENTITY, dtype="fp8"),
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
        # not even when the file is moved to where it would be found
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
    monkeypatch.setattr(store_dir, "QUARANTINED_FILES", 3)
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
