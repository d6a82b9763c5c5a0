"""DeepEP's low-latency mode: one block of fixed size per slot, nothing read on the host.

    slot 0   | row row row ···· |        num_rows[slot] rows are filled; ranks × max_tokens have room
    slot 1   | row ············ |

A call has two halves: sending, and a hook that receives. Between them the network card works and no part of the GPU.
DeepEP has two sets of arrival flags and uses them in turn; the sending half of a call clears the other set, where the
rows of the call before it are announced (github.com/deepseek-ai/DeepEP/issues/513). So at most one call is under way:
the next one receives it first. In the order of overlap.py this is the moment at which its rows are to be here anyway.
"""

# T tokens of this rank, K experts per token, S slots of this rank, C rows of room per slot, D hidden

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from batchinfer.parallel.deepep.normal import SlotDispatcher
from batchinfer.parallel.dispatch import ExpertInput
from batchinfer_kernels.reference.places import ExpertRows

_MAX_RESULTS = 2  # dispatched rows not yet sent back; the library's results may lie in its two halves


class Receiver:
    """The receiving half of a dispatch or combine. It runs once: on the first wait, or when the next call starts."""

    def __init__(self, hook: Callable[[], None]):
        self._hook: Callable[[], None] | None = hook

    def receive(self) -> None:
        """Make the current stream wait for the rows and receive them; do nothing on later calls."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()


class LowLatencyBuffer:
    """The group's buffer and the call under way on it; all layers share it.

    Args:
        max_tokens: room per rank and slot, the number that the buffer was made for.
    """

    def __init__(self, buffer: Any, max_tokens: int):
        self.buffer, self.max_tokens = buffer, max_tokens
        self.num_results = 0
        self._last: Receiver | None = None

    def receive_last(self) -> None:
        """Take in the rows of the call under way; call it before another call starts."""
        if self._last is not None:
            self._last.receive()

    def started(self, hook: Callable[[], None]) -> Receiver:
        """Keep the receiving hook of a call that has started."""
        self._last = Receiver(hook)
        return self._last


@dataclass(slots=True)
class LowLatencyHandle:
    """A dispatch under way, with DeepEP's handle by which combine reverses it."""

    rows: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    num_rows_S: torch.Tensor
    slots_TK: torch.Tensor
    weights_TK: torch.Tensor
    ep_handle: Any
    receiver: Receiver
    ready_s: None = None
    arrived_s: None = None

    def wait(self) -> ExpertInput:
        """Return blocks [S, C, D]; rows after the filled ones of a block are stale."""
        self.receiver.receive()
        x_SCD, scales = self.rows if isinstance(self.rows, tuple) else (self.rows, None)
        return ExpertInput(x_SCD, scales, "masked", self.num_rows_S.long())


@dataclass(slots=True)
class LowLatencySums:
    """Sums on their way back."""

    sums_TD: torch.Tensor
    receiver: Receiver
    ready_s: None = None
    arrived_s: None = None

    def wait(self) -> torch.Tensor:
        """Return [T, D] float32; DeepEP sums in float32, in the order of a token's experts, rounds to bfloat16."""
        self.receiver.receive()
        return self.sums_TD.float()


class LowLatencyDispatcher(SlotDispatcher):
    """The exchange over version 1's Buffer in low-latency mode; DeepEP rounds rows to FP8 itself.

    At most two dispatches may wait for their combine. Tokens that are not counted have slot -1, which DeepEP sends
    nowhere and adds up to zero: a rank that fills up a step costs the others nothing.
    """

    buffer: LowLatencyBuffer

    @property
    def why_not_recorded(self) -> str | None:
        """No reason (None), see Dispatcher: blocks have one size, and no count is read on the host."""
        return None

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        is_counted: torch.Tensor | None = None,
    ) -> LowLatencyHandle:
        """Start sending each (token, slot) row into the slot's block."""
        assert self.buffer.num_results < _MAX_RESULTS, "a third dispatch before the first one's combine"
        slots_TK = self.slots(topk_ids)
        if is_counted is not None:
            slots_TK = torch.where(is_counted[:, None] > 0, slots_TK, -1)
        self.buffer.receive_last()
        rows, num_rows_S, ep_handle, _, hook = self.buffer.buffer.low_latency_dispatch(
            x.to(torch.bfloat16).contiguous(),
            slots_TK,
            self.buffer.max_tokens,
            self.placement.num_slots,
            use_fp8=self.use_fp8,
            return_recv_hook=True,
        )
        self.buffer.num_results += 1
        receiver = self.buffer.started(hook)
        return LowLatencyHandle(rows, num_rows_S, slots_TK, topk_weights.contiguous(), ep_handle, receiver)

    def combine(self, y: ExpertRows, handle: LowLatencyHandle) -> LowLatencySums:
        """Start sending the filled rows of each block back; DeepEP weights them when it sums them."""
        assert isinstance(y, torch.Tensor), "blocks have no places of their own"
        self.buffer.receive_last()
        sums_TD, _, hook = self.buffer.buffer.low_latency_combine(
            y.to(torch.bfloat16).contiguous(),
            handle.slots_TK,
            handle.weights_TK,
            handle.ep_handle,
            return_recv_hook=True,
        )
        self.buffer.num_results -= 1
        return LowLatencySums(sums_TD, self.buffer.started(hook))
