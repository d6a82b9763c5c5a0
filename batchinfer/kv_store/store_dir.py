"""Where things are in a KV store's folder, all of them readable by their owner only.

store.json                        what makes a folder a store
models/<digest>-<block bytes>/    identity.json, and <00 .. 63>/<name>.kv: the blocks (block_file.py)
writing/<bytes>.<session>.tmp     files being written, each locked by its writer
quarantine/                       damaged files, the latest few
claims/<session>                  which blocks a live run still needs, and when (next_uses.py)
history/<session>.json            what each run found and wrote
used-bytes                        size of all files, under a lock (space_ledger.py)
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.kv_store.block_file import FileName, file_bytes
from batchinfer.kv_store.blocks import KvIdentity
from batchinfer.records import ConfigError

STORE_VERSION = 1
QUARANTINED_FILES = 16  # kept for a look at what happened


class StoreDir:
    """The paths of a store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.marker = root / "store.json"
        self.models = root / "models"
        self.writing = root / "writing"
        self.quarantine = root / "quarantine"
        self.claims = root / "claims"
        self.history = root / "history"
        self.used_bytes = root / "used-bytes"

    def model(self, identity: KvIdentity) -> Path:
        # the size of a block in the name: files can be counted without being opened
        return self.models / f"{identity.digest.hex()[:16]}-{identity.block_bytes}"


@dataclass(slots=True)
class StoredFile:
    """One file of blocks, as its path tells."""

    path: str
    name: FileName | None  # None: in quarantine
    num_bytes: int
    model: str = ""  # folder of its model


def create_store(store: StoreDir, identity: KvIdentity) -> None:
    """Make a store of a new or empty folder, and room for a model in it; what is there already stays.

    Raises:
        ConfigError: the folder holds other things, or a store of a newer version.
        OSError: it cannot be written.
    """
    make_folder(store.root)
    if not store.marker.exists():
        others = [name for name in os.listdir(store.root) if not name.startswith(".") and name != store.marker.name]
        if others:
            raise ConfigError(f"{store.root} is not empty and no KV store (it holds {others[0]}); name another folder")
        publish_private(store.marker, {"format": "batchinfer KV store", "version": STORE_VERSION})
    check_store(store)
    for folder in (store.models, store.writing, store.quarantine, store.claims, store.history, store.model(identity)):
        make_folder(folder)
    label = store.model(identity) / "identity.json"
    if not label.exists():
        publish_private(label, {"digest": identity.digest.hex(), **identity.describe()})


def check_store(store: StoreDir) -> None:
    """Raises:
    ConfigError: the folder is no store, or one of a newer version.
    """
    try:
        version = json.loads(store.marker.read_bytes())["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "its content is damaged"
        raise ConfigError(
            f"{store.root} is no KV store: cannot read {store.marker.name} in it ({reason}); name the folder of kv.dir"
        ) from None
    if version != STORE_VERSION:
        raise ConfigError(
            f"the KV store {store.root} has version {version} and this program knows {STORE_VERSION}; "
            "use the newer program or another folder"
        )


def make_folder(folder: Path) -> None:
    """A folder for its owner only; one that exists stays as it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def publish_private(target: Path, document: Any) -> None:
    """Write a small file (JSON, or bytes as they are) so that it is whole or absent, readable by its owner only."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(handle, "wb") as file:
            file.write(document if isinstance(document, bytes) else json.dumps(document, indent=1).encode() + b"\n")
        os.rename(name, target)
    except OSError:
        os.unlink(name)
        raise


def list_folder(folder: str | Path) -> list[str]:
    """Names in a folder, sorted; none when it is not there (another process may just have emptied the store)."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def stored_files(store: StoreDir) -> Iterator[StoredFile]:
    """Every file of blocks, of all models; nothing is opened."""
    for model in list_folder(store.models):
        block_bytes = model.rpartition("-")[2]
        if not block_bytes.isdecimal():
            continue  # not ours
        for part in list_folder(store.models / model):
            folder = f"{store.models}/{model}/{part}"
            for text in list_folder(folder):
                name = FileName.parse(text)
                if name is not None:
                    num_bytes = file_bytes(len(name.blocks), int(block_bytes))
                    yield StoredFile(f"{folder}/{text}", name, num_bytes, model)


def quarantined_files(store: StoreDir) -> list[StoredFile]:
    """Damaged files that were moved aside, first come first."""
    found = []
    for name in list_folder(store.quarantine):
        path = f"{store.quarantine}/{name}"
        try:
            status = os.stat(path)
        except FileNotFoundError:  # another process made room
            continue
        found.append((status.st_ctime_ns, StoredFile(path, None, status.st_size)))
    return [file for _, file in sorted(found, key=lambda item: item[0])]


def quarantine(store: StoreDir, path: str) -> None:
    """Move a damaged file aside and keep the latest few of its kind.

    Raises:
        OSError: the folder cannot be written.
    """
    try:
        os.rename(path, store.quarantine / os.path.basename(path))
    except FileNotFoundError:  # evicted, or moved by another process
        return
    for file in quarantined_files(store)[:-QUARANTINED_FILES]:
        # its space stays booked until files are counted again
        Path(file.path).unlink(missing_ok=True)
