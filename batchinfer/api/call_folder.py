"""Temporary folders of calls; folders of killed processes are removed by the user's next call on the same host.

The process of a call holds a lock on its folder until it ends. The lock file appears after the lock is taken.
"""

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK, CONTENT = "lock", "call"


@contextmanager
def call_folder() -> Iterator[Path]:
    """Yield an empty temporary folder, which is removed afterwards."""
    prefix = f"batchinfer-{socket.gethostname()}-"  # locks may be unknown on other hosts
    for lock in Path(tempfile.gettempdir()).glob(f"{prefix}*/{LOCK}"):
        _remove_left(lock)
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        folder = Path(name)
        (folder / CONTENT).mkdir()
        with open(folder / "new", "wb") as file:
            with suppress(OSError):  # on a file system without locks, orphaned folders stay
                fcntl.flock(file, fcntl.LOCK_EX)
                (folder / "new").rename(folder / LOCK)
            yield folder / CONTENT


def _remove_left(lock: Path) -> None:
    """Remove the folder of this lock if it is this user's and its process has ended."""
    with suppress(OSError), open(lock, "rb") as file:  # another call may do the same, or the process still end
        if os.fstat(file.fileno()).st_uid == os.geteuid():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.with_name(CONTENT))
            shutil.rmtree(lock.parent)
