"""Layers read into reused slots: the files' bytes in order, on any file system, and a sentence where reading fails."""

import ctypes
import errno
import gc
import os
import threading
import time
from pathlib import Path

import pytest

from batchinfer.model import weight_stream
from batchinfer.model.memory_split import split_memory
from batchinfer.model.weight_stream import WeightStream, read_speed
from batchinfer.records import ModelError

SIZES = (5_000_001, 4096, 12_345, 9 << 20, 777, 4_194_304, 8_388_608, 4_000_000, 99)


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / f"layer-{number}" for number in range(len(SIZES))]
    for path, size in zip(paths, SIZES, strict=True):
        path.write_bytes(os.urandom(size))
    return paths


@pytest.fixture
def stream(files):
    streams = []

    def make(**given):
        memory = {"memory_bytes": 1 << 30, "fixed_bytes": 0, "least_kv_bytes": 0, "useful_kv_bytes": None, **given}
        streams.append(WeightStream(files, split_memory(SIZES, **memory)))
        return streams[-1]

    yield make
    for one in streams:
        one.close()


def read_sweep(stream, files):
    for layer, path in enumerate(files):
        stream.wait()
        assert bytes(stream.memory_of(layer)[: path.stat().st_size]) == path.read_bytes(), layer
        stream.release()


def test_each_sweep_reads_the_bytes_of_the_files(stream, files):
    found = stream()
    for _ in range(3):
        read_sweep(found, files)
    assert found.num_bytes >= 3 * sum(SIZES)


def test_layers_that_stay_are_read_once(stream, files):
    found = stream(memory_bytes=65 << 20, useful_kv_bytes=0)
    assert found.split.num_resident == 3
    for _ in range(2):
        read_sweep(found, files)
    stay = sum(SIZES) - found.split.sweep_bytes
    assert found.num_bytes <= stay + 3 * found.split.sweep_bytes


def test_without_direct_reads_the_bytes_are_the_same(stream, files, monkeypatch):
    real, dropped = os.open, []

    def no_direct(path, flags):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags)

    monkeypatch.setattr(weight_stream.os, "open", no_direct)
    monkeypatch.setattr(weight_stream.os, "posix_fadvise", lambda *given: dropped.append(given))
    found = stream()
    for _ in range(2):
        read_sweep(found, files)
    assert dropped


def test_a_sweep_that_is_left_is_followed_by_a_whole_one(stream, files):
    found = stream()
    for num_layers in (0, 1, 4, 7):
        for _ in range(num_layers):
            found.wait()
            found.release()
        found.skip_sweep()
        read_sweep(found, files)


@pytest.mark.parametrize(
    ("fault", "words"), [("EIO", "Input/output error"), ("short", "it ends after"), ("other", "a fault")]
)
def test_a_failed_read_is_raised_where_its_layer_is_needed(stream, files, monkeypatch, fault, words):
    real = os.preadv

    def failing(file, buffers, place):
        if os.readlink(f"/proc/self/fd/{file}").endswith("layer-3") and place:
            if fault == "EIO":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if fault == "other":
                raise ValueError("a fault of another kind")
            return 0
        return real(file, buffers, place)

    monkeypatch.setattr(weight_stream.os, "preadv", failing)
    found = stream()
    for _ in range(3):
        found.wait()
        found.release()
    with pytest.raises(ModelError, match=f"layer-3 cannot be read: {words}.*; results are kept"):
        found.wait()


def test_a_file_that_shrank_is_noticed(stream, files):
    found = stream()
    os.truncate(files[6], 5_000_000)
    with pytest.raises(ModelError, match=r"layer-6 cannot be read: it ends after"):
        read_sweep(found, files)


def test_reads_go_on_with_the_next_layer_before_the_last_one_is_whole(stream, files, monkeypatch):
    real, go_on, begun = os.preadv, threading.Event(), threading.Event()

    def held_up(file, buffers, place):
        name = os.readlink(f"/proc/self/fd/{file}")
        if name.endswith("layer-0") and place:
            assert go_on.wait(30)
        if name.endswith("layer-1"):
            begun.set()
        return real(file, buffers, place)

    monkeypatch.setattr(weight_stream.os, "preadv", held_up)
    found = stream()
    assert begun.wait(30)
    assert not found._num_ready  # the first layer's last block is missing
    go_on.set()
    read_sweep(found, files)


def test_a_slot_is_filled_anew_only_when_reads_of_a_layer_that_was_left_out_have_ended(stream, files, monkeypatch):
    real, go_on, order = os.preadv, threading.Event(), []

    def held_up(file, buffers, place):
        name = os.readlink(f"/proc/self/fd/{file}")[-1]
        if name == "0" and place and not go_on.is_set():
            assert go_on.wait(30)
            order.append("old block")
        got = real(file, buffers, place)
        order.append(name)
        return got

    monkeypatch.setattr(weight_stream.os, "preadv", held_up)
    found = stream()
    end_s = time.monotonic() + 60
    while "2" not in order:
        assert time.monotonic() < end_s, found._error
        time.sleep(0.001)
    found.skip_sweep()
    time.sleep(0.05)  # readers that do not wait would read layer 0 of the next sweep
    assert "old block" not in order
    go_on.set()
    read_sweep(found, files)


def test_memory_grows_by_the_slots_alone_however_many_layers_there_are(tmp_path):
    size, num_layers = 8 << 20, 60
    layer = tmp_path / "layer"
    layer.write_bytes(os.urandom(size))
    memory = {"memory_bytes": 5 * size, "fixed_bytes": size, "least_kv_bytes": size, "useful_kv_bytes": None}
    split = split_memory([size] * num_layers, **memory)
    assert sum(split.slot_bytes) == 3 * size
    gc.collect()  # slots of tests before this one
    before = _resident_bytes()
    found = WeightStream([layer] * num_layers, split)
    read_sweep(found, [layer] * num_layers)
    grown = _resident_bytes() - before
    found.close()
    assert 3 * size <= grown <= 4 * size  # of 60 that were read


def _resident_bytes():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def test_the_disk_is_measured_as_sweeps_read_it(files, monkeypatch):
    """Pieces of all layers, in blocks, past the cache and several at a time, into memory that is used again."""
    real, lock, under_way, most = os.preadv, threading.Lock(), 0, 0
    layers, ends, places = set(), [], set()

    def noted(file, buffers, place):
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
            layers.add(os.readlink(f"/proc/self/fd/{file}"))
            ends.append(place + len(buffers[0]))
            places.add(ctypes.addressof(ctypes.c_char.from_buffer(buffers[0])))
        try:
            time.sleep(0.001)
            return real(file, buffers, place)
        finally:
            with lock:
                under_way -= 1

    monkeypatch.setattr(weight_stream, "PIECE_BYTES", 3 << 20)
    monkeypatch.setattr(weight_stream, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(weight_stream.os, "preadv", noted)
    assert 0 < read_speed(files) < 1e12
    assert layers == {str(path) for path in files}
    assert max(ends) == 3 << 20
    assert most > 1
    assert len(places) < len(ends) / 2
    assert len(ends) > 2 * len(files)
    assert read_speed(files[:1]) > 0  # a layer that is alone in its ring is read again, too
