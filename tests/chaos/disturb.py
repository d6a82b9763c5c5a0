"""200 disturbances of small jobs, each with a rerun: `make chaos`. A quick share: tests/journeys/test_chaos.py."""

from __future__ import annotations

import pytest

from support.disturbances import disturb, make_calm

NUM_DISTURBANCES = 200


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    return make_calm(tmp_path_factory.mktemp("calm"))


@pytest.mark.parametrize("number", range(NUM_DISTURBANCES))
def test_a_disturbed_run_ends_like_a_calm_one(calm, tmp_path, number):
    print(disturb(calm, tmp_path / "run", number))
