"""Memory of a rank on the CPU: for KV pages, cleared by the kernel when it is used; for weights, before it is used.

The kernel finds and clears a page when it is first touched, and threads that want the same large page wait for each
other. On a virtual machine whose host has to find the page first, that takes several times as long as reading and
packing the weights that go there. So threads touch the memory ahead of the loader: in a lone rank from when it knows
its job, while it still imports torch.
"""

import ctypes
import mmap
import os
import sys
import threading
from contextlib import suppress

_WINDOW_BYTES = 4 << 20  # that a thread touches at a time: two large pages
_ALIGNMENT = 64


def zeroed(num_bytes: int) -> mmap.mmap:
    """Zeros that take no memory until they are touched; in large pages where the system has them.

    Raises:
        OSError: there is not so much address space.
    """
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # a system without large pages, or without the choice
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class FreshMemory:
    """So many bytes, touched from the front on by threads of their own; whoever takes a part waits for it, and helps.

    Raises:
        OSError: there is not so much address space.
    """

    def __init__(self, num_bytes: int, num_threads: int) -> None:
        self._memory = zeroed(num_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._num_bytes = num_bytes
        self._num_taken = 0
        self._next_window = 0
        self._num_windows = -(-num_bytes // _WINDOW_BYTES)
        self._is_touched = [False] * self._num_windows
        self._num_ready = 0  # windows before the first that is not touched
        self._changed = threading.Condition()
        for _ in range(num_threads):
            threading.Thread(target=self._work, name="touch memory", daemon=True).start()

    def take(self, num_bytes: int) -> memoryview | None:
        """The next part, all of it touched; None when there is not so much left. It keeps all the memory alive."""
        start, end = self._num_taken, self._num_taken + num_bytes
        if end > self._num_bytes:
            return None
        self._num_taken = -(-end // _ALIGNMENT) * _ALIGNMENT
        windows = -(-end // _WINDOW_BYTES)
        while self._touch_next(windows):
            pass
        with self._changed:
            self._changed.wait_for(lambda: self._num_ready >= windows)
        return memoryview(self._memory)[start:end]

    def close(self) -> None:
        """Give back what nobody took."""
        with self._changed:
            begun, self._next_window = self._next_window, self._num_windows
            self._changed.wait_for(lambda: self._num_ready >= begun)
        page = mmap.PAGESIZE
        unused = -(-self._num_taken // page) * page
        if unused < self._num_bytes:
            self._memory.madvise(mmap.MADV_DONTNEED, unused)

    def _work(self) -> None:
        if sys.platform == "linux":  # elsewhere it would be of the whole process
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, 10)  # imports and planning go first
        while self._touch_next(self._num_windows):
            pass

    def _touch_next(self, end_window: int) -> bool:
        """Touch the next window if it lies before `end_window`."""
        with self._changed:
            window = self._next_window
            if window >= end_window:
                return False
            self._next_window += 1
        start = window * _WINDOW_BYTES
        # nobody has this part yet; others may run meanwhile
        ctypes.memset(self._address + start, 0, min(_WINDOW_BYTES, self._num_bytes - start))
        with self._changed:
            self._is_touched[window] = True
            while self._num_ready < self._num_windows and self._is_touched[self._num_ready]:
                self._num_ready += 1
            self._changed.notify_all()
        return True
