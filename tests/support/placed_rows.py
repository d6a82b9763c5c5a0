"""Rows as a grouped product leaves them, at places of their own, and as DeepEP hands them out, in whole tiles."""

from __future__ import annotations

import torch

from batchinfer_kernels.reference.places import PlacedRows


def in_tiles(rows_MD: torch.Tensor, counts: list[int], tile_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows sorted by expert, each expert's from a multiple of `tile_rows` on, and their places; the rest is NaN."""
    places: list[int] = []
    start = 0
    for count in counts:
        places += range(start, start + count)
        start += -(-count // tile_rows) * tile_rows
    place_M = torch.tensor(places, dtype=torch.int64, device=rows_MD.device)
    values_SD = rows_MD.new_full((start, rows_MD.shape[1]), torch.nan)
    values_SD[place_M] = rows_MD
    return values_SD, place_M


def placed(rows_MD: torch.Tensor, seed: int = 0) -> PlacedRows:
    """Return rows at places in no order, with NaN at all other places."""
    places_S = torch.randperm(2 * len(rows_MD) + 3, generator=torch.Generator().manual_seed(seed))
    place_M = places_S[: len(rows_MD)].to(rows_MD.device)
    values_SD = rows_MD.new_full((len(places_S), rows_MD.shape[1]), torch.nan)
    values_SD[place_M] = rows_MD
    return PlacedRows(values_SD, place_M)
