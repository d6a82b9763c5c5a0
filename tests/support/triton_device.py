"""The device of tests of the Triton operations: a GPU if there is one, else Triton's interpreter on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from batchinfer_kernels.triton import probe
from support import random_tensors

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))  # kernels that no job takes yet are there
REASON = probe.why_not()
if probe.interprets() and REASON is None:
    from interpreter import multiply_in_float64

    multiply_in_float64()

DEVICE = torch.device("cpu" if probe.interprets() else "cuda")
needs_triton = pytest.mark.skipif(REASON is not None, reason=f"no Triton operations on this machine: {REASON}")

# Against float64 of the operands as they are; for FP8 those are the rounded ones.
TOLERANCE = {"bf16": 1e-2, "fp8": 1e-3}


def random(*shape, seed=0, dtype=torch.bfloat16):
    """Normal values, the same on any device."""
    return random_tensors.random(*shape, seed=seed, dtype=dtype).to(DEVICE)


def relative_error(result, exact):
    """The largest error over the largest value."""
    assert torch.isfinite(result).all()
    return ((result.double() - exact).abs().max() / exact.abs().max()).item()


def calc_diff(result, exact):
    """1 - cosine-like similarity of both, as DeepGEMM's tests measure it."""
    result = result.double()
    assert torch.isfinite(result).all()
    return (1 - 2 * (result * exact).sum() / (result * result + exact * exact).sum()).item()
