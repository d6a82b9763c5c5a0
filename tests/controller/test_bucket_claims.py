"""Units claimed in a bucket: one worker at a time, nothing lost or doubled, whatever is killed and whatever fails."""

import pyarrow as pa
import pytest

from batchinfer.config import S3Config
from batchinfer.controller.bucket_claims import BucketClaims
from batchinfer.controller.result_files import write_results
from batchinfer.run.store import bucket_lease
from batchinfer.run.store.bucket import BucketStorage
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
