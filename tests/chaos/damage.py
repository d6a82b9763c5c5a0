"""2,000 damaged runs: `make chaos`. A quick share: tests/finish/test_damage.py."""

from __future__ import annotations

import shutil

import pytest

from support.damage import KINDS, damaged_copy, expect_equal_or_named, flip_bit, make_computed_run_with_outputs

NUM_TRIALS = 2000
FLIPS_OF_10 = 8  # the others go round the other kinds
PER_TEST = 100
REPAIR_EVERY = 10


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    return make_computed_run_with_outputs(tmp_path_factory.mktemp("computed"))


@pytest.mark.parametrize("first", range(0, NUM_TRIALS, PER_TEST))
def test_no_damage_reaches_the_outputs(computed, first):
    run, expected = computed
    found = []
    for number in range(first, first + PER_TEST):
        target = run.parent / f"damaged-{number}"
        kind = flip_bit if number % 10 < FLIPS_OF_10 else KINDS[1 + number % (len(KINDS) - 1)]
        print(number, kind.__name__, damaged_copy(run, target, number, kind=kind))
        found.append(expect_equal_or_named(target, expected, repair=number % REPAIR_EVERY == 0))
        shutil.rmtree(target)
    assert "named" in found
