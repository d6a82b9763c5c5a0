"""Units claimed in a bucket by workers that are killed, while the store fails; and what a unit costs in requests."""

import time

import pytest

from batchinfer.run.store.bucket_claims_copy import ClaimsCopy
from support.bucket_claimants import ROWS, disturbed
from support.claim_places import add_row, bucket_place, compute
from support.faulty_store import Faults
from support.s3_servers import server_with

pytest.importorskip("obstore")

server = server_with("runs")


def test_kills_and_faults_lose_nothing_and_double_nothing(server, tmp_path):
    """A quick share; tests/chaos/object_store.py has the rest."""
    faults = Faults(share=0.06, hold_s=0.6, seed=3)
    disturbed(server, tmp_path, "quick", faults, num_units=40, num_kills=3)
    assert faults.injected.total() >= 10


def test_copies_of_results_have_the_dates_of_the_bucket(server, tmp_path, monkeypatch):
    """By these, `status` measures speeds, and `peek` finds the files that were written last."""
    place = bucket_place(tmp_path, server.endpoint, "dates")
    with place.worker("a") as worker:
        compute(worker, worker.try_claim(0))
        add_row(worker, worker.try_claim(1), 0)
        store = place.store("reader")
        store.fetch("state")
        monkeypatch.setattr(ClaimsCopy, "_clock", lambda _: -1000.0)  # so dates are easily told from now
        store.fetch("results", "claims")
    dates = {path.relative_to(store.run.root).parts[1]: path.stat().st_mtime for path in store.run.root.rglob("part-*")}
    assert dates.keys() == {"000000", "000001"}
    assert all(abs(time.time() - 1000 - date_s) < 100 for date_s in dates.values())


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
        # the claim, then each result, then whether it was taken over, and the mark; a worker's lease comes and goes
        expected = num_units * (1 + ROWS + 2) + 2
        assert faults.requests.total() - faults.requests["list"] == expected
