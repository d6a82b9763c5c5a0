"""Expert exchange: send each token to its experts, bring the results back; used by every mixture-of-experts layer.

    handle = dispatcher.dispatch(x, topk_ids, topk_weights)     rows start to travel
    received = handle.wait()                                    rows for the experts of this rank
    future = dispatcher.combine(experts(received), handle)      results start to travel back
    y = future.wait()                                           one weighted sum per token

Between a call and its wait the caller may compute something else; that is where communication hides. Whatever the
ranks and the placement, the sum is taken by the token's own rank over unreduced rows, in ascending top-k position and
in float32, so that it does not depend on where the experts are.
"""

# T tokens of this rank, D hidden, K experts per token, E experts of this rank, M received (token, expert) rows

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch

from batchinfer.parallel.placement import Placement
from batchinfer.parallel.row_format import RowFormat


@dataclass(frozen=True, slots=True)
class ExpertInput:
    """Rows for the experts of this rank.

    x: [M, D], sorted by expert, no gaps ("contiguous"), or [E, capacity, D] with a count of filled rows ("masked").
    scales: for FP8 rows one float32 per 128 values, [..., D / 128]; None for wider rows.
    num_rows_E: [E] int64 on the device of x, rows of each expert slot of this rank.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    layout: Literal["contiguous", "masked"]
    num_rows_E: torch.Tensor


class DispatchHandle(Protocol):
    """Rows on their way to the experts; also what `combine` needs to bring them back."""

    def wait(self) -> ExpertInput:
        """The rows for this rank's experts, once they are here."""
        ...

    @property
    def arrived_s(self) -> float | None:
        """After `wait`: Unix time when all rows were here; None where that is not known."""
        ...


class CombineFuture(Protocol):
    """Results on their way back to the tokens."""

    def wait(self) -> torch.Tensor:
        """[T, D] float32, per token the sum over its experts of weight × row."""
        ...

    @property
    def arrived_s(self) -> float | None:
        """After `wait`: Unix time when all results were here; None where that is not known."""
        ...


HandleT = TypeVar("HandleT", bound=DispatchHandle)


class Dispatcher(Protocol[HandleT]):
    """One layer's way of exchanging rows. Calls come in the same order on all ranks; several may be under way."""

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> HandleT:
        """Start sending rows to their experts.

        Args:
            x: [T, D], T may differ from rank to rank and may be 0.
            topk_ids: [T, K] int64, expert ids, all different within a row.
            topk_weights: [T, K] float32.
        """
        ...

    def combine(self, y: torch.Tensor, handle: HandleT) -> CombineFuture:
        """Start sending the experts' results back; `y` has the layout that `handle.wait()` gave."""
        ...

    def place(self, placement: Placement) -> None:
        """Between steps: from now on experts stand in these slots, as many as before, on all ranks at once."""
        ...


@dataclass(frozen=True, slots=True)
class LocalHandle:
    """Rows of a dispatch that stays on this rank: `order_M` is the (token, k) entry behind each sorted row."""

    received: ExpertInput
    order_M: torch.Tensor
    weights_TK: torch.Tensor
    arrived_s: None = None

    def wait(self) -> ExpertInput:
        """The sorted rows (nothing to wait for)."""
        return self.received


@dataclass(frozen=True, slots=True)
class Finished:
    """A combine that is done already."""

    y_TD: torch.Tensor
    arrived_s: None = None

    def wait(self) -> torch.Tensor:
        """The sums (nothing to wait for)."""
        return self.y_TD


class LocalDispatcher:
    """The exchange of a single rank that holds all experts: a sort, and a sum after undoing it.

    Args:
        row_format: form of the rows for the experts; None: as they come.
    """

    def __init__(self, num_experts: int, row_format: RowFormat | None = None):
        self.num_experts = num_experts
        self._row_format = row_format

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> LocalHandle:
        """Sort the (token, expert) rows by expert, tokens in order within one; see Dispatcher."""
        expert_M = topk_ids.flatten()
        order_M = torch.argsort(expert_M, stable=True)
        token_M = order_M // topk_ids.shape[1]
        scales = None
        if self._row_format is None:
            rows = x[token_M]
        else:
            rows, scales = self._row_format.unpack(self._row_format.pack(x)[token_M], x.shape[1])
        num_rows_E = count_rows(expert_M, self.num_experts)
        return LocalHandle(ExpertInput(rows, scales, "contiguous", num_rows_E), order_M, topk_weights)

    def combine(self, y: torch.Tensor, handle: LocalHandle) -> Finished:
        """Undo the sort and sum; see Dispatcher."""
        return Finished(sum_per_token(y, handle.order_M, handle.weights_TK))

    def place(self, placement: Placement) -> None:
        """See Dispatcher; all experts are here, wherever they stand."""


def sum_per_token(sorted_MD: torch.Tensor, order_M: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """[T, D] float32: each token's weighted sum, from rows in the order in which a dispatch sorted them.

    Args:
        order_M: the (token, k) entry behind each row.
    """
    rows_MD = torch.empty_like(sorted_MD)
    rows_MD[order_M] = sorted_MD
    num_tokens, topk = weights_TK.shape
    return weighted_sum(rows_MD.view(num_tokens, topk, sorted_MD.shape[-1]), weights_TK)


def weighted_sum(rows_TKD: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """[T, D] float32: sum of weight × row, one k after the other.

    Product and sum are rounded separately; a fused multiply-add would round differently in a tensor's tail.
    """
    total_TD = torch.zeros(rows_TKD[:, 0].shape, dtype=torch.float32, device=rows_TKD.device)
    for k in range(weights_TK.shape[1]):
        total_TD += rows_TKD[:, k].float() * weights_TK[:, k, None]
    return total_TD


def count_rows(expert_M: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[num_experts] int64, how often each expert id occurs; stays on the device (bincount would read its result)."""
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=expert_M.device)
    return counts_E.scatter_add_(0, expert_M, torch.ones_like(expert_M))
