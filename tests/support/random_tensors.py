"""Random tensors for tests of operations."""

from __future__ import annotations

import torch


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values, the same on any machine."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
