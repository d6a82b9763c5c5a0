"""The operations a model was built with, chosen once; every layer calls them through this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from batchinfer.records import ModelError
from batchinfer_kernels import backend

TensorOp = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation per operation; shapes as in `batchinfer_kernels.reference` and `reference_mla`."""

    linear: TensorOp
    batched_matmul: TensorOp
    rms_norm: TensorOp
    silu_mul: TensorOp
    rope: TensorOp
    gate: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    grouped_mlp: TensorOp
    masked_mlp: TensorOp
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
