"""Tensors between the host and a GPU, through pinned memory.

On the CPU nothing is copied. Pinned buffers come from torch's cache, which hands one out again only after the copies
that use it are over.
"""

# B bytes

from collections.abc import Sequence

import torch


def in_one_copy(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy host tensors of one dtype, any shapes, to the device: joined, copied once, and cut apart there.

    The host does not wait for the copy; later work on the current stream does.
    """
    parts = _joined(tensors, device).to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device without waiting; return the tensor itself on the CPU."""
    return tensor if device.type == "cpu" else in_one_copy([tensor], device)[0]


def refill(held: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite the tensors that `in_one_copy` returned with others of the same shapes, again in one copy."""
    whole = torch.empty(0, dtype=held[0].dtype, device=held[0].device).set_(held[0].untyped_storage())
    assert [tensor.shape for tensor in held] == [tensor.shape for tensor in tensors]
    whole.copy_(_joined(tensors, whole.device), non_blocking=True)


def _joined(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Join all values in host memory, pinned if the device is a GPU."""
    num_values = sum(tensor.numel() for tensor in tensors)
    joined = torch.empty(num_values, dtype=tensors[0].dtype, pin_memory=device.type == "cuda")
    return torch.cat([tensor.reshape(-1) for tensor in tensors], out=joined)


def to_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors on the host, after one wait for all work that was started before."""
    if not any(tensor.is_cuda for tensor in tensors):
        return list(tensors)
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(next(tensor.device for tensor in tensors if tensor.is_cuda)).synchronize()
    return copies


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished all work that was started; return at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate [B] uint8 in host memory, not cleared, for bytes from or to this device."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def put_pages(pages: torch.Tensor, page_ids: Sequence[int], content: torch.Tensor) -> None:
    """Copy pages from host memory into the pool; the host does not wait, so pageable memory is copied twice on a GPU.

    Args:
        pages: [L, P, 64, W], the pool.
        page_ids: N places in it.
        content: [N, L, 64, W] on the host.
    """
    ids = torch.tensor(page_ids, dtype=torch.int64)
    if pages.device.type != "cpu":
        (ids,), content = in_one_copy([ids], pages.device), content.to(pages.device, non_blocking=True)
    pages[:, ids] = content.transpose(0, 1)


def take_pages(pages: torch.Tensor, page_ids: Sequence[int]) -> torch.Tensor:
    """Return some pages of the pool [L, P, 64, W] on the host as [N, L, 64, W], the form that `put_pages` takes."""
    ids = to_device(torch.tensor(page_ids, dtype=torch.int64), pages.device)
    return to_host(pages.transpose(0, 1).index_select(0, ids))[0]
