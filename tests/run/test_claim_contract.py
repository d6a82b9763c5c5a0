"""Claims, takeover, results and done marks: the same promises on a disk and in a bucket, whatever is killed."""

from __future__ import annotations

import re
import threading

import pytest

from batchinfer.controller import open_units
from batchinfer.controller.open_units import OpenUnits
from batchinfer.data.bucket import Bucket
from batchinfer.records import DamagedFileError
from batchinfer.run.units.claims import done_mark, offer_again
from batchinfer.run.units.damage import reopen_damaged_units
from batchinfer.run.units.result_files import is_result
from support.claim_places import (
    LEASE_S,
    ROWS,
    Killed,
    add_row,
    all_dead,
    beat_once,
    bucket_place,
    compute,
    count_seconds,
    counted_rows,
    file_in,
    folder_place,
    is_done,
    killed_after,
    on_other_hosts,
    rows_in,
    stale_listings,
    without_beats,
)
from support.object_store import s3_server

ALL_ROWS = list(range(ROWS))
MOST_OPERATIONS = 200  # of one unit from its claim to its mark


@pytest.fixture(scope="module")
def server():
    with s3_server() as found:
        found.make_bucket("runs")
        yield found


@pytest.fixture(params=["folder", "bucket"])
def place(request, tmp_path, server, monkeypatch):
    if request.param == "folder":
        return folder_place(tmp_path)
    pytest.importorskip("obstore")
    # this server compares and writes a condition in two steps, which S3 does not
    plain, writing = Bucket._put, threading.Lock()

    def one_at_a_time(*arguments):
        with writing:
            return plain(*arguments)

    monkeypatch.setattr(Bucket, "_put", one_at_a_time)
    return bucket_place(tmp_path, server.endpoint, re.sub(r"\W", "-", request.node.name))


@pytest.fixture
def elsewhere(monkeypatch):
    on_other_hosts(monkeypatch)


@pytest.fixture
def clock(monkeypatch, elsewhere):
    return count_seconds(monkeypatch)


def test_a_unit_is_held_by_one_and_given_back_with_its_durable_results(place):
    with place.worker("a") as first, place.worker("b") as second:
        claim = first.try_claim(7)
        assert (claim.unit, claim.name, claim.inherited) == (7, "0000", ())
        assert second.try_claim(7) is None
        add_row(first, claim, 0)
        first.end()
        again = second.try_claim(7)
        assert again.name == "0001"
        assert rows_in(again.inherited) == [0]
        assert counted_rows(place, 7) == [0]
        compute(second, again)
        assert counted_rows(place, 7) == ALL_ROWS
        assert first.try_claim(7) is None


def test_of_workers_that_claim_at_once_one_has_each_unit(place):
    num_workers, units = 4, range(6)
    workers = [place.worker(f"node-{number}") for number in range(num_workers)]
    start, won = threading.Barrier(num_workers), [[] for _ in workers]

    def take(number):
        for unit in units:
            start.wait()
            if workers[number].try_claim(unit) is not None:
                won[number].append(unit)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(num_workers)]
    for worker in workers:
        worker.__enter__()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(unit for found in won for unit in found) == list(units)
    finally:
        for worker in workers:
            worker.__exit__(None, None, None)


def test_a_claim_that_is_created_between_two_looks_at_it_holds(place, monkeypatch):
    """A worker makes the claim's folder first; another that lists units then must not take the claim for a dead one."""
    (place.store("b").run.claim(3, "0000")).mkdir(parents=True)
    with place.worker("a") as first, place.worker("b") as second:
        store = second._store
        if place.is_bucket:  # where a folder is there once it holds something
            monkeypatch.setattr(store, "names", lambda folder, plain=store.names: [*plain(folder), "0000"])
        plain, claims = store.get, []

        def get(path):
            found = plain(path)
            if not claims:
                claims.append(first.try_claim(3))
            return found

        monkeypatch.setattr(store, "get", get)
        assert second.try_claim(3) is None
        assert [claim and claim.name for claim in claims] == ["0000"]


def test_a_lease_runs_out_by_the_watchers_clock_alone(place, clock):
    dead = place.silent_worker("dead")
    assert dead.try_claim(0) is not None
    with place.worker("alive") as mine:
        assert mine.try_claim(0) is None
        clock.now_s += LEASE_S - 1
        assert mine.try_claim(0) is None
        beat_once(dead)  # a sign of life: the time begins again
        clock.now_s += LEASE_S - 1
        assert mine.try_claim(0) is None
        clock.now_s += LEASE_S
        assert mine.try_claim(0).name == "0001"


def test_a_watcher_tries_when_a_lease_runs_out_not_at_the_end_of_its_pause(place, clock, monkeypatch):
    monkeypatch.setattr(open_units, "time", clock)
    dead = place.silent_worker("dead")
    assert dead.try_claim(0) is not None
    store = place.store("alive")
    with place.worker("alive") as mine:
        units = OpenUnits(store, [{"unit": 0}])
        while clock.now_s < 5:
            assert units.claim(mine, set()) is None
            clock.now_s += 1
        beat_once(dead)
        while units.claim(mine, set()) is None:
            clock.now_s += 1
            assert clock.now_s <= 2 * LEASE_S


def test_a_dead_worker_of_this_machine_is_known_at_once(place, monkeypatch):
    without_beats(monkeypatch)
    dead = place.silent_worker("dead")
    claim = dead.try_claim(0)
    add_row(dead, claim, 0)
    all_dead(monkeypatch)
    with place.worker("alive") as mine:
        again = mine.try_claim(0)
        assert (again.name, rows_in(again.inherited)) == ("0001", [0])


