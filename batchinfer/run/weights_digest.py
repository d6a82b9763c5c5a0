"""Digest of all bytes of a model's weights, for the KV store, which outlives a job.

The fingerprint of a run only samples the weights (fingerprint.py): a run folder meets the same model again, or quite
another one. A KV store meets every version of a model, and must tell them apart.
"""

import contextlib
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xxhash import xxh3_128

from batchinfer.checked_json import publish_json
from batchinfer.ownership import check_folder, make_folder
from batchinfer.progress import note
from batchinfer.records import ConfigError, ModelError

CHUNK_BYTES = 1 << 24
NUM_THREADS = 4  # files read at a time
TOLD_BYTES = 10_000_000_000  # from this size on a note announces the hashing


def whole_weights_digest(folder: Path, cache: Path | None) -> str:
    """Digest of names and all bytes of the safetensors files.

    Args:
        cache: folder in which the digests of files are remembered, by path, size, inode and times of change;
            None: nowhere.

    Raises:
        ModelError: a file cannot be read.
        ConfigError: others may write in the cache.
    """
    paths = sorted(folder.absolute().glob("*.safetensors"))
    name = f"{hashlib.blake2b(os.fsencode(folder.absolute()), digest_size=8).hexdigest()}.json"
    if cache is not None and cache.is_dir():
        check_folder(cache, None, setting="XDG_CACHE_HOME")
    known = {} if cache is None else _read_cache(cache / name)
    try:
        keys = {path.name: _key(path) for path in paths}
        missing = [path for path in paths if known.get(path.name, [None])[0] != keys[path.name]]
        num_bytes = sum(path.stat().st_size for path in missing)
        if num_bytes > TOLD_BYTES:
            note(f"hashing {num_bytes / 1e9:,.0f} GB of weights, so that the KV store knows them (once)")
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            digests = dict(zip([path.name for path in missing], threads.map(_file_digest, missing), strict=True))
    except OSError as error:
        raise ModelError(f"cannot read the weights {error.filename}: {error.strerror}") from None
    found = {name: [key, digests.get(name) or known[name][1]] for name, key in keys.items()}
    if digests and cache is not None:
        # with no place to remember them they are hashed again next time
        with contextlib.suppress(ConfigError, OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
            make_folder(cache, None)
            publish_json(cache / name, found)
    return hashlib.blake2b(
        json.dumps({name: found[name][1] for name in sorted(found)}).encode(), digest_size=16
    ).hexdigest()


def cache_folder() -> Path | None:
    """Return the folder of this user's cached digests, None for a user without a home, as in containers."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "batchinfer" / "weights"
    except RuntimeError:
        return None


def _key(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def _file_digest(path: Path) -> str:
    hasher, buffer = xxh3_128(), bytearray(CHUNK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:num_read])
    return hasher.hexdigest()


def _read_cache(path: Path) -> dict[str, list]:
    """Return the cached digests of a folder, {} if the cache is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {name: [key, str(digest)] for name, (key, digest) in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
