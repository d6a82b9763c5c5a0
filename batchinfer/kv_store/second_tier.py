"""A KV store's second tier: its files as objects in a bucket, for nodes whose stores are on local disks.

    key                                                drawn once, by the first store
    models/<digest>-<block bytes>/<00 .. 63>/<name>    a file as block_file.py has it, with checksums by that key
    quarantine/<name>                                  objects that did not match their names

A name is made of hashes of all that the blocks depend on, so an object is created once, by a conditional write, and
never replaced. The writer puts a file here before writing it to disk: files that the disk's bound evicts are fetched
again. Each block is checked by the bucket's key when it is fetched, and stored on disk with checksums by the store's
own key. If the bucket fails, the tier is switched off, with one sentence; the disk goes on alone.
"""

import os
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from batchinfer.data.bucket import Bucket
from batchinfer.kv_store.block_file import (
    KEY_BYTES,
    DamagedBlocksError,
    FileName,
    Header,
    NameClashError,
    make_header,
    read_whole,
)
from batchinfer.kv_store.index import BlockIndex, parsed_name
from batchinfer.kv_store.session import StoreSession
from batchinfer.records import StoreError

ATTEMPTS = 3  # of a request: prefill waits for it


class SecondTier:
    """The second tier, for all threads of one process; no method raises.

    Args:
        index: records which files the bucket has.
    """

    def __init__(self, bucket: Bucket, session: StoreSession, index: BlockIndex) -> None:
        self._bucket, self._session, self._index = bucket, session, index
        self._folder = f"models/{session.store.model(session.identity).name}"
        self._key = b""
        self._is_on = True
        self._sent: set[str] = set()  # a listing in progress may lack these
        self._locks: dict[str, threading.Lock] = {}  # one thread fetches a file, others wait for it
        self._lock = threading.Lock()

    def open(self) -> None:
        """Create or read the bucket's key, and list its files."""
        try:
            self._bucket.create("key", secrets.token_hex(KEY_BYTES).encode())
            found = self._bucket.read("key")
            self._key = bytes.fromhex("" if found is None else found.data.decode("ascii"))
            if len(self._key) != KEY_BYTES:
                raise ValueError("it has another length")
        except StoreError as error:
            self._switch_off(str(error))
        except ValueError as error:
            self._switch_off(f"its key is damaged ({error}); name another folder, or delete all that is in this one")
        self.refresh()

    def refresh(self) -> None:
        """List the files that other nodes have put, by one request for each 1,000 files."""
        if not self._is_on:
            return
        try:
            listed = {os.path.basename(item.name) for item in self._bucket.objects(self._folder)}
        except StoreError as error:
            self._switch_off(str(error))
            return
        self._index.set_far({name for name in listed | self._sent if FileName.parse(name) is not None})

    def put(self, name: FileName, blocks: Sequence[bytes], content: np.ndarray) -> bool:
        """Put a file into the bucket; return False if the bucket does not take it.

        Args:
            blocks: names of the file's blocks.
            content: [len(blocks), block_bytes] uint8, contiguous.
        """
        if not self._is_on:
            return False
        header = make_header(self._session.identity, blocks, name.first, content, self._key, self._session.run)
        try:
            written = self._bucket.create(self._object(name), header + content.tobytes())
        except StoreError as error:
            self._switch_off(str(error))
            return False
        if written is not None:  # otherwise another node was quicker
            self._session.counters.add(sent_files=1, sent_bytes=len(header) + content.nbytes)
        self._sent.add(str(name))
        self._index.add_far(str(name))
        return True

    def fetching(self, name: str) -> threading.Lock:
        """Return the lock that the thread that fetches a file holds."""
        with self._lock:
            return self._locks.setdefault(name, threading.Lock())

    def fetch(self, file: str) -> tuple[Header, np.ndarray] | None:
        """Return a file's header and checked blocks, [n, block_bytes] uint8; None if missing, damaged or unreadable."""
        if not self._is_on or not self._index.is_far(file):
            return None
        name, identity = parsed_name(file), self._session.identity
        descriptor = os.memfd_create("batchinfer-kv")
        try:
            if not self._bucket.fetch(self._object(name), Path(f"/proc/self/fd/{descriptor}")):
                self._forget(file)
                return None
            num_bytes = os.fstat(descriptor).st_size
            found = read_whole(
                descriptor, name, key=self._key, identity=identity.digest, block_bytes=identity.block_bytes
            )
            self._session.counters.add(fetched_files=1, fetched_bytes=num_bytes)
            return found
        except (DamagedBlocksError, NameClashError):
            self._set_aside(name, os.pread(descriptor, num_bytes, 0))
            return None
        except StoreError as error:
            self._switch_off(str(error))
            return None
        finally:
            os.close(descriptor)

    def _set_aside(self, name: FileName, data: bytes) -> None:
        """Move a damaged object to quarantine/, so that no node reads it again and its blocks can be put again."""
        self._forget(str(name))
        self._session.counters.add(damaged_files=1)
        try:
            self._bucket.put(f"quarantine/{name}", data)
            self._bucket.delete(self._object(name))
        except StoreError as error:
            self._switch_off(str(error))

    def _forget(self, file: str) -> None:
        self._sent.discard(file)
        self._index.remove_far(file)

    def _object(self, name: FileName) -> str:
        return f"{self._folder}/{name.folder}/{name}"

    def _switch_off(self, reason: str) -> None:
        with self._lock:
            is_news, self._is_on = self._is_on, False
        self._index.set_far(set())
        if is_news:
            self._session.problems.append(
                f"the second tier of the KV store {self._session.store.root} ({self._bucket.uri}) is switched off: "
                f"{reason}; the job goes on with what is on this disk"
            )
