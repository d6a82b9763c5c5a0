"""Layers copied into slots on a GPU, in order, sweep after sweep, while the layers before them compute.

host      disk → pinned slots, or a pinned copy of all layers
copying   0 1 2 . 3 …     a copy waits for its slot: an event of the computing stream
computing . 0 1 2 3 …     a layer waits for its copy: an event of the copying stream

Only a thread that starts the copies waits for their end, before it gives memory of the host to the next reads. The
computing thread goes on: its stream waits. It is ahead of the GPU by the slots of the ring at most.
"""

# L layers, M of them streamed

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from batchinfer.model.device_split import streamed_layers
from batchinfer.model.memory_split import MemorySplit
from batchinfer.model.weight_stream import slot_memory
from batchinfer.parallel.exchange import TravelStream
from batchinfer.records import ModelError

_GO_ON = "results are kept: run the same command to go on"


class HostSource(Protocol):
    """The streamed layers in the host's memory, used in order as those of a WeightStream; M layers a sweep."""

    @property
    def sweep_read_s(self) -> float: ...

    def memory_of(self, layer: int) -> memoryview: ...

    def wait(self) -> None: ...

    def release(self) -> None: ...

    def skip_sweep(self) -> None: ...

    def close(self) -> None: ...


class HostLayers:
    """A copy of all layers; there is nothing to wait for.

    Args:
        copies: [L] memory of each layer; pinned memory must not be given back before the process ends.
        streamed: [M] the layers that are used.
    """

    sweep_read_s = 0.0

    def __init__(self, copies: Sequence[memoryview], streamed: Sequence[int]) -> None:
        self._copies, self._streamed = copies, streamed

    def memory_of(self, layer: int) -> memoryview:
        """Return the memory of one of the streamed layers."""
        return self._copies[self._streamed[layer]]

    def wait(self) -> None: ...

    def release(self) -> None: ...

    def skip_sweep(self) -> None: ...

    def close(self) -> None: ...


