"""A quick share of tests/chaos/disturb.py: every victim and every deed, at random moments."""

from __future__ import annotations

import pytest

from support.disturbances import DEEDS, VICTIMS, disturb, make_calm

# finish, a rank and a controller, each with another signal; what test_resume and test_faults do not do anyway
NUMBERS = (999, 1003, 1007)
MORE = (1005, 1010)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    return make_calm(tmp_path_factory.mktemp("calm"))


@pytest.mark.parametrize(
    "number",
    [
        NUMBERS[1],  # make test: a rank
        *(
            pytest.param(number, marks=pytest.mark.all) for number in NUMBERS if number != NUMBERS[1]
        ),  # make test: a rank
        *(pytest.param(number, marks=pytest.mark.slow) for number in MORE),
    ],
)
def test_a_disturbed_run_ends_like_a_calm_one(calm, tmp_path, number):
    print(disturb(calm, tmp_path / "run", number))


def test_the_share_holds_every_victim_and_deed():
    assert {VICTIMS[number % 3] for number in NUMBERS} == set(VICTIMS)
    assert {DEEDS[number // 3 % 3] for number in NUMBERS} == set(DEEDS)
