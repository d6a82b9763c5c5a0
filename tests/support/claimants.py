"""Simulated controllers that claim units of a plan by real leases on a real file system, and what that costs there.

Every controller has its own OpenUnits and UnitClaims, as a process would; they take turns in an order drawn by chance.
The time that a unit takes is drawn too, in turns, so that controllers drift apart. What is counted are the calls that
reach the file system: each listing as one more for every 1,000 names, as a server would send them. A listing may be a
simulated minute old, as clients of a network file system give it (and as otherwise this would take hours).
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.controller import open_units
from batchinfer.controller.open_units import OpenUnits
from batchinfer.run.store import watch
from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.store.interface import Storage
from batchinfer.run.units import claims
from batchinfer.run.units.claims import Claim, UnitClaims
from batchinfer.rundir import RunDir

NAMES_PER_CALL = 1000
LISTING_S = 60.0  # how old it may be
# what Python tells an audit hook of, and what it means here; stat calls are not among them
CHANGES = ("mkdir", "rename", "remove", "rmdir", "link", "chmod", "utime", "scandir", "listdir")
AUDITED = {"open"} | {f"os.{name}" for name in CHANGES}
BESIDES = ("stat", "lstat", "fsync", "fstat")


class Counter:
    """Calls to the file system since the last reset, by name."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.is_on = False
        sys.addaudithook(self._audit)  # for ever: a hook cannot be taken back

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on or event not in AUDITED:
            return
        if not str(arguments[0]).startswith("/proc/"):
            self.calls[event.removeprefix("os.")] += 1

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count within; functions that no hook tells of are wrapped meanwhile."""
        plain = {name: getattr(os, name) for name in BESIDES}

        def counted(name: str) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                self.calls[name] += 1
                return plain[name](*args, **options)

            return call

        for name in BESIDES:
            setattr(os, name, counted(name))
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
            for name, function in plain.items():
                setattr(os, name, function)


@dataclass
class Cost:
    """The cost of claiming all units."""

    units: int
    controllers: int
    seconds: float  # of one processor and disk that did it all
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def calls_per_unit(self) -> float:
        return sum(self.calls.values()) / self.units


class _Clock:
    """Simulated seconds for the pauses between looks."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def claim_all(folder: Path, num_units: int, num_controllers: int, counter: Counter) -> Cost:
    """Have this many simulated controllers claim and complete all units of an empty run folder.

    A unit takes 100 to 300 simulated seconds. Workers come within the first minute, as tasks of an array do.
    """
    run, rng, clock = RunDir(folder), random.Random(0), _Clock()
    rows = [{"unit": unit, "num_requests": 1} for unit in range(num_units)]
    counter.calls.clear()
    begun_s = time.perf_counter()
    hearts = _Hearts(clock, counter)
    # (when, number, controller): what each does next
    turns: list[tuple[float, int, _Controller | None]] = [
        (rng.uniform(0, 60), number, None) for number in range(num_controllers)
    ]
    heapq.heapify(turns)
    with counter.counting(), _simulated(clock, counter):
        while turns:
            clock.now_s, number, controller = heapq.heappop(turns)
            if controller is None:
                controller = _Controller(run, rows, rng, hearts)
            pause_s = controller.turn()
            if pause_s is not None:
                heapq.heappush(turns, (clock.now_s + pause_s, number, controller))
    return Cost(num_units, num_controllers, time.perf_counter() - begun_s, dict(counter.calls))


@contextlib.contextmanager
def _simulated(clock: _Clock, counter: Counter) -> Iterator[None]:
    """Replace pauses by the simulated clock; callers within LISTING_S share a listing, which is counted for each."""
    listings: dict[Path, tuple[float, np.ndarray]] = {}

    def named(storage: Storage, folder: Path, num_units: int) -> np.ndarray:
        listed_s, found = listings.get(folder, (-LISTING_S, None))
        if found is None or clock.now_s >= listed_s + LISTING_S:
            found = plain_named(storage, folder, num_units)
            listings[folder] = clock.now_s, found
        counter.calls["list"] += 1 + int(found.sum()) // NAMES_PER_CALL
        return found

    plain_time, plain_named = open_units.time, open_units._named
    open_units.time = watch.time = claims.time = clock  # type: ignore[assignment]
    open_units._named = named
    try:
        yield
    finally:
        open_units.time = watch.time = claims.time = plain_time
        open_units._named = plain_named


class _Hearts:
    """The heartbeats of all controllers, applied to a lease just before a watcher reads it."""

    def __init__(self, clock: _Clock, counter: Counter) -> None:
        self.held: dict[int, Path] = {}  # leases by unit
        self._clock, self._counter = clock, counter

    def beat(self, unit: int) -> None:
        if (lease := self.held.get(unit)) is not None:
            last_s = self._clock.now_s // FolderStorage.beat_s * FolderStorage.beat_s
            self._counter.is_on = False  # this is not the watcher's
            os.utime(lease, (last_s, last_s))
            self._counter.is_on = True


class _Claims(UnitClaims):
    def __init__(self, run: RunDir, hearts: _Hearts) -> None:
        super().__init__(FolderStorage(run))
        self._hearts = hearts

    def try_claim(self, unit: int, *, is_new: bool = False) -> Claim | None:
        self._hearts.beat(unit)
        claim = super().try_claim(unit, is_new=is_new)
        if claim is not None:
            self._hearts.held[unit] = self._lease.path
        return claim

    def complete(self, claim: Claim) -> None:
        del self._hearts.held[claim.unit]
        super().complete(claim)


class _Controller:
    def __init__(self, run: RunDir, rows: list[dict[str, Any]], rng: random.Random, hearts: _Hearts) -> None:
        self._claims, self._rng = _Claims(run, hearts), rng
        self._units = OpenUnits(FolderStorage(run), rows, start=None)
        self._units._random = rng  # the same every time
        self._claim: Any = None

    def turn(self) -> float | None:
        """End a unit and take another one; the simulated seconds until its next turn, None when all are done."""
        if self._claim is not None:
            self._claims.complete(self._claim)
            self._claim = None
        found = self._units.claim(self._claims, set())
        if found is not None:
            self._claim = found[1]
            return self._rng.uniform(100, 300)
        return None if self._units.are_all_done(self._claims.completed) else 1.0
