"""A reader of KV blocks ahead of their use, in the order of requests, in background threads.

reads   done, held by the caller │ being read │ waiting for budget …       left of the last line: `ahead_bytes`
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from batchinfer.kv_store.disk import DiskStore
from batchinfer.kv_store.index import FileSpan

WAIT_S = 60.0  # a disk that does not answer within this time has failed

Allocate = Callable[[tuple[int, int]], np.ndarray]


def pageable(shape: tuple[int, int]) -> np.ndarray:
    """Allocate ordinary host memory."""
    return np.empty(shape, np.uint8)


class BlockRead:
    """Consecutive blocks of one chain on their way from disk; made by `Reader.ask`."""

    def __init__(self, reader: Reader, blocks: Sequence[bytes], spans: list[FileSpan]) -> None:
        self._reader = reader
        self.blocks = blocks
        self.spans = spans  # without those that were dropped unread
        self.num_intact = [0] * len(spans)
        self.num_started = self.num_finished = 0  # spans
        self.content: np.ndarray | None = None  # from the start of reading to `close`
        self.num_bytes = 0  # of the budget, likewise
        self.allocating = threading.Lock()
        self.is_urgent = self.is_closed = False

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        return self.num_finished == len(self.spans)

    def wait(self, timeout_s: float = WAIT_S) -> np.ndarray:
        """Return the blocks, from the first on, that were there and intact: [k, block_bytes] uint8.

        They are valid until `close`. After `timeout_s` there are none, and the store is switched off.
        """
        return self._reader.wait(self, timeout_s)

    def close(self) -> None:
        """Free the memory, and drop blocks that are not read yet."""
        self._reader.close_read(self)

    def drop_unread(self) -> None:
        del self.spans[self.num_started :]


class Reader:
    """Reads ahead for one process.

    Args:
        ahead_bytes: most bytes being read or held by the caller; a read that is waited for may exceed it.
        num_threads: files read at a time.
        allocate: memory for [blocks, block_bytes] uint8; for a GPU, pinned memory.
    """

    def __init__(
        self, store: DiskStore, *, ahead_bytes: int = 1 << 28, num_threads: int = 4, allocate: Allocate = pageable
    ) -> None:
        self.store = store
        self._ahead_bytes = ahead_bytes
        self._allocate = allocate
        self._waiting: deque[BlockRead] = deque()  # reads with files that no thread has begun
        self._held_bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kv-reader-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, blocks: Sequence[bytes]) -> BlockRead:
        """Start to read those of these blocks that are in the store; return at once.

        Args:
            blocks: names of consecutive blocks of one chain, from its start or from any block on.
        """
        read = BlockRead(self, blocks, self.store.spans(blocks))
        with self._changed:
            if self._is_closed:
                read.drop_unread()
            elif read.spans:
                self._waiting.append(read)
                self._changed.notify_all()
        return read

    def wait(self, read: BlockRead, timeout_s: float) -> np.ndarray:
        """Wait for a read as `BlockRead.wait` describes.

        The read moves to the front and needs no budget, so that it cannot wait for itself.
        """
        assert not read.is_closed, "a read that is closed has no content"
        started_s, is_first = time.monotonic(), not read.is_urgent
        with self._changed:
            read.is_urgent = True
            if read in self._waiting:
                self._waiting.remove(read)
                self._waiting.appendleft(read)
                self._changed.notify_all()
            has_answered = self._changed.wait_for(lambda: read.is_done, timeout_s)
        if not has_answered:
            self.store.fail(TimeoutError(f"no answer for {timeout_s:,.0f} s"))
        if read.content is None or not has_answered:
            return pageable((0, self._block_bytes))
        num_blocks = 0
        for span, num_intact in zip(read.spans, read.num_intact, strict=False):
            num_blocks += num_intact
            if num_intact < span.stop - span.start:
                break
        if is_first:
            self.store.counters.add(hit_blocks=num_blocks, hit_bytes=num_blocks * self._block_bytes)
        self.store.counters.add(wait_s=time.monotonic() - started_s)
        return read.content[:num_blocks]

    def close_read(self, read: BlockRead) -> None:
        """Close a read; see `BlockRead.close`."""
        with self._changed:
            read.is_closed = True
            self._drop_unread(read)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop; reads in progress end with the blocks that are there by now."""
        with self._changed:
            self._is_closed = True
            for read in list(self._waiting):
                self._drop_unread(read)
            self._changed.notify_all()
        # a thread that hangs in the operating system must not delay the job; it ends with the process
        for thread in self._threads:
            thread.join(timeout=1.0)

    @property
    def _block_bytes(self) -> int:
        return self.store.identity.block_bytes

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._may_start())
                if self._is_closed:
                    return
                read, at = self._take_span()
            num_intact = 0
            try:
                num_intact = self._read(read, read.spans[at])
            except Exception as error:  # reported to the user; the caller computes instead
                self.store.fail(error)
            with self._changed:
                read.num_intact[at] = num_intact
                read.num_finished += 1
                if num_intact < read.spans[at].stop - read.spans[at].start:
                    self._drop_unread(read)  # of no use without these
                self._free_if_over(read)
                self._changed.notify_all()

    def _may_start(self) -> bool:
        if not self._waiting:
            return False
        read = self._waiting[0]
        num_bytes = read.spans[-1].stop * self._block_bytes
        is_affordable = self._held_bytes == 0 or self._held_bytes + num_bytes <= self._ahead_bytes
        return read.num_started > 0 or read.is_urgent or is_affordable

    def _take_span(self) -> tuple[BlockRead, int]:
        """Take the next file of the first waiting read."""
        read = self._waiting[0]
        at = read.num_started
        read.num_started += 1
        if at == 0:
            read.num_bytes = read.spans[-1].stop * self._block_bytes
            self._held_bytes += read.num_bytes
        if read.num_started == len(read.spans):
            self._waiting.popleft()
        return read, at

    def _read(self, read: BlockRead, span: FileSpan) -> int:
        with read.allocating:
            if read.content is None:
                read.content = self._allocate((read.num_bytes // self._block_bytes, self._block_bytes))
        return self.store.read_span(span, read.blocks[span.start : span.stop], read.content[span.start : span.stop])

    def _drop_unread(self, read: BlockRead) -> None:
        read.drop_unread()
        if read in self._waiting:
            self._waiting.remove(read)
        self._free_if_over(read)

    def _free_if_over(self, read: BlockRead) -> None:
        if read.is_closed and read.is_done:
            self._held_bytes -= read.num_bytes
            read.num_bytes, read.content = 0, None
