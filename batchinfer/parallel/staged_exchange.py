"""Rows of GPUs between ranks of one host through the host's shared memory; also for ranks that share one GPU.

    GPU ---- copy ----> sender's shared memory ---- message by socket ----> receiver: copy ----> GPU

NCCL and DeepEP take each GPU once. Here a rank needs nothing but its own device and memory that both hosts' processes
map (shared_memory.py). Both copies are made on the thread and the stream of a LaneExchange. Rows for the rank itself
stay where they are.
"""

# R ranks

import torch

from batchinfer.clock import unix_s
from batchinfer.parallel.exchange import Counts, Exchange, LaneExchange, ReceivedRows


class StagedExchange(LaneExchange):
    """See module docstring and Exchange.

    Args:
        on_host: moves rows of the host; for this exchange alone, which closes it.
        device: where rows live.
    """

    def __init__(self, on_host: Exchange, device: torch.device):
        super().__init__(on_host.rank, on_host.size, device)
        self._on_host = on_host

    def close(self) -> None:
        """See Exchange."""
        super().close()
        self._on_host.close()

    def _all_to_all(self, rows: torch.Tensor, counts: Counts) -> ReceivedRows:
        if isinstance(counts, torch.Tensor):
            counts = counts.tolist()
        sizes = [sum(rank_counts) for rank_counts in counts]
        first = sum(sizes[: self.rank])
        own = slice(first, first + sizes[self.rank])
        on_host = self._on_host.buffer(len(rows), rows.shape[1])
        for part in (slice(0, own.start), slice(own.stop, len(rows))):
            on_host[part].copy_(rows[part])
        received = self._on_host.start(on_host, counts).wait()
        parts = [rows[own] if rank == self.rank else self._copy(part) for rank, part in enumerate(received.rows)]
        return ReceivedRows(parts, received.counts, received.ready_s, unix_s())

    def _copy(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy rows of shared memory to the device; wait for the copy, as the sender will use the memory again."""
        return torch.empty_like(rows, device=self._device).copy_(rows)
