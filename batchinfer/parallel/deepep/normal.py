"""DeepEP's two forms with rows sorted by slot: version 2, and the normal mode of version 1.

Both run on a second stream while the first one computes; `wait` makes the current stream wait for them, not the host.
Only `dispatch` holds the host up, until the other ranks have said how many rows will come.

    version 2   sends a token once per rank, hands out one row per (token, slot), and adds those up again; a slot's rows
                may begin at a whole tile of the grouped product, which then need not move them
    version 1   hands out the token; which of them a slot takes, weighting and adding up are left to us
"""

# T tokens of this rank, K experts per token, N tokens received, M received (token, slot) rows (gaps among them),
# S slots of this rank, D hidden

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from batchinfer.parallel.dispatch import ExpertInput, count_rows, sum_per_token
from batchinfer.parallel.placement import Placement
from batchinfer.parallel.row_format import SCALE_VALUES
from batchinfer_kernels import registry
from batchinfer_kernels.reference.places import ExpertRows, in_order

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # bfloat16, or FP8 with its scales


@dataclass(slots=True)
class Sums:
    """Sums on their way back, complete after `event`."""

    sums_TD: torch.Tensor
    event: Any
    ready_s: None = None
    arrived_s: None = None

    def wait(self) -> torch.Tensor:
        """Wait and return [T, D] float32; DeepEP has rounded the sums to bfloat16."""
        self.event.current_stream_wait()
        return self.sums_TD.float()


