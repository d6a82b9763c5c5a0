"""How soon an idle watcher has the unit of a holder that died on another host, and what its waiting costs a disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchinfer.checked_json import publish_json, read_json
from batchinfer.controller import lease_watch, open_units
from batchinfer.controller.claims import HEARTBEAT_S, UnitClaims, last_claim
from batchinfer.controller.lease_watch import LEASE_S
from batchinfer.controller.open_units import MOST_WATCHED, OpenUnits
from batchinfer.run.store.folder import FolderStorage
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
    monkeypatch.setattr(lease_watch, "time", found)
    return found


@pytest.fixture(scope="module")
def counter() -> Counter:
    return Counter()


class Holders:
    """Holders on other hosts, whose clocks are hours off; their leases change as a heartbeat changes them."""

    def __init__(self, run: RunDir, num_units: int) -> None:
        claims = UnitClaims(run)
        for unit in range(num_units):
            assert claims.try_claim(unit) is not None
        self.leases = [last_claim(run, unit) / "lease.json" for unit in range(num_units)]
        for lease in self.leases:
            publish_json(lease, {**read_json(lease), "host": "elsewhere"})
        self._beats = 0

    def live_until(self, now_s: float) -> None:
        """Give the signs of life that are due."""
        while self._beats * HEARTBEAT_S <= now_s:
            for lease in self.leases:
                os.utime(lease, (7200.0 + self._beats, 7200.0 + self._beats))
            self._beats += 1


def rows(count):
    return [{"unit": unit, "num_requests": 10} for unit in range(count)]


def taken_after_s(folder: Path, clock: Clock, *, lived_s: float) -> float:
    """Seconds from a holder's death until a watcher that has waited since the beginning has its unit."""
    run = RunDir(folder)
    holders, mine, clock.now_s = Holders(run, 1), UnitClaims(run), 0.0
    units = OpenUnits(FolderStorage(run), rows(1))
    while True:
        holders.live_until(min(clock.now_s, lived_s))
        lapses_s = mine.lapses_s(0)
        if units.claim(mine, set()) is not None:
            assert lapses_s <= clock.now_s <= lapses_s + TICK_S  # it was tried then, not at the end of a pause
            return clock.now_s - lived_s
        assert clock.now_s < lived_s + 600
        clock.now_s += TICK_S


@pytest.mark.parametrize("lived_s", [*range(0, 90, 7), 300.0, 311.0, 322.0])
def test_a_dead_holders_unit_is_taken_when_its_lease_has_run_out_and_at_once(tmp_path, clock, lived_s, monkeypatch):
    monkeypatch.setattr(UnitClaims, "watch_s", 13.0)  # of which a lease is no multiple
    after_s = taken_after_s(tmp_path, clock, lived_s=lived_s)
    assert after_s >= LEASE_S - HEARTBEAT_S  # not before
    assert after_s <= LEASE_S + UnitClaims.watch_s + 2 * TICK_S


def test_a_holder_that_lives_is_never_taken_for_dead(tmp_path, clock):
    run = RunDir(tmp_path)
    holders, mine = Holders(run, 3), UnitClaims(run)
    units = OpenUnits(FolderStorage(run), rows(3))
    for _ in range(1800):
        holders.live_until(clock.now_s)
        assert units.claim(mine, set()) is None
        clock.now_s += TICK_S


def test_waiting_costs_a_disk_no_more_than_it_did_with_half_as_many_looks(tmp_path, clock, counter):
    """Some of the units of others are watched: each by 2 calls in 15 s, and 2 more once a minute."""
    run, hour_s = RunDir(tmp_path), 3600
    holders, mine = Holders(run, 40), UnitClaims(run)
    units = OpenUnits(FolderStorage(run), rows(40))
    counter.calls.clear()
    for _ in range(hour_s):
        holders.live_until(clock.now_s)
        with counter.counting():
            assert units.claim(mine, set()) is None
        clock.now_s += TICK_S
    # besides two listings each time. Looked at every 30 s, with nothing remembered between, they took 9,880
    assert sum(counter.calls.values()) <= 9_880
    assert counter.calls["scandir"] <= 1.1 * MOST_WATCHED * hour_s / LEASE_S


@pytest.mark.parametrize("held_s", [95, 110, 125, 140])  # whenever in the minute in which claims are listed anew
def test_a_unit_given_back_is_had_before_its_lease_would_run_out(tmp_path, clock, held_s):
    run = RunDir(tmp_path)
    holder, mine = UnitClaims(run), UnitClaims(run)
    claim = holder.try_claim(0)
    units = OpenUnits(FolderStorage(run), rows(1))
    for _ in range(held_s):
        os.utime(claim.folder / "lease.json", (clock.now_s, clock.now_s))
        assert units.claim(mine, set()) is None
        clock.now_s += TICK_S
    # by a lease of the same date: another file, which says so
    holder.release(claim)
    os.utime(claim.folder / "lease.json", (clock.now_s - TICK_S, clock.now_s - TICK_S))
    given_back_s = clock.now_s
    while units.claim(mine, set()) is None:
        assert clock.now_s - given_back_s <= UnitClaims.watch_s
        clock.now_s += TICK_S


def test_a_claim_behind_the_one_that_is_watched_is_seen_within_a_minute(tmp_path, clock):
    """The first holder was taken over while it was not heard of, and goes on; the second one dies."""
    run = RunDir(tmp_path)
    first, second, mine = UnitClaims(run), UnitClaims(run), UnitClaims(run)
    alive = first.try_claim(0).folder / "lease.json"
    assert second.try_claim(0) is None
    clock.now_s += LEASE_S
    assert second.try_claim(0).name == "0001"
    units, begun_s = OpenUnits(FolderStorage(run), rows(1)), clock.now_s
    assert mine._watch.is_held(0, alive.parent)  # it was watched before
    while units.claim(mine, set()) is None:
        assert clock.now_s - begun_s <= 2 * LEASE_S + UnitClaims.watch_s
        os.utime(alive, (clock.now_s, clock.now_s))
        clock.now_s += TICK_S
    assert last_claim(run, 0).name == "0002"
