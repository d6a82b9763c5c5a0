"""Units claimed in a bucket by workers that are killed, while the store fails; and what a unit costs in requests."""

import pytest

from support.bucket_claimants import ROWS, disturbed
from support.faulty_store import Faults
from support.s3_servers import server_with

pytest.importorskip("obstore")

server = server_with("runs")


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
        # the claim, then each result, then whether it was taken over, and the mark; a worker's lease comes and goes
        expected = num_units * (1 + ROWS + 2) + 2
        assert faults.requests.total() - faults.requests["list"] == expected
