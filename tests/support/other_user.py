"""Doing something as another user of this machine, who is in no group of the one that runs the tests."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchinfer.data import tokenizer_process, tokenizer_worker

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
            tokenizer_process.start_process = _ForkedTokenizer  # type: ignore[assignment]
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


class _ForkedTokenizer:
    """The tokenizer's process as a fork of this one: the user may not be allowed to run Python from where it is.

    As tokenizer_process.start_process.
    """

    def __init__(self, control: int, stderr: int) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.update(tokenizer_process.ENVIRONMENT)
            for standard in (1, 2):
                os.dup2(stderr, standard)
            tokenizer_worker.serve(socket.socket(fileno=os.dup(control)))

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


@contextmanager
def open_folder() -> Iterator[Path]:
    """Yield a folder that every user may enter, unlike those of pytest."""
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
