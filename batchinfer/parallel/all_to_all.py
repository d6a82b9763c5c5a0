"""Expert parallelism over any row exchange: every rank sends (token, expert) rows to the slots that take them.

Rows are sorted by slot, so those for one rank are together; each travels there, through its expert and back
unreduced. The token's own rank sums, in the order of the token's experts: what a slot or rank holds changes nothing.
"""

# T tokens of this rank, K experts per token, M = T * K rows sent, N rows received, D hidden, S slots of one rank

import itertools
from dataclasses import dataclass, field

import torch

from batchinfer.parallel.dispatch import ExpertInput, sort_by_expert, sum_per_token
from batchinfer.parallel.exchange import Exchange, PendingRows
from batchinfer.parallel.placement import Placement
from batchinfer.parallel.row_format import RowFormat
from batchinfer_kernels.reference.places import ExpertRows, PlacedRows
from batchinfer_kernels.transfer import in_one_copy


@dataclass(slots=True)
class AllToAllHandle:
    """A dispatch under way, and the order by which combine sends each row back."""

    pending: PendingRows
    row_format: RowFormat
    num_values: int
    place_M: torch.Tensor  # the sent row of each (token, k) entry
    weights_TK: torch.Tensor
    sizes: list[list[int]] = field(default_factory=list)  # rows received by [source rank][slot]
    ready_s: float | None = None
    arrived_s: float | None = None

    def wait(self) -> ExpertInput:
        """Return rows by slot, within a slot by source rank and token."""
        received = self.pending.wait()
        self.ready_s, self.arrived_s, self.sizes = received.ready_s, received.arrived_s, received.counts
        parts = [rows.split(sizes) for rows, sizes in zip(received.rows, self.sizes, strict=True)]
        rows_NB = torch.cat([part for slot_parts in zip(*parts, strict=True) for part in slot_parts])
        x_ND, scales = self.row_format.unpack(rows_NB, self.num_values)
        num_rows_S = torch.tensor([sum(sizes) for sizes in zip(*self.sizes, strict=True)])
        if not x_ND.is_cpu:
            (num_rows_S,) = in_one_copy([num_rows_S], x_ND.device)
        return ExpertInput(x_ND, scales, "contiguous", num_rows_S)


@dataclass(slots=True)
class AllToAllFuture:
    """A combine under way."""

    pending: PendingRows
    row_format: RowFormat
    handle: AllToAllHandle
    ready_s: float | None = None
    arrived_s: float | None = None

    def wait(self) -> torch.Tensor:
        """Wait for all results; return [T, D] float32 sums."""
        received = self.pending.wait()
        self.ready_s, self.arrived_s = received.ready_s, received.arrived_s
        # rank by rank in slot order: the order in which the rows were sent
        sorted_MD, _ = self.row_format.unpack(torch.cat(received.rows), self.handle.num_values)
        return sum_per_token(sorted_MD, self.handle.place_M, self.handle.weights_TK)


class AllToAllDispatcher:
    """The expert exchange of one layer; see Dispatcher.

    Args:
        exchange: the exchange of the expert-parallel group.
        placement: the placement of this layer, equal on all ranks.
        row_format: form of the rows on their way to the experts.
    """

    stays_here = False
    why_not_recorded: str | None = (
        "this exchange sends as many rows as there are, which the host has to know; cluster.exchange = "
        "'deepep-low-latency' does not"
    )

    def __init__(self, exchange: Exchange, placement: Placement, row_format: RowFormat):
        assert placement.num_ranks == exchange.size, f"{placement.num_ranks} ranks placed, {exchange.size} in the group"
        self._exchange = exchange
        self._placement, self._turn = placement, 0
        self._row_format = row_format
        self._combine_format = RowFormat.for_combine(row_format)

    def place(self, placement: Placement) -> None:
        """Change the slots of the experts, see Dispatcher."""
        self._placement, self._turn = placement, 0

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        is_counted: torch.Tensor | None = None,
    ) -> AllToAllHandle:
        """Start sending each (token, expert) row to a slot of its expert."""
        placement, num_values = self._placement, x.shape[1]
        slot_M = placement.slots_for(topk_ids.flatten(), self._exchange.rank, self._turn)
        self._turn += 1
        tokens_M, place_M, num_rows_S = sort_by_expert(slot_M.view(topk_ids.shape), placement.num_slots, x.dtype)
        counts = num_rows_S.view(placement.num_ranks, -1)
        rows = self._exchange.buffer(len(tokens_M), self._row_format.row_bytes(num_values))
        torch.index_select(self._row_format.pack(x), 0, tokens_M, out=rows)
        pending = self._exchange.start(rows, counts if rows.is_cuda else counts.tolist())
        return AllToAllHandle(pending, self._row_format, num_values, place_M, topk_weights)

    def combine(self, y: ExpertRows, handle: AllToAllHandle) -> AllToAllFuture:
        """Start sending each result back to the rank of its token, without a copy."""
        pack = self._combine_format.pack
        rows = self._exchange.buffer(len(y), self._combine_format.row_bytes(handle.num_values))
        if isinstance(y, PlacedRows):
            torch.index_select(pack(y.values_SD), 0, torch.cat(_by_rank(y.place_M, handle.sizes)), out=rows)
        else:
            torch.cat(_by_rank(pack(y), handle.sizes), out=rows)
        pending = self._exchange.start(rows, [[sum(sizes)] for sizes in handle.sizes])
        return AllToAllFuture(pending, self._combine_format, handle)


def _by_rank(rows_N: torch.Tensor, sizes: list[list[int]]) -> list[torch.Tensor]:
    """Return rows by slot in the order of their ranks, by slot within a rank; `sizes` as the handle has them."""
    by_slot, num_ranks = rows_N.split(list(itertools.chain(*zip(*sizes, strict=True)))), len(sizes)
    return [by_slot[slot * num_ranks + rank] for rank in range(num_ranks) for slot in range(len(sizes[0]))]
