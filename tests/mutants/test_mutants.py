"""A share of `make mutants`: in `make test-all` five sabotages are caught, and all of the list can still be made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.mutants import ROOT, Mutant, MutantError, is_caught, mutated, read_mutants

MUTANTS = read_mutants()
SHARE = [mutant for mutant in MUTANTS if mutant.in_test_all]
EXAMPLE = Mutant("an example", "batchinfer/stop.py", "self.requested = True", "self.requested = False", "tests/x.py")


@pytest.mark.all  # make test: the sabotage below that survives runs the same way
@pytest.mark.parametrize("mutant", SHARE, ids=lambda mutant: mutant.name)
def test_a_sabotage_is_caught_by_the_tests_nearest_to_it(mutant):
    assert is_caught(mutant), f"{mutant.tests} pass with it"


def test_the_share_has_five():
    assert len(SHARE) == 5


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_can_be_made_and_its_tests_are_there(mutant):
    mutated(mutant)
    for test in mutant.tests.split():
        path, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8"), test


@pytest.mark.parametrize(
    "change",
    [{"old": "self.requested = Maybe"}, {"old": "requested"}, {"file": "batchinfer/none.py"}, {"new": EXAMPLE.old}],
)
def test_a_mutant_that_cannot_be_made_is_named(change):
    with pytest.raises(MutantError, match="'an example': its old text stands "):
        mutated(replace(EXAMPLE, **change))


def test_a_mutant_that_its_tests_do_not_see_survives_and_the_tree_stays_as_it_is():
    before = (ROOT / EXAMPLE.file).read_bytes()
    assert not is_caught(replace(EXAMPLE, tests="tests/kv/test_kv.py::test_pages_for_rounds_up"))
    with pytest.raises(MutantError, match="'an example': pytest cannot run"):
        is_caught(EXAMPLE)
    assert (ROOT / EXAMPLE.file).read_bytes() == before
