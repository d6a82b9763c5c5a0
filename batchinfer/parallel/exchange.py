"""Moving rows of bytes between the ranks of a group: an uneven all-to-all that goes on while the caller computes.

Dispatchers use it for expert rows, the mesh for the small agreements between steps. Exchanges are started in the same
order on all ranks, and waited for in that order; up to two may be under way, one per micro-batch. This file holds the
interface and the version over torch.distributed (gloo between hosts, NCCL on GPUs); shared_memory.py the one for ranks
on one host, staged_exchange.py the same for ranks on GPUs.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from batchinfer.clock import unix_ns, unix_s
from batchinfer.records import PeerLostError


class TravelStream:
    """The second stream, with the events by which it and the computing stream wait for each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def depart(self, tensors: Sequence[torch.Tensor]) -> torch.cuda.Event:
        """Return the event after which these tensors can be sent; call it on the computing thread."""
        for tensor in tensors:
            tensor.record_stream(self._stream)
        return torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def travelling(self, ready: torch.cuda.Event) -> Iterator[None]:
        """Run the block's work on this stream, after `ready`; for the sending thread."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            yield

    def arrived(self) -> torch.cuda.Event:
        """Return the event after which the received rows are complete; call it on the sending thread."""
        return self._stream.record_event()

    def arrive(self, tensors: Sequence[torch.Tensor], arrived: torch.cuda.Event) -> None:
        """Make the computing thread's stream wait for `arrived`, so that later work may use these tensors."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(arrived)
        for tensor in tensors:
            tensor.record_stream(computing)


Counts = list[list[int]] | torch.Tensor
MAX_UNDER_WAY = 2


@dataclass(frozen=True, slots=True)
class ReceivedRows:
    """The rows from each rank, own rows included; valid until MAX_UNDER_WAY further exchanges were started.

    rows: per rank [its rows, row bytes] uint8.
    counts: per rank the C counts that it sent for this rank.
    ready_s: Unix time when the last of the other ranks had sent its rows, as far as this rank can tell; before that
        nothing could arrive. None if unknown.
    arrived_s: Unix time when the last row had arrived; None on a GPU, which works on while the host goes ahead.
    """

    rows: list[torch.Tensor]
    counts: list[list[int]]
    ready_s: float | None
    arrived_s: float | None


@dataclass(frozen=True, slots=True)
class PendingRows:
    """An exchange under way.

    wait: gives the rows from all ranks; raises PeerLostError when one has ended or did not answer before the deadline.
    """

    wait: Callable[[], ReceivedRows]


class Exchange(Protocol):
    """An exchange of rows between the ranks of a group."""

    rank: int
    size: int

    def buffer(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """Return [num_rows, row_bytes] uint8 to fill and pass to the next `start`."""
        ...

    def start(self, rows: torch.Tensor, counts: Counts) -> PendingRows:
        """Start sending.

        Args:
            rows: [M, row bytes] from `buffer`, those for rank 0 first.
            counts: for each of the R ranks C >= 1 counts that add up to its rows; the same C on all ranks. Rows on a
                GPU may come with a tensor [R, C] int64 there, which this call does not wait for.

        Raises:
            PeerLostError: a rank has ended.
        """
        ...

    def close(self) -> None:
        """Close connections and release memory; other ranks that still wait get a PeerLostError."""
        ...


class LaneExchange:
    """An exchange that waits for the other ranks on a separate thread, one all-to-all after the other.

    On a GPU the thread has a separate stream, so that the caller's stream computes while rows travel.

    Args:
        device: where rows live.
    """

    def __init__(self, rank: int, size: int, device: torch.device | str = "cpu"):
        self.rank, self.size = rank, size
        self._device = torch.device(device)
        self._stream = TravelStream(self._device) if self._device.type == "cuda" else None
        # one thread keeps the collectives in order, as they must be
        self._lane = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exchange")

    def buffer(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """See Exchange."""
        return torch.empty(num_rows, row_bytes, dtype=torch.uint8, device=self._device)

    def start(self, rows: torch.Tensor, counts: Counts) -> PendingRows:
        """See Exchange."""
        if self._stream is None:
            return PendingRows(self._lane.submit(self._all_to_all, rows, self._departing(counts)).result)
        ready = self._stream.depart([rows, counts] if isinstance(counts, torch.Tensor) else [rows])
        future = self._lane.submit(self._travel, self._stream, ready, rows, counts)
        return PendingRows(partial(_arrive, self._stream, future))

    def close(self) -> None:
        """Close the exchange; do not wait for a collective that is stuck."""
        self._lane.shutdown(wait=False, cancel_futures=True)

    def _travel(
        self, stream: TravelStream, ready: torch.cuda.Event, rows: torch.Tensor, counts: Counts
    ) -> tuple[ReceivedRows, torch.cuda.Event]:
        with stream.travelling(ready):
            received = self._all_to_all(rows, counts)
            return replace(received, ready_s=None, arrived_s=None), stream.arrived()

    def _departing(self, counts: Counts) -> Counts:
        """Return the counts to send with rows that start now from a CPU."""
        return counts

    def _all_to_all(self, rows: torch.Tensor, counts: Counts) -> ReceivedRows:
        """Send rows to all ranks and return the rows received from them; runs on the thread."""
        raise NotImplementedError


class DistributedExchange(LaneExchange):
    """The exchange over a process group of torch.distributed: counts first, then rows.

    On CPUs each rank's counts come with the time, by its clock, at which it started the exchange.

    Args:
        group: its size, rank and deadline count; gloo for CPU tensors, NCCL for GPU tensors.
        device: where rows live.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | str = "cpu"):
        super().__init__(group.rank(), group.size(), device)
        self._group = group

    def _departing(self, counts: Counts) -> Counts:
        assert not isinstance(counts, torch.Tensor), "a CPU's counts are on the host"
        return [[*rank_counts, unix_ns()] for rank_counts in counts]

    def _all_to_all(self, rows: torch.Tensor, counts: Counts) -> ReceivedRows:
        try:
            sent_RC = torch.as_tensor(counts, dtype=torch.int64, device=self._device)
            received_RC = torch.empty_like(sent_RC)
            dist.all_to_all_single(received_RC, sent_RC, group=self._group)
            sent_counts, received_counts = torch.stack([sent_RC, received_RC]).tolist()
            ready_s = None
            if self._stream is None:
                started_ns = [rank_counts.pop() for rank_counts in received_counts]
                for rank_counts in sent_counts:
                    rank_counts.pop()
                ready_s = max(started_ns) / 1e9
            sizes = [sum(count) for count in received_counts]
            received = torch.empty(sum(sizes), rows.shape[1], dtype=torch.uint8, device=self._device)
            dist.all_to_all_single(received, rows, sizes, [sum(count) for count in sent_counts], group=self._group)
        except RuntimeError as error:
            raise PeerLostError(f"the exchange between ranks failed: {(str(error).splitlines() or [''])[0]}") from error
        return ReceivedRows(list(received.split(sizes)), received_counts, ready_s, unix_s())


def _arrive(stream: TravelStream, future: Future[tuple[ReceivedRows, torch.cuda.Event]]) -> ReceivedRows:
    """Return rows that are complete for later work of the computing stream; the host waits for counts alone."""
    received, arrived = future.result()
    stream.arrive(received.rows, arrived)
    return received
