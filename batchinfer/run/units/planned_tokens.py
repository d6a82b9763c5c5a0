"""Tokens that a plan expects of its units: what progress is measured by."""

# U units

from typing import Any

import numpy as np


def planned_tokens(rows: list[dict[str, Any]], counts: dict[str, Any]) -> np.ndarray:
    """[U, 2] float, by unit: prompt tokens to compute, and output tokens expected.

    Where the plan knows how long answers are, a unit gets a share of them by its limits (max_tokens); else its limits.

    Args:
        rows: of plan/units.
        counts: of the plan (plan/summary).
    """
    expected, most = counts["expected_output_tokens"], counts["max_output_tokens"]
    share = 1.0 if expected is None or not most else expected / most
    tokens_U2 = np.array([(row["new_tokens"], row["max_output_tokens"]) for row in rows], dtype=np.float64)
    return tokens_U2.reshape(-1, 2) * (1.0, share)
