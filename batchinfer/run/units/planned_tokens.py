"""Tokens that a plan expects of its units, by which progress is measured."""

# U units

from typing import Any

import numpy as np


def planned_tokens(rows: list[dict[str, Any]], counts: dict[str, Any]) -> np.ndarray:
    """Return [U, 2] float64: the prompt tokens to compute and the output tokens expected of each unit.

    The plan's expected output tokens are divided among the units by their limits (sums of max_tokens). Without an
    expectation, each unit counts its limit.

    Args:
        rows: of plan/units.
        counts: of the plan (plan/summary).
    """
    expected, most = counts["expected_output_tokens"], counts["max_output_tokens"]
    share = 1.0 if expected is None or not most else expected / most
    tokens_U2 = np.array([(row["new_tokens"], row["max_output_tokens"]) for row in rows], dtype=np.float64)
    return tokens_U2.reshape(-1, 2) * (1.0, share)
