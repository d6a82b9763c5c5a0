"""Tokens without all logits: products in 8 bits rule out nearly all columns, and the others' are exact.

The tokens are those of `argmax` and `draw` of `linear(x, weight)`, ties included; csrc/screen.h says why.
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

    def candidates(
        self,
        x: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        allowed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the columns that each row's token may be, their products, and whether the row is certain.

        Of a row with temperature 0 these are the columns with the largest product, of others the ones that `draw` may
        take: at least the first top_k of its order, or with top_p from 1 on those with min_p of the largest weight. So
        `draw` from these products takes the same column as from all.

        Args:
            x: [T, D].
            temperature: [T] float64; 0: greedy.
            top_k: [T] int64, at least 1 in rows that are not greedy, unless they have min_p and no top_p.
            top_p: [T] float64.
            min_p: [T] float64.
            allowed: [T, ceil(V / 32)] int32, columns that the token may be, as in `apply_token_bitmask`; None: all.

        Returns:
            ([T, K] int64 columns, ascending; [T, K] float32 products; [T] bool); K: as many as some row has. Behind a
            row's own are column 0 and a product that has no weight. A certain row has finite products only; the columns
            of a row that is not certain mean nothing.
        """
        screen = self.values, self.columns, self.most
        settings = temperature, top_k, top_p, min_p
        return library().screened_candidates(whole_pairs(x), *self.weight.plain, *screen, *settings, allowed)


def can_screen(weight: Packed) -> bool:
    """Return whether a weight can be screened, on a processor whose products in 8 bits are quicker."""
    return (
        weight.kind in (WeightKind.BFLOAT16, WeightKind.FLOAT32)
        and 0 < weight.depth <= MOST_DEPTH
        and weight.num_columns > 0
        and library().screening_pays()
    )
