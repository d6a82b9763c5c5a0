"""For tests that plain PyTorch's rows are equal bit for bit: whether they can be, on this processor and here."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from batchinfer.model.row_computations import plain_computations
from batchinfer.model.transformer import Transformer
from batchinfer_kernels.row_check import RowComputation, why_rows_differ


def skip_unless_equal(computed: Transformer | Iterable[RowComputation]) -> None:
    """Skip with the reason where a run of this model, or of these computations, would say that rows are not equal."""
    computations = plain_computations(computed) if isinstance(computed, Transformer) else computed
    reason = why_rows_differ(computations)
    if reason is not None:
        pytest.skip(f"in plain PyTorch on this processor {reason}")
