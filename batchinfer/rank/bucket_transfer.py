"""KV transfers between hosts that share no folder: each is an object of the run, deleted once it was read.

Transfers are put from and fetched into anonymous memory: no disk is touched.
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
    """KV transfers of one rank through an object store.

    Args:
        folder: the folder of this rank's objects in the store.
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
        """Fetch a transfer that another rank has put; yield its path in memory.

        Raises:
            PeerLostError: the transfer is gone, as its sender has ended.
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
