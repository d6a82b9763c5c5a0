"""Doing something as another user of this machine, who is in no group of the one that runs the tests."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534


def as_user(function: Callable[[], object], *, uid: int = NOBODY, groups: Sequence[int] = ()) -> int:
    """Run a function in a child process of another user; returns its exit status, 0 when all asserts held."""
    if os.getuid() != 0:
        pytest.skip("NOT TESTED: only root can become another user")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups(groups)
            os.setgid(NOBODY)
            os.setuid(uid)
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, which those that pytest makes are not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def give_away(folder: Path, uid: int, gid: int = -1) -> None:
    """Make everything in a folder another user's."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, gid)


def readable_files(folder: Path) -> list[str]:
    """The files below a folder that this user can read, by name."""
    found = []
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                Path(root, name).read_bytes()
            except PermissionError:
                continue
            found.append(name)
    return found
