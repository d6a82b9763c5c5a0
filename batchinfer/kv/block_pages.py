"""Copies of KV blocks between host memory, in the layout of files, and the device's pages."""

# L layers, P pages of the pool, N pages of some blocks, W latent width

from collections.abc import Sequence

import numpy as np
import torch

from batchinfer.kv.memory import KvMemory
from batchinfer_kernels.transfer import to_host


def blocks_from_pages(pages: torch.Tensor | Sequence[torch.Tensor], page_ids: list[int], num_blocks: int) -> np.ndarray:
    """Copy pages out of the pool.

    Args:
        pages: [L, P, 64, W], the pool; or tensors [P, values], see KvMemory.
        page_ids: [N] the pages of the blocks, in order.

    Returns:
        [num_blocks, block_bytes] uint8 in host memory, each block its pages one after another: [L, 64, W] each.
    """
    if not isinstance(pages, torch.Tensor):
        taken = KvMemory(tuple(pages)).take_pages(page_ids)
        return taken.view(torch.uint8).numpy().reshape(num_blocks, -1)
    content = torch.empty((len(page_ids), pages.shape[0], *pages.shape[2:]), dtype=pages.dtype, device=pages.device)
    for index, page in enumerate(page_ids):
        content[index].copy_(pages[:, page])
    return to_host(content)[0].view(torch.uint8).numpy().reshape(num_blocks, -1)


def finite_blocks(blocks: np.ndarray, dtype: torch.dtype) -> int:
    """Count the leading blocks that hold only finite numbers; rows in FP8 (uint8) are not checked.

    Args:
        blocks: [num_blocks, block_bytes] uint8, as `blocks_from_pages` returns them.
        dtype: of the pages.
    """
    if not dtype.is_floating_point:
        return len(blocks)
    # a sum that is finite has finite terms, and needs one pass
    wide = torch.float64 if dtype is torch.float32 else torch.float32
    is_finite = torch.from_numpy(blocks).view(dtype).sum(dim=1, dtype=wide).isfinite()
    return int(is_finite.to(torch.int8).cumprod(0).sum())


def blocks_to_pages(
    blocks: np.ndarray,
    pages: torch.Tensor | Sequence[torch.Tensor],
    page_ids: list[int],
    *,
    skip_pages: int = 0,
) -> None:
    """Copy blocks into the pool.

    Args:
        blocks: [num_blocks, block_bytes] uint8, contiguous, as `blocks_from_pages` returns them.
        pages: [L, P, 64, W], the pool; or tensors [P, values], see KvMemory.
        page_ids: [N] destinations of the blocks' pages, in order, without the skipped ones.
        skip_pages: leading pages of the blocks to leave out.
    """
    if not isinstance(pages, torch.Tensor):
        memory = KvMemory(tuple(pages))
        whole = torch.from_numpy(blocks).view(-1).view(memory.dtype).view(-1, *memory.page_shape)
        memory.put_pages(page_ids, whole[skip_pages:])
        return
    content = torch.from_numpy(blocks).view(-1).view(pages.dtype).view(-1, pages.shape[0], *pages.shape[2:])
    # not asynchronous: the caller frees the blocks' memory
    content = content[skip_pages:].to(pages.device)
    for index, page in enumerate(page_ids):
        pages[:, page].copy_(content[index])
