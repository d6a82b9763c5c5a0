"""KV on its way between hosts that share no folder: an object of the run folder in an object store, until it was read.

What is put and fetched is memory without a name, so no disk is touched.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from batchinfer.data.bucket import Bucket
from batchinfer.kv.transfer import KvTransfer
from batchinfer.records import PeerLostError


class BucketTransfers:
    """The transfers of one rank.

    Args:
        folder: of this rank's objects.
    """

    def __init__(self, bucket: Bucket, folder: str) -> None:
        self._bucket, self._folder = bucket, folder

    def put(self, name: str, transfer: KvTransfer) -> KvTransfer:
        """Move a transfer from memory to the store.

        Raises:
            StoreError: the store does not take it.
        """
        name = f"{self._folder}/{name}"
        try:
            self._bucket.put(name, Path(transfer.path))
        finally:
            transfer.close()
        return KvTransfer(name, transfer.num_bytes, partial(self._bucket.delete, name))

    @contextmanager
    def fetched(self, name: str) -> Iterator[str]:
        """The path of a transfer that another rank has put, in memory.

        Raises:
            PeerLostError: it is gone; its sender has ended.
            StoreError: the store does not give it.
        """
        descriptor = os.memfd_create("batchinfer-kv")
        try:
            path = f"/proc/self/fd/{descriptor}"
            if not self._bucket.fetch(name, Path(path)):
                raise PeerLostError(f"the KV transfer {self._bucket.uri}/{name} is gone")
            yield path
        finally:
            os.close(descriptor)
