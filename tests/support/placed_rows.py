"""Rows as a grouped product leaves them: at places of their own."""

from __future__ import annotations

import torch

from batchinfer_kernels.reference.places import PlacedRows


def placed(rows_MD: torch.Tensor, seed: int = 0) -> PlacedRows:
    """Rows at places in no order, among others of nobody that are not numbers."""
    places_S = torch.randperm(2 * len(rows_MD) + 3, generator=torch.Generator().manual_seed(seed))
    place_M = places_S[: len(rows_MD)].to(rows_MD.device)
    values_SD = rows_MD.new_full((len(places_S), rows_MD.shape[1]), torch.nan)
    values_SD[place_M] = rows_MD
    return PlacedRows(values_SD, place_M)
