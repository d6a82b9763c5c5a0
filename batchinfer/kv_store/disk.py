"""The KV store on disk: blocks by name, shared by processes and hosts. Called by stored_prefixes.py and its threads.

A store never fails a job. When the disk does, the store switches itself off, has one sentence about it for the user
(`take_problem`), finds nothing and writes nothing from then on. Trouble with writing alone leaves reading on.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import numpy as np

from batchinfer.kv_store.block_file import (
    MAX_BLOCKS,
    TARGET_BYTES,
    DamagedFileError,
    FileName,
    NameClashError,
    file_bytes,
    make_header,
    open_blocks,
    read_blocks,
    write_blocks,
)
from batchinfer.kv_store.blocks import SHORT_BYTES, KvIdentity
from batchinfer.kv_store.claims import LEASE_SECONDS, Claims
from batchinfer.kv_store.counters import Counters
from batchinfer.kv_store.history import publish_history
from batchinfer.kv_store.index import BlockIndex, Span, parsed_name
from batchinfer.kv_store.space_ledger import LockTimeoutError
from batchinfer.kv_store.space_manager import Room
from batchinfer.kv_store.store_dir import StoredFile, StoreDir, create_store, quarantined_files
from batchinfer.records import ConfigError

TOUCH_SECONDS = 10.0  # a file's last use is noted at most this often
TEND_SECONDS = 5.0  # what other processes did is learned, and claims and history told, at least this often apart
MAX_TEND_SHARE = 0.05  # of the time
MAX_PAUSE_SECONDS = LEASE_SECONDS / 4  # claims are renewed before they run out
CLOSE_SECONDS = 10.0  # a disk that hangs holds the job up no longer
QUARANTINED_FILES = 16  # kept for a look at what happened
FILES_BELOW_BOUND = 8  # a file is at most this share of a small store

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
_sessions = count()


class DiskStore:
    """One process's view of a store; all methods may be called from several threads. Its reader and writer close first.

    Args:
        folder: of the store; made when it is not there.
        identity: of the blocks that this process reads and writes.
        max_bytes: bound of all files in the folder; None: none.
    """

    def __init__(self, folder: Path, identity: KvIdentity, *, max_bytes: int | None = None) -> None:
        self.store = StoreDir(Path(folder))
        self.identity = identity
        self.counters = Counters()
        self.session = f"{int(time.time() * 1000):013d}-{socket.gethostname()}-{os.getpid()}-{next(_sessions)}"
        self.is_readable = self.is_writable = True
        self._problems: list[str] = []
        self._index = BlockIndex(self.store.model(identity))
        self._claims = Claims(self.store, self.session)
        self._room = Room(self.store, self._claims, self.session, max_bytes, self._note_eviction)
        self._room_lock = threading.Lock()  # one thread of this process makes room at a time
        bound = TARGET_BYTES if max_bytes is None else min(TARGET_BYTES, max_bytes // FILES_BELOW_BOUND)
        self.blocks_per_file = max(1, min(MAX_BLOCKS, bound // identity.block_bytes))
        self._started_s = time.time()
        self._is_closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="kv-keeper", daemon=True)
        self._open()

    def chain(self, token_ids: Sequence[int] | np.ndarray) -> list[bytes]:
        """Names of the whole blocks of a prompt, see `KvIdentity.chain`."""
        return self.identity.chain(token_ids)

    def find(self, blocks: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, are in the store as far as this process knows; reads nothing.

        Args:
            blocks: names of blocks that follow each other in one chain, from its start or from any place on.
        """
        return self._index.count_leading(blocks) if self.is_readable else 0

    def spans(self, blocks: Sequence[bytes]) -> list[Span]:
        """In which files these blocks are, as far as `find` finds them."""
        return self._index.spans(blocks) if self.is_readable else []

    def read_span(self, span: Span, blocks: Sequence[bytes], out: np.ndarray) -> int:
        """Read blocks that are in one file; returns how many of them, from the first on, were there and intact.

        Args:
            blocks: names of the span's blocks.
            out: [len(blocks), block_bytes] uint8, receives them.
        """
        started_s, num_intact = time.monotonic(), 0
        path = self._index.path(span.file)
        try:
            if self.is_readable:
                self._read_file(path, span, blocks, out)
                num_intact = len(blocks)
        except FileNotFoundError as error:
            self._index.forget(span.file)
            if not os.path.exists(self.store.marker):
                self._switch_off("read", error)
        except NameClashError:
            pass  # one in 2**48: counted below as missing, and computed
        except DamagedFileError as error:
            num_intact = error.num_intact
            self._quarantine(span.file, path)
        except OSError as error:
            if error.errno == errno.ESTALE:  # NFS: evicted by another host while it was open
                self._index.forget(span.file)
            else:
                self._switch_off("read", error)
        self.counters.add(read_s=time.monotonic() - started_s, missing_blocks=len(blocks) - num_intact)
        return num_intact

    def write(self, blocks: Sequence[bytes], first: int, content: np.ndarray) -> int:
        """Write blocks of a chain that are not in the store yet; returns how many are new in it.

        Args:
            blocks: names of the chain's blocks from its start to the last one given.
            first: place of the first block given.
            content: [len(blocks) - first, block_bytes] uint8, contiguous.
        """
        shape = (len(blocks) - first, self.identity.block_bytes)
        assert content.shape == shape, f"blocks of shape {content.shape}, not {shape}"
        num_written, started_s = 0, time.monotonic()
        if first and not self.find([blocks[first - 1]]):
            # nobody would find them without the one before
            self.counters.add(dropped_blocks=len(blocks) - first)
            return 0
        for start, stop in self._missing_runs(blocks, first):
            if not self.is_writable or not self._write_file(blocks, start, stop, content[start - first : stop - first]):
                break
            num_written += stop - start
        num_bytes = num_written * self.identity.block_bytes
        self.counters.add(written_blocks=num_written, written_bytes=num_bytes, write_s=time.monotonic() - started_s)
        return num_written

    def set_next_uses(self, next_uses: Mapping[bytes, int | None]) -> None:
        """Say when blocks (by name) are needed next in this run; None: not any more. Files no longer needed go first.

        The numbers only have to agree in order with those of the run's other ranks, for example work units.
        """
        self._claims.set(next_uses)

    def refresh(self) -> None:
        """Learn now what other processes wrote and removed (done by itself every few seconds)."""
        try:
            if self.is_readable:
                self._index.refresh()
        except OSError as error:
            self._switch_off("read", error)

    def take_problem(self) -> str | None:
        """A sentence for the user about why the store switched itself (or writing) off; each is given once."""
        return self._problems.pop(0) if self._problems else None

    def fail(self, error: Exception) -> None:
        """Switch off for a reason that no error of the disk gives: no answer, or a defect in a background thread."""
        self._switch_off("use", error)

    def close(self) -> None:
        """Withdraw this run's claims and write its history; nothing is found or written afterwards."""
        self._is_closing.set()
        if self._keeper.is_alive():
            self._keeper.join(CLOSE_SECONDS)
        if not self._keeper.is_alive():
            self._tell(is_last=True)
        self.is_readable = self.is_writable = False

    def _open(self) -> None:
        try:
            create_store(self.store, self.identity)
            self._tell()
        except ConfigError as error:
            self.is_readable = self.is_writable = False
            self._problems.append(f"{error}; the job goes on without a KV store")
        except OSError as error:
            self._switch_off("write" if os.path.isdir(self._index.folder) else "use", error)
        self.refresh()
        if self.is_readable:
            self._keeper.start()

    def _read_file(self, path: str, span: Span, blocks: Sequence[bytes], out: np.ndarray) -> None:
        descriptor = open_blocks(path)
        try:
            read_blocks(
                descriptor,
                parsed_name(span.file),
                identity=self.identity.digest,
                block_bytes=self.identity.block_bytes,
                wanted=blocks,
                position=span.position,
                out=out,
            )
            if time.time() - os.fstat(descriptor).st_mtime > TOUCH_SECONDS:
                self._touch(descriptor)
        finally:
            os.close(descriptor)

    def _touch(self, descriptor: int) -> None:
        try:
            os.utime(descriptor)
        except OSError:  # somebody else's file or a read-only folder: it is read all the same
            self.counters.add(untouched_files=1)

    def _missing_runs(self, blocks: Sequence[bytes], first: int) -> list[tuple[int, int]]:
        """Blocks that are not in the store, file by file: no longer than a file, cut where the next use changes."""
        runs: list[tuple[int, int]] = []
        for at in range(first, len(blocks)):
            short = blocks[at][:SHORT_BYTES]
            if short in self._index.file_of_block:
                continue
            if runs and runs[-1][1] == at and at - runs[-1][0] < self.blocks_per_file:
                before = blocks[at - 1][:SHORT_BYTES]
                if self._claims.next_use(before) == self._claims.next_use(short):
                    runs[-1] = (runs[-1][0], at + 1)
                    continue
            runs.append((at, at + 1))
        return runs

    def _write_file(self, blocks: Sequence[bytes], start: int, stop: int, content: np.ndarray) -> bool:
        name = FileName.of(blocks, start, stop)
        try:
            header = make_header(self.identity, blocks, start, content)
            with self._room_lock:
                ancestors = self._index.ancestors(name.parent)
                booked = self._room.book(name, file_bytes(stop - start, self.identity.block_bytes), ancestors)
            if booked is None:
                self.counters.add(refused_blocks=stop - start)
                return False
            self._publish(*booked, self._index.path(str(name)), header, content)
        except LockTimeoutError:
            self.counters.add(lock_timeouts=1)
            return False
        except OSError as error:
            self._switch_off("write", error)
            return False
        self._index.add(str(name))
        return True

    def _publish(self, descriptor: int, temporary: str, path: str, header: bytes, content: np.ndarray) -> None:
        try:
            write_blocks(descriptor, header, content)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:  # the first file in its folder
                Path(path).parent.mkdir(0o700, exist_ok=True)
                os.rename(temporary, path)
        except OSError:
            # its room stays booked until files are counted again: whatever failed here may fail there too
            Path(temporary).unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def _quarantine(self, file: str, path: str) -> None:
        """Move a damaged file aside, so that nobody meets it again, and keep only the latest few."""
        self._index.forget(file)
        self.counters.add(damaged_files=1)
        try:
            quarantine(self.store, path)
        except OSError as error:
            self._switch_off("write", error)

    def _note_eviction(self, file: StoredFile) -> None:
        self.counters.add(evicted_files=1, evicted_bytes=file.num_bytes)
        if file.name is not None:
            self._index.forget(str(file.name))

    def _keep(self) -> None:
        """The background thread: count once, then refresh, tell, sleep."""
        self._count_again()
        pause_s = TEND_SECONDS
        while not self._is_closing.wait(pause_s):
            started_s = time.monotonic()
            self.refresh()
            self._tell()
            pause_s = max(TEND_SECONDS, min(MAX_PAUSE_SECONDS, (time.monotonic() - started_s) / MAX_TEND_SHARE))

    def _count_again(self) -> None:
        """Free the room that killed processes had booked, and keep a bound that is lower than it was before."""
        try:
            with self._room_lock:
                if self.is_writable and not self._room.is_within_bound():
                    self._room.shrink()
        except LockTimeoutError:
            self.counters.add(lock_timeouts=1)
        except OSError as error:
            self._switch_off("write", error)

    def _tell(self, *, is_last: bool = False) -> None:
        try:
            if self.is_writable and is_last:
                self._claims.withdraw()
            elif self.is_writable:
                self._claims.publish()
            if self.is_writable:
                publish_history(self.store, self.session, self.identity, self.counters, self._started_s)
        except OSError as error:
            self._switch_off("write", error)

    def _switch_off(self, what: str, error: Exception) -> None:
        """After a failed write nothing more is written; after any other failure nothing is read either."""
        is_news = self.is_writable if what == "write" else self.is_readable
        self.is_writable = False
        self.is_readable = self.is_readable and what == "write"
        if is_news:
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else repr(error)
            where = error.filename if isinstance(error, OSError) and error.filename else self.store.root
            remedy = _REMEDIES.get(getattr(error, "errno", None) or 0, "check the disk or choose another kv.dir")
            goes_on = "what it holds is still read" if self.is_readable else "the job goes on without it"
            self._problems.append(
                f"the KV store {self.store.root} is switched off{' for writing' * self.is_readable}: cannot {what} "
                f"{where}: {reason}; {goes_on}; {remedy}"
            )


def quarantine(store: StoreDir, path: str) -> None:
    """Move a damaged file aside and keep the latest few of its kind.

    Raises:
        OSError: the folder cannot be written.
    """
    try:
        os.rename(path, store.quarantine / os.path.basename(path))
    except FileNotFoundError:  # evicted, or moved by another process
        return
    for file in quarantined_files(store)[:-QUARANTINED_FILES]:
        # its room stays booked until files are counted again
        Path(file.path).unlink(missing_ok=True)
