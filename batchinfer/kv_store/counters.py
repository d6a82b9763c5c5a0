"""What one process did with a KV store, counted by all of its threads and kept in history/."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Counters:
    """Blocks, files, bytes and seconds since the store was opened."""

    hit_blocks: int = 0  # handed to the caller, intact
    hit_bytes: int = 0
    missing_blocks: int = 0  # found by a look-up and then not served: evicted meanwhile, damaged, or the store is off
    read_s: float = 0.0  # of reading and checking, summed over threads
    wait_s: float = 0.0  # that callers of the reader waited
    damaged_files: int = 0  # moved to quarantine
    untouched_files: int = 0  # whose last use could not be noted (a store that may only be read)
    written_blocks: int = 0
    written_bytes: int = 0
    write_s: float = 0.0  # of checksums and writing, summed over threads
    dropped_blocks: int = 0  # not written: the buffer was full, or the block before them is not there
    refused_blocks: int = 0  # not written: all that is there is worth more
    lock_timeouts: int = 0  # another process kept the lock: a file was not written, or not counted
    evicted_files: int = 0
    evicted_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **amounts: float) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def as_dict(self) -> dict[str, float]:
        with self._lock:
            return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "_lock"}
