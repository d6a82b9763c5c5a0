"""Watching leases of other processes by the watcher's own clock: no two clocks are compared.

A lease has run out when a watcher has seen the same version of it for LEASE_S of the watcher's own monotonic clock, or
when its process is known to be dead. The last change has to be seen before that time can begin, so leases are looked at
often.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from batchinfer.checked_json import parse_json
from batchinfer.records import DamagedFileError
from batchinfer.run.liveness import is_dead

LEASE_S = 60.0
HOLDER = ("released", "host", "pid", "process")  # keys of a lease

Name = TypeVar("Name", bound=Hashable)


class Lease(Protocol):
    """Content and version of a lease."""

    @property
    def data(self) -> bytes: ...

    @property
    def version(self) -> str: ...


class Watch(Generic[Name]):
    """The leases of other processes as this one has seen them.

    Args:
        find: reads the lease of a name, None if there is none.
    """

    def __init__(self, find: Callable[[Name], Lease | None]) -> None:
        self._find = find
        self._seen: dict[Name, tuple[str, float]] = {}  # lease -> version, and when it was first seen

    def has_run_out(self, lease: Name) -> bool:
        """Return whether the owner of a lease is gone: ended, known to be dead, or silent for LEASE_S."""
        now_s = time.monotonic()  # before the lease is read
        found = self._find(lease)
        if found is None or _says_that_it_is_over(found.data, str(lease)):
            self._seen.pop(lease, None)
            return True
        version, since_s = self._seen.get(lease, ("", math.inf))
        if version != found.version:
            self._seen[lease] = found.version, time.monotonic()
            return False
        return now_s - since_s >= LEASE_S

    def lapses_s(self, lease: Name) -> float:
        """Return when, by the monotonic clock, a lease runs out unless it is renewed; inf if it was not seen."""
        return self._seen[lease][1] + LEASE_S if lease in self._seen else math.inf


def is_over(holder: dict[str, Any]) -> bool:
    """Return whether a lease says that its owner has ended, or its process is known to be dead."""
    return bool(holder["released"]) or is_dead(holder)


def _says_that_it_is_over(data: bytes, lease: str) -> bool:
    try:
        return is_over(parse_json(data, lease, *HOLDER))
    except DamagedFileError:  # only its age can tell
        return False
