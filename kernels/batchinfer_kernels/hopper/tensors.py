"""Where tensors are."""

import torch


def is_on_gpu(*tensors: torch.Tensor) -> bool:
    """Whether all of them are on a GPU."""
    return all(tensor.is_cuda for tensor in tensors)
