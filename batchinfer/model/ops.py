"""The operations a model was built with, chosen once; every layer calls them through this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from batchinfer.records import ModelError
from batchinfer_kernels import backend
from batchinfer_kernels.cpu.packed import Packed

TensorOp = Callable[..., torch.Tensor]
Weight = torch.Tensor | Packed  # as `pack` gives it


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation per operation; shapes as in the `reference` modules of batchinfer_kernels."""

    pack: Callable[..., Weight]
    pack_router: Callable[..., Any]
    linear: TensorOp
    batched_linear: TensorOp
    router: TensorOp
    rms_norm: TensorOp
    silu_mul: TensorOp
    rope_and_cache: TensorOp
    gate: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    grouped_mlp: TensorOp
    masked_mlp: TensorOp
    add_sums: TensorOp
    mla_prefill: TensorOp
    mla_decode: TensorOp

    @property
    def names(self) -> str:
        """Where the implementations come from: those that give the same bits have the same names."""
        return " ".join(sorted({backend.origin(getattr(self, field.name)) for field in fields(self)}))

    @classmethod
    def select(cls, choice: str = backend.AUTO, dtype: torch.dtype | None = None) -> Ops:
        """The best implementation that runs here ("auto"), or the one named for all operations.

        Raises:
            ModelError: the named one does not exist or cannot run here, with its reason.
        """
        try:
            return cls(**{field.name: backend.select(field.name, choice, dtype).run for field in fields(cls)})
        except backend.BackendError as error:
            raise ModelError(f"backend {choice!r}: {error}") from error
