"""One process's use of a KV store: what it did, and whether the disk still does its part.

A store never fails a job. When the disk does, the store is switched off, has one sentence about it for the user, finds
nothing and writes nothing from then on. Trouble with writing alone leaves reading on.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import dataclass, field
from itertools import count

from batchinfer.kv_store.blocks import KvIdentity
from batchinfer.kv_store.counters import Counters
from batchinfer.kv_store.store_dir import StoreDir

_REMEDIES = {
    errno.ENOSPC: "free space there or set a lower kv.max_bytes",
    errno.EDQUOT: "free space there or set a lower kv.max_bytes",
    errno.EACCES: "make it readable and writable for this user or choose another kv.dir",
    errno.EPERM: "make it readable and writable for this user or choose another kv.dir",
    errno.EROFS: "make it writable or choose another kv.dir",
    errno.ENOENT: "leave the folder where it is while a job runs, or choose another kv.dir",
    errno.ENOLCK: "mount the file system with locks or choose another kv.dir",
    errno.EOPNOTSUPP: "mount the file system with locks or choose another kv.dir",
}
_numbers = count()


def _new_name() -> str:
    return f"{int(time.time() * 1000):013d}-{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"


@dataclass(slots=True)
class StoreSession:
    """From the store's opening to its close."""

    store: StoreDir
    identity: KvIdentity
    name: str = field(default_factory=_new_name)
    started_s: float = field(default_factory=time.time)
    counters: Counters = field(default_factory=Counters)
    is_readable: bool = True
    is_writable: bool = True
    problems: list[str] = field(default_factory=list)  # sentences for the user that nobody has taken yet

    def switch_off(self, what: str, error: Exception) -> None:
        """After a failed write nothing more is written; after any other failure nothing is read either."""
        is_news = self.is_writable if what == "write" else self.is_readable
        self.is_writable = False
        self.is_readable = self.is_readable and what == "write"
        if is_news:
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else repr(error)
            where = error.filename if isinstance(error, OSError) and error.filename else self.store.root
            remedy = _REMEDIES.get(getattr(error, "errno", None) or 0, "check the disk or choose another kv.dir")
            goes_on = "what it holds is still read" if self.is_readable else "the job goes on without it"
            self.problems.append(
                f"the KV store {self.store.root} is switched off{' for writing' * self.is_readable}: cannot {what} "
                f"{where}: {reason}; {goes_on}; {remedy}"
            )
