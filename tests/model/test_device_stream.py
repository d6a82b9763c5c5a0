"""Layers are copied into slots of a GPU in order, byte for byte; stand-ins for CUDA's streams find a missing wait."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager

import pytest
import torch

from batchinfer.model import device_stream
from batchinfer.model.device_split import split_device_memory
from batchinfer.model.device_stream import DeviceStream, HostLayers
from batchinfer.model.memory_split import SLOT_ALIGNMENT, SplitError
from batchinfer.model.sweeps import Clock
from batchinfer.model.weight_stream import WeightStream, slot_memory
from batchinfer.parallel.exchange import TravelStream
from batchinfer.records import ModelError
from support.strict_streams import StrictStreams

CPU = torch.device("cpu")
SIZES = (500_001, 4096, 12_345, 3 << 20, 777, 2_194_304, 1_388_608, 400_000, 99)
SLOT = 2 * SLOT_ALIGNMENT  # of the largest layer
SOURCES = ["host", "disk"]


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / f"layer-{number}" for number in range(len(SIZES))]
    for path, size in zip(paths, SIZES, strict=True):
        path.write_bytes(os.urandom(size))
    return paths


@pytest.fixture
def gpu(monkeypatch):
    strict = StrictStreams(monkeypatch)
    monkeypatch.setattr(device_stream, "_HostCopies", lambda: device_stream._CudaCopies(CPU))
    return strict


@pytest.fixture
def stream(files):
    streams = []

    def make(source="host", **given):
        memory = {"device_bytes": 1 << 30, "fixed_bytes": 0, "least_kv_bytes": 0, "useful_kv_bytes": None, **given}
        split = split_device_memory(SIZES, host_bytes=1 << 30 if source == "host" else 3 * SLOT, **memory)
        assert split.source == source
        of_source = [files[layer] for layer in split.streamed]
        if source == "host":
            copies = [slot_memory(SLOT) for _ in SIZES]
            for copy, path, size in zip(copies, files, SIZES, strict=True):
                copy[:size] = path.read_bytes()
            host = HostLayers(copies, split.streamed)
        else:
            host = WeightStream(of_source, split.host)
        streams.append(DeviceStream(host, SIZES, split.device, CPU))
        return streams[-1]

    yield make
    for one in streams:
        one.close()


def compute_layer(stream, files, layer, gpu=None):
    stream.wait()
    slot = stream.memory_of(layer)
    if slot is None:
        assert stream.split.slot_of_layer.count(stream.split.slot_of_layer[layer]) == 1
    else:
        if gpu is not None:
            gpu.compute_with(slot)
        are_equal = bytes(slot[: SIZES[layer]].numpy()) == files[layer].read_bytes()
        assert are_equal, layer  # with -v pytest would compute every difference, for hours
    stream.release()


def compute_sweep(stream, files, gpu=None):
    for layer in range(len(SIZES)):
        compute_layer(stream, files, layer, gpu)


@pytest.mark.parametrize("source", SOURCES)
def test_each_sweep_copies_the_bytes_of_the_layers_in_the_order_of_events(stream, files, gpu, source):
    found = stream(source)
    for _ in range(4):
        compute_sweep(found, files, gpu)
    assert not gpu.faults
    assert found.num_bytes >= 4 * sum(SIZES)
    assert found.wait_s == pytest.approx(4 * len(SIZES) / 1e3)  # of the stand-in's events
    assert found.sweep_read_s > 0


@pytest.mark.parametrize("source", SOURCES)
def test_without_a_gpu_copies_are_made_at_once(stream, files, source):
    found = stream(source)
    for _ in range(3):
        compute_sweep(found, files)
    assert found.num_bytes >= 3 * sum(SIZES)


def test_a_caller_in_inference_mode_gets_its_layers(stream, files):
    with torch.inference_mode():
        compute_sweep(stream(), files)


def test_layers_that_stay_are_not_copied(stream, files, gpu):
    found = stream(device_bytes=17 * SLOT_ALIGNMENT, useful_kv_bytes=0)
    assert found.split.num_resident == 3
    for _ in range(3):
        compute_sweep(found, files, gpu)
    assert not gpu.faults
    assert found.num_bytes <= 4 * found.split.sweep_bytes < 4 * sum(SIZES)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("device_bytes", [1 << 30, 17 * SLOT_ALIGNMENT], ids=["none stays", "some stay"])
def test_a_sweep_that_is_left_is_followed_by_a_whole_one(stream, files, gpu, source, device_bytes):
    found = stream(source, device_bytes=device_bytes, useful_kv_bytes=0)
    for num_layers in (0, 1, 4, 7, 9):
        for layer in range(num_layers):
            compute_layer(found, files, layer, gpu)
        if num_layers < len(SIZES):
            found.skip_sweep()
        compute_sweep(found, files, gpu)
    assert not gpu.faults


def without_waiting_for_the_slot(monkeypatch):
    real = TravelStream.travelling

    @contextmanager
    def travelling(self, ready):
        with real(self, self._stream.record_event()):
            yield

    monkeypatch.setattr(TravelStream, "travelling", travelling)


def without_waiting_for_the_copy(monkeypatch):
    monkeypatch.setattr(TravelStream, "arrive", lambda self, tensors, arrived: None)


def without_an_event_after_computing(monkeypatch):
    real = DeviceStream.release

    def release(self):
        slot = self.split.slot_of_layer[self._layer]
        free = self._free[slot]
        computed = self._copies.computed
        self._copies.computed = lambda: free
        real(self)
        self._copies.computed = computed

    monkeypatch.setattr(DeviceStream, "release", release)


def without_waiting_for_a_copy_s_end(monkeypatch):
    monkeypatch.setattr(device_stream._CudaCopies, "end", lambda self, copy: 0.001)


@pytest.mark.parametrize(
    ("fault", "source", "words"),
    [
        (without_waiting_for_the_slot, "host", "a slot is overwritten while it is read"),
        (without_an_event_after_computing, "host", "a slot is overwritten while it is read"),
        (without_waiting_for_the_copy, "host", "a slot is read before its copy is over"),
        (without_waiting_for_a_copy_s_end, "disk", None),
    ],
)
def test_a_missing_wait_is_found(stream, files, gpu, monkeypatch, fault, source, words):
    """Remove one wait: the stand-ins report it, or a layer has other bytes. So the tests above notice such a fault."""
    fault(monkeypatch)
    found, has_other_bytes = stream(source), False
    for _ in range(4):
        try:
            compute_sweep(found, files, gpu)
        except AssertionError:
            has_other_bytes = True
            break
    assert words in gpu.faults if words else has_other_bytes


def test_a_layer_is_not_copied_before_the_one_in_its_slot_was_released(stream, files, gpu):
    found = stream()
    num_slots = len(found._slots)
    end_s = time.monotonic() + 60
    while found.num_bytes < sum(SIZES[:num_slots]):
        assert time.monotonic() < end_s, found._error
        time.sleep(0.001)
    assert not found._changed.acquire(blocking=False) or found._changed.release() is None
    assert found._num_started == num_slots
    compute_sweep(found, files, gpu)
    assert not gpu.faults


def test_steps_of_a_sweep_are_timed_by_events_of_the_gpu(gpu):
    clock = Clock(torch.device("cuda"))
    for _ in range(3):
        with clock.running():
            assert gpu.current() is gpu.computing
    assert clock.seconds == pytest.approx(3e-3)  # 1 ms each by the stand-in
    with clock.running():
        pass
    assert clock.seconds == pytest.approx(4e-3)


@pytest.mark.parametrize("fault", ["disk", "copy"])
def test_a_failure_is_raised_where_its_layer_is_needed(stream, files, monkeypatch, fault):
    if fault == "disk":
        found, words = stream("disk"), r"layer-6 cannot be read: it ends after .*; results are kept"
        os.truncate(files[6], 5)  # at most six layers are in slots of host and device
        before = 6
    else:
        real, copied = device_stream._HostCopies.start, []

        def start(self, slot, host, free):
            if len(copied) == 4:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            copied.append(slot)
            return real(self, slot, host, free)

        monkeypatch.setattr(device_stream._HostCopies, "start", start)
        found, words = stream(), r"layer 4 cannot be copied to the GPU: CUDA error: .*; results are kept"
        before = 4
    for layer in range(before):
        compute_layer(found, files, layer)
    with pytest.raises(ModelError, match=words):
        found.wait()


@pytest.mark.parametrize(
    ("host_slots", "source", "num_kept"), [(9, "host", 9), (8, "disk", 3), (5, "disk", 2), (2, "disk", 0)]
)
def test_the_host_holds_all_layers_or_a_ring_and_as_many_as_fit(host_slots, source, num_kept):
    split = split_device_memory(
        [SLOT] * 9,
        device_bytes=10 * SLOT,
        host_bytes=host_slots * SLOT,
        fixed_bytes=SLOT,
        least_kv_bytes=SLOT,
        useful_kv_bytes=None,
    )
    assert split.source == source
    assert split.host.num_resident == num_kept
    assert split.host.sweep_bytes == (0 if source == "host" else (9 - num_kept) * SLOT)
    assert sum(split.host.slot_bytes) <= host_slots * SLOT
    assert sum(split.device.slot_bytes) + split.device.kv_bytes + SLOT <= 10 * SLOT
    assert len(split.streamed) == 9


@pytest.mark.parametrize(
    ("device_slots", "host_slots", "words"), [(3, 9, "for 2 of 9 layers at a time"), (10, 1, "on their way from disk")]
)
def test_memory_without_room_for_two_layers_is_refused_with_its_bytes(device_slots, host_slots, words):
    with pytest.raises(SplitError, match=words):
        split_device_memory(
            [SLOT] * 9,
            device_bytes=device_slots * SLOT,
            host_bytes=host_slots * SLOT,
            fixed_bytes=SLOT,
            least_kv_bytes=SLOT,
            useful_kv_bytes=None,
        )


def test_pinned_memory_that_the_driver_refuses_is_one_sentence(monkeypatch):
    class Driver:
        @staticmethod
        def cudaHostRegister(address, num_bytes, flags):
            assert address % SLOT_ALIGNMENT == 0
            return 2 if num_bytes > SLOT else 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver)
    assert len(device_stream.pinned_memory(SLOT)) == SLOT
    with pytest.raises(
        ModelError, match=r"0\.01 GB of the host's memory cannot be pinned .*CUDA error 2.*lower cluster"
    ):
        device_stream.pinned_memory(2 * SLOT)
