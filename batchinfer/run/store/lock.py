"""Locks of a run folder on a file system; the operating system releases them when the process ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from batchinfer.progress import note
from batchinfer.records import RunBusyError
from batchinfer.rundir import RunDir, send_lock
from batchinfer.whole_files import cannot_write


@contextmanager
def locked(run: RunDir, *, doing: str) -> Iterator[None]:
    """Hold the run's lock: for a plan, finish or retry.

    Args:
        doing: what must not happen twice at once, for a file system without locks: "finish this run".

    Raises:
        RunBusyError: another process holds the lock.
        ConfigError: the lock's file cannot be written.
    """
    with _opened(run.lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusyError(f"another process plans or finishes {run.root}; wait for it or stop it") from None
        except OSError as error:
            _note_no_locks(run, error, doing)
        yield


@contextmanager
def turn_to_send(run: RunDir) -> Iterator[None]:
    """Wait until no other command on this file system sends or ends tasks of the run.

    Raises:
        ConfigError: the lock's file cannot be written.
    """
    with _opened(send_lock(run)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            _note_no_locks(run, error, "send tasks of this run")
        yield


def _opened(path: Path) -> TextIO:
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise cannot_write(path, error) from None


def _note_no_locks(run: RunDir, error: OSError, doing: str) -> None:
    note(f"no file locks in {run.root} ({error.strerror}); do not {doing} twice at once")
