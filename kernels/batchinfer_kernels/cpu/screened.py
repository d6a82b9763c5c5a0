"""Greedy tokens without all logits: products in 8 bits rule out nearly all columns, and the others' are exact.

The tokens are those of `argmax(linear(x, weight))`, ties included; csrc/screen.h says why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from batchinfer_kernels.cpu.packed import Packed, WeightKind, library, whole_pairs

MOST_DEPTH = 2**16  # kMostScreened of csrc/screen.h
_NORM, _ERROR = 1, 2  # parts of a screen's columns


@dataclass(frozen=True, slots=True)
class Screen:
    """A packed weight's columns in 8 bits, and how far their products can be from the exact ones."""

    weight: Packed
    values: torch.Tensor  # [panels, bytes] uint8
    columns: torch.Tensor  # [panels, 4, 64] float32
    most: float  # largest norm of a column, with its error

    @classmethod
    def of(cls, weight: Packed) -> Screen | None:
        """Round a weight in bfloat16 or float32; return None if its values are not finite or too large for bounds."""
        values, columns = library().screen(*weight.plain)
        most = float((columns[:, _NORM] + columns[:, _ERROR]).max())
        return cls(weight, values, columns, most) if math.isfinite(most) else None

    def largest(self, x: torch.Tensor, allowed: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's column with the largest product, the first among equals, and whether that is certain.

        A certain row has finite products only.

        Args:
            x: [T, D].
            allowed: [T, ceil(V / 32)] int32, columns that may be the one, as in `apply_token_bitmask`, of a row without
                any: column 0; None: all may.

        Returns:
            ([T] int64, [T] bool); the column of a row that is not certain means nothing.
        """
        screen = self.values, self.columns, self.most
        return library().largest_columns(whole_pairs(x), *self.weight.plain, *screen, allowed)


def can_screen(weight: Packed) -> bool:
    """Return whether a weight can be screened, on a processor where products in 8 bits take half the time."""
    return (
        weight.kind in (WeightKind.BFLOAT16, WeightKind.FLOAT32)
        and 0 < weight.depth <= MOST_DEPTH
        and weight.num_columns > 0
        and library().screening_pays()
    )
