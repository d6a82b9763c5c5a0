"""A writer of KV blocks behind the computation, from a bounded buffer, in background threads.

The caller never waits. If the buffer is full, blocks are dropped and counted instead: a block that is not stored costs
at most one computation later, while waiting for the disk would cost all requests of a step now.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchinfer.kv_store.disk import DiskStore


@dataclass(frozen=True, slots=True)
class _Job:
    blocks: Sequence[bytes]
    first: int
    content: np.ndarray

    @property
    def parent(self) -> bytes | None:
        return self.blocks[self.first - 1] if self.first else None


class Writer:
    """Writes behind for one process.

    Args:
        buffer_bytes: most bytes that wait or are being written.
        num_threads: chains written at a time.
    """

    def __init__(self, store: DiskStore, *, buffer_bytes: int = 1 << 28, num_threads: int = 2) -> None:
        self.store = store
        self._buffer_bytes = buffer_bytes
        self._jobs: deque[_Job] = deque()
        self._pending: set[bytes] = set()  # blocks that wait or are being written
        self._writing: set[bytes] = set()  # blocks that are being written
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kv-writer-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, blocks: Sequence[bytes], first: int, content: np.ndarray) -> int:
        """Queue blocks of a chain for writing; return how many, from the first on, are in the store or on their way.

        A block is useless without those before it. So blocks behind a dropped block, or behind one that was never
        stored, are dropped, too.

        Args:
            blocks: names of the chain's blocks from its start to the last one given.
            first: index of the first block given in its chain.
            content: [len(blocks) - first, block_bytes] uint8, contiguous; it belongs to the writer from now on.
        """
        with self._changed:
            start = first
            while start < len(blocks) and self._is_known(blocks[start]):
                start += 1
            room = (self._buffer_bytes // self.store.identity.block_bytes) - len(self._pending)
            can_take = (
                not self._is_closed and self.store.is_writable and (start == 0 or self._is_known(blocks[start - 1]))
            )
            stop = start + min(len(blocks) - start, max(room, 0)) if can_take else start
            self.store.counters.add(dropped_blocks=len(blocks) - stop)
            if stop > start:
                taken = content[start - first : stop - first]
                # a part of an array keeps all of it in memory
                taken = taken if len(taken) == len(content) else taken.copy()
                self._pending.update(blocks[start:stop])
                self._jobs.append(_Job(blocks[:stop], start, taken))
                self._changed.notify_all()
        return stop - first

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all blocks are written; return False after a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def close(self, timeout_s: float = 60.0) -> None:
        """Write the waiting blocks, within the timeout; drop and count the rest."""
        self.flush(timeout_s)
        with self._changed:
            self._is_closed = True
            for job in self._jobs:
                self.store.counters.add(dropped_blocks=len(job.blocks) - job.first)
            self._jobs.clear()
            self._changed.notify_all()
        for thread in self._threads:
            # a thread that hangs in the operating system must not delay the job; it ends with the process
            thread.join(timeout=1.0)

    def _is_known(self, block: bytes) -> bool:
        return block in self._pending or self.store.find([block]) == 1

    def _may_start(self) -> bool:
        """Return whether the first job may start: not while the block before it in its chain is being written."""
        return bool(self._jobs) and self._jobs[0].parent not in self._writing

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._may_start())
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._writing.update(job.blocks[job.first :])
            try:
                self.store.write(job.blocks, job.first, job.content)
            except Exception as error:  # reported to the user; the blocks are computed again when needed
                self.store.fail(error)
            with self._changed:
                self._writing.difference_update(job.blocks[job.first :])
                self._pending.difference_update(job.blocks[job.first :])
                self._changed.notify_all()