def test_later_results_of_a_worker_that_was_taken_over_are_ignored(place, clock, capsys):
    zombie = place.silent_worker("zombie")
    with place.worker("b") as second:
        claim = zombie.try_claim(0)
        add_row(zombie, claim, 0)
        assert second.try_claim(0) is None
        clock.now_s += LEASE_S
        taken = second.try_claim(0)
        assert rows_in(taken.inherited) == [0]
        add_row(zombie, claim, 1)
        assert counted_rows(place) == [0]
        add_row(second, taken, 1)
        assert counted_rows(place) == [0, 1]
        add_row(zombie, claim, 2)
        zombie.complete(claim)  # too late: the unit is another worker's
        assert "unit 0 was taken over by another worker" in capsys.readouterr().err
        assert not is_done(place)
        add_row(second, taken, 2)
        second.complete(taken)
        store = place.store("reader")
        store.fetch("state")
        store.fetch("results")
        assert done_mark(store.run, 0).claim.name == "0001"
        assert counted_rows(place) == ALL_ROWS


def test_the_first_done_mark_of_a_unit_counts(place):
    store = place.store("b")
    with place.worker("a") as worker:
        claim = worker.try_claim(0)
        assert store.create(store.run.done(0), b"another's")
        worker.complete(claim)
        assert not store.create(store.run.done(0), b"a third's")
    assert store.get(store.run.done(0)) == b"another's"


def test_a_damaged_result_is_not_inherited(place, monkeypatch, capsys):
    without_beats(monkeypatch)
    with place.worker("a") as first:
        claim = first.try_claim(0)
        bad, good = (add_row(first, claim, row) for row in (0, 1))
        first.end()
    _, write = file_in(place, f"units/000000/0000/{bad.name}")
    write(b"something else")
    with place.worker("b") as second:
        claim = second.try_claim(0)
        assert [path.name for path in claim.inherited] == [good.name]
        assert "its bytes are not those that were written" in capsys.readouterr().err
        compute(second, claim)
    assert counted_rows(place) == ALL_ROWS


@pytest.mark.parametrize(
    "damage", [b"", b"{", b'{"unit": 1, "claim": "0000", "files": {}}'], ids=["empty", "cut", "other"]
)
def test_a_damaged_done_mark_is_found_by_its_readers(place, damage):
    with place.worker("a") as worker:
        compute(worker, worker.try_claim(0))
    assert counted_rows(place) == ALL_ROWS
    _, write = file_in(place, "done/000000")
    write(damage)
    with pytest.raises(DamagedFileError):
        counted_rows(place)


@pytest.mark.parametrize("damage", ["mark cut", "other mark", "result cut", "result gone"])
def test_a_damaged_done_unit_is_opened_again_and_computes_only_the_lost_rows(place, damage):
    with place.worker("a") as worker:
        for unit in range(2):
            compute(worker, worker.try_claim(unit))
    store = place.store("b")
    (part, *_) = sorted(item.path for item in store.list(store.run.claim(0, "0000")) if is_result(item.path))
    read, write = file_in(place, f"units/000000/0000/{part.name}")
    if damage.startswith("result"):
        write(read()[:-9])
        if damage == "result gone":
            store.delete(part)
    else:
        write = file_in(place, "done/000000")[1]
        write(b"{" if damage == "mark cut" else b'{"unit": 1, "claim": "0000", "files": {}}')
    assert reopen_damaged_units(store) == [0]
    assert not is_done(place)
    assert reopen_damaged_units(store) == []
    with place.worker("b") as worker:
        claim = worker.try_claim(0)
        assert len(claim.inherited) == ROWS - damage.startswith("result")
        compute(worker, claim)
    assert [counted_rows(place, unit) for unit in range(2)] == [ALL_ROWS] * 2


def test_a_claim_offered_again_inherits_exactly_what_it_names(place):
    with place.worker("a") as worker:
        compute(worker, worker.try_claim(0))
        foreign = worker.try_claim(1)
        other = add_row(worker, foreign, 0)
        store = place.store("a")
        store.fetch("state")
        store.fetch("results", "claims")
        files = list(done_mark(store.run, 0).files)
        assert offer_again(store, 0, inherited=[files[0], other], fill=lambda folder: None)
        store.delete(store.run.done(0))
        again = worker.try_claim(0)
        assert (again.name, rows_in(again.inherited)) == ("0002", [0])  # of its own unit alone
        compute(worker, again)
    assert counted_rows(place) == ALL_ROWS


def test_an_old_listing_costs_work_and_doubles_nothing(place, monkeypatch):
    without_beats(monkeypatch)
    with stale_listings(place), place.worker("b") as second:
        assert second.try_claim(1) is not None  # its listings of unit 0 are from before anybody claimed it
        units = OpenUnits(place.store("b"), [{"unit": unit} for unit in range(2)])
        with place.worker("a") as first:
            compute(first, first.try_claim(0))
        assert second.try_claim(0) is None
        assert units.claim(second, {1}) is None
    assert counted_rows(place) == ALL_ROWS


def test_a_kill_between_any_two_operations_loses_and_doubles_nothing(place, monkeypatch):
    """A worker is killed before its next operation on the store; the next worker finishes the unit."""
    without_beats(monkeypatch)
    all_dead(monkeypatch)
    for unit in range(MOST_OPERATIONS):
        victim = place.silent_worker(f"victim-{unit}")
        with killed_after(place, unit) as done:
            try:
                claim = victim.try_claim(unit)
                compute(victim, claim)
                is_over = True
            except Killed:
                is_over = False
        with place.worker("heir") as heir:
            claim = heir.try_claim(unit)
            if claim is not None:
                compute(heir, claim)
        assert is_done(place, unit)
        assert counted_rows(place, unit) == ALL_ROWS
        if is_over:
            assert done[0] > ROWS
            return
    raise AssertionError("a unit takes more operations than are tried")
