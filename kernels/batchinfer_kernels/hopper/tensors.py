"""A check that tensors are on a GPU."""

import torch


def is_on_gpu(*tensors: torch.Tensor) -> bool:
    """Return whether all tensors are on a GPU."""
    return all(tensor.is_cuda for tensor in tensors)
