"""Layers of a converted folder, read from its disk into slots, in order, sweep after sweep.

layers of the sweeps  0 1 2 3 4 … L-1 0 1 2 …
slots                 0 1 2 0 1 …              layer 3 is read into slot 0 once layer 0 has computed

Slots are made once and used again: fresh memory is slow to come by. Files are read past the page cache (O_DIRECT),
several blocks at a time. On a file system without it they are read through the cache, and dropped from there.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from batchinfer.model.layer_pieces import DIRECT_BYTES, Block, LayerPieces, whole_file
from batchinfer.model.memory_split import RING_SLOTS, SLOT_ALIGNMENT, MemorySplit, slot_size, split_memory
from batchinfer.records import ModelError

BLOCK_BYTES = 4 << 20  # of one read
NUM_READERS = 8  # reads at a time
PIECE_BYTES = 256 << 20  # of each layer, to measure the disk's speed
MEASURED_S, MEASURED_ROUNDS = 4.0, 2  # most seconds of that, and most reads of each piece


class LayerStream(Protocol):
    """A source of layers for sweeps; see WeightStream.

    sweep_read_s: seconds in which the layers of a sweep can be brought, as measured so far; 0: not known.
    """

    split: MemorySplit
    num_bytes: int

    @property
    def wait_s(self) -> float: ...

    @property
    def sweep_read_s(self) -> float: ...

    def memory_of(self, layer: int) -> Any: ...

    def starts_of(self, layer: int) -> Mapping[str, int] | None: ...

    def wait(self) -> None: ...

    def release(self) -> None: ...

    def skip_sweep(self) -> None: ...

    def close(self) -> None: ...


class WeightStream:
    """Reader of layers into slots, on threads that begin at once.

    Layers are used in order: `wait`, compute, `release`, then the next one; the first follows the last. Blocks are
    read in this order, too, on to the next layer as soon as its slot is free: reads never pause at a layer's end.

    Args:
        files: [L] the layers' files.
        layers: [L] what is read of each file; None: all of it.
        new_memory: allocates a slot of this size at a multiple of SLOT_ALIGNMENT; None: pageable memory.
    """

    def __init__(
        self,
        files: Sequence[Path],
        split: MemorySplit,
        new_memory: Callable[[int], memoryview] | None = None,
        *,
        layers: Sequence[LayerPieces] | None = None,
    ) -> None:
        self.split = split
        self.num_bytes = 0  # read so far
        self.read_s = 0.0  # seconds in which something was being read
        self.wait_s = 0.0  # seconds in which a layer was waited for
        self._files = [_LayerFile(path) for path in files]
        self._layers = layers or [whole_file(file.size) for file in self._files]
        self._blocks = [
            [block for piece in layer.pieces for block in piece.blocks(BLOCK_BYTES)] for layer in self._layers
        ]
        self._slots = [(new_memory or slot_memory)(size) for size in split.slot_bytes]
        self._changed = threading.Condition()
        # layers are counted on over all sweeps
        self._num_used = 0  # layers that were released
        self._num_ready = 0  # layers before the first one that is not in its slot yet
        self._num_begun = 0  # layers whose reads were handed out, or that need none
        self._held = [-1] * len(self._slots)  # number of the layer in each slot
        self._open: tuple[int, int] | None = None  # number of the layer whose blocks are handed out, and the next block
        self._num_left: dict[int, int] = {}  # blocks that are not read yet, by layer, from _num_ready on
        self._num_reading, self._reading_since_s = 0, 0.0
        self._error: str | None = None
        self._num_failed = -1  # number of the first layer that cannot be read; those before it come all the same
        self._is_closed = False
        self._readers = [
            threading.Thread(target=self._read_blocks, name="read weights", daemon=True) for _ in range(NUM_READERS)
        ]
        for reader in self._readers:
            reader.start()

    def memory_of(self, layer: int) -> memoryview:
        """Return the memory into which a layer's file is read, from its first byte on."""
        return self._slots[self.split.slot_of_layer[layer]]

    def starts_of(self, layer: int) -> Mapping[str, int] | None:
        """Return where a layer's tensors begin in its memory; None: as in its file."""
        return self._layers[layer].starts

    @property
    def sweep_read_s(self) -> float:
        """Seconds of a sweep's reads, as measured so far; 0: none was read."""
        return self.split.sweep_bytes * self.read_s / self.num_bytes if self.num_bytes else 0.0

    def wait(self) -> None:
        """Wait until the next layer is in its slot.

        Raises:
            ModelError: its file cannot be read, or is shorter than it was.
        """
        started_s = time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._num_ready > self._num_used or (self._error is not None and self._num_used >= self._num_failed)
                )
            )
            if self._num_ready <= self._num_used:
                raise ModelError(f"{self._error}; results are kept: run the same command to go on")
        self.wait_s += time.monotonic() - started_s

    def release(self) -> None:
        """Give the slot of the layer that was waited for to the next reads."""
        with self._changed:
            self._num_used += 1
            self._changed.notify_all()

    def skip_sweep(self) -> None:
        """Leave out the rest of this sweep."""
        with self._changed:
            self._num_used = -(-self._num_used // len(self._files)) * len(self._files)
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads and close the files."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for reader in self._readers:
            reader.join()
        for file in self._files:
            file.close()

    def _read_blocks(self) -> None:
        """Read one block after the other until the stream is closed or a read fails."""
        copied = slot_memory(BLOCK_BYTES + 2 * DIRECT_BYTES) if self._has_copies else memoryview(b"")
        while (found := self._next_block()) is not None:
            number, block = found
            layer = number % len(self._files)
            file, reason = self._files[layer], None
            try:
                file.read(self.memory_of(layer), block, copied)
            except Exception as error:  # of any kind: it is raised where this layer is waited for
                reason = (error.strerror if isinstance(error, OSError) else None) or error
            with self._changed:
                self._num_reading -= 1
                before_s, self._reading_since_s = self._reading_since_s, time.monotonic()
                self.read_s += self._reading_since_s - before_s
                if reason is not None:
                    if self._error is None or number < self._num_failed:
                        self._error, self._num_failed = f"{file.path} cannot be read: {reason}", number
                else:
                    self.num_bytes += block.num_bytes
                    self._num_left[number] -= 1
                if reason is not None or not self._num_left[number]:
                    self._count_ready()
                    self._changed.notify_all()

    @property
    def _has_copies(self) -> bool:
        return not all(block.is_direct for blocks in self._blocks for block in blocks)

    def _next_block(self) -> tuple[int, Block] | None:
        """Wait for a free slot; return the number of its layer and the next block. None: nothing is read."""
        with self._changed:
            while self._open is None and not self._is_closed and self._error is None:
                if not self._begin_layer():
                    self._changed.wait()
            if self._open is None or self._is_closed or self._error is not None:
                return None
            number, place = self._open
            blocks = self._blocks[number % len(self._files)]
            self._open = (number, place + 1) if place + 1 < len(blocks) else None
            if not self._num_reading:
                self._reading_since_s = time.monotonic()
            self._num_reading += 1
            return number, blocks[place]

    def _begin_layer(self) -> bool:
        """Begin the next layer if its slot is free; return whether it is. A layer alone in its slot is read once."""
        number, num_layers = self._num_begun, len(self._files)
        layer = number % num_layers
        slot = self.split.slot_of_layer[layer]
        held = self._held[slot]
        # the layer in the slot has computed, none of its reads is under way (it may have been left out), and no layer
        # is a whole sweep ahead
        if self._num_used <= max(held, number - num_layers) or self._num_left.get(held):
            return False
        self._num_begun += 1
        is_there, is_needed = held >= 0 and held % num_layers == layer, number >= self._num_used
        if is_there or is_needed:
            self._held[slot] = number
        self._num_left[number] = 0
        if is_needed and not is_there and self._blocks[layer]:
            self._num_left[number] = len(self._blocks[layer])
            self._open = number, 0
        self._count_ready()
        self._changed.notify_all()
        return True

    def _count_ready(self) -> None:
        """Count the layers that are in their slots without a gap."""
        while self._num_left.get(self._num_ready) == 0:
            del self._num_left[self._num_ready]
            self._num_ready += 1


def read_speed(files: Sequence[Path]) -> float:
    """Return the bytes per second at which sweeps read these files while nothing computes.

    A stream reads the first PIECE_BYTES of each file, round and round: with the readers, blocks and reused slots of a
    sweep, and without a pause. The clock starts once its slots are full.

    Raises:
        ModelError: a file cannot be read.
    """
    several = [*files] * -(-2 * RING_SLOTS // len(files))  # so that no layer is alone in its slot, and read only once
    sizes = [min(path.stat().st_size, PIECE_BYTES) for path in several]
    ring_bytes = RING_SLOTS * slot_size(max(sizes))
    split = split_memory(sizes, memory_bytes=ring_bytes, fixed_bytes=0, least_kv_bytes=0, useful_kv_bytes=0)
    stream = WeightStream(several, split, layers=[whole_file(size) for size in sizes])
    started_s = num_before = 0.0
    try:
        for number in range(RING_SLOTS + MEASURED_ROUNDS * len(several)):
            if number == RING_SLOTS:
                started_s, num_before = time.monotonic(), stream.num_bytes
            elif number > RING_SLOTS and time.monotonic() - started_s > MEASURED_S:
                break
            stream.wait()
            stream.release()
        return (stream.num_bytes - num_before) / max(time.monotonic() - started_s, 1e-6)
    finally:
        stream.close()


class _LayerFile:
    """An open file of one layer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.size = path.stat().st_size
            self._file, self._is_direct = _open(path)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None

    def read(self, memory: memoryview, block: Block, copied: memoryview) -> None:
        """Read one block to its place in `memory`.

        Args:
            copied: aligned memory for a block that cannot be read to its place directly.

        Raises:
            OSError: the disk fails, or the file ends early.
        """
        start, target, num_bytes, is_direct = block
        if is_direct or not self._is_direct:
            self._read(memory[target:], start, num_bytes)
        else:
            before = start % DIRECT_BYTES
            self._read(copied, start - before, before + num_bytes)
            # without the interpreter's lock
            to, source = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (memory, copied))
            ctypes.memmove(to + target, source + before, num_bytes)
        if not self._is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, start, num_bytes, os.POSIX_FADV_DONTNEED)

    def _read(self, memory: memoryview, start: int, num_bytes: int) -> None:
        """Read bytes of the file; direct reads go on to a multiple of DIRECT_BYTES, or to the file's end."""
        room = -(-num_bytes // DIRECT_BYTES) * DIRECT_BYTES if self._is_direct else num_bytes
        done = 0
        while done < num_bytes:
            got = os.preadv(self._file, [memory[done:room]], start + done)
            if got <= 0 or (self._is_direct and done + got < num_bytes and got % DIRECT_BYTES):
                raise OSError(f"it ends after {start + done + got:,} of {self.size:,} bytes")
            done += got

    def close(self) -> None:
        os.close(self._file)


def _open(path: Path) -> tuple[int, bool]:
    """Open a file past the page cache if its file system can do so; return whether it can, too."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (AttributeError, OSError) as error:  # no such flag on this system, or on this file system
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDONLY), False
    try:
        with mmap.mmap(-1, DIRECT_BYTES) as memory:
            os.preadv(file, [memory], 0)
    except OSError as error:
        os.close(file)
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDONLY), False
    return file, True


def slot_memory(num_bytes: int) -> memoryview:
    """Return memory of this size at a multiple of SLOT_ALIGNMENT, each page touched once."""
    memory = mmap.mmap(-1, num_bytes + SLOT_ALIGNMENT)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % SLOT_ALIGNMENT
    view = memoryview(memory)[start : start + num_bytes]
    for page in range(0, num_bytes, mmap.PAGESIZE):
        view[page] = 0
    return view
