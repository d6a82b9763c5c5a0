"""The writer of block files, which keeps to the store's bound and publishes each file at once or not at all."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from batchinfer.kv_store.block_file import MAX_BLOCKS, TARGET_BYTES, FileName, file_bytes, make_header, write_blocks
from batchinfer.kv_store.blocks import SHORT_BYTES
from batchinfer.kv_store.index import BlockIndex
from batchinfer.kv_store.next_uses import BlockClaims
from batchinfer.kv_store.second_tier import SecondTier
from batchinfer.kv_store.session import StoreSession
from batchinfer.kv_store.space_ledger import LockTimeoutError
from batchinfer.kv_store.space_manager import SpaceManager
from batchinfer.kv_store.store_dir import StoredFile, remove_temporary_files
from batchinfer.ownership import make_folder

FILES_BELOW_BOUND = 8  # a file is at most this share of a small store


class FileWriter:
    """Writes block files, for all threads of one process.

    Args:
        max_bytes: bound of all files in the folder; None: none.
        tier: gets each file before the disk does; None: there is none.
    """

    def __init__(
        self,
        session: StoreSession,
        index: BlockIndex,
        claims: BlockClaims,
        max_bytes: int | None,
        tier: SecondTier | None,
    ) -> None:
        self._session, self._index, self._claims, self._tier = session, index, claims, tier
        self._space = SpaceManager(session.store, claims, session.name, max_bytes, self._note_eviction)
        self._space_lock = threading.Lock()  # one thread of this process makes space at a time
        bound = TARGET_BYTES if max_bytes is None else min(TARGET_BYTES, max_bytes // FILES_BELOW_BOUND)
        self.blocks_per_file = max(1, min(MAX_BLOCKS, bound // session.identity.block_bytes))

    def write(self, blocks: Sequence[bytes], first: int, content: np.ndarray) -> int:
        """Write blocks of a chain that are not in the store yet; return how many are new in it.

        Args:
            blocks: names of the chain's blocks from its start to the last one given.
            first: index of the first block given in its chain.
            content: [len(blocks) - first, block_bytes] uint8, contiguous.
        """
        session, block_bytes = self._session, self._session.identity.block_bytes
        shape = (len(blocks) - first, block_bytes)
        assert content.shape == shape, f"blocks of shape {content.shape}, not {shape}"
        num_written, started_s = 0, time.monotonic()
        if first and not (session.is_readable and self._index.count_leading([blocks[first - 1]])):
            # look-ups stop at the missing block before these
            session.counters.add(dropped_blocks=len(blocks) - first)
            return 0
        for start, stop in self._missing_runs(blocks, first):
            part = content[start - first : stop - first]
            if not session.is_writable or not self._write_file(blocks, start, stop, part):
                break
            num_written += stop - start
        num_bytes, write_s = num_written * block_bytes, time.monotonic() - started_s
        session.counters.add(written_blocks=num_written, written_bytes=num_bytes, write_s=write_s)
        return num_written

    def recount(self) -> None:
        """Delete the leftovers of killed processes, free the space they booked, and shrink to the current bound."""
        try:
            if self._session.is_writable:
                remove_temporary_files(self._session.store)
            with self._space_lock:
                if self._session.is_writable and not self._space.is_within_bound():
                    self._space.shrink()
        except LockTimeoutError:
            self._session.counters.add(lock_timeouts=1)
        except OSError as error:
            self._session.switch_off("write", error)

    def _missing_runs(self, blocks: Sequence[bytes], first: int) -> list[tuple[int, int]]:
        """Return runs of blocks that are not in the store, at most one file each, cut where the next use changes."""
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
        is_sent = self._tier is not None and self._tier.put(name, blocks[start:stop], content)
        return self.write_to_disk(name, blocks[start:stop], content) or is_sent

    def write_to_disk(
        self, name: FileName, blocks: Sequence[bytes], content: np.ndarray, run: str | None = None
    ) -> bool:
        """Write a file to disk, unless all files there are worth more; return whether it was written.

        Args:
            blocks: names of the file's blocks.
            content: [len(blocks), block_bytes] uint8, contiguous.
            run: id of the run that has computed them; None: this one.
        """
        try:
            run = self._session.run if run is None else run
            header = make_header(self._session.identity, blocks, name.first, content, self._session.key, run)
            with self._space_lock:
                ancestors = self._index.ancestors(name.parent)
                booked = self._space.book(name, file_bytes(len(blocks), self._session.identity.block_bytes), ancestors)
            if booked is None:
                self._session.counters.add(refused_blocks=len(blocks))
                return False
            self._publish(*booked, self._index.path(str(name)), header, content)
        except LockTimeoutError:
            self._session.counters.add(lock_timeouts=1)
            return False
        except OSError as error:
            self._session.switch_off("write", error)
            return False
        self._index.add(str(name))
        return True

    def _publish(self, descriptor: int, temporary: str, path: str, header: bytes, content: np.ndarray) -> None:
        try:
            write_blocks(descriptor, header, content)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:  # the first file in its folder
                make_folder(Path(path).parent, self._session.store.gid)
                os.rename(temporary, path)
        except OSError:
            # its space stays booked until the next recount: freeing it now may fail for the same reason
            Path(temporary).unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def _note_eviction(self, file: StoredFile) -> None:
        self._session.counters.add(evicted_files=1, evicted_bytes=file.num_bytes)
        if file.name is not None:
            self._index.remove(str(file.name))
