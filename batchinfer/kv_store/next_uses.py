"""The next uses of blocks by live runs: each run publishes its own in a file that the others read before they evict.

A claim counts while its file is fresh; the claim of a killed run expires. Next uses are compared directly, over all
ranks of a run and all runs on a store: they are numbers of work units.
"""

import os
import time
from collections.abc import Mapping

import numpy as np

from batchinfer.kv_store.blocks import SHORT_BYTES
from batchinfer.kv_store.store_dir import StoreDir, list_folder, publish_private
from batchinfer.whole_files import file_system_s

LEASE_S = 300.0
_RENEW_S = 60.0
_RECORD = np.dtype([("block", "<u8"), ("next_use", "<i8")])


class BlockClaims:
    """The next uses of blocks: this run's, and those of other runs when last read."""

    def __init__(self, store: StoreDir, session: str) -> None:
        self._store = store
        self._session = session
        self._own: dict[bytes, int] = {}
        self._others: dict[bytes, int] = {}
        self._has_changed = False
        self._published_s = 0.0

    def set(self, next_uses: Mapping[bytes, int | None]) -> None:
        """Set when blocks (by name) are needed next; None: not any more."""
        for block, next_use in next_uses.items():
            if next_use is None:
                self._own.pop(block[:SHORT_BYTES], None)
            else:
                self._own[block[:SHORT_BYTES]] = next_use
        self._has_changed = self._has_changed or bool(next_uses)

    def next_use(self, block: bytes) -> int | None:
        """Return the earliest next use of a block (by its short name) over all live runs; None: no run needs it."""
        own, other = self._own.get(block), self._others.get(block)
        return other if own is None else own if other is None else min(own, other)

    def next_uses(self) -> dict[bytes, int]:
        """Return `next_use` of every block that some run needs."""
        merged = dict(self._others)
        for block, next_use in self._own.copy().items():
            merged[block] = min(next_use, merged.get(block, next_use))
        return merged

    def publish(self) -> None:
        """Write this run's next uses for other runs, if they have changed or are due for renewal.

        Raises:
            OSError: the file cannot be written.
        """
        is_due = time.monotonic() - self._published_s > _RENEW_S
        if not self._has_changed and not (is_due and self._own):
            return
        self._has_changed, self._published_s = False, time.monotonic()
        own = self._own.copy()  # in one step: another thread may be changing it
        records = np.empty(len(own), _RECORD)
        records["block"] = np.fromiter((int.from_bytes(block, "little") for block in own), np.uint64, len(own))
        records["next_use"] = np.fromiter(own.values(), np.int64, len(own))
        publish_private(self._store, self._store.claims / self._session, records.tobytes())

    def read_others(self) -> None:
        """Read the next uses of other runs; delete expired files."""
        self._others = {}
        names = [name for name in list_folder(self._store.claims) if name != self._session and not name.startswith(".")]
        now_s = file_system_s(self._store.claims) if names else 0.0
        for name in names:
            path = self._store.claims / name
            try:
                if now_s - path.stat().st_mtime > LEASE_S:
                    os.unlink(path)
                    continue
                data = path.read_bytes()
            except FileNotFoundError:  # that run has ended
                continue
            records = np.frombuffer(data[: len(data) - len(data) % _RECORD.itemsize], _RECORD)
            for block, next_use in zip(records["block"].tolist(), records["next_use"].tolist(), strict=True):
                short = (block % (1 << 8 * SHORT_BYTES)).to_bytes(SHORT_BYTES, "little")
                self._others[short] = min(next_use, self._others.get(short, next_use))

    def withdraw(self) -> None:
        """Delete this run's claim."""
        (self._store.claims / self._session).unlink(missing_ok=True)
