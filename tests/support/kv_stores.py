"""KV stores for tests: tiny blocks whose every byte follows from their name, so that readers can check them."""

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.kv_store.block_file import file_bytes
from batchinfer.kv_store.blocks import KvIdentity
from batchinfer.kv_store.disk import DiskStore
from batchinfer.kv_store.reader import Reader

IDENTITY = KvIdentity(
    model="tiny",
    weights="w" * 32,
    config="c" * 32,
    dtype="bfloat16",
    numerics="cpu",
    salt="",
    block_tokens=64,
    num_layers=2,
    latent_dim=16,
)
BLOCK_BYTES = IDENTITY.block_bytes  # 4096
FILE_BYTES = file_bytes(1, BLOCK_BYTES)  # of one block
BIG = replace(IDENTITY, num_layers=8, latent_dim=128)  # 128 KiB


def tokens_of(*parts: str) -> list[int]:
    """Token ids of whole blocks by name: tokens_of("a", "b") and tokens_of("a", "c") share their first block."""
    return [token for part in parts for token in np.frombuffer(hashlib.shake_128(part.encode()).digest(256), "<u4")]


def chain_of(*parts: str, identity: KvIdentity = IDENTITY) -> list[bytes]:
    return identity.chain(tokens_of(*parts))


def content_of(blocks: Sequence[bytes], identity: KvIdentity = IDENTITY) -> np.ndarray:
    """[len(blocks), block_bytes] uint8."""
    rows = [np.frombuffer(hashlib.shake_128(block).digest(identity.block_bytes), np.uint8) for block in blocks]
    return np.array(rows, np.uint8).reshape(len(blocks), identity.block_bytes)


def write_chain(store: DiskStore, blocks: list[bytes], first: int = 0) -> int:
    """Write the blocks of a chain from `first` on; returns how many are new in the store."""
    return store.write(blocks, first, content_of(blocks[first:], store.identity))


def read_intact(store: DiskStore, blocks: list[bytes]) -> int:
    """Return how many leading blocks the store serves; every byte of them is checked."""
    with closing(Reader(store, num_threads=1)) as reader:
        content = reader.ask(blocks).wait()
        assert np.array_equal(content, content_of(blocks[: len(content)], store.identity))
        return len(content)


def wait_until(happened: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def damage(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def quarantined(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "quarantine").iterdir())


def open_store(folder: Path, identity: KvIdentity = IDENTITY, **options: Any) -> DiskStore:
    """A store that opened without trouble."""
    store = DiskStore(folder, identity, **options)
    problem = store.take_problem()
    assert problem is None, problem
    return store


def block_files(folder: Path) -> list[Path]:
    """The files of blocks in a store, by path, in the order of their names."""
    return sorted(folder.glob("models/*/*/*.kv"), key=lambda path: path.name)


def total_bytes(folder: Path) -> int:
    """Return the bytes of all files of blocks, including those in quarantine and those being written."""
    total = 0
    for pattern in ("models/*/*/*.kv", "quarantine/*", "writing/*"):
        for path in folder.glob(pattern):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
    return total
