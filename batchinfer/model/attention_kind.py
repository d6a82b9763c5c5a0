"""Attention kinds, second half: reading weights, computing, and checking that rows do not depend on their batch.

The first half, sizes and costs, has no torch (attention_config.py). attention_kinds.py has the table of kinds.
"""

# T tokens, S wanted rows, D hidden

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from batchinfer.model.ops import Ops
from batchinfer.model.step import AttentionStep
from batchinfer.model.weights import Projection
from batchinfer_kernels.row_check import RowComputation
from batchinfer_kernels.weight_format import Weight


class LayerAttention(Protocol):
    """Attention of one layer in two parts, between which a micro-batch may wait.

    The result of `project` is for the same object's `attend`.
    """

    def project(
        self, hidden_TD: torch.Tensor, step: AttentionStep, pages: Any, rows_S: torch.Tensor | None = None
    ) -> Any: ...

    def attend(self, hidden_TD: torch.Tensor, queries: Any, step: AttentionStep, pages: Any, /) -> torch.Tensor: ...


class LayerReader(Protocol):
    """The parts of a WeightLoader that read a layer's attention."""

    @property
    def joins_products(self) -> bool: ...
    def tensor(self, name: str, dtype: torch.dtype | None = None, *, finite: bool = False) -> torch.Tensor: ...
    def norm(self, name: str) -> torch.Tensor: ...
    def source(self, name: str, dtype: torch.dtype | None = None, *, finite: bool = False) -> torch.Tensor: ...
    def pack(self, weight: torch.Tensor) -> Weight: ...
    def router(self, name: str, *, finite: bool = False) -> Any: ...
    def projection(self, *prefixes: str) -> Projection: ...
    def joined_projection(self, *prefixes: str, order: list[int] | None = None) -> Projection: ...


class MemoryParts(NamedTuple):
    """The tensors in the memory of a layer whose requests have a state.

    pages: [number of pages, values] each, all of one dtype.
    slots: [number of slots, ...] each.
    stored: those of `slots` that matter after a multiple of `unit_tokens` tokens (AttentionConfig).
    """

    pages: tuple[torch.Tensor, ...]
    slots: tuple[torch.Tensor, ...]
    stored: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Functions of one attention kind; their `config` is the kind's subclass of AttentionConfig.

    weights: the type of a layer's weights.
    unused_ops: operations of other kinds, which this one never calls.
    load: (reader, config, prefix of the tensors' names, layer) to weights.
    build: (ops, config, weights, weight [D] (None: no norm) and epsilon of the norm before it, layer) to attention.
    products: weights to ("linear", "batched" or "router", weight) of each product of rows.
    computations: (ops, config, the first layer's weights, dtype) to attention itself, for the check of its rows.
    memory: (config, layers, pages, slots of requests, dtype, device) to the memory of each layer; None: pages alone.
    parts: the memory of a layer to its tensors; given with `memory`.
    """

    weights: type[Any]
    unused_ops: tuple[str, ...]
    load: Callable[[LayerReader, Any, str, int], Any]
    build: Callable[[Ops, Any, Any, Any, float, int], LayerAttention]
    products: Callable[[Any], Iterator[tuple[str, object]]]
    computations: Callable[[Ops, Any, Any, torch.dtype], Iterator[RowComputation]]
    memory: Callable[[Any, int, int, int, torch.dtype, torch.device], Sequence[Any]] | None = None
    parts: Callable[[Any], MemoryParts] | None = None
