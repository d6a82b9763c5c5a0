"""Layers read into reused slots: the files' bytes in order, on any file system, and a sentence where reading fails."""

import errno
import os

import pytest

from batchinfer.model import weight_stream
from batchinfer.model.memory_split import split_memory
from batchinfer.model.weight_stream import WeightStream
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
