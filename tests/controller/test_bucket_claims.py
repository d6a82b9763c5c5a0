"""Units claimed in a bucket: one worker at a time, nothing lost or doubled, whatever is killed and whatever fails."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.config import S3Config
from batchinfer.controller import open_units
from batchinfer.controller.bucket_claims import BucketClaims
from batchinfer.controller.open_units import OpenUnits
from batchinfer.controller.result_files import write_results
from batchinfer.run import bucket_lease, liveness
from batchinfer.run.bucket_storage import BucketStorage
from support.bucket_claimants import ROWS, disturbed, mark_of
from support.faulty_store import Faults
from support.s3_servers import server_with

pytest.importorskip("obstore")


class Clock:
    now_s = 0.0

    def monotonic(self):
        return self.now_s


server = server_with("runs")


@pytest.fixture
def place(server, tmp_path, request):
    """Gives storages of one run folder, each on a node of its own."""

    def storage(node):
        name = request.node.name.replace("[", "-").replace("]", "")
        found = BucketStorage(f"s3://runs/{name}", S3Config(endpoint=server.endpoint), str(tmp_path / node))
        found.run.root.mkdir(parents=True, exist_ok=True)
        return found

    return storage


@pytest.fixture
def elsewhere(monkeypatch):
    """Nobody's process can be seen: others are only dead when their leases run out."""
    monkeypatch.setattr(bucket_lease, "is_dead", lambda _: False)


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(bucket_lease, "time", found)
    return found


def claims_at(storage):
    return BucketClaims(storage.run, storage.bucket)


def add_row(claims, claim, number):
    table = pa.table({"row": [number]})
    path = write_results(claim.folder, number, table)
    claims.add(claim, path)
    return path


def test_a_unit_is_held_by_one_and_given_back_with_what_is_committed(place):
    with claims_at(place("a")) as first, claims_at(place("b")) as second:
        claim = first.try_claim(7)
        assert (claim.unit, claim.name, claim.inherited) == (7, "0000", ())
        assert second.try_claim(7) is None
        kept = add_row(first, claim, 0)
        first.commit(claim)
        add_row(first, claim, 1)  # put, but named by nobody yet
        first.release(claim)
        again = second.try_claim(7)
        assert again.name == "0001"
        assert [path.name for path in again.inherited] == [kept.name]
        assert pq.read_table(again.inherited[0])["row"].to_pylist() == [0]
        add_row(second, again, 1)
        second.complete(again)
        assert list(mark_of(place("a"), 7)["files"]) == [
            f"units/000007/0000/{kept.name}",
            next(f"units/000007/0001/{path.name}" for path in again.folder.glob("part-*")),
        ]
        assert first.try_claim(7) is None


def test_a_lease_runs_out_by_the_watchers_clock_alone(place, elsewhere, clock):
    dead = claims_at(place("dead"))
    dead._worker._version = dead._bucket.create(dead._worker.name, dead._worker._document(released=False))
    assert dead.try_claim(0) is not None
    with claims_at(place("alive")) as mine:
        assert mine.try_claim(0) is None
        clock.now_s += bucket_lease.LEASE_S - 1
        assert mine.try_claim(0) is None
        # a sign of life: the time begins anew
        dead._worker._version = dead._bucket.replace(
            dead._worker.name, dead._worker._document(released=False), dead._worker._version
        )
        clock.now_s += bucket_lease.LEASE_S - 1
        assert mine.try_claim(0) is None
        clock.now_s += bucket_lease.LEASE_S
        assert mine.try_claim(0).name == "0001"


def test_a_watcher_tries_when_a_lease_would_run_out_not_at_the_end_of_its_pause(place, elsewhere, clock, monkeypatch):
    monkeypatch.setattr(open_units, "time", clock)
    dead = claims_at(place("dead"))
    dead._worker._version = dead._bucket.create(dead._worker.name, dead._worker._document(released=False))
    assert dead.try_claim(0) is not None
    with claims_at(place("alive")) as mine:
        units = OpenUnits(place("alive"), [{"unit": 0}])
        while clock.now_s < 5:
            assert units.claim(mine, set()) is None
            clock.now_s += 1
        dead._worker._version = dead._bucket.replace(
            dead._worker.name, dead._worker._document(released=False), dead._worker._version
        )
        while units.claim(mine, set()) is None:
            clock.now_s += 1
            assert clock.now_s <= 6 + bucket_lease.LEASE_S  # it looked a second after the sign of life


def test_who_was_taken_over_is_told_and_its_later_results_are_ignored(place, capsys):
    first, second = claims_at(place("a")), claims_at(place("b"))
    with first, second:
        claim = first.try_claim(0)
        kept = add_row(first, claim, 0)
        first.commit(claim)
        first._bucket.delete(first._worker.name)  # as if it had been silent for long
        taken = second.try_claim(0)
        assert [path.name for path in taken.inherited] == [kept.name]
        add_row(first, claim, 1)
        first.commit(claim)
        assert "unit 0 was taken over by another worker" in capsys.readouterr().err
        first.complete(claim)
        assert place("c").bucket.read("done/000000") is None
        add_row(second, taken, 1)
        second.complete(taken)
        assert mark_of(place("c"), 0)["claim"] == "0001"


def test_a_damaged_result_is_not_inherited(place, server, capsys):
    with claims_at(place("a")) as first:
        claim = first.try_claim(0)
        bad, good = add_row(first, claim, 0), add_row(first, claim, 1)
        first.commit(claim)
        first.release(claim)
    storage = place("b")
    storage.bucket.put(f"units/000000/0000/{bad.name}", b"something else")
    with claims_at(storage) as second:
        assert [path.name for path in second.try_claim(0).inherited] == [good.name]
    assert "is left out: its bytes are not those that were written" in capsys.readouterr().err


def test_a_dead_process_of_this_machine_is_known_at_once(place, monkeypatch):
    dead = claims_at(place("dead"))
    monkeypatch.setattr(bucket_lease, "this_process", lambda: {**liveness.this_process(), "pid": 2**22 - 1})
    dead._bucket.create(dead._worker.name, dead._worker._document(released=False))
    monkeypatch.undo()
    assert dead.try_claim(0) is not None
    with claims_at(place("alive")) as mine:
        assert mine.try_claim(0).name == "0001"


@pytest.mark.all  # make test: who was taken over, above
def test_kills_and_faults_lose_nothing_and_double_nothing(server, tmp_path):
    """A quick share; tests/chaos/object_store.py has the rest."""
    faults = Faults(share=0.06, hold_s=0.6, seed=3)
    disturbed(server, tmp_path, "quick", faults, num_units=40, num_kills=3)
    assert faults.injected.total() >= 10


@pytest.mark.all  # make test: a unit is held by one, above
def test_a_unit_costs_so_many_requests(server, tmp_path):
    """A worker alone; others ask now and then whether a unit that is held has become free."""
    for num_units in (3, 9):
        faults = Faults()
        (tmp_path / str(num_units)).mkdir()
        disturbed(
            *(server, tmp_path / str(num_units), f"counted-{num_units}", faults),
            **{"num_units": num_units, "num_kills": 0, "num_workers": 1, "is_calm": True},
        )
        # the lease, then a result and the lease for each commit, then the mark; a worker's own lease comes and goes;
        # and how the store wants ETags is found out once
        expected = num_units * (1 + 2 * ROWS + 1) + 2 + (0 if server.takes_quotes else 2)
        assert faults.requests.total() - faults.requests["list"] == expected
