"""Stand-ins for CUDA's streams and events on a CPU that check the order of copies and of what reads them.

Copies of another stream than the computing one are made as late as possible: when an event after them is waited for.
Each stream knows which work of the other streams comes before its next work, by the events that it has waited for. A
copy into memory that is read, and a read of memory into which is copied, must come after it by this, or it is a fault.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager

import torch


class StrictStreams:
    """The streams of one GPU; `faults` are sentences."""

    def __init__(self, monkeypatch):
        self.faults: list[str] = []
        self.lock = threading.RLock()
        self.computing = _Stream(self, "computing")
        self._current = threading.local()
        self._written: dict[int, tuple[_Stream, int]] = {}  # by address, the last copy into this memory
        self._read: dict[int, Counter[_Stream]] = {}  # by address, the last reads
        real_copy = torch.Tensor.copy_

        def copy(target, source, non_blocking=False):
            stream = self.current()
            if stream is self.computing:
                return real_copy(target, source, non_blocking)
            assert non_blocking, "the thread that starts copies waits for one"
            with self.lock:
                number = stream.begin(lambda: real_copy(target, source))
                self._check_copy(stream, target.data_ptr(), number)
            return target

        class Event(_Event):
            def __init__(event, enable_timing=False):
                super().__init__(self)

        monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream(self, "copying"))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current())
        monkeypatch.setattr(torch.Tensor, "copy_", copy)

    def current(self):
        return getattr(self._current, "stream", self.computing)

    @contextmanager
    def _on(self, stream):
        self._current.stream = stream
        yield
        self._current.stream = self.computing

    def compute_with(self, memory):
        """Notes that the computing stream reads this memory now."""
        with self.lock:
            number, place = self.computing.begin(), memory.data_ptr()
            writer, written = self._written[place]
            if self.computing.known[writer] < written:
                self.faults.append("a slot is read before its copy is over")
            self._read.setdefault(place, Counter())[self.computing] = number

    def _check_copy(self, stream, place, number):
        for reader, read in self._read.get(place, Counter()).items():
            if stream.known[reader] < read:
                self.faults.append("a slot is overwritten while it is read")
        self._written[place] = stream, number


class _Stream:
    def __init__(self, gpu, name):
        self.gpu, self.name = gpu, name
        self.known: Counter[_Stream] = Counter()  # the work of each stream that comes before this one's next
        self._num_begun = 0
        self._waiting = []  # number and work, in order

    def begin(self, work=None):
        """Returns the number of new work."""
        self._num_begun += 1
        self.known[self] = self._num_begun
        if work is not None:
            self._waiting.append((self._num_begun, work))
        return self._num_begun

    def run(self, last):
        """Does the work up to this number."""
        while self._waiting and self._waiting[0][0] <= last:
            self._waiting.pop(0)[1]()

    def record_event(self, event=None):
        event = event or _Event(self.gpu)
        event.record(self)
        return event

    def wait_event(self, event):
        with self.gpu.lock:
            self.known |= event.known
            if self is self.gpu.computing:  # its work is done at once
                event.finish()


class _Event:
    def __init__(self, gpu):
        self._gpu, self.known, self._stream = gpu, None, None

    def record(self, stream=None):
        with self._gpu.lock:
            self._stream = stream or self._gpu.current()
            self.known = Counter(self._stream.known)

    def finish(self):
        with self._gpu.lock:
            for stream, last in self.known.items():
                stream.run(last)

    synchronize = finish

    def query(self):
        return self.known is not None

    def elapsed_time(self, end):
        assert self.known is not None, "an event that was not recorded"
        assert end.known is not None, "an event that was not recorded"
        return 1.0
