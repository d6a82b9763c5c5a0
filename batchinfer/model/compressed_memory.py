"""Memory of compressed attention in one layer: entries in pages, and what waits of each request in slots.

A page of 64 tokens has the entries of its tokens; an entry of 128 tokens is in two pages, half of its values in each.
A slot has the last rows of its request, and the parts of tokens whose entry is not made yet, or that the next entry
needs again. Both are rings by position: a later token takes the place of one that is no longer needed, so that a slot
needs no clearing.
"""

# B requests, P pages of a request, W rows of the window, C width of a row, E entries

from collections.abc import Sequence
from typing import NamedTuple

import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.attention_kind import MemoryParts
from batchinfer.model.compressed_config import WIDE, CompressedConfig
from batchinfer.model.page_memory import zeros


class LayerMemory(NamedTuple):
    """The memory of one layer.

    window: [num_slots, W, C].
    entries: of each compressor [num_pages, values of a page].
    waiting: of each compressor [num_slots, tokens, 2, raw width] float32, values above gates.
    """

    window: torch.Tensor
    entries: tuple[torch.Tensor, ...]
    waiting: tuple[torch.Tensor, ...]


def empty_memory(
    config: CompressedConfig, num_layers: int, num_pages: int, num_slots: int, dtype: torch.dtype, device: torch.device
) -> list[LayerMemory]:
    """Return the memory of each of the first layers; on a CPU it takes memory when it is used.

    Raises:
        ConfigError: the address space does not suffice.
    """
    sizes = num_pages, num_slots, dtype, device
    return [_empty_layer(config, layer, *sizes) for layer in range(num_layers)]


def _empty_layer(
    config: CompressedConfig, layer: int, num_pages: int, num_slots: int, dtype: torch.dtype, device: torch.device
) -> LayerMemory:
    compressors = config.compressors(layer)
    return LayerMemory(
        window=zeros((num_slots, config.window, config.head_dim), dtype, device),
        entries=tuple(zeros((num_pages, PAGE_TOKENS * one.width // one.ratio), dtype, device) for one in compressors),
        waiting=tuple(
            zeros((num_slots, one.num_waiting, 2, one.raw_width), torch.float32, device) for one in compressors
        ),
    )


def memory_parts(memory: LayerMemory) -> MemoryParts:
    """Return the tensors of a layer's memory; see MemoryParts.

    After a multiple of the tokens of the largest entry only overlapping entries need tokens from before.
    """
    overlapping = tuple(ring for ring in memory.waiting if ring.shape[1] < WIDE)
    return MemoryParts(memory.entries, (memory.window, *memory.waiting), (memory.window, *overlapping))


def copy_state(memory: LayerMemory, source: int, target: int) -> None:
    """Copy the state in a slot to another one."""
    for ring in (memory.window, *memory.waiting):
        ring[target] = ring[source]


def put_state(memory: LayerMemory, slot: int, parts: Sequence[torch.Tensor]) -> None:
    """Put a state after whole entries into a slot; see MemoryParts.stored."""
    for ring, part in zip(memory_parts(memory).stored, parts, strict=True):
        ring[slot] = part


def take_state(memory: LayerMemory, slot: int, parts: Sequence[torch.Tensor]) -> None:
    """Copy the state after whole entries out of a slot."""
    for ring, part in zip(memory_parts(memory).stored, parts, strict=True):
        part.copy_(ring[slot])


def copy_entries(memory: LayerMemory, source: int, target: int) -> None:
    """Copy the entries in a page to another one."""
    for pages in memory.entries:
        pages[target] = pages[source]
