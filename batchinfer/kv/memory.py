"""The content of pages and of requests' states as bytes in host memory, in which it travels and is stored.

page    all layers one after another, in each the values of 64 tokens
state   all layers one after another, in each one row of every tensor of slots
"""

# L layers, P pages of the pool, N pages, W width of a row, V values of a page over all layers

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from batchinfer_kernels.transfer import put_pages, take_pages, to_device, to_host

TensorsOfLayers = tuple[tuple[torch.Tensor, ...], ...]  # of each layer some tensors, or none


@dataclass(frozen=True, slots=True)
class KvMemory:
    """KV pages of a rank, and the states of its requests if its model's requests have states.

    pages: [L, P, 64, W]; or, where layers differ, tensors [P, values] of one dtype, in the order of layers.
    slots: of each layer tensors [number of slots, ...], a row of each for a request.
    stored: of each layer those of `slots` that matter after a multiple of the tokens of the largest entry.
    """

    pages: torch.Tensor | tuple[torch.Tensor, ...]
    slots: TensorsOfLayers = ()
    stored: TensorsOfLayers = ()

    @property
    def dtype(self) -> torch.dtype:
        return self._first.dtype

    @property
    def device(self) -> torch.device:
        return self._first.device

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of one page on the host: [L, 64, W], or [V]."""
        if isinstance(self.pages, torch.Tensor):
            return self.pages.shape[0], *self.pages.shape[2:]
        return (sum(one.shape[1] for one in self.pages),)

    @property
    def page_bytes(self) -> int:
        return torch.Size(self.page_shape).numel() * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's state; 0 if requests have none."""
        return _row_bytes(self.slots)

    @property
    def stored_bytes(self) -> int:
        """Bytes of a state after a multiple of the tokens of the largest entry."""
        return _row_bytes(self.stored)

    def take_pages(self, page_ids: Sequence[int]) -> torch.Tensor:
        """Return the content of N pages on the host: [N, *page_shape]."""
        if isinstance(self.pages, torch.Tensor):
            return take_pages(self.pages, page_ids)
        ids = to_device(torch.tensor(page_ids, dtype=torch.int64), self.device)
        return to_host(torch.cat([one[ids] for one in self.pages], dim=1))[0]

    def put_pages(self, page_ids: Sequence[int], content: torch.Tensor) -> None:
        """Copy [N, *page_shape], as `take_pages` returns it, into N pages; the caller may free its memory."""
        if isinstance(self.pages, torch.Tensor):
            put_pages(self.pages, page_ids, content)
            return
        ids = to_device(torch.tensor(page_ids, dtype=torch.int64), self.device)
        parts = content.to(self.device).split([one.shape[1] for one in self.pages], dim=1)
        for one, part in zip(self.pages, parts, strict=True):
            one[ids] = part

    def take_blocks(self, page_ids: Sequence[int], num_blocks: int) -> np.ndarray:
        """Copy the pages of some blocks to the host, in the layout of the KV store's files.

        Returns:
            [num_blocks, block_bytes] uint8, each block its pages one after another.
        """
        return self.take_pages(page_ids).view(torch.uint8).numpy().reshape(num_blocks, -1)

    def put_blocks(self, blocks: np.ndarray, page_ids: Sequence[int], *, skip_pages: int = 0) -> None:
        """Copy blocks into pages; the caller may free the blocks' memory.

        Args:
            blocks: contiguous, as `take_blocks` returns them.
            page_ids: destinations of the blocks' pages in order, without the skipped ones.
            skip_pages: leading pages of the blocks to leave out.
        """
        whole = torch.from_numpy(blocks).view(-1).view(self.dtype).view(-1, *self.page_shape)
        # not asynchronous: the caller frees the blocks' memory
        self.put_pages(page_ids, whole[skip_pages:].to(self.device))

    def take_state(self, slot: int) -> torch.Tensor:
        """Return the state in a slot: [state_bytes] uint8 on the host; empty without states."""
        return as_bytes([[one[slot] for one in layer] for layer in self.slots])

    def put_state(self, slot: int, content: torch.Tensor) -> None:
        """Copy [state_bytes] uint8, as `take_state` returns it, into a slot."""
        for layer, parts in zip(self.slots, _parts(self.slots, content), strict=True):
            for one, part in zip(layer, parts, strict=True):
                one[slot] = part.to(one.device)

    def stored_parts(self, content: torch.Tensor) -> TensorsOfLayers:
        """Return [stored_bytes] uint8 as a row of each tensor of `stored`, on the device."""
        return tuple(tuple(part.to(self.device) for part in parts) for parts in _parts(self.stored, content))

    def empty_stored(self) -> TensorsOfLayers:
        """Return a row of each tensor of `stored`, with any values."""
        return tuple(tuple(torch.empty_like(one[0]) for one in layer) for layer in self.stored)

    @property
    def _first(self) -> torch.Tensor:
        return self.pages if isinstance(self.pages, torch.Tensor) else self.pages[0]


def as_bytes(parts: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Return tensors of each layer, joined, as bytes on the host."""
    flat = [part.reshape(-1).view(torch.uint8) for layer in parts for part in layer]
    return to_host(torch.cat(flat))[0] if flat else torch.empty(0, dtype=torch.uint8)


def _row_bytes(layers: TensorsOfLayers) -> int:
    return sum(one[0].numel() * one.element_size() for layer in layers for one in layer)


def _parts(layers: TensorsOfLayers, content: torch.Tensor) -> list[list[torch.Tensor]]:
    """Split bytes into one row of each tensor; the rows are copies, so that each is aligned for its dtype."""
    found, start = [], 0
    for layer in layers:
        parts = []
        for one in layer:
            end = start + one[0].numel() * one.element_size()
            parts.append(content[start:end].clone().view(one.dtype).view(one.shape[1:]))
            start = end
        found.append(parts)
    assert start == len(content), f"a state of {len(content)} bytes, not {start}"
    return found
