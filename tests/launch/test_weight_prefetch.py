"""Weights come into the page cache before a rank asks for them, if there is room; nothing is said of bad folders."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchinfer.launch import weight_prefetch

PAGE = mmap.PAGESIZE


def resident_share(path: Path) -> float:
    """The share of a file's pages that are in the page cache (mincore)."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        num_pages = -(-len(mapped) // PAGE)
        found = (ctypes.c_ubyte * num_pages)()
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(mapped)), found) == 0
        return sum(byte & 1 for byte in found) / num_pages


@pytest.fixture
def model() -> Iterator[Path]:
    """A folder with two files of weights that are on disk only; not in tmp_path, which may be in memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in (1, 2):
            (folder / f"model-0000{number}-of-00002.safetensors").write_bytes(bytes(24 << 20))
        for path in folder.iterdir():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
        if max(map(resident_share, folder.iterdir())) > 0.1:
            pytest.skip("this file system keeps files in memory")
        yield folder


def test_the_kernel_reads_all_of_a_model(model):
    weight_prefetch.read_ahead(model).join()
    deadline = time.monotonic() + 60
    while min(map(resident_share, model.iterdir())) < 0.99:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_model_that_fills_the_memory_is_not_read_twice(model, monkeypatch):
    monkeypatch.setattr(weight_prefetch, "free_memory_bytes", lambda: 64 << 20)
    weight_prefetch.read_ahead(model).join()
    time.sleep(0.5)
    assert max(map(resident_share, model.iterdir())) < 0.1


def test_a_missing_or_unreadable_folder_is_left_to_the_ranks(tmp_path, capfd):
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "nowhere")
    weight_prefetch.read_ahead(tmp_path).join()
    weight_prefetch.read_ahead(tmp_path / "none").join()
    assert capfd.readouterr() == ("", "")
