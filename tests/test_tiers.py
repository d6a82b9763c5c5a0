"""The tiers of the tests: files of `make check`, and parameters that `make test` leaves out."""

from __future__ import annotations

import pytest

from support.paths import ROOT
from support.tiers import first_in_make_test


def test_the_files_of_make_check_are_there_once_and_in_order():
    files = (ROOT / "tests" / "check.txt").read_text().splitlines()
    assert files == sorted(set(files))
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_the_long_tests_are_there_once_and_in_order():
    tests = (ROOT / "tests" / "long.txt").read_text().splitlines()
    assert tests == sorted(set(tests))
    for name in tests:
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), name


def test_all_parameters_but_the_first_are_left_to_make_test_all():
    slow = pytest.param(3, marks=pytest.mark.slow, id="three")
    first, second, third = first_in_make_test([1, (2, "b"), slow])
    assert first == 1
    assert (second.values, [mark.name for mark in second.marks]) == ((2, "b"), ["all"])
    assert (third.values, third.id, [mark.name for mark in third.marks]) == ((3,), "three", ["slow", "all"])
