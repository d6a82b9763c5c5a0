"""The store by which the ranks of a group exchange addresses and the like to meet, through their controller.

Torch's stores do not fit: TCPStore listens on a port and takes values from any caller, FileStore needs locks of the
file system.
"""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist


class GroupStore(dist.Store):
    """Keys and values that ranks have set; each key is set once, by one rank, and reaches all ranks.

    Torch calls the store from its threads, too. Counters (`add`) and deletion are left out, as no group of torch
    needs them to meet.

    Args:
        tell: sends a key and its value to the other ranks.
    """

    def __init__(self, tell: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._tell = tell
        self._known = dist.HashStore()

    def learn(self, key: str, value: bytes) -> None:
        """Take in a key and value that another rank has set."""
        self._known.set(key, value)  # type: ignore[arg-type]  # torch takes bytes, too

    def set(self, key: str, value: str | bytes) -> None:
        """See dist.Store."""
        content = value.encode() if isinstance(value, str) else value
        self.learn(key, content)
        self._tell(key, content)

    def get(self, key: str) -> bytes:
        """See dist.Store; waits for the key until the timeout."""
        return self._known.get(key)

    def check(self, keys: list[str]) -> bool:
        """See dist.Store."""
        return self._known.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See dist.Store."""
        if timeout is None:
            self._known.wait(keys)
        else:
            self._known.wait(keys, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """See dist.Store."""
        self._known.set_timeout(timeout)
