"""What the ranks of a group tell each other so that they can meet, addresses above all; it travels by their controller.

Torch's own stores do not fit: TCPStore listens on a port and takes values from anybody who calls there, FileStore needs
locks of the file system.
"""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist


class GroupStore(dist.Store):
    """What this rank has told and learnt; each key is set once, by one rank, and reaches all of them.

    Torch calls it in threads of its own, too. What counts (`add`) and what takes back is left out: none of torch's
    groups uses it to meet.

    Args:
        tell: sends a key and its value to the other ranks.
    """

    def __init__(self, tell: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._tell = tell
        self._known = dist.HashStore()

    def learn(self, key: str, value: bytes) -> None:
        """What another rank has told."""
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
