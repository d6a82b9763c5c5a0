"""Which units controllers claim, and how often they ask the file system; real leases, see claimants.py."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from batchinfer.controller import open_units
from batchinfer.controller.open_units import OpenUnits
from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.units.claims import Claim, UnitClaims
from batchinfer.rundir import RunDir
from support.claimants import Counter, claim_all


@pytest.fixture
def quick_folder() -> Iterator[Path]:
    """In memory where that can be had: the calls are the same, and none waits for a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def counter() -> Counter:
    return Counter()


@pytest.fixture
def without_pauses(monkeypatch):
    monkeypatch.setattr(open_units, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(open_units, "LONGEST_PAUSE_S", 0.0)


def rows(count):
    return [{"unit": unit, "num_requests": 10} for unit in range(count)]


def take(units, mine, held=()):
    found = units.claim(mine, set(held))
    return None if found is None else found[0]["unit"]


def test_calls_per_unit_do_not_grow_with_the_number_of_units(quick_folder, counter):
    few, many = (claim_all(quick_folder / str(count), count, 4, counter) for count in (100, 800))
    assert few.calls_per_unit < 45
    assert many.calls_per_unit < 1.05 * few.calls_per_unit
    assert {int(path.name) for path in (quick_folder / "800" / "done").iterdir()} == set(range(800))
    # each unit was claimed once
    assert len(list(quick_folder.glob("800/units/*/0000"))) == 800
    assert not list(quick_folder.glob("800/units/*/0001"))


def test_calls_per_unit_hardly_grow_with_the_number_of_controllers(quick_folder, counter):
    few, many = (claim_all(quick_folder / str(count), 400, count, counter) for count in (2, 16))
    assert many.calls_per_unit < 1.7 * few.calls_per_unit


def test_a_lone_controller_takes_the_units_in_the_plans_order(tmp_path):
    run = RunDir(tmp_path)
    with UnitClaims(FolderStorage(run)) as mine:
        units = OpenUnits(FolderStorage(run), rows(4))
        assert [take(units, mine) for _ in range(4)] == [0, 1, 2, 3]
        assert take(units, mine, held=range(4)) is None
        assert not units.are_all_done(mine.completed)


def test_a_controller_that_meets_another_goes_on_elsewhere(tmp_path):
    run = RunDir(tmp_path)
    with UnitClaims(FolderStorage(run)) as first, UnitClaims(FolderStorage(run)) as second:
        ours, theirs = OpenUnits(FolderStorage(run), rows(40)), OpenUnits(FolderStorage(run), rows(40))
        assert [take(ours, first) for _ in range(3)] == [0, 1, 2]
        taken = [take(theirs, second) for _ in range(20)]
        assert not set(taken) & {0, 1, 2}
        assert len(set(taken)) == 20
        # in stretches: where nobody is in the way the next unit comes next
        assert sum(after == before + 1 for before, after in itertools.pairwise(taken)) >= 10


class Tried(UnitClaims):
    """Notes what is tried."""

    def __init__(self, storage: FolderStorage) -> None:
        super().__init__(storage)
        self.units: list[int] = []

    def try_claim(self, unit: int, *, is_new: bool = False) -> Claim | None:
        self.units.append(unit)
        assert len(self.units) < 200
        return super().try_claim(unit, is_new=is_new)


def test_an_old_listing_does_not_have_a_controller_try_the_same_units_for_ever(tmp_path, monkeypatch):
    """Clients of a network file system may be shown a folder as it was a minute ago."""
    run = RunDir(tmp_path)
    with UnitClaims(FolderStorage(run)) as other, Tried(FolderStorage(run)) as mine:
        monkeypatch.setattr(open_units, "_named", lambda *_: np.zeros(40, dtype=bool))
        units = OpenUnits(FolderStorage(run), rows(40))
        for unit in range(40):
            other.try_claim(unit)
        assert units.claim(mine, set()) is None
    assert set(mine.units) == set(range(40))


def test_units_given_back_are_taken_and_all_done_is_seen(tmp_path, without_pauses):
    run = RunDir(tmp_path)
    with UnitClaims(FolderStorage(run)) as first, UnitClaims(FolderStorage(run)) as second:
        ours = OpenUnits(FolderStorage(run), rows(2))
        held = [ours.claim(first, set())[1] for _ in range(2)]
        theirs = OpenUnits(FolderStorage(run), rows(2))
        assert take(theirs, second) is None
        assert not theirs.are_all_done(second.completed)
        first.complete(held[0])
        first.end()
        _, claim = theirs.claim(second, set())
        assert (claim.unit, claim.name) == (1, "0001")
        second.complete(claim)
        assert theirs.are_all_done(second.completed)
        assert theirs.take_done_elsewhere() == [0]
        assert ours.are_all_done(first.completed)


def test_a_unit_that_was_opened_again_is_seen_by_a_controller_that_waits(tmp_path, without_pauses):
    run = RunDir(tmp_path)
    with UnitClaims(FolderStorage(run)) as mine, UnitClaims(FolderStorage(run)) as other:
        units = OpenUnits(FolderStorage(run), rows(2))
        mine.complete(units.claim(mine, set())[1])
        assert other.try_claim(1) is not None  # so that there is something to wait for
        assert take(units, mine) is None
        run.done(0).unlink()
        assert take(units, mine) == 0


def test_folders_and_marks_of_units_that_the_plan_has_no_more_are_passed_over(tmp_path):
    run = RunDir(tmp_path)
    with UnitClaims(FolderStorage(run)) as mine:
        mine.complete(mine.try_claim(7))
        mine.try_claim(8)
        units = OpenUnits(FolderStorage(run), rows(2))
        assert [take(units, mine) for _ in range(2)] == [0, 1]


def test_asking_whether_all_is_done_does_not_keep_a_controller_from_claiming(tmp_path, monkeypatch):
    class Clock:
        now_s = 0.0

        def monotonic(self):
            return self.now_s

    clock = Clock()
    monkeypatch.setattr(open_units, "time", clock)
    run = RunDir(tmp_path)
    with UnitClaims(FolderStorage(run)) as other, UnitClaims(FolderStorage(run)) as mine:
        assert other.try_claim(0) is not None
        units = OpenUnits(FolderStorage(run), rows(1))
        assert take(units, mine) is None
        other.end()
        for _ in range(100):
            clock.now_s += 1.0
            assert not units.are_all_done(mine.completed)
            if take(units, mine) == 0:
                break
        assert clock.now_s < 100
