"""Parameters of which `make test` takes the first ones alone: the others show the same mechanism again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def first_in_make_test(values: Iterable[Any], num_first: int = 1) -> list[Any]:
    """Return the values for `parametrize`, of which all but the first are left to `make test-all`."""
    return [value if place < num_first else _left_to_test_all(value) for place, value in enumerate(values)]


def _left_to_test_all(value: Any) -> ParameterSet:
    if isinstance(value, ParameterSet):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.all], id=value.id)
    return pytest.param(*value if isinstance(value, tuple) else (value,), marks=pytest.mark.all)
