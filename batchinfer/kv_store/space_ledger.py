"""The number of bytes of a store's files, in one small file under a lock.

Space is booked before a byte is written and freed after a file is gone, all under the lock: whenever a process is
killed, the ledger never shows less than there is, so writers on any number of hosts together stay below the bound.
Space that a
killed process leaves booked, and files deleted by hand, are corrected by a recount: whenever a store is opened and
whenever space is made.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from batchinfer.kv_store.store_dir import StoreDir, list_folder, quarantined_files, stored_files
from batchinfer.ownership import share_file

LOCK_S = 10.0
_POLL_S = 0.001


class LockTimeoutError(Exception):
    """Another process has held the lock for LOCK_S."""


class SpaceLedger:
    """The count of used bytes while the lock is held."""

    def __init__(self, store: StoreDir, descriptor: int) -> None:
        self._store = store
        self._descriptor = descriptor
        text = os.pread(descriptor, 64, 0)
        # empty in a new store, arbitrary after a power cut
        self.used_bytes = int(text) if text.strip().isdigit() else self.recount()

    def create(self, num_bytes: int, session: str) -> tuple[int, str]:
        """Book a file's space and create it; return its descriptor, which holds the file's lock, and its path.

        Raises:
            OSError: it cannot be created.
        """
        path = f"{self._store.writing}/{num_bytes}.{session}.tmp"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        share_file(descriptor, self._store.gid)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.add(num_bytes)
        return descriptor, path

    def remove(self, path: str, num_bytes: int) -> bool:
        """Delete a file and free its space; return False if another process has deleted it."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        self.add(-num_bytes)
        return True

    def add(self, num_bytes: int) -> None:
        self.used_bytes = max(0, self.used_bytes + num_bytes)
        os.pwrite(self._descriptor, b"%020d\n" % self.used_bytes, 0)

    def recount(self) -> int:
        """Recount all files and delete the leftovers of dead writers.

        Files being written are counted first, since they move to the others.
        """
        self.used_bytes = 0
        for name in list_folder(self._store.writing):
            path, size = self._store.writing / name, name.partition(".")[0]
            if _is_abandoned(str(path)):
                path.unlink(missing_ok=True)
            elif size.isdecimal():
                self.used_bytes += int(size)
        self.used_bytes += sum(file.num_bytes for file in quarantined_files(self._store))
        self.used_bytes += sum(file.num_bytes for file in stored_files(self._store))
        self.add(0)
        return self.used_bytes


@contextmanager
def open_ledger(store: StoreDir) -> Iterator[SpaceLedger]:
    """Hold the lock.

    Raises:
        LockTimeoutError: another process held it for LOCK_S.
        OSError: the store is gone or cannot be written, or its file system has no locks.
    """
    try:
        descriptor = os.open(store.used_bytes, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        share_file(descriptor, store.gid)
    except FileExistsError:
        descriptor = os.open(store.used_bytes, os.O_RDWR | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_S
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise LockTimeoutError
            time.sleep(_POLL_S)
        yield SpaceLedger(store, descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_abandoned(path: str) -> bool:
    """Return whether no process writes this file any more: its lock went with its writer."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return _try_lock(descriptor)
    finally:
        os.close(descriptor)
