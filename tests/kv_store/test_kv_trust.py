"""Trust in blocks: a KV store serves only those that its owner or its group wrote."""

import os
import shutil
import stat
import struct
import time
from contextlib import closing

import pytest

from batchinfer.kv_store import block_file
from batchinfer.kv_store.block_file import HEADER_BYTES
from batchinfer.kv_store.disk import DiskStore
from batchinfer.kv_store.upkeep import shrink_store
from support.jobs import batchinfer, write_job
from support.kv_stores import (
    IDENTITY,
    block_files,
    chain_of,
    content_of,
    open_store,
    quarantined,
    read_intact,
    write_chain,
)
from support.other_user import NOBODY, as_user, give_away, readable_files

TEAM = 4242  # a group that needs no name


def refusal(folder, **options):
    """The sentence of a store that is not used."""
    with closing(DiskStore(folder, IDENTITY, **options)) as store:
        problem = store.take_problem()
        assert problem is not None
        assert store.find(chain_of("a")) == 0
        assert write_chain(store, chain_of("z")) == 0
        return problem


@pytest.fixture
def folder(tmp_path):
    """A closed store with one file of two blocks."""
    with closing(open_store(tmp_path / "kv")) as store:
        write_chain(store, chain_of(*"ab"))
    return tmp_path / "kv"


def forged(tmp_path):
    """Return a file with other content for the same blocks, written without the store's key."""
    with closing(open_store(tmp_path / "forger")) as forger:
        chain = chain_of(*"ab")
        assert forger.write(chain, 0, content_of(chain) ^ 1) == 2
    return block_files(tmp_path / "forger")[0]


def test_a_block_forged_without_the_key_is_neither_served_nor_overlooked(tmp_path, folder):
    (path,), forgery = block_files(folder), forged(tmp_path)
    shutil.copy(forgery, path)
    with closing(open_store(folder)) as store:
        assert store.find(chain_of(*"ab")) == 2
        assert read_intact(store, chain_of(*"ab")) == 0
        assert store.counters.damaged_files == 1
    shutil.copy(forgery, path)
    ended = batchinfer("kv", "verify", folder)
    assert ended.code == 3
    assert "not written by this store's users" in ended.out


def test_blocks_put_under_a_sound_header_are_found(tmp_path, folder):
    (path,) = block_files(folder)
    path.write_bytes(path.read_bytes()[:HEADER_BYTES] + forged(tmp_path).read_bytes()[HEADER_BYTES:])
    ended = batchinfer("kv", "verify", folder)
    assert ended.code == 3
    assert "the checksum of block 0 does not match" in ended.out


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"blocks":["', b'"blocks":["zz'),
        (b'"checksums":["', b'"checksums":["00'),
        (b'"identity":"', b'"identity":"q'),
        (b'"blocks":[', b'"blocks":[[],'),
        (b'"checksums":[', b'"checksums":[7,'),
        (b'"blocks":[', b'"bricks":['),
        (b'{"identity"', b'"identity"'),
    ],
    ids=str,
)
def test_verify_has_one_line_for_a_signed_header_that_makes_no_sense(folder, old, new):
    (path,) = block_files(folder)
    content, key = path.read_bytes(), bytes.fromhex((folder / "key").read_text())
    magic, version, length, _ = block_file._PREFIX.unpack_from(content)
    text = content[block_file._PREFIX.size :][:length].replace(old, new, 1)
    prefix = struct.pack("<8sII16s", magic, version, len(text), bytes(16))
    unsigned = (prefix + text).ljust(HEADER_BYTES, b"\0")
    signature = block_file._sign(unsigned, key)
    path.write_bytes(unsigned[:16] + signature + unsigned[32:] + content[HEADER_BYTES:])
    ended = batchinfer("kv", "verify", folder)
    assert ended.code == 3, ended.err
    damaged, total = ended.out.splitlines()
    assert damaged.startswith(f"{path.name}: its header cannot be understood")
    assert total == "1 file checked, 1 of them damaged"
    assert quarantined(folder) == [path.name]


def test_verify_has_one_line_for_a_file_in_a_folder_of_absurd_blocks(folder):
    (path,) = block_files(folder)
    model = path.parent.parent
    model.rename(model.with_name(f"{model.name.partition('-')[0]}-{10**17}"))
    ended = batchinfer("kv", "verify", folder)
    assert (ended.code, len(ended.out.splitlines())) == (3, 2), ended.err
    assert "does not have the size" in ended.out


def test_keys_of_two_stores_differ_and_one_stays(tmp_path, folder):
    key = (folder / "key").read_text()
    open_store(folder).close()
    assert (folder / "key").read_text() == key
    open_store(tmp_path / "other").close()
    assert (tmp_path / "other" / "key").read_text() != key


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda key: key.unlink(), "lost its key"),
        (lambda key: key.write_text("short"), "damaged key"),
        (lambda key: key.write_text("z" * 64), "damaged key"),
        (lambda key: key.chmod(0o644), "others can read"),
    ],
    ids=["lost", "short", "not hex", "known"],
)
def test_a_store_without_a_secret_key_is_not_used(folder, spoil, word):
    spoil(folder / "key")
    assert word in refusal(folder)
    ended = batchinfer("kv", "verify", folder)
    assert ended.code == 2
    assert word in ended.err
    assert len(block_files(folder)) == 1


