"""Places of the experts' rows in tiles that no two experts share, in plain PyTorch."""

# E experts, M rows sorted by expert, S places, D hidden

from dataclasses import dataclass
from typing import NamedTuple

import torch


class ExpertPlaces(NamedTuple):
    """Places of rows sorted by expert when each expert starts at a whole tile.

        rows      0 0 0 1 2 2 …
        places    0 0 0 - 1 - - - 2 2 - -      with tiles of 4 rows; "-": empty

    place_M: [M] int64, the place of each row.
    expert_S: [S] int32, the expert of each place, -1 for empty ones.
    source_S: [S] int64, the row to copy to each place; 0 for empty ones, so that they hold numbers.
    """

    place_M: torch.Tensor
    expert_S: torch.Tensor
    source_S: torch.Tensor


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Rows [M, D] sorted by expert that are still at their places in tiles, not moved together.

    values_SD: the rows at all places; empty places may hold anything.
    place_M: [M] int64, the place of each row.
    """

    values_SD: torch.Tensor
    place_M: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values_SD.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return self.values_SD.device

    def __len__(self) -> int:
        return len(self.place_M)


ExpertRows = torch.Tensor | PlacedRows


def in_order(rows: ExpertRows) -> torch.Tensor:
    """Return the rows in order, [M, D]; PlacedRows are moved together."""
    return rows.values_SD[rows.place_M] if isinstance(rows, PlacedRows) else rows


def stored_rows(rows: ExpertRows, index_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor that holds the rows, and the indices in it of the rows `index_M`."""
    return (rows.values_SD, rows.place_M[index_M]) if isinstance(rows, PlacedRows) else (rows, index_M)


def expert_places(
    num_rows_E: torch.Tensor, num_rows: int, tile_rows: int, tokens_M: torch.Tensor | None = None
) -> ExpertPlaces:
    """Assign places, with room for the most tiles that `num_rows` rows may need: only the device knows the counts.

    Args:
        num_rows_E: [E] integer, rows of each expert.
        num_rows: M, their sum or more; entries of `place_M` behind the last row may be anything.
        tokens_M: [M] int64, the source of each row; None: the row itself.
    """
    num_experts, device = len(num_rows_E), num_rows_E.device
    padded_E = (num_rows_E + tile_rows - 1) // tile_rows * tile_rows
    ends_E = num_rows_E.cumsum(0)
    moved_E = (padded_E.cumsum(0) - padded_E) - (ends_E - num_rows_E)
    row_M = torch.arange(num_rows, device=device)
    expert_M = torch.searchsorted(ends_E, row_M, right=True).clamp(max=num_experts - 1)
    place_M = row_M + moved_E[expert_M]
    is_row_M = row_M < ends_E[-1]
    num_places = most_places(num_experts, num_rows, tile_rows)
    expert_S = torch.full((num_places,), -1, dtype=torch.int32, device=device)
    expert_S[place_M] = torch.where(is_row_M, expert_M, -1).to(torch.int32)
    source_S = torch.zeros(num_places, dtype=torch.int64, device=device)
    source_S[place_M] = torch.where(is_row_M, row_M if tokens_M is None else tokens_M, 0)
    return ExpertPlaces(place_M, expert_S, source_S)


def most_places(num_experts: int, num_rows: int, tile_rows: int) -> int:
    """Return S: each expert that has a row may leave all but one of a tile's places empty."""
    return (num_rows + (tile_rows - 1) * min(num_experts, num_rows)) // tile_rows * tile_rows
