"""The KV store on disk: blocks by name, shared by processes and hosts."""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from batchinfer.data.bucket import Bucket
from batchinfer.kv_store.blocks import KvIdentity
from batchinfer.kv_store.file_reader import FileReader
from batchinfer.kv_store.file_writer import FileWriter
from batchinfer.kv_store.index import BlockIndex, FileSpan
from batchinfer.kv_store.next_uses import LEASE_S, BlockClaims
from batchinfer.kv_store.second_tier import SecondTier
from batchinfer.kv_store.session import StoreSession, publish_history
from batchinfer.kv_store.store_dir import StoreDir, add_model, create_store, read_key
from batchinfer.records import ConfigError

TEND_S = 5.0  # shortest pause between updates: reading others' changes, publishing claims and history
MAX_TEND_SHARE = 0.05  # of the time
MAX_PAUSE_S = LEASE_S / 4  # claims are renewed before they run out
TIER_S = 60.0  # shortest pause between listings of the second tier
CLOSE_S = 10.0  # a hanging disk delays the end of the job by at most this


class DiskStore:
    """One process's view of a store; all methods may be called from several threads. Close its reader and writer first.

    Args:
        folder: of the store; made if it does not exist.
        identity: of the blocks that this process reads and writes.
        max_bytes: bound of all files in the folder; None: none.
        gid: the group that shares the store; None: it is this user's alone.
        bucket: has the files, too, and keeps those that the bound evicts; None: there is no second tier.
        run: id of the run that this process works for; files store it, so that a run recognises its own blocks.
    """

    def __init__(
        self,
        folder: Path,
        identity: KvIdentity,
        *,
        max_bytes: int | None = None,
        gid: int | None = None,
        bucket: Bucket | None = None,
        run: str = "",
    ) -> None:
        self.session = StoreSession(StoreDir(Path(folder), gid), identity, run)
        self.store, self.identity, self.counters = self.session.store, identity, self.session.counters
        self._index = BlockIndex(self.store.model(identity))
        self._claims = BlockClaims(self.store, self.session.name)
        self._tier = None if bucket is None else SecondTier(bucket, self.session, self._index)
        self._tier_due_s = 0.0
        self._writer = FileWriter(self.session, self._index, self._claims, max_bytes, self._tier)
        self._reader = FileReader(self.session, self._index, self._tier, self._writer.write_to_disk)
        self._is_closing = threading.Event()
        self._keeper = threading.Thread(target=self._tend, name="kv-keeper", daemon=True)
        self._open()

    @property
    def is_writable(self) -> bool:
        """Whether blocks are still written."""
        return self.session.is_writable

    def find(self, blocks: Sequence[bytes]) -> int:
        """Count how many of these blocks, from the first on, this process knows to be in the store; read nothing.

        Args:
            blocks: names of consecutive blocks of one chain, from its start or from any block on.
        """
        return self._index.count_leading(blocks) if self.session.is_readable else 0

    def spans(self, blocks: Sequence[bytes]) -> list[FileSpan]:
        """Return the files of the blocks that `find` counts."""
        return self._index.spans(blocks) if self.session.is_readable else []

    def is_own(self, span: FileSpan) -> bool:
        """Return whether this run, or an earlier session of it, has computed these blocks; known only after a read."""
        return span.file in self.session.own_files

    def read_span(self, span: FileSpan, blocks: Sequence[bytes], out: np.ndarray) -> int:
        """Read blocks of one file; see FileReader.read_span."""
        return self._reader.read_span(span, blocks, out)

    def write(self, blocks: Sequence[bytes], first: int, content: np.ndarray) -> int:
        """Write blocks; see FileWriter.write."""
        return self._writer.write(blocks, first, content)

    def set_next_uses(self, next_uses: Mapping[bytes, int | None]) -> None:
        """Set when this run needs blocks (by name) next; None: not any more. Files no longer needed are evicted first.

        The numbers only have to agree in order with those of the run's other ranks, for example work units.
        """
        self._claims.set(next_uses)

    def refresh(self) -> None:
        """Read now which files other processes wrote and removed (done in the background every few seconds)."""
        try:
            if self.session.is_readable:
                self._index.refresh()
        except OSError as error:
            self.session.switch_off("read", error)

    def take_problem(self) -> str | None:
        """Return a sentence for the user about why the store (or writing) was switched off, each once, or None."""
        return self.session.problems.pop(0) if self.session.problems else None

    def fail(self, error: Exception) -> None:
        """Switch off for a reason other than an error of the disk: no answer, or a defect in a background thread."""
        self.session.switch_off("use", error)

    def close(self) -> None:
        """Withdraw this run's claims and write its history; nothing is found or written afterwards."""
        self._is_closing.set()
        if self._keeper.is_alive():
            self._keeper.join(CLOSE_S)
        if not self._keeper.is_alive():
            last = threading.Thread(target=self._publish, kwargs={"is_last": True}, name="kv-last", daemon=True)
            last.start()
            last.join(CLOSE_S)
        self.session.is_readable = self.session.is_writable = False

    def _open(self) -> None:
        try:
            warning = create_store(self.store)
            if warning is not None:
                self.session.problems.append(warning)
            self.session.key = read_key(self.store)
            add_model(self.store, self.identity)
            self._publish()
        except ConfigError as error:
            self.session.is_readable = self.session.is_writable = False
            self.session.problems.append(f"{error}; the job goes on without a KV store")
        except OSError as error:
            self.session.switch_off("write", error)
        self.refresh()
        if self.session.is_readable:
            if self._tier is not None:
                self._tier.open()
                self._tier_due_s = time.monotonic() + TIER_S
            self._keeper.start()

    def _tend(self) -> None:
        """Run the background thread: recount once, then refresh, publish and sleep in a loop."""
        self._writer.recount()
        pause_s = TEND_S
        while not self._is_closing.wait(pause_s):
            started_s = time.monotonic()
            self.refresh()
            self._publish()
            if self._tier is not None and started_s >= self._tier_due_s:
                self._tier.refresh()
                self._tier_due_s = time.monotonic() + TIER_S
            pause_s = max(TEND_S, min(MAX_PAUSE_S, (time.monotonic() - started_s) / MAX_TEND_SHARE))

    def _publish(self, *, is_last: bool = False) -> None:
        try:
            if self.session.is_writable:
                if is_last:
                    self._claims.withdraw()
                else:
                    self._claims.publish()
            if self.session.is_writable or (is_last and self.session.key):  # why an open store was switched off, too
                publish_history(self.session)
        except OSError as error:
            self.session.switch_off("write", error)
