"""Attention kinds, first half: sizes and costs by config.json, for code that has no torch.

The second half, which computes, is an AttentionKind (attention_kind.py). A kind is a subclass of AttentionConfig with
its reader of config.json, and a row in attention_kinds.py. No other code asks which kind a model has.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.rope_config import RopeConfig

Tensors = Iterator[tuple[str, tuple[int, ...]]]  # names and shapes


class LayerMatrices(NamedTuple):
    """Weights of one layer's attention as a CPU holds them; a matrix is (inputs, outputs)."""

    narrow: tuple[tuple[int, int], ...]  # held in 8 bits if the job's dtype says so
    wide: tuple[tuple[int, int], ...] = ()  # packed for products in the run's dtype
    num_others: int = 0  # values of norms, biases and matrices that are not packed


@dataclass(frozen=True, slots=True)
class AttentionConfig(ABC):
    """Attention of one model, whose tokens have rows in pages of 64 tokens (PAGE_TOKENS)."""

    unit_tokens: ClassVar[int] = PAGE_TOKENS  # tokens that follow a multiple of it change no page before it
    why_no_drafts: ClassVar[str | None] = None  # reason why the layer for multi-token prediction cannot draft
    num_attention_heads: int
    rope: RopeConfig

    @property
    @abstractmethod
    def row_width(self) -> int:
        """Values kept per token and layer; the mean where layers differ."""

    def values_per_token(self, num_layers: int) -> int:
        """Return the values kept per token over all layers."""
        return num_layers * self.row_width

    def state_bytes(self, bytes_per_value: int, *, stored: bool = False) -> int:
        """Return the bytes that a request keeps apart from its rows; none in a kind whose state is rows alone.

        Args:
            stored: of a state in the KV store, which is one after a multiple of `unit_tokens`.
        """
        return 0

    @property
    def cuts_anywhere(self) -> bool:
        """Whether a prompt can go on after any token of a shared prefix, by the rows of that prefix alone."""
        return self.state_bytes(1) == 0

    @property
    @abstractmethod
    def rotary_dim(self) -> int:
        """Values of a head's query that are rotated by its position."""

    @property
    @abstractmethod
    def query_width(self) -> int:
        """Values of all heads' queries."""

    @property
    @abstractmethod
    def output_width(self) -> int:
        """Values of all heads' results, before the output projection."""

    @property
    def most_keys(self) -> float:
        """Largest number of keys that a query attends to; infinite if it attends to all keys before it."""
        return math.inf

    @property
    @abstractmethod
    def products_per_key(self) -> int:
        """Multiplications of one layer for each key that a decode row attends to."""

    def products_per_scored_key(self, num_layers: int) -> int:
        """Return the multiplications of all layers for each key that is scored in order to choose some of them."""
        return 0

    @abstractmethod
    def num_weights(self, hidden: int, num_layers: int) -> int:
        """Return the mean number of a layer's weights without norms; a token is multiplied with each once."""

    @abstractmethod
    def matrices(self, hidden: int, layer: int) -> LayerMatrices:
        """Return a layer's weights as a CPU holds them."""

    @abstractmethod
    def tensors(self, prefix: str, hidden: int, layer: int) -> Tensors:
        """Yield name and shape of a layer's tensors in a checkpoint, in the names of transformers."""

    @property
    @abstractmethod
    def why_no_fp8_pages(self) -> str | None:
        """Reason why pages cannot hold rows in FP8, to go on a sentence; None if they can."""

    @property
    def fp8_row_bytes(self) -> int:
        """Bytes of a row in FP8, if pages can hold that."""
        raise NotImplementedError


def linear_tensors(prefix: str, num_out: int, num_in: int, *, bias: bool) -> Tensors:
    """Yield name and shape of the tensors of a linear map."""
    yield f"{prefix}.weight", (num_out, num_in)
    if bias:
        yield f"{prefix}.bias", (num_out,)
