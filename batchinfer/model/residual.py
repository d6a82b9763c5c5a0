"""Residual kinds: how a sublayer (attention, MLP) takes its input from the state between layers, and changes that."""

# T tokens, S of these rows, D hidden

from typing import Any, Protocol

import torch

from batchinfer.model.ops import Ops


class Residual(Protocol):
    """The state between sublayers, in plain models the sum of all results so far.

    A sublayer adds its result to the tensor that `base` returns, in its last product.
    """

    def open(self, embedded_TD: torch.Tensor) -> Any:
        """Return the state before the first layer."""
        ...

    def enter(self, state: Any) -> tuple[torch.Tensor, Any]:
        """Return a sublayer's input before its norm, and the part of the state that goes past the sublayer."""
        ...

    def take(self, ops: Ops, past: Any, rows_S: torch.Tensor) -> Any:
        """Return that part of some tokens, by row."""
        ...

    def base(self, past: Any) -> torch.Tensor:
        """Return [T, D], to which the sublayer adds its result."""
        ...

    def leave(self, past: Any, sum_TD: torch.Tensor) -> Any:
        """Return the state after a sublayer, whose result was added to the base."""
        ...

    def close(self, state: Any) -> torch.Tensor:
        """Return [T, D], the input of the last norm."""
        ...


class PlainResidual:
    """One row per token, to which each sublayer adds its result."""

    def open(self, embedded_TD: torch.Tensor) -> torch.Tensor:
        return embedded_TD

    def enter(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return state, state

    def take(self, ops: Ops, past: torch.Tensor, rows_S: torch.Tensor) -> torch.Tensor:
        taken: torch.Tensor = ops.gather_rows(past, rows_S)
        return taken

    def base(self, past: torch.Tensor) -> torch.Tensor:
        return past

    def leave(self, past: torch.Tensor, sum_TD: torch.Tensor) -> torch.Tensor:
        return sum_TD

    def close(self, state: torch.Tensor) -> torch.Tensor:
        return state
