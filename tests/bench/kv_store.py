"""The KV store against plain files on the same disk, and how quickly it opens and finds; ratios decide no test.

Blocks as large as DeepSeek-V3's (4.5 MB) and small ones (48 KiB) go from memory through the writer to the disk and
through the reader back; the same bytes go into one large file and back in pieces of 8 MiB. Both alike: written until
the disk has them (one `sync` of everything at the end), dropped from the page cache, read into fresh memory. Medians of
several rounds taken in turn.

    python tests/bench/kv_store.py [--folder FOLDER] [--mib 256] [--rounds 6]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from batchinfer.kv_store.block_file import KEY_BYTES, FileName, checksum
from batchinfer.kv_store.blocks import KvIdentity
from batchinfer.kv_store.disk import DiskStore
from batchinfer.kv_store.reader import Reader
from batchinfer.kv_store.upkeep import shrink_store
from batchinfer.kv_store.writer import Writer

LARGE = KvIdentity("bench", "w", "c", "bfloat16", "bench", "", 64, 61, 576)
SMALL = replace(LARGE, num_layers=4, latent_dim=96)
PIECE_BYTES = 8 << 20
CHAIN_BLOCKS = 16  # a prompt of 1024 tokens
NUM_FILES, NUM_BLOCKS = 100_000, 1_000_000


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def drop_cache(paths: list[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def write_plain(path: Path, content: np.ndarray) -> None:
    data = content.reshape(-1)
    with open(path, "wb", buffering=0) as file:
        for at in range(0, len(data), PIECE_BYTES):
            file.write(data[at : at + PIECE_BYTES].data)
    os.sync()


def read_plain(path: Path) -> None:
    out = np.empty(path.stat().st_size, np.uint8)
    with open(path, "rb", buffering=0) as file:
        for at in range(0, len(out), PIECE_BYTES):
            file.readinto(out[at : at + PIECE_BYTES].data)


def files_of(store: DiskStore) -> list[Path]:
    return list(store.store.models.glob("*/*/*.kv"))


def write_store(store: DiskStore, chains: list[list[bytes]], content: np.ndarray) -> None:
    with closing(Writer(store, buffer_bytes=content.nbytes)) as writer:
        for number, chain in enumerate(chains):
            writer.put(chain, 0, content[number * CHAIN_BLOCKS : (number + 1) * CHAIN_BLOCKS])
        writer.flush()
    os.sync()


def read_store(store: DiskStore, chains: list[list[bytes]]) -> None:
    with closing(Reader(store)) as reader:
        loads = [reader.ask(chain) for chain in chains]
        for load, chain in zip(loads, chains, strict=True):
            assert len(load.wait()) == len(chain)
            load.close()


def compare(identity: KvIdentity, folder: Path, num_bytes: int, rounds: int) -> None:
    rng = np.random.default_rng(0)
    num_chains = max(1, num_bytes // (identity.block_bytes * CHAIN_BLOCKS))
    content = rng.integers(0, 256, (num_chains * CHAIN_BLOCKS, identity.block_bytes), np.uint8)
    chains = [identity.chain(rng.integers(0, 1 << 17, 64 * CHAIN_BLOCKS)) for _ in range(num_chains)]
    taken: dict[str, list[float]] = {"write": [], "plain write": [], "read": [], "plain read": []}
    plain, kv = folder / "plain", folder / "kv"
    for number in range(rounds + 1):
        with closing(DiskStore(kv, identity)) as store:
            steps: list[tuple[str, Callable[[], object]]] = [
                ("plain write", lambda: write_plain(plain, content)),
                ("write", lambda store=store: write_store(store, chains, content)),
                ("plain read", lambda: read_plain(plain)),
                ("read", lambda store=store: read_store(store, chains)),
            ]
            # who comes second gets colder memory: they take turns
            order = (0, 1, 2, 3) if number % 2 else (1, 0, 3, 2)
            for step in order:
                name, function = steps[step]
                if "read" in name:
                    drop_cache([plain, *files_of(store)])
                taken[name].append(seconds(function))
            num_files, problem = len(files_of(store)), store.take_problem()
            assert problem is None, problem
        plain.unlink()
        shutil.rmtree(kv)
    # the first round only warms up
    medians = {name: statistics.median(values[1:]) for name, values in taken.items()}
    print(f"{content.nbytes / 2**20:,.0f} MiB in blocks of {identity.block_bytes:,} bytes, {num_files:,} files")
    hashed_s = min(seconds(lambda: [checksum(block.data, bytes(KEY_BYTES)) for block in content]) for _ in range(5))
    print(f"  checksums {content.nbytes / hashed_s / 1e9:.2f} GB/s on one core")
    for name in ("write", "read"):
        rates = [content.nbytes / medians[which] / 1e9 for which in (name, f"plain {name}")]
        slowest, fastest = (
            choose(plain / own for plain, own in zip(taken[f"plain {name}"][1:], taken[name][1:], strict=True))
            for choose in (min, max)
        )
        print(
            f"  {name:5}  store {rates[0]:5.2f} GB/s   plain file {rates[1]:5.2f} GB/s   {rates[0] / rates[1]:6.1%}"
            f"   (single rounds {slowest:.0%} - {fastest:.0%})",
            flush=True,
        )


def look_up(folder: Path) -> None:
    """Opening and searching a store of many files; only names count for that, so the files are empty."""
    identity = SMALL
    per_file = NUM_BLOCKS // NUM_FILES
    rng = np.random.default_rng(0)
    with closing(DiskStore(folder, identity)) as store:
        parts = store.store.model(identity)
    for number in range(64):
        (parts / f"{number:02d}").mkdir(exist_ok=True)
    chains = [identity.chain(rng.integers(0, 1 << 17, 64 * per_file)) for _ in range(NUM_FILES)]
    for chain in chains:
        name = FileName.of(chain, 0, per_file)
        os.close(os.open(parts / name.folder / str(name), os.O_CREAT, 0o600))
    started = time.perf_counter()
    store = DiskStore(folder, identity)
    opened_s = time.perf_counter() - started
    print(f"{NUM_BLOCKS:,} blocks in {NUM_FILES:,} files (their folders in the page cache)")
    print(f"  opened in {opened_s:.2f} s")
    found_s = seconds(lambda: sum(store.find(chain) for chain in chains))
    assert sum(store.find(chain) for chain in chains) == NUM_BLOCKS
    print(f"  {NUM_BLOCKS / found_s:12,.0f} look-ups/s, found, in chains of {per_file}")
    singles = [[block] for chain in chains for block in chain]
    found_s = seconds(lambda: sum(store.find(single) for single in singles))
    print(f"  {NUM_BLOCKS / found_s:12,.0f} look-ups/s, found, one by one")
    missing = [[os.urandom(32)] for _ in range(NUM_BLOCKS)]
    found_s = seconds(lambda: sum(store.find(single) for single in missing))
    print(f"  {NUM_BLOCKS / found_s:12,.0f} look-ups/s, not there, one by one")
    store.refresh()  # the folders were still young when the store was opened
    print(f"  refreshed in {seconds(store.refresh) * 1000:.1f} ms, nothing new")
    names_s = seconds(lambda: identity.chain(np.arange(64 * 100_000)))
    print(f"  {100_000 / names_s:12,.0f} names/s of a prompt's blocks")
    print(f"  `kv gc` ranks and counts all files in {seconds(lambda: shrink_store(store.store, None)):.2f} s")
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--mib", type=int, default=256, help="bytes to write and read per round")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        for name, identity in (("large", LARGE), ("small", SMALL)):
            (Path(scratch) / name).mkdir()
            compare(identity, Path(scratch) / name, options.mib << 20, options.rounds)
        look_up(Path(scratch) / "names")


if __name__ == "__main__":
    main()
