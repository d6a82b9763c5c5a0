"""The expert exchange of one GPU among many, without the others: local copies of the bytes that would travel.

With balanced routing a GPU receives as many rows as it sends: one per token and expert. Here each row that would be
sent is copied to where one would be received, in FP8 with scales; results are summed, in decode after their filled rows
have been copied together. So the experts get the right number of rows of the right size, from this GPU's own tokens
instead of the others'.

    decode    blocks [slots, ranks × tokens, D] as DeepEP's low-latency mode has them, partly filled ("masked")
    prefill   rows sorted by slot, each slot's from a whole tile on, as DeepEP's version 2 hands them out ("contiguous")
"""

# T tokens, K experts per token, S slots of this GPU, C room of a slot, M = T * K rows, P rows with those between slots,
# D hidden, J scales of a row

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from batchinfer.parallel.dispatch import ExpertInput
from batchinfer.parallel.placement import Placement
from batchinfer_kernels.reference.fp8 import FP8, ROW_BLOCK
from batchinfer_kernels.reference.places import ExpertRows

_TILE_ROWS = 128  # of deep_gemm's grouped product


@dataclass(frozen=True)
class Rows:
    """The destinations of T tokens' rows: entry j = (token, k) goes to slot j % S, behind the earlier entries."""

    token_SM: list[torch.Tensor]  # per slot the token of each of its rows
    source_P: torch.Tensor  # the token of each row when each slot's begin at a whole tile; any for gaps
    place_M: torch.Tensor  # the row of each entry: of those, or of the filled rows of all slots together
    counts: list[int]
    counts_S: torch.Tensor

    @classmethod
    def of(cls, num_tokens: int, topk: int, num_slots: int, device: torch.device, *, tile_rows: int) -> Rows:
        """Made once per number of tokens."""
        entries = torch.arange(num_tokens * topk, device=device)
        of_slot = [entries[slot::num_slots] for slot in range(num_slots)]
        place_M, starts = torch.empty_like(entries), [0]
        for rows in of_slot:
            place_M[rows] = starts[-1] + torch.arange(len(rows), device=device)
            starts.append(starts[-1] + -(-len(rows) // tile_rows) * tile_rows)
        source_P = torch.zeros(starts[-1], dtype=torch.int64, device=device)
        source_P[place_M] = entries // topk
        counts = [len(rows) for rows in of_slot]
        return cls([rows // topk for rows in of_slot], source_P, place_M, counts, torch.tensor(counts, device=device))


@dataclass(slots=True)
class CopyHandle:
    """Rows that have been copied."""

    received: ExpertInput
    rows: Rows
    weights_TK: torch.Tensor
    ready_s: None = None
    arrived_s: None = None

    def wait(self) -> ExpertInput:
        """The rows for this GPU's experts."""
        return self.received


@dataclass(slots=True)
class CopiedSums:
    """Results that have been copied back; the sum is taken by `wait`."""

    back_MD: ExpertRows
    rows: Rows
    weights_TK: torch.Tensor
    sum_per_token: Callable[..., torch.Tensor]
    ready_s: None = None
    arrived_s: None = None

    def wait(self) -> torch.Tensor:
        """[T, D] float32."""
        return self.sum_per_token(self.back_MD, self.rows.place_M, self.weights_TK)


class CopyDispatcher:
    """See Dispatcher; one serves all layers, for in one stream its buffers are free again when a layer is done.

    Args:
        num_ranks: of the deployment unit.
        num_slots: routed experts of this GPU.
        is_masked: decode's layout instead of prefill's.
        quantize, sum_per_token: the operations of these names.
    """

    def __init__(
        self,
        num_ranks: int,
        num_slots: int,
        *,
        is_masked: bool,
        quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        sum_per_token: Callable[..., torch.Tensor],
    ):
        self.num_ranks = num_ranks
        self.num_slots = num_slots
        self.is_masked = is_masked
        self._quantize = quantize
        self._sum_per_token = sum_per_token
        self._rows: dict[int, Rows] = {}

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        is_counted: torch.Tensor | None = None,
    ) -> CopyHandle:
        """Round the tokens to FP8 and copy one row per entry; see Dispatcher."""
        num_tokens, topk = topk_ids.shape
        if num_tokens not in self._rows:
            tile_rows = 1 if self.is_masked else _TILE_ROWS
            self._rows[num_tokens] = Rows.of(num_tokens, topk, self.num_slots, x.device, tile_rows=tile_rows)
        rows = self._rows[num_tokens]
        values, scales = self._quantize(x, ROW_BLOCK)
        make = self._blocks if self.is_masked else self._tiles
        return CopyHandle(make(values.view(torch.uint8), scales, rows), rows, topk_weights)

    def combine(self, y: ExpertRows, handle: CopyHandle) -> CopiedSums:
        """Take each filled row back; see Dispatcher."""
        rows = handle.rows
        if isinstance(y, torch.Tensor) and self.is_masked:
            back_MD: ExpertRows = torch.cat([block[:count] for block, count in zip(y, rows.counts, strict=True)])
        else:
            back_MD = y  # the exchange reads rows where they are, and its published time has that in it
        return CopiedSums(back_MD, rows, handle.weights_TK, self._sum_per_token)

    def place(self, placement: Placement) -> None:
        """See Dispatcher; the slots of a slice stay as they are."""
        raise AssertionError("a slice has no other ranks to exchange experts with")

    def _tiles(self, bytes_TD: torch.Tensor, scales_TJ: torch.Tensor, rows: Rows) -> ExpertInput:
        """Rows of each slot from a whole tile on; scales lie column by column, as DeepEP has them when asked."""
        x_PD = bytes_TD.index_select(0, rows.source_P).view(FP8)
        scales_PJ = scales_TJ.t().index_select(1, rows.source_P).t()
        return ExpertInput(x_PD, scales_PJ, "contiguous", rows.counts_S, tile_rows=_TILE_ROWS)

    def _blocks(self, bytes_TD: torch.Tensor, scales_TJ: torch.Tensor, rows: Rows) -> ExpertInput:
        """Blocks with room for all tokens of all ranks; scales of a block lie column by column, as DeepEP has them."""
        num_tokens, width = bytes_TD.shape
        room = self.num_ranks * num_tokens
        x_SCD = bytes_TD.new_empty(self.num_slots, room, width)
        scales_SJC = scales_TJ.new_empty(self.num_slots, scales_TJ.shape[1], room)
        for slot, (token_M, count) in enumerate(zip(rows.token_SM, rows.counts, strict=True)):
            torch.index_select(bytes_TD, 0, token_M, out=x_SCD[slot, :count])
            scales_SJC[slot, :, :count] = scales_TJ.t()[:, token_M]
        return ExpertInput(x_SCD.view(FP8), scales_SJC.mT, "masked", rows.counts_S)
