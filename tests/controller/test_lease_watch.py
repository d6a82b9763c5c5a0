"""How soon an idle watcher has the unit of a holder that died on another host, and what its waiting costs a disk."""

from __future__ import annotations

import os

import pytest

from batchinfer.checked_json import publish_json, read_json
from batchinfer.controller import open_units
from batchinfer.controller.open_units import MOST_WATCHED, OpenUnits
from batchinfer.run.store import watch
from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.store.watch import LEASE_S
from batchinfer.run.units import claims
from batchinfer.run.units.claims import UnitClaims, last_claim, lease_of
from batchinfer.rundir import RunDir
from support.claimants import Counter

TICK_S = 1.0  # between two wishes for a unit


class Clock:
    """Counted seconds, for the watcher alone."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(open_units, "time", found)
    monkeypatch.setattr(watch, "time", found)
    monkeypatch.setattr(claims, "time", found)
    return found


@pytest.fixture(scope="module")
def counter() -> Counter:
    return Counter()


class Holders:
    """A holder of units on another host, whose clock is hours off; its lease changes as a heartbeat changes it."""

    def __init__(self, run: RunDir, num_units: int) -> None:
        claims = UnitClaims(FolderStorage(run))
        for unit in range(num_units):
            assert claims.try_claim(unit) is not None
        self.lease = lease_of(last_claim(run, 0))
        publish_json(self.lease, {**read_json(self.lease), "host": "elsewhere"})
        self._beats = 0

    def live_until(self, now_s: float) -> None:
        """Give the signs of life that are due."""
        while self._beats * FolderStorage.beat_s <= now_s:
            os.utime(self.lease, (7200.0 + self._beats, 7200.0 + self._beats))
            self._beats += 1


def rows(count):
    return [{"unit": unit, "num_requests": 10} for unit in range(count)]


def test_waiting_costs_a_disk_no_more_than_it_did_with_half_as_many_looks(tmp_path, clock, counter):
    """Some of the units of others are watched: each by 2 calls in 15 s, and 2 more once a minute."""
    run, hour_s = RunDir(tmp_path), 3600
    holders, mine = Holders(run, 40), UnitClaims(FolderStorage(run))
    units = OpenUnits(FolderStorage(run), rows(40))
    counter.calls.clear()
    for _ in range(hour_s):
        holders.live_until(clock.now_s)
        with counter.counting():
            assert units.claim(mine, set()) is None
        clock.now_s += TICK_S
    # besides listings. Looked at every 30 s, with nothing remembered between, they took 9,880
    assert sum(counter.calls.values()) - counter.calls["listdir"] <= 9_880
    num_looks = hour_s / open_units.LONGEST_PAUSE_S
    assert counter.calls["listdir"] <= 1.1 * (MOST_WATCHED * hour_s / LEASE_S + 2 * num_looks)


@pytest.mark.parametrize("held_s", [95, 110, 125, 140])  # whenever in the minute in which claims are listed anew
def test_a_unit_given_back_is_had_before_its_lease_would_run_out(tmp_path, clock, held_s):
    run = RunDir(tmp_path)
    holder, mine = UnitClaims(FolderStorage(run)), UnitClaims(FolderStorage(run))
    lease = lease_of(holder.try_claim(0).folder)
    units = OpenUnits(FolderStorage(run), rows(1))
    for _ in range(held_s):
        os.utime(lease, (clock.now_s, clock.now_s))
        assert units.claim(mine, set()) is None
        clock.now_s += TICK_S
    holder.end()
    given_back_s = clock.now_s
    while units.claim(mine, set()) is None:
        assert clock.now_s - given_back_s <= FolderStorage.watch_s
        clock.now_s += TICK_S


def test_a_claim_behind_the_one_that_is_watched_is_seen_within_a_minute(tmp_path, clock):
    """The first holder was taken over while it was not heard of, and goes on; the second one dies."""
    run = RunDir(tmp_path)
    first, second, mine = UnitClaims(FolderStorage(run)), UnitClaims(FolderStorage(run)), UnitClaims(FolderStorage(run))
    alive = lease_of(first.try_claim(0).folder)
    assert second.try_claim(0) is None
    clock.now_s += LEASE_S - 1
    assert mine.try_claim(0) is None  # it watches the first one from now on
    clock.now_s += 1
    assert second.try_claim(0).name == "0001"
    units, begun_s = OpenUnits(FolderStorage(run), rows(1)), clock.now_s
    while units.claim(mine, set()) is None:
        assert clock.now_s - begun_s <= 2 * LEASE_S + FolderStorage.watch_s
        os.utime(alive, (clock.now_s, clock.now_s))
        clock.now_s += TICK_S
    assert last_claim(run, 0).name == "0002"
