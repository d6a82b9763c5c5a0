"""The group of ranks that share the experts: joining it, agreeing between steps, one dispatcher per layer.

A job's ranks form one group (colocated), or one for prefill and one for decode, each with all experts
(disaggregated). Each group is a separate world of torch.distributed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from batchinfer.net.interface import interface_of
from batchinfer.parallel.all_to_all import AllToAllDispatcher
from batchinfer.parallel.deepep.dispatcher import open_dispatchers, why_not
from batchinfer.parallel.dispatch import Dispatcher, LocalDispatcher
from batchinfer.parallel.exchange import DistributedExchange, Exchange
from batchinfer.parallel.exchange_rules import DEEPEP, ON_GPUS, check_device
from batchinfer.parallel.placement import Placement
from batchinfer.parallel.row_format import RowFormat
from batchinfer.parallel.shared_memory import SharedMemoryExchange, can_share_memory
from batchinfer.parallel.staged_exchange import StagedExchange
from batchinfer.parallel.tls_exchange import Meeting, TlsExchange
from batchinfer.records import ConfigError, PeerLostError


@dataclass(frozen=True, slots=True)
class Seat:
    """Number of a rank in its group, and the settings for joining it."""

    rank: int
    size: int
    exchange: str  # cluster.exchange of the job
    one_host: bool  # whether all ranks of the group are on this host
    timeout_s: float
    meeting: Meeting | None = None  # with ranks of other hosts; None: there are none


class Mesh:
    """The group that this rank belongs to; `exchange` is None for a rank alone."""

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Exchange | None,
        *,
        agreements: Exchange | None = None,
        kind: str = "local",
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ):
        self.rank = rank
        self.size = size
        self.kind = kind
        self._exchange = exchange
        self._agreements = agreements or exchange  # on the host: agreeing never waits for a GPU
        self._group = group
        self._device = torch.device(device)

    @classmethod
    def alone(cls) -> Mesh:
        """Return the mesh of a lone rank, which holds all experts."""
        return cls(0, 1, None)

    @classmethod
    def join(cls, seat: Seat, store: dist.Store, device: torch.device) -> Mesh:
        """Join the group: connect to its other ranks and return the mesh.

        Raises:
            ConfigError: the exchange that the job names cannot run here.
            PeerLostError: a rank did not connect within the timeout.
        """
        if seat.size == 1:
            return cls.alone()
        kind = _choose(seat, device)
        group = None
        if kind == "gloo" or kind in ON_GPUS:
            group = _open_group("gloo" if kind == "gloo" else "nccl", seat, store)
        if kind == "gloo":
            assert group is not None
            on_host: Exchange = DistributedExchange(group)
        elif seat.one_host and can_share_memory():
            on_host = SharedMemoryExchange(store, seat.rank, seat.size, timeout_s=seat.timeout_s)
        else:
            assert seat.meeting is not None
            on_host = TlsExchange(store, seat.rank, seat.size, seat.meeting, timeout_s=seat.timeout_s)
        exchange = on_host
        if kind == "nccl":
            assert group is not None
            exchange = DistributedExchange(group, device)
        elif kind == "shared" and _is_staged(device):
            rows = SharedMemoryExchange(store, seat.rank, seat.size, timeout_s=seat.timeout_s, name="staged_rows")
            exchange = StagedExchange(rows, device)
        return cls(seat.rank, seat.size, exchange, agreements=on_host, kind=kind, group=group, device=device)

    def agree(self, values: Sequence[int]) -> list[list[int]]:
        """Return the values of every rank, by rank; each rank gives the same number of them.

        Raises:
            PeerLostError: a rank has ended or did not answer.
        """
        if self._agreements is None:
            return [list(values)]
        rows = self._agreements.buffer(self.size, 8 * len(values))
        rows.view(torch.int64)[:] = torch.tensor(list(values))
        received = self._agreements.start(rows, [[1]] * self.size).wait()
        return [row.view(torch.int64)[0].tolist() for row in received.rows]

    def dispatchers(
        self, placements: Sequence[Placement], row_format: RowFormat, *, max_tokens: int, hidden: int, topk: int
    ) -> list[Dispatcher]:
        """Return the expert exchange of each MoE layer; all ranks call this with the same arguments.

        Args:
            row_format: form of the rows on their way to the experts.
            max_tokens: most tokens of one rank in one micro-batch.
            hidden: values per row.
            topk: experts per token.

        Raises:
            ConfigError: DeepEP was asked for and cannot run here.
        """
        if self._exchange is None:
            plain = None if row_format.dtype != "fp8" else row_format
            return [LocalDispatcher(placement.num_experts, plain, gathers=False) for placement in placements]
        if self.kind in DEEPEP:
            assert self._group is not None
            sizes = {"max_tokens": max_tokens, "hidden": hidden, "topk": topk}
            return open_dispatchers(self.kind, self._group, placements, row_format, **sizes, device=self._device)
        return [AllToAllDispatcher(self._exchange, placement, row_format) for placement in placements]

    def close(self) -> None:
        """Close the connections to the other ranks."""
        if self._exchange is not None:
            self._exchange.close()
        if self._agreements is not None and self._agreements is not self._exchange:
            self._agreements.close()


def explain_exchanges() -> dict[str, str | None]:
    """Return each exchange with the reason why it cannot run here, None if it can."""
    no_gpu = "this torch is built without CUDA" if torch.version.cuda is None else None
    if no_gpu is None and not torch.cuda.is_available():
        no_gpu = "no GPU that this torch can use"
    return {
        "shared": None if can_share_memory() else "shared memory between ranks needs Linux",
        "tls": None,
        "gloo": None,
        "nccl": no_gpu,
        **{kind: why_not(kind) for kind in DEEPEP},
    }


def _open_group(backend: str, seat: Seat, store: dist.Store) -> dist.ProcessGroup:
    """Return the process group of torch.distributed, once all ranks have joined it.

    Raises:
        ConfigError: an interface that the user named does not exist.
        PeerLostError: a rank did not join within the timeout.
    """
    if seat.one_host:
        _stay_on_loopback()
    elif backend == "gloo" and seat.meeting is not None:
        _listen_where_others_call(seat.meeting.host)
    if backend == "gloo":
        _refuse_missing_interfaces()
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=seat.rank,
            world_size=seat.size,
            timeout=timedelta(seconds=seat.timeout_s),
        )
    except RuntimeError as error:
        raise PeerLostError(f"the group's ranks did not meet ({seat.timeout_s:g} s at most): {error}") from error
    group = dist.group.WORLD
    assert group is not None
    return group


def _stay_on_loopback() -> None:
    """Make gloo and NCCL listen on the loopback interface alone, unless the user has named another one."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)