@pytest.mark.parametrize(("mode", "who"), [(0o777, "every user"), (0o1777, "every user"), (0o770, "group")])
def test_a_store_that_others_may_write_is_refused_until_it_is_repaired(folder, mode, who):
    if who == "group":
        os.chown(folder, -1, TEAM) if os.getuid() == 0 else pytest.skip("NOT TESTED: only root may give it to a group")
    folder.chmod(mode)
    problem = refusal(folder)
    assert f"can be written by {who}" in problem
    assert f"chmod go-w {folder}" in problem
    for command in ("stat", "verify", "gc", "path"):
        ended = batchinfer("kv", command, folder)
        assert (ended.code, ended.out) == (2, "")
        assert f"chmod go-w {folder}" in ended.err
    folder.chmod(0o755)
    with closing(open_store(folder)) as store:
        assert read_intact(store, chain_of(*"ab")) == 2


def test_another_users_store_is_refused(everyones_folder):
    folder = everyones_folder / "kv"
    with closing(open_store(folder)) as store:
        write_chain(store, chain_of("a"))
    give_away(folder, 12345)
    folder.chmod(0o755)

    def check():
        assert "belongs to user 12345" in refusal(folder)
        assert batchinfer("kv", "verify", folder).code == 2

    assert as_user(check) == 0


def test_root_uses_another_users_store_with_a_warning(folder):
    if os.getuid() != 0:
        pytest.skip("NOT TESTED: only root can give a folder away")
    give_away(folder, 12345)
    with closing(DiskStore(folder, IDENTITY)) as store:
        assert "belongs to user 12345" in store.take_problem()
        assert store.take_problem() is None
        assert read_intact(store, chain_of(*"ab")) == 2


def test_another_user_reads_nothing_of_a_store(everyones_folder):
    previous = os.umask(0)
    try:
        with closing(open_store(everyones_folder / "kv")) as store:
            write_chain(store, chain_of("a"))
            assert as_user(lambda: check_nothing(everyones_folder)) == 0
            # nor where its owner lets others in
            (everyones_folder / "kv").chmod(0o755)
            assert as_user(lambda: check_nothing(everyones_folder)) == 0
    finally:
        os.umask(previous)


def check_nothing(folder):
    assert readable_files(folder) == []


@pytest.mark.parametrize("umask", [0o022, 0o077, 0])
def test_members_of_a_group_share_a_store_and_nobody_else_is_let_in(everyones_folder, umask):
    folder = everyones_folder / "kv"
    everyones_folder.chmod(0o777)

    def first():
        os.umask(umask)
        with closing(open_store(folder, gid=TEAM)) as store:
            write_chain(store, chain_of("a"))
            for path in [folder, *folder.rglob("*")]:
                status = path.stat()
                kind = 0o2770 if path.is_dir() else 0o640 if path.name == "key" else 0o660
                assert (stat.S_IMODE(status.st_mode), status.st_gid) == (kind, TEAM), path

    def second():
        os.umask(umask)
        with closing(open_store(folder, gid=TEAM, max_bytes=10**6)) as store:
            assert read_intact(store, chain_of("a")) == 1
            assert write_chain(store, chain_of("b")) == 1
        assert batchinfer("kv", "verify", folder).code == 0
        assert batchinfer("kv", "gc", folder).code == 0

    assert as_user(first, uid=12345, groups=[TEAM]) == 0
    assert as_user(second, uid=12346, groups=[TEAM]) == 0
    assert as_user(lambda: check_nothing(everyones_folder)) == 0
    with closing(open_store(folder, gid=TEAM)) as store:
        assert read_intact(store, chain_of("b")) == 1


def test_a_store_that_is_not_shared_with_the_group_is_refused(folder):
    if os.getuid() != 0:
        pytest.skip("NOT TESTED: only root is in every group")
    assert f"not shared with group {TEAM}" in refusal(folder, gid=TEAM)
    # and one that is shared is for who says so only
    os.chown(folder, -1, TEAM)
    folder.chmod(0o2770)
    assert f"can be written by group {TEAM}" in refusal(folder)


def test_a_job_names_the_group_of_its_store(folder):
    ended = batchinfer("kv", "stat", write_job(folder.parent, kv={"dir": "kv", "shared_group": "no such group"}))
    assert ended.code == 2
    assert "kv.shared_group is 'no such group'" in ended.err


def test_temporary_files_of_the_dead_are_deleted_when_they_are_old(folder):
    model = block_files(folder)[0].parent.parent
    left = [place / ".left.x.tmp" for place in (folder, folder / "history", folder / "claims", model)]
    young = folder / ".young.x.tmp"
    for path in (*left, young):
        path.write_text("half")
    for path in left:
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    with closing(open_store(folder)) as store:
        shrink_store(store.store, None)
    assert not any(path.exists() for path in left)
    assert young.exists()


def test_a_store_that_root_alone_may_change_is_read_by_nobody_else(everyones_folder):
    open_store(everyones_folder / "kv").close()
    (everyones_folder / "kv").chmod(0o755)

    def check():
        assert os.geteuid() == NOBODY
        assert "Permission denied" in refusal(everyones_folder / "kv")

    assert as_user(check) == 0
