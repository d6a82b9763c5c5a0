"""Whether the holders of others' claims live, by the dates of their leases on a file system.

A lease's date changes while its holder lives. It has run out when this process, by its own monotonic clock, has seen
the date unchanged for LEASE_S, whatever date that is: no two clocks are compared. Before that time can begin the last
change has to be seen, so leases are looked at often, and a look is small: one that was seen before is opened for its
date, and read again only when another file has its name.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.checked_json import parse_json
from batchinfer.records import DamagedFileError
from batchinfer.run.liveness import is_dead

LEASE_S = 60.0  # a lease whose date has not changed for this long, by the watcher's own clock, has expired
_HOLDER = ("released", "host", "pid", "process")  # what a lease is asked for


@dataclass(slots=True)
class _Seen:
    """The lease of a unit's last claim as it was seen; times are those of this process's monotonic clock."""

    claim: Path
    holder: dict[str, Any] | None = None  # None: it is damaged, and only its date can tell
    file: tuple[int, int] = (0, 0)  # a unit is given back by another file under the lease's name
    date_ns: int | None = None
    since_s: float = math.inf  # when it was first seen with this date
    listed_s: float = math.inf  # when the claim was seen to be the last one

    @property
    def lapses_s(self) -> float:
        return self.since_s + LEASE_S

    def lives(self, date_ns: int, now_s: float) -> bool:
        """Whether the holder may be alive, by what it has said and by the lease's date.

        Args:
            now_s: before the date was read.
        """
        if self.holder is not None and is_over(self.holder):
            return False
        if date_ns != self.date_ns:
            self.date_ns, self.since_s = date_ns, time.monotonic()
            return True
        return now_s < self.lapses_s


class LeaseWatch:
    """What this process has seen of others' leases."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}  # by unit

    def is_still_held(self, unit: int) -> bool:
        """Whether the claim that `is_held` was asked about lives, by one look at its lease.

        False: nobody knows, since it does not, or others may have claimed the unit after it.
        """
        seen, now_s = self._seen.get(unit), time.monotonic()
        if seen is None or now_s >= seen.listed_s + LEASE_S:
            return False
        try:
            # opened: a network file system asks its server for the date then
            with open(seen.claim / "lease.json", "rb") as file:
                status = os.fstat(file.fileno())
        except OSError:
            return False
        return _which(status) == seen.file and seen.lives(status.st_mtime_ns, now_s)

    def is_held(self, unit: int, claim: Path) -> bool:
        """Whether the holder of this claim, the last of its unit, lives."""
        seen, now_s = self._seen.get(unit), time.monotonic()
        if seen is None or seen.claim != claim:
            seen = self._seen[unit] = _Seen(claim)
        path = claim / "lease.json"
        date_ns, seen.holder, seen.listed_s = 0, None, now_s
        try:
            with open(path, "rb") as file:
                status, data = os.fstat(file.fileno()), file.read()
            seen.file, date_ns = _which(status), status.st_mtime_ns
            seen.holder = parse_json(data, path, *_HOLDER)
        except (OSError, DamagedFileError):  # who cannot be known is only told dead by the date
            pass
        return seen.lives(date_ns, now_s)

    def lapses_s(self, unit: int) -> float:
        """When, by the monotonic clock, the lease runs out unless it is renewed; inf where none is watched."""
        seen = self._seen.get(unit)
        return math.inf if seen is None else seen.lapses_s

    def forget(self, unit: int) -> None:
        """It is done, or this process's own."""
        self._seen.pop(unit, None)


def is_over(lease: dict[str, Any]) -> bool:
    """Whether a unit was given back, or its holder is known to be dead."""
    return bool(lease["released"]) or is_dead(lease)


def _which(status: os.stat_result) -> tuple[int, int]:
    """Tells a lease from the one that replaces it: by number, and by size where a file system makes numbers up."""
    return status.st_ino, status.st_size
