"""A node's copy of a run folder in an object store: nobody else can put another one in its place."""

import os
import pwd
import tempfile

import pytest

from batchinfer.records import ConfigError
from batchinfer.run.store.bucket_files import copies_folder, make_copy
from batchinfer.rundir import RunDir
from support.other_user import NOBODY, as_user

VICTIM = 4321


def copy_in(folder):
    return RunDir(folder / "hash" / "run", "s3://bucket/run")


@pytest.fixture
def shared(everyones_folder, monkeypatch):
    """The temporary folder, which is for all."""
    everyones_folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(everyones_folder))
    return everyones_folder


def test_it_is_for_this_user_alone(shared):
    run, before = copy_in(copies_folder()), os.umask(0)
    try:
        for _ in range(2):
            make_copy(run)
    finally:
        os.umask(before)
    assert [folder.stat().st_mode & 0o777 for folder in (run.root, *run.root.parents[:2])] == [0o700] * 3


def refused(run):
    with pytest.raises(ConfigError, match=f"belongs to user {pwd.getpwuid(NOBODY).pw_name}, .* choose another output"):
        make_copy(run)


@pytest.mark.parametrize("user", [VICTIM, 0])
def test_a_temporary_folder_that_another_user_made_first_is_refused(shared, user):
    """Its owner could exchange what is in it at any time."""
    folder = shared / f"batchinfer-{user}"
    assert as_user(folder.mkdir) == 0
    folder.chmod(0o777)
    assert as_user(lambda: refused(copy_in(folder)), uid=user) == 0


def test_a_place_that_the_job_names_is_its_own_choice_and_what_is_made_in_it_is_checked(shared):
    assert as_user(lambda: make_copy(copy_in(shared)), uid=VICTIM) == 0
    other = RunDir(shared / "other" / "run", "s3://bucket/run")

    def be_first():
        other.root.parent.mkdir()
        other.root.parent.chmod(0o777)

    assert as_user(be_first) == 0
    assert as_user(lambda: refused(other), uid=VICTIM) == 0