def _listen_where_others_call(address: str) -> None:
    """Make gloo listen on the interface of this address, unless the user chose one; its default is often loopback."""
    interface = interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _refuse_missing_interfaces() -> None:
    """Raise for a missing interface, which gloo would report only on each of many restarts.

    Raises:
        ConfigError: an interface that the user named for gloo does not exist, or has no address.
    """
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        try:
            dist.ProcessGroupGloo.create_device(interface=name)
        except RuntimeError:
            raise ConfigError(
                f"cluster.exchange is 'gloo', but the network interface {name} (GLOO_SOCKET_IFNAME) is not there or "
                'has no address; name another one, or use cluster.exchange = "auto"'
            ) from None


def _is_staged(device: torch.device) -> bool:
    """Return whether rows of this device are copied to the host before they travel through its memory."""
    return device.type != "cpu"


def _choose(seat: Seat, device: torch.device) -> str:
    """Return the exchange that the job names, or the fastest that can run here."""
    can_share = seat.one_host and can_share_memory()
    if seat.exchange == "auto":
        between_hosts = "gloo" if seat.meeting is None else "tls"
        return "nccl" if device.type == "cuda" else "shared" if can_share else between_hosts
    if seat.exchange == "shared" and not can_share:
        raise ConfigError(
            "cluster.exchange is 'shared', but the ranks are on several hosts (or not on Linux); use 'auto'"
        )
    if seat.exchange == "tls" and seat.meeting is None:
        raise ConfigError("cluster.exchange is 'tls', but all ranks are started by one process; use 'auto'")
    check_device(seat.exchange, device.type)
    return seat.exchange
