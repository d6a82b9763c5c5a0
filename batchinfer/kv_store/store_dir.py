"""The layout of a KV store's folder, all of it for its owner only, or for the one group that shares the store.

store.json                        marks a folder as a store
key                               drawn with the store; everybody who can read it can write blocks that are accepted
models/<digest>-<block bytes>/    identity.json, and <00 .. 63>/<name>.kv: the blocks (block_file.py)
writing/<bytes>.<session>.tmp     files being written, each locked by its writer
quarantine/                       damaged files, the latest few
claims/<session>                  blocks that a live run still needs, and when (next_uses.py)
history/<session>.json            counters of each session
used-bytes                        size of all files, under a lock (space_ledger.py)
"""

import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.kv_store.block_file import KEY_BYTES, FileName, file_bytes
from batchinfer.kv_store.blocks import KvIdentity
from batchinfer.ownership import check_folder, make_folder, share_file
from batchinfer.records import ConfigError
from batchinfer.whole_files import TEMPORARY, create_exclusively, remove_leftovers

STORE_VERSION = 2
QUARANTINED_FILES = 16  # kept to examine the damage


class StoreDir:
    """The paths of a store, and the group that shares it, if any."""

    def __init__(self, root: Path, gid: int | None = None) -> None:
        self.root, self.gid = root, gid
        self.key = root / "key"
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
    """One file of blocks, described by its path."""

    path: str
    name: FileName | None  # None: in quarantine
    num_bytes: int
    model: str = ""  # folder of its model


def create_store(store: StoreDir) -> str | None:
    """Make a store of a new or empty folder; leave an existing store unchanged.

    Returns:
        A warning about its owner, if any.

    Raises:
        ConfigError: the folder holds other files, or a store of another version; or others may write in it.
        OSError: it cannot be written.
    """
    store.root.parent.mkdir(parents=True, exist_ok=True)
    make_folder(store.root, store.gid)
    warning = check_folder(store.root, store.gid, setting="kv.dir")
    if not store.marker.exists():
        own = {store.marker.name, store.key.name}
        others = [name for name in os.listdir(store.root) if not name.startswith(".") and name not in own]
        # another process that creates the store writes the marker before everything except its key
        if others and not store.marker.exists():
            raise ConfigError(f"{store.root} is not empty and no KV store (it holds {others[0]}); name another folder")
        _make_key(store)
        publish_private(store, store.marker, {"format": "batchinfer KV store", "version": STORE_VERSION})
    check_version(store)
    return warning


def add_model(store: StoreDir, identity: KvIdentity) -> None:
    """Create the folders for a model's blocks.

    Raises:
        OSError: the store cannot be written.
    """
    for folder in (store.models, store.writing, store.quarantine, store.claims, store.history, store.model(identity)):
        make_folder(folder, store.gid)
    label = store.model(identity) / "identity.json"
    if not label.exists():
        publish_private(store, label, {"digest": identity.digest.hex(), **identity.describe()})


def _make_key(store: StoreDir) -> None:
    """Draw the store's key; one of several concurrent processes wins."""
    if create_exclusively(store.key, secrets.token_hex(KEY_BYTES), mode=0o600) and store.gid is not None:
        store.key.chmod(0o640)


def read_key(store: StoreDir) -> bytes:
    """Return the key of the checksums of blocks.

    Raises:
        ConfigError: it is lost or damaged, or others may read it.
        OSError: it cannot be read.
    """
    remedy = f"delete the folder {store.root} or name another: its blocks can be computed again"
    try:
        descriptor = os.open(store.key, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ConfigError(f"the KV store {store.root} has lost its key; {remedy}") from None
    with open(descriptor, "rb") as file:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & (0o077 if store.gid is None else 0o007):
            raise ConfigError(f"others can read {store.key}, and with it forge blocks; {remedy}")
        text = file.read(2 * KEY_BYTES + 1)
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"the KV store {store.root} has a damaged key; {remedy}")
    return key


def check_version(store: StoreDir) -> None:
    """Check that the folder is a store whose blocks this program can read.

    Raises:
        ConfigError: it is no store, or one of another version.
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
            f"the KV store {store.root} has version {version} and this program knows {STORE_VERSION}; use the program "
            "that wrote it, or delete the folder or name another: its blocks can be computed again"
        )


def remove_temporary_files(store: StoreDir) -> None:
    """Delete small files left by killed processes; leftover block files are found by their locks."""
    for folder in (store.root, store.claims, store.history, *map(store.models.joinpath, list_folder(store.models))):
        remove_leftovers(folder)


def publish_private(store: StoreDir, target: Path, document: Any) -> None:
    """Write a small file (JSON, or bytes as given) so that it is whole or absent, for the store's users only."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=TEMPORARY, dir=target.parent)
    try:
        share_file(handle, store.gid)
        with open(handle, "wb") as file:
            file.write(document if isinstance(document, bytes) else json.dumps(document, indent=1).encode() + b"\n")
        os.rename(name, target)
    except OSError:
        os.unlink(name)
        raise


def list_folder(folder: str | Path) -> list[str]:
    """Return the names in a folder, sorted; empty if it is missing (another process may have emptied the store)."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def stored_files(store: StoreDir) -> Iterator[StoredFile]:
    """Yield every file of blocks, of all models, without opening any."""
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
    """Return the damaged files that were moved aside, the oldest first."""
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
    """Move a damaged file aside and keep the latest few.

    Raises:
        OSError: the folder cannot be written.
    """
    try:
        os.rename(path, store.quarantine / os.path.basename(path))
    except FileNotFoundError:  # evicted, or moved by another process
        return
    for file in quarantined_files(store)[:-QUARANTINED_FILES]:
        # its space stays booked until the next recount
        Path(file.path).unlink(missing_ok=True)
