"""Places of the experts' rows in tiles that no two experts share: one kernel, in Triton."""

# E experts, M rows sorted by expert, S places

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.places import ExpertPlaces, most_places

_PLACES = 128


def expert_places(
    num_rows_E: torch.Tensor, num_rows: int, tile_rows: int, tokens_M: torch.Tensor | None = None
) -> ExpertPlaces:
    num_experts, device = len(num_rows_E), num_rows_E.device
    num_places = most_places(num_experts, num_rows, tile_rows)
    place_M = torch.empty(num_rows, dtype=torch.int64, device=device)
    expert_S = torch.empty(num_places, dtype=torch.int32, device=device)
    source_S = torch.empty(num_places, dtype=torch.int64, device=device)
    if num_places:
        _expert_places[(triton.cdiv(num_places, _PLACES),)](
            num_rows_E, tokens_M, place_M, expert_S, source_S, num_experts, num_places, tile_rows,
            EXPERTS=triton.next_power_of_2(num_experts), TILE=_PLACES, num_warps=8,
        )  # fmt: skip
    return ExpertPlaces(place_M, expert_S, source_S)


@triton.jit
def _expert_places(
    num_rows_ptr, tokens_ptr, place_ptr, expert_ptr, source_ptr, num_experts, num_places, tile_rows,
    EXPERTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find the experts of this program's places from all counts, and store places, experts and sources."""
    experts = tl.arange(0, EXPERTS)
    num_rows = tl.load(num_rows_ptr + experts, mask=experts < num_experts, other=0).to(tl.int32)
    padded = (num_rows + tile_rows - 1) // tile_rows * tile_rows
    behind = tl.cumsum(padded, 0)
    first_row = tl.cumsum(num_rows, 0) - num_rows

    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    expert = tl.sum((behind[None, :] <= places[:, None]).to(tl.int32), 1)
    mine = tl.minimum(expert, EXPERTS - 1)
    in_expert = places - tl.gather(behind - padded, mine, 0)
    is_row = (expert < num_experts) & (in_expert < tl.gather(num_rows, mine, 0))
    row = tl.gather(first_row, mine, 0) + in_expert
    source = row.to(tl.int64)
    if tokens_ptr is not None:
        source = tl.load(tokens_ptr + row, mask=is_row, other=0)
    is_place = places < num_places
    tl.store(expert_ptr + places, tl.where(is_row, expert, -1), mask=is_place)
    tl.store(source_ptr + places, tl.where(is_row, source, 0), mask=is_place)
    tl.store(place_ptr + row, places.to(tl.int64), mask=is_place & is_row)
