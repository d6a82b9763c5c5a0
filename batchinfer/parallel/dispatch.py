"""Expert exchange: send each token to its experts, bring the results back.

    handle = dispatcher.dispatch(x, topk_ids, topk_weights)     rows start to travel
    received = handle.wait()                                    rows for the experts of this rank
    future = dispatcher.combine(experts(received), handle)      results start to travel back
    y = future.wait()                                           one weighted sum per token

Between a call and its wait the caller may compute something else; that is where communication hides. Whatever the
ranks and the placement, the sum is taken by the token's own rank over unreduced rows, in ascending top-k position and
in float32, so that it does not depend on where the experts are.
"""

# T tokens of this rank, D hidden, K experts per token, E experts of this rank, M received (token, expert) rows

from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch

from batchinfer.parallel.placement import Placement
from batchinfer.parallel.row_format import RowFormat
from batchinfer.parallel.spans import Arriving
from batchinfer_kernels import registry
from batchinfer_kernels.reference.fp8 import ScaledRows
from batchinfer_kernels.reference.places import ExpertRows


@dataclass(frozen=True, slots=True)
class ExpertInput:
    """Rows for the experts of this rank.

    x: [M, D], sorted by expert ("contiguous"), or [E, capacity, D] with a count of filled rows ("masked").
    scales: for FP8 rows one float32 per 128 values, [..., D / 128]; None for wider rows.
    num_rows_E: [E] int64 on the device of x, rows of each expert slot of this rank.
    tokens_M: where the rows have not moved: the row of x, [T, D] then, behind each row sorted by expert; contiguous.
    tile_rows: contiguous: each expert's rows begin at a multiple of this; those between are nobody's. 1: no gaps.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    layout: Literal["contiguous", "masked"]
    num_rows_E: torch.Tensor
    tokens_M: torch.Tensor | None = None
    tile_rows: int = 1


# rows on their way to the experts; also what `combine` needs to bring them back
HandleT = TypeVar("HandleT", bound=Arriving[ExpertInput])


class Dispatcher(Protocol[HandleT]):
    """The expert exchange of one layer. Calls come in the same order on all ranks; several may be under way."""

    @property
    def stays_here(self) -> bool:
        """Whether no row leaves this rank."""
        ...

    @property
    def why_not_recorded(self) -> str | None:
        """Reason why a CUDA graph cannot hold the exchange; None if shapes are fixed and the host waits for nothing."""
        ...

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        is_counted: torch.Tensor | None = None,
    ) -> HandleT:
        """Start sending rows to their experts.

        Args:
            x: [T, D], T may differ from rank to rank and may be 0.
            topk_ids: [T, K] int64, expert ids, all different within a row.
            topk_weights: [T, K] float32.
            is_counted: [T] int64, 0 for tokens that need not be sent, whose sums may be anything; None: all are.
        """
        ...

    def combine(self, y: ExpertRows, handle: HandleT) -> Arriving[torch.Tensor]:
        """Start sending the experts' results back; `y` has the layout that `handle.wait()` gave.

        Sorted rows ("contiguous") may be PlacedRows: they are read where they lie.

        The future's result is [T, D] float32, per token the sum over its experts of weight × row.
        """
        ...

    def place(self, placement: Placement) -> None:
        """Change the slots of the experts, between steps and on all ranks at once; their number stays."""
        ...


@dataclass(frozen=True, slots=True)
class LocalHandle:
    """Rows of a dispatch that stays on this rank: `place_M` is the sorted row of each (token, k) entry."""

    received: ExpertInput
    place_M: torch.Tensor
    weights_TK: torch.Tensor
    ready_s: None = None
    arrived_s: None = None

    def wait(self) -> ExpertInput:
        """Return the sorted rows (nothing to wait for)."""
        return self.received


@dataclass(frozen=True, slots=True)
class Finished:
    """The future of a combine that is complete."""

    y_TD: torch.Tensor
    ready_s: None = None
    arrived_s: None = None

    def wait(self) -> torch.Tensor:
        """Return the sums (nothing to wait for)."""
        return self.y_TD


class LocalDispatcher:
    """The exchange of a single rank that holds all experts: a sort, and a sum after undoing it.

    Args:
        row_format: form of the rows for the experts; None: as they come.
        gathers: put rows in their order; otherwise they stay where they are and ExpertInput says which they are.
    """

    stays_here = True
    why_not_recorded: str | None = None

    def __init__(self, num_experts: int, row_format: RowFormat | None = None, *, gathers: bool = True):
        self.num_experts = num_experts
        self.row_format = row_format
        self._gathers = gathers

    @property
    def takes_fp8(self) -> bool:
        """Whether `dispatch` takes rows that are rounded to FP8 already."""
        return self.row_format is not None and self.row_format.dtype == "fp8"

    def dispatch(
        self,
        x: torch.Tensor | ScaledRows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        is_counted: torch.Tensor | None = None,
    ) -> LocalHandle:
        """Sort the (token, expert) rows by expert, tokens in order within one; see Dispatcher."""
        scales = None
        if isinstance(x, ScaledRows):
            assert self.takes_fp8, "rows are rounded for experts in FP8 alone"
            dtype, scales, x = torch.bfloat16, x.scales, x.values
        else:
            dtype = x.dtype
            if self.row_format is not None:
                x, scales = self.row_format.rounded(x)
        tokens_M, place_M, num_rows_E = sort_by_expert(topk_ids, self.num_experts, dtype)
        if self._gathers:
            x, scales = x[tokens_M], None if scales is None else scales[tokens_M]
        rows = ExpertInput(x, scales, "contiguous", num_rows_E, None if self._gathers else tokens_M)
        return LocalHandle(rows, place_M, topk_weights)

    def combine(self, y: ExpertRows, handle: LocalHandle) -> Finished:
        """Undo the sort and sum; see Dispatcher."""
        return Finished(sum_per_token(y, handle.place_M, handle.weights_TK))

    def place(self, placement: Placement) -> None:
        """Do nothing, see Dispatcher: all experts are on this rank."""


def sort_by_expert(
    ids_TK: torch.Tensor, num_experts: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort (token, k) entries; return the token of each row [M], the row of each entry [M], and rows per expert [E]."""
    return registry.select("sort_by_expert", dtype=dtype, device=ids_TK.device)(ids_TK, num_experts)


def sum_per_token(sorted_MD: ExpertRows, place_M: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Return [T, D] float32: each token's weighted sum of rows, which are in the order of a dispatch.

    Args:
        place_M: the sorted row of each (token, k) entry.
    """
    run = registry.select("sum_per_token", dtype=sorted_MD.dtype, device=sorted_MD.device)
    return run(sorted_MD, place_M, weights_TK)


def count_rows(expert_M: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return [num_experts] int64, the count of each expert id, on the device (bincount would wait for the device)."""
    if expert_M.device.type == "cpu":
        return torch.bincount(expert_M, minlength=num_experts)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=expert_M.device)
    return counts_E.scatter_add_(0, expert_M, torch.ones_like(expert_M))