@dataclass(slots=True)
class ElasticHandle:
    """A dispatch under way with version 2."""

    rows: Rows
    weights_M: torch.Tensor
    tile_rows: int
    ep_handle: Any
    event: Any
    ready_s: None = None
    arrived_s: None = None

    def wait(self) -> ExpertInput:
        """Return rows by slot, in no particular order within one."""
        self.event.current_stream_wait()
        # where each slot's rows end; the next slot's begin at the next whole tile
        ends_S = self.ep_handle.psum_num_recv_tokens_per_expert.long()
        starts_S = F.pad((ends_S[:-1] + self.tile_rows - 1) // self.tile_rows * self.tile_rows, (1, 0))
        x_MD, scales = self.rows if isinstance(self.rows, tuple) else (self.rows, None)
        return ExpertInput(x_MD, scales, "contiguous", ends_S - starts_S, tile_rows=self.tile_rows)


@dataclass(slots=True)
class SlotDispatcher:
    """The exchange of one layer through DeepEP, whose "experts" are our slots; see Dispatcher.

    Args:
        buffer: of the group, shared by all layers.
        placement: of the layer; may be exchanged between steps.
        rank: whose tokens are sent.
        ids_dtype: integer type that the library was built for.
        use_fp8: rows travel in FP8, with a scale per 128 values.
    """

    buffer: Any
    placement: Placement
    rank: int
    ids_dtype: torch.dtype
    use_fp8: bool
    turn: torch.Tensor | None = None  # [] float64 on the device: a recorded dispatch counts on, too

    @property
    def stays_here(self) -> bool:
        """See Dispatcher."""
        return False

    @property
    def why_not_recorded(self) -> str | None:
        """See Dispatcher."""
        return (
            "this exchange waits on the host until other ranks have said how many rows will come; cluster.exchange = "
            "'deepep-low-latency' does not"
        )

    def place(self, placement: Placement) -> None:
        """See Dispatcher."""
        self.placement, self.turn = placement, None

    def slots(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Return [T, K] slots for [T, K] expert ids."""
        if self.turn is None:
            self.turn = torch.zeros((), dtype=torch.float64, device=topk_ids.device)
        slots_M = self.placement.slots_for(topk_ids.flatten(), self.rank, self.turn)
        if self.placement.has_replicas:
            self.turn += 1
        return slots_M.view(topk_ids.shape).to(self.ids_dtype)


@dataclass(slots=True)
class ElasticDispatcher(SlotDispatcher):
    """The exchange over version 2's ElasticBuffer.

    Args:
        tile_rows: each slot's rows begin at a multiple of this.
    """

    tile_rows: int = 1

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        is_counted: torch.Tensor | None = None,
    ) -> ElasticHandle:
        """Start sending each token to the ranks of its slots."""
        rows, _, weights_M, ep_handle, event = self.buffer.dispatch(
            _rows_to_send(x, self.use_fp8),
            topk_idx=self.slots(topk_ids),
            topk_weights=topk_weights.contiguous(),
            num_experts=self.placement.num_slots,
            expert_alignment=self.tile_rows,
            async_with_compute_stream=True,
            do_expand=True,
            use_tma_aligned_col_major_sf=self.use_fp8,  # as deep_gemm reads scales
        )
        return ElasticHandle(rows, weights_M, self.tile_rows, ep_handle, event)

    def combine(self, y: ExpertRows, handle: ElasticHandle) -> Sums:
        """Weight the results and start sending them back, as DeepEP adds rows up unweighted.

        Rows and weights in the gaps between slots may be anything, as DeepEP does not send them.
        """
        y_MD = in_order(y)
        weighted_MD = torch.empty(y_MD.shape, dtype=torch.bfloat16, device=y_MD.device)
        torch.mul(y_MD, handle.weights_M[:, None], out=weighted_MD)  # in float32, rounded once
        sums_TD, _, event = self.buffer.combine(weighted_MD, handle.ep_handle, async_with_compute_stream=True)
        return Sums(sums_TD, event)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The sorted rows of each received token: a token's own slots come first and ascending in K, then the rest."""

    rows_NK: torch.Tensor  # num_rows or more: a slot of another rank
    weights_NK: torch.Tensor
    num_rows: int
    num_local_slots: int

    def weighted_sums(self, y_MD: ExpertRows) -> torch.Tensor:
        """Return [N, D] float32: per token the sum of weight × row over the slots of this rank.

        Each token that came has a slot here, or it would not have come. Slots of other ranks count as this one's row
        with weight 0: that changes no sum, and what another token's row is makes no difference.
        """
        rows_NK = self.rows_NK[:, : self.num_local_slots]  # no token has more rows than that
        is_row_NK = rows_NK < self.num_rows
        weights_NK = torch.where(is_row_NK, self.weights_NK[:, : self.num_local_slots], 0.0)
        return sum_per_token(y_MD, torch.where(is_row_NK, rows_NK, rows_NK[:, :1]).flatten(), weights_NK)


@dataclass(slots=True)
class NormalHandle:
    """A dispatch under way with version 1; after `wait` with the rows of each received token."""

    tokens: Rows
    slots_NK: torch.Tensor  # slots of this rank, counted from 0; -1 for slots of other ranks
    weights_NK: torch.Tensor
    num_rows: int
    num_local_slots: int
    ep_handle: Any
    event: Any
    token_rows: TokenRows | None = None
    ready_s: None = None
    arrived_s: None = None

    def wait(self) -> ExpertInput:
        """Return rows by slot, within a slot in the order in which the tokens came."""
        self.event.current_stream_wait()
        elsewhere = self.num_local_slots
        slots_NK, k_NK = torch.where(self.slots_NK < 0, elsewhere, self.slots_NK.long()).sort(dim=1)
        entries = torch.argsort(slots_NK.flatten(), stable=True)
        rows = torch.empty_like(entries)
        rows[entries] = torch.arange(len(entries), device=entries.device)
        weights_NK = self.weights_NK.gather(1, k_NK)
        self.token_rows = TokenRows(rows.view(k_NK.shape), weights_NK, self.num_rows, self.num_local_slots)
        token_M = entries[: self.num_rows] // k_NK.shape[1]
        num_rows_S = count_rows(slots_NK.flatten(), elsewhere + 1)[:elsewhere]
        x_ND, scales = self.tokens if isinstance(self.tokens, tuple) else (self.tokens, None)
        return ExpertInput(x_ND, scales, "contiguous", num_rows_S, token_M)


class NormalDispatcher(SlotDispatcher):
    """The exchange over version 1's Buffer in normal mode."""

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        is_counted: torch.Tensor | None = None,
    ) -> NormalHandle:
        """Start sending each token to the ranks of its slots."""
        slots_TK = self.slots(topk_ids)
        # asynchronous too: else the computation would wait here for whatever the other micro-batch has under way.
        # Its event is not needed, since the dispatch comes after it on the same stream.
        per_rank, per_rdma_rank, per_slot, is_in_rank, _ = self.buffer.get_dispatch_layout(
            slots_TK, self.placement.num_slots, async_finish=True
        )
        tokens, slots_NK, weights_NK, counts, ep_handle, event = self.buffer.dispatch(
            _rows_to_send(x, self.use_fp8),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_slot,
            topk_idx=slots_TK,
            topk_weights=topk_weights.contiguous(),
            async_finish=True,
        )
        num_local_slots = self.placement.slots_per_rank
        return NormalHandle(tokens, slots_NK, weights_NK, sum(counts), num_local_slots, ep_handle, event)

    def combine(self, y: ExpertRows, handle: NormalHandle) -> Sums:
        """Weight and add up per received token, and start sending that back; DeepEP adds up over the ranks."""
        assert handle.token_rows is not None, "combine before wait"
        sums_ND = handle.token_rows.weighted_sums(y).to(torch.bfloat16)
        sums_TD, _, event = self.buffer.combine(sums_ND, handle.ep_handle, async_finish=True)
        return Sums(sums_TD, event)


def _rows_to_send(x_TD: torch.Tensor, use_fp8: bool) -> Rows:
    if use_fp8:
        return registry.select("quantize_fp8_block", device=x_TD.device)(x_TD, (1, SCALE_VALUES))
    return x_TD.to(torch.bfloat16).contiguous()