class DeviceStream:
    """Copier of layers into slots on a device, on a thread that begins at once; used as a WeightStream.

    Args:
        source: the streamed layers, in order.
        layer_bytes: [L] bytes of each layer.
        split: of the device's memory; a layer alone in its slot is not streamed, and not held here.
        device: a GPU, or the CPU in its place: then a copy is over when it was started.
    """

    def __init__(
        self, source: HostSource, layer_bytes: Sequence[int], split: MemorySplit, device: torch.device
    ) -> None:
        self.split = split
        self.num_bytes = 0  # copied so far
        self._source, self._layer_bytes = source, layer_bytes
        self._streamed = streamed_layers(split)
        rings = {split.slot_of_layer[layer] for layer in self._streamed}
        self._slots = {
            slot: torch.empty(split.slot_bytes[slot], dtype=torch.uint8, device=device) for slot in sorted(rings)
        }
        self._copies: Any = _CudaCopies(device) if device.type == "cuda" else _HostCopies()
        self._copy_s = 0.0  # seconds of all copies
        self._host_wait_s = 0.0  # seconds in which the computing thread waited for a copy to be started
        self._layer = 0  # the layer that is waited for next, or computes
        self._changed = threading.Condition()
        # streamed layers are counted on over all sweeps
        self._num_used = 0  # layers that were released, or left out
        self._num_started = 0  # layers whose copies were started, or that were left out
        self._held = dict.fromkeys(self._slots, -1)  # number of the layer in each slot
        # memory from torch may still be in use by work of the computing stream
        self._free = dict.fromkeys(self._slots, self._copies.computed())
        self._filled: dict[int, Any] = {}  # by slot, what the layer in it waits for
        self._error: str | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._copy_layers, name="copy weights", daemon=True)
        self._thread.start()

    @property
    def wait_s(self) -> float:
        """Seconds in which the device waited for layers, of the waits that are over."""
        return self._copies.waited_s(self._host_wait_s)

    @property
    def sweep_read_s(self) -> float:
        """Seconds of a sweep's copies, or of its reads from disk if those take longer; 0: nothing was copied."""
        copy_s = self.split.sweep_bytes * self._copy_s / self.num_bytes if self.num_bytes else 0.0
        return max(copy_s, self._source.sweep_read_s)

    def memory_of(self, layer: int) -> torch.Tensor | None:
        """Return the device's memory into which a layer is copied, from its first byte on; None if it stays."""
        return self._slots.get(self.split.slot_of_layer[layer])

    def starts_of(self, layer: int) -> None:
        """Return None: a layer's tensors begin in its memory as in its file."""

    def wait(self) -> None:
        """Have work that is started from now on wait until the next layer is in its slot.

        Raises:
            ModelError: the layer cannot be read or copied.
        """
        if self.memory_of(self._layer) is None:
            return
        started_s = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._num_started > self._num_used or self._error is not None)
            if self._num_started <= self._num_used:
                raise ModelError(str(self._error))
            filled = self._filled[self.split.slot_of_layer[self._layer]]
        self._host_wait_s += time.monotonic() - started_s
        self._copies.arrive(filled)

    def release(self) -> None:
        """Give the slot of the layer that was waited for to the next copies, once the work so far is over."""
        slot = self.split.slot_of_layer[self._layer]
        self._layer = (self._layer + 1) % len(self.split.slot_of_layer)
        if slot not in self._slots:
            return
        computed = self._copies.computed()
        with self._changed:
            self._free[slot] = computed
            self._num_used += 1
            self._changed.notify_all()

    def skip_sweep(self) -> None:
        """Leave out the rest of this sweep."""
        self._layer, computed = 0, self._copies.computed()
        with self._changed:
            self._free = dict.fromkeys(self._free, computed)
            num_layers = max(1, len(self._streamed))
            self._num_used = -(-self._num_used // num_layers) * num_layers
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and the source's."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()  # a read that it waits for ends
        self._source.close()

    @torch.inference_mode()  # slots that are made under it can only be written under it
    def _copy_layers(self) -> None:
        """Copy one layer after the other until the stream is closed or a layer cannot be read or copied."""
        number = 0
        try:
            while self._streamed and (number := self._next_layer(number)) >= 0:
                self._source.wait()
                if self._is_closed:
                    return
                self._copy(number)
                number += 1
        except ModelError as error:
            self._fail(str(error))
        except Exception as error:  # of any kind: it is raised where this layer is waited for
            self._fail(f"layer {self._layer_of(number)} cannot be copied to the GPU: {error}; {_GO_ON}")

    def _next_layer(self, number: int) -> int:
        """Wait until the layer's slot is free; return its number, or that of the first one not left out; -1: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._num_used > self._held[self._slot_of(number)])
            if self._is_closed:
                return -1
            left_out = self._num_used > number
            if left_out:
                number = self._num_started = self._num_used
        if left_out:
            self._source.skip_sweep()
            return self._next_layer(number)
        return number

    def _copy(self, number: int) -> None:
        """Start a layer's copy, then wait for its end, after which the host's memory may be read into again."""
        layer, slot = self._layer_of(number), self._slot_of(number)
        size = self._layer_bytes[layer]
        host = torch.frombuffer(self._source.memory_of(number % len(self._streamed)), dtype=torch.uint8, count=size)
        with self._changed:
            free = self._free[slot]
        copy = self._copies.start(self._slots[slot][:size], host, free)
        with self._changed:
            self._held[slot], self._filled[slot] = number, copy
            self._num_started = number + 1
            self._changed.notify_all()
        self._copy_s += self._copies.end(copy)
        self.num_bytes += size
        self._source.release()

    def _layer_of(self, number: int) -> int:
        return self._streamed[number % len(self._streamed)]

    def _slot_of(self, number: int) -> int:
        return self.split.slot_of_layer[self._layer_of(number)]

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._error = reason
            self._changed.notify_all()


class _CudaCopies:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._travel = TravelStream(device)
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # begin and end on the computing stream
        self._waited_s = 0.0

    def computed(self) -> torch.cuda.Event:
        """Return the event after all work that this thread has started."""
        return self._travel.depart(())

    def start(
        self, slot: torch.Tensor, host: torch.Tensor, free: torch.cuda.Event
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Copy pinned memory into a slot after `free`; return the events at the copy's begin and end."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self._travel.travelling(free):
            begin.record()
            slot.copy_(host, non_blocking=True)
            end.record()
        return begin, end

    def arrive(self, copy: tuple[torch.cuda.Event, torch.cuda.Event]) -> None:
        """Make later work of the computing stream wait for a copy."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        computing = torch.cuda.current_stream(self._device)
        begin.record(computing)
        self._travel.arrive((), copy[1])
        end.record(computing)
        self._waits.append((begin, end))

    def end(self, copy: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
        """Wait on the host until a copy is over; return its seconds."""
        begin, end = copy
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def waited_s(self, _: float) -> float:
        """Return the seconds in which the computing stream waited, as far as it has come."""
        while self._waits and self._waits[0][1].query():
            begin, end = self._waits.popleft()
            self._waited_s += begin.elapsed_time(end) / 1e3
        return self._waited_s


class _HostCopies:
    """Copies that are over when they were started."""

    def computed(self) -> None:
        """Return nothing: this thread's work is over."""

    def start(self, slot: torch.Tensor, host: torch.Tensor, _: None) -> float:
        """Copy at once; return the seconds."""
        started_s = time.monotonic()
        slot.copy_(host)
        return time.monotonic() - started_s

    def arrive(self, _: float) -> None: ...

    def end(self, seconds: float) -> float:
        """Return the seconds of the copy."""
        return seconds

    def waited_s(self, host_s: float) -> float:
        """Return the seconds in which this host waited."""
        return host_s


def pinned_memory(num_bytes: int) -> memoryview:
    """Return memory at a multiple of SLOT_ALIGNMENT that a GPU copies from directly.

    torch's own pinned memory takes the next power of two: up to twice as much.

    Raises:
        ModelError: the driver refuses it.
    """
    memory = slot_memory(num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    code = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
    if int(code):
        raise ModelError(
            f"{num_bytes / 1e9:.2f} GB of the host's memory cannot be pinned for copies to the GPU (CUDA error "
            f"{int(code)}); free memory or lower cluster.memory_bytes"
        )
    return memory
