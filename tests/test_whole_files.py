"""Files that are whole or absent: their modes, their order on disk, and what dead processes left."""

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from batchinfer import whole_files
from batchinfer.records import ConfigError
from batchinfer.run.store.folder import FolderStorage
from batchinfer.rundir import RunDir
from batchinfer.whole_files import (
    Publisher,
    create_exclusively,
    publish_text,
    published,
    remove_folder,
    remove_leftovers,
)
from support.jobs import answers, batchinfer, write_job, write_questions

OLD_S = 7200


def leave(path, *, age_s=OLD_S):
    """Create a leftover of a killed process: a temporary file, or a folder with a file in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.startswith((".claim-", ".probe-")):
        path.mkdir()
        (path / "part-00000.parquet").write_text("half")
    else:
        path.write_text("half")
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


@pytest.mark.parametrize("umask", [0, 0o022, 0o027, 0o077])
def test_published_files_follow_the_umask_and_secrets_do_not(tmp_path, umask):
    before = os.umask(umask)
    try:
        publish_text(tmp_path / "plain", "text")
        create_exclusively(tmp_path / "mark", "text")
        publish_text(tmp_path / "secret", "text", mode=0o600)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"plain": 0o666 & ~umask, "mark": 0o666 & ~umask, "secret": 0o600}


def test_only_old_temporary_names_are_left_over(tmp_path):
    old, folder = leave(tmp_path / ".run.json.x.tmp"), leave(tmp_path / ".probe-x.tmp")
    kept = [
        leave(tmp_path / ".young.x.tmp", age_s=60),
        leave(tmp_path / "report.tmp"),
        leave(tmp_path / ".hidden"),
        leave(tmp_path / "deep" / ".below.tmp"),
    ]
    remove_leftovers(tmp_path)
    assert [path.exists() for path in (old, folder, *kept)] == [False, False, True, True, True, True]
    remove_leftovers(tmp_path, deep=True)
    assert [path.exists() for path in kept] == [True, True, True, False]
    remove_leftovers(tmp_path / "nowhere", deep=True)


def test_a_run_ends_without_what_killed_processes_left_in_it(tmp_path):
    write_questions(tmp_path / "prompts", (4,))
    job = write_job(tmp_path)
    run = tmp_path / "run"
    assert batchinfer("plan", job).code == 0
    left = [
        leave(run / name)
        for name in (
            ".run.json.x.tmp",
            ".probe-x.tmp",
            "plan/.units.parquet.x.tmp",
            "tokens/.00000.parquet.x.tmp",
            "units/000000/.claim-x.tmp",
            "units/000000/0000/.part-00000.parquet.x.tmp",
            "done/.000000.x.tmp",
            "stats/steps/.s.parquet.x.tmp",
        )
    ]
    (run / "units/000000/0000/.part-00000.parquet.x.tmp").unlink()
    (run / "units/000000/0000").rmdir()
    assert batchinfer("work", job).code == 0
    leave(run / "units/000000/0000/.part-00000.parquet.x.tmp")
    young = leave(run / "stats/steps/.t.parquet.x.tmp", age_s=0)
    assert batchinfer("finish", job).code == 0
    assert [path for path in left if path.exists()] == []
    assert young.exists()
    assert len(answers(run)) == 4


@pytest.fixture
def calls(monkeypatch):
    """The syncs and renames in their order; a temporary name is `new`."""
    made = []

    def short(path):
        name = os.path.basename(path)
        return "new" if name.endswith(".tmp") else name

    def recorded(name, plain):
        def call(*arguments, **options):
            paths = [os.readlink(f"/proc/self/fd/{item}") if isinstance(item, int) else item for item in arguments]
            made.append((name, *map(short, paths)))
            return plain(*arguments, **options)

        return call

    for name in ("fsync", "rename", "link"):
        monkeypatch.setattr(os, name, recorded(name, getattr(os, name)))
    return made


def test_a_file_is_on_disk_before_it_gets_its_name_and_its_name_before_anybody_goes_on(tmp_path, calls):
    folder = tmp_path / "folder"
    publish_text(folder / "file", "text")
    assert calls == [("fsync", "new"), ("rename", "new", "file"), ("fsync", "folder")]
    calls.clear()
    assert create_exclusively(folder / "mark", "text")
    assert calls == [("fsync", "new"), ("link", "new", "mark"), ("fsync", "folder")]


def put_all(folder, names, **options):
    with Publisher(**options) as publisher:
        for name in names:
            with published(folder / name, publisher=publisher) as temporary:
                temporary.write_text(name)


def test_a_publisher_syncs_files_side_by_side_each_before_it_gets_its_name(tmp_path, calls, monkeypatch):
    names = ["a", "b", "c", "d"]
    together = threading.Barrier(len(names), timeout=60)  # broken unless all are synced at the same time
    plain = whole_files.sync_file
    monkeypatch.setattr(whole_files, "sync_file", lambda path: (together.wait(), plain(path)))
    put_all(tmp_path, names, then=lambda path: calls.append(("then", path.name, path.read_text())))
    for name in names:
        synced, named = calls.index(("fsync", "new")), calls.index(("rename", "new", name))
        assert synced < named < calls.index(("fsync", tmp_path.name), named) < calls.index(("then", name, name))
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_publisher_that_cannot_write_says_so_and_leaves_nothing_half(tmp_path, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(whole_files, "sync_file", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        put_all(tmp_path, [str(number) for number in range(200)])
    assert list(tmp_path.iterdir()) == []


def test_a_publisher_does_not_take_many_more_files_when_one_could_not_be_written(tmp_path, monkeypatch):
    """The next ones can take hours to make."""
    begun = []

    def fail(path):
        raise OSError(errno.EIO, "Input/output error")

    def made_slowly():
        for number in range(whole_files.MOST_WAITING):
            begun.append(number)
            time.sleep(0.01)
            yield str(number)

    monkeypatch.setattr(whole_files, "sync_file", fail)
    with pytest.raises(ConfigError, match="Input/output error"):
        put_all(tmp_path, made_slowly())
    assert len(begun) < whole_files.MOST_WAITING / 2


def test_of_two_that_create_a_file_the_first_wins(tmp_path):
    assert create_exclusively(tmp_path / "mark", "first")
    assert not create_exclusively(tmp_path / "mark", "second")
    assert (tmp_path / "mark").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["mark"]


@pytest.mark.parametrize("remove", [remove_folder, FolderStorage(RunDir(Path())).delete_folder])
def test_a_folder_goes_although_others_still_write_there(tmp_path, monkeypatch, remove):
    folder = tmp_path / "session"
    (folder / "rank-3").mkdir(parents=True)
    plain = shutil.rmtree

    def meanwhile(*arguments, **options):
        monkeypatch.setattr(shutil, "rmtree", plain)
        plain(*arguments, **options)
        (folder / "rank-3").mkdir(parents=True)
        (folder / "rank-3" / "0-1-0.kv").touch()

    monkeypatch.setattr(shutil, "rmtree", meanwhile)
    remove(folder)
    assert not folder.exists()
    remove(folder)  # nothing is there


def test_what_cannot_be_removed_stays(tmp_path, monkeypatch):
    def busy(path, **_):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    monkeypatch.setattr(os, "rmdir", busy)
    remove_folder(tmp_path)
    assert tmp_path.exists()
