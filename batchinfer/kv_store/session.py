"""One process's use of a KV store: whether the disk still works, and counters, which the store keeps as history.

A store never fails a job. If the disk fails, the store is switched off and reports one sentence to the user; from then
on it finds and writes nothing. A failure of writing alone leaves reading on.
"""

import errno
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field, fields
from typing import Any

from batchinfer.kv_store.blocks import KvIdentity
from batchinfer.kv_store.store_dir import StoreDir, list_folder, publish_private

MAX_SESSIONS = 1000
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


def _new_name() -> str:
    # no process number: another container on this host may have a process of the same number
    return f"{int(time.time() * 1000):013d}-{socket.gethostname()}-{secrets.token_hex(6)}"


@dataclass(slots=True)
class Counters:
    """Blocks, files, bytes and seconds since the store was opened, counted by all threads and kept in history/."""

    hit_blocks: int = 0  # returned to the caller, intact
    hit_bytes: int = 0
    missing_blocks: int = 0  # found by a look-up, then not served: evicted meanwhile, damaged, or the store is off
    read_s: float = 0.0  # of reading and checking, summed over threads
    wait_s: float = 0.0  # that callers of the reader waited
    damaged_files: int = 0  # moved to quarantine
    untouched_files: int = 0  # whose last use could not be recorded (a read-only store)
    written_blocks: int = 0
    written_bytes: int = 0
    write_s: float = 0.0  # of checksums and writing, summed over threads
    dropped_blocks: int = 0  # not written: the buffer was full, or the block before them is not there
    refused_blocks: int = 0  # not written: all files of the store are worth more
    lock_timeouts: int = 0  # another process kept the lock: a file was not written, or not counted
    evicted_files: int = 0
    evicted_bytes: int = 0
    fetched_files: int = 0  # from the second tier
    fetched_bytes: int = 0
    sent_files: int = 0  # to the second tier
    sent_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **amounts: float) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def as_dict(self) -> dict[str, float]:
        with self._lock:
            return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "_lock"}


@dataclass(slots=True)
class StoreSession:
    """The state of a store from its opening to its close, in one process."""

    store: StoreDir
    identity: KvIdentity
    run: str = ""  # id of the run that this process works for; "": none
    name: str = field(default_factory=_new_name)
    started_s: float = field(default_factory=time.time)
    counters: Counters = field(default_factory=Counters)
    key: bytes = b""  # known once the store is open
    is_readable: bool = True
    is_writable: bool = True
    problems: list[str] = field(default_factory=list)  # sentences for the user, not reported yet
    switched_off: str | None = None  # the latest of them on why the store, or writing, is off
    own_files: set[str] = field(default_factory=set)  # files read whose blocks this run has computed

    def switch_off(self, what: str, error: Exception) -> None:
        """Stop writing after a failed write; stop reading, too, after any other failure or if the folder is gone."""
        if what == "write" and not os.path.isdir(self.store.model(self.identity)):
            what = "use"  # deleted, moved or never made: there is nothing to read either
        is_news = self.is_writable if what == "write" else self.is_readable
        self.is_writable = False
        self.is_readable = self.is_readable and what == "write"
        if is_news:
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else repr(error)
            where = error.filename if isinstance(error, OSError) and error.filename else self.store.root
            remedy = _REMEDIES.get(getattr(error, "errno", None) or 0, "check the disk or choose another kv.dir")
            goes_on = "what it holds is still read" if self.is_readable else "the job goes on without it"
            self.switched_off = (
                f"the KV store {self.store.root} is switched off{' for writing' * self.is_readable}: cannot {what} "
                f"{where}: {reason}; {goes_on}; {remedy}"
            )
            self.problems.append(self.switched_off)


def publish_history(session: StoreSession) -> None:
    """Write a session's current counters: one small file each, of which the latest MAX_SESSIONS are kept.

    Raises:
        OSError: the file cannot be written.
    """
    counts, identity, store = session.counters.as_dict(), session.identity, session.store
    document = {
        "session": session.name,
        "model": identity.describe()["model"],
        "identity": identity.digest.hex(),
        "started_s": session.started_s,
        "last_s": time.time(),
        "hit_tokens": counts["hit_blocks"] * identity.tokens_per_block,
        "written_tokens": counts["written_blocks"] * identity.tokens_per_block,
        "switched_off": session.switched_off,
        **counts,
    }
    publish_private(store, store.history / f"{session.name}.json", document)
    # names begin with the time: the oldest come first
    finished = [name for name in list_folder(store.history) if not name.startswith(".")]
    for name in finished[:-MAX_SESSIONS]:
        (store.history / name).unlink(missing_ok=True)


def read_history(store: StoreDir) -> list[dict[str, Any]]:
    """Return the counters of all sessions, the oldest first; skip files that cannot be read (damaged, just removed)."""
    found = []
    for name in list_folder(store.history):
        if name.startswith("."):
            continue
        try:
            document = json.loads((store.history / name).read_bytes())
        except (FileNotFoundError, ValueError):
            continue
        if isinstance(document, dict) and "session" in document:
            found.append(document)
    return found
