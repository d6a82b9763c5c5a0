"""Rows between ranks of one host: the sender writes them to shared memory and notifies the others by socket.

Each pair of ranks has a Unix socket. A rank has four regions of anonymous shared memory, used in turn; their file
descriptors travel over the sockets, so nothing has a name that could collide or be left behind. A message says where
rows lie. Its arrival wakes the receiver in microseconds; the end of a rank closes its sockets, which the others notice
at once.

A region is used again four exchanges later. By then everybody has read it: with at most two exchanges under way, a rank
starts exchange n + 4 after it has taken in n + 2, which each peer started after it had taken in n.
"""

# R ranks, C counts per rank

import mmap
import os
import secrets
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from batchinfer.clock import unix_ns
from batchinfer.parallel.exchange import MAX_UNDER_WAY, Counts, PendingRows, ReceivedRows
from batchinfer.records import PeerLostError
from batchinfer.whole_files import NO_DESCRIPTOR, too_many_files

# sequence number, sender's Unix time in ns, region bytes, offset of the first row, row bytes, number of counts
_HEADER = struct.Struct("=6q")
_HELLO = struct.Struct("=q")  # the caller's rank
_MAX_MESSAGE = _HEADER.size + 8 * 65536
_SMALLEST_REGION = 1 << 20
_NUM_REGIONS = 2 * MAX_UNDER_WAY
_NO_SHARING = "a rank cannot share memory with its group"


def can_share_memory() -> bool:
    """Return whether this system has anonymous memory files and abstract Unix sockets (Linux)."""
    return sys.platform == "linux"


@dataclass(slots=True)
class _Message:
    sent_s: float
    offset: int
    row_bytes: int
    counts: list[int]


@dataclass(slots=True)
class _Region:
    """Shared memory of one rank, mapped here; a larger region replaces it when it has to grow."""

    fd: int
    memory: mmap.mmap | None = None
    num_bytes: int = 0

    def view(self, offset: int, num_rows: int, row_bytes: int) -> torch.Tensor:
        if num_rows * row_bytes == 0:
            return torch.empty(num_rows, row_bytes, dtype=torch.uint8)
        assert self.memory is not None
        flat = torch.frombuffer(self.memory, dtype=torch.uint8, count=num_rows * row_bytes, offset=offset)
        return flat.view(num_rows, row_bytes)


@dataclass(slots=True)
class _Peer:
    """The connection to another rank, and its regions mapped here."""

    connection: socket.socket
    regions: list[_Region] = field(default_factory=lambda: [_Region(-1) for _ in range(_NUM_REGIONS)])


class SharedMemoryExchange:
    """See module docstring and Exchange.

    Args:
        store: shared by the group, for the sockets' addresses.
        name: of the exchange, if the ranks have several.
        timeout_s: deadline of each exchange, and of the first connection.

    Raises:
        PeerLostError: a rank did not connect in time.
        ConfigError: later, when the limit of open files is too low.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, *, timeout_s: float, name: str = "shared_memory"):
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self._sequence = 0  # of the next exchange to start
        self._num_received = 0
        self._own = [_Region(-1) for _ in range(_NUM_REGIONS)]
        self._is_new_region = False
        self._peers = _connect(store, name, rank, size, timeout_s)

    def buffer(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """See Exchange."""
        assert self._sequence - self._num_received < MAX_UNDER_WAY, "too many exchanges under way"
        region = self._own[self._sequence % _NUM_REGIONS]
        self._is_new_region = num_rows * row_bytes > region.num_bytes
        if self._is_new_region:
            _replace(region, max(_SMALLEST_REGION, 2 * num_rows * row_bytes))
        return region.view(0, num_rows, row_bytes)

    def start(self, rows: torch.Tensor, counts: Counts) -> PendingRows:
        """See Exchange."""
        assert not isinstance(counts, torch.Tensor), "rows of a GPU have to be on the host"
        sequence, row_bytes = self._sequence, rows.shape[1]
        region = self._own[sequence % _NUM_REGIONS]
        self._sequence += 1
        sent_ns = unix_ns()
        first_row, own_row = 0, 0
        for rank, rank_counts in enumerate(counts):
            if rank == self.rank:
                own_row = first_row
            else:
                message = _HEADER.pack(
                    sequence, sent_ns, region.num_bytes, first_row * row_bytes, row_bytes, len(rank_counts)
                ) + struct.pack(f"={len(rank_counts)}q", *rank_counts)
                self._send(rank, message, [region.fd] if self._is_new_region else [])
            first_row += sum(rank_counts)
        self._is_new_region = False
        own_counts = counts[self.rank]
        own = rows[own_row : own_row + sum(own_counts)]
        return PendingRows(partial(self._receive, sequence, own, own_counts, sent_ns / 1e9))

    def close(self) -> None:
        """See Exchange."""
        for peer in self._peers.values():
            with suppress(OSError):  # the peer is gone; a thread that waits for it wakes up
                peer.connection.shutdown(socket.SHUT_RDWR)
            peer.connection.close()
            for region in peer.regions:
                _close(region)
        for region in self._own:
            _close(region)

    def _receive(self, sequence: int, own: torch.Tensor, own_counts: list[int], own_sent_s: float) -> ReceivedRows:
        """Return the rows of one exchange from all ranks."""
        rows, counts, arrived_s = [], [], own_sent_s
        for rank in range(self.size):
            if rank == self.rank:
                rows.append(own)
                counts.append(own_counts)
                continue
            message = self._next_message(rank, sequence)
            region = self._peers[rank].regions[sequence % _NUM_REGIONS]
            rows.append(region.view(message.offset, sum(message.counts), message.row_bytes))
            counts.append(message.counts)
            arrived_s = max(arrived_s, message.sent_s)
        self._num_received = sequence + 1
        # the sender has written the rows where this rank reads them: nothing moves in between
        return ReceivedRows(rows, counts, arrived_s, arrived_s)

    def _send(self, rank: int, message: bytes, descriptors: list[int]) -> None:
        try:
            if descriptors:
                socket.send_fds(self._peers[rank].connection, [message], descriptors)
            else:
                self._peers[rank].connection.send(message)
        except OSError as error:
            raise self._lost(rank, error) from None

    def _next_message(self, rank: int, sequence: int) -> _Message:
        peer = self._peers[rank]
        try:
            data, descriptors, _, _ = socket.recv_fds(peer.connection, _MAX_MESSAGE, 1)
        except OSError as error:
            raise self._lost(rank, error) from None
        if not data:
            raise self._lost(rank, None)
        sent, sent_ns, num_bytes, offset, row_bytes, num_counts = _HEADER.unpack_from(data)
        assert sent == sequence, f"rank {rank} is at exchange {sent}, this rank at {sequence}"
        region = peer.regions[sequence % _NUM_REGIONS]
        if descriptors:
            _close(region)
            region.fd, region.num_bytes = descriptors[0], num_bytes
            region.memory = mmap.mmap(region.fd, num_bytes)
        elif num_bytes != region.num_bytes:
            # a new region is always larger; at the limit of open files the system drops its descriptor
            raise too_many_files(_NO_SHARING)
        counts = list(struct.unpack_from(f"={num_counts}q", data, _HEADER.size))
        return _Message(sent_ns / 1e9, offset, row_bytes, counts)

    def _lost(self, rank: int, error: OSError | None) -> PeerLostError:
        if isinstance(error, TimeoutError):
            return PeerLostError(f"rank {rank} of the group did not answer within {self._timeout_s:g} s")
        return PeerLostError(f"rank {rank} of the group has ended")


def _connect(store: dist.Store, name: str, rank: int, size: int, timeout_s: float) -> dict[int, _Peer]:
    """Connect to every other rank: call lower ranks, accept calls of higher ranks; return the connections."""
    peers: dict[int, _Peer] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # the leading NUL makes it an abstract name: no file, gone with the process
        address = f"\0batchinfer-{secrets.token_hex(16)}"
        listener.bind(address)
        listener.listen(size)
        listener.settimeout(timeout_s)
        store.set(f"{name}/{rank}", address[1:])
        try:
            for lower in range(rank):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                connection.settimeout(timeout_s)
                _call(connection, "\0" + store.get(f"{name}/{lower}").decode(), timeout_s)
                connection.send(_HELLO.pack(rank))
                peers[lower] = _Peer(connection)
            while len(peers) < size - 1:
                connection, _ = listener.accept()
                connection.settimeout(timeout_s)
                caller = _caller(connection)
                if caller is None or caller in peers or caller not in range(rank + 1, size):
                    connection.close()  # a process outside this group
                    continue
                peers[caller] = _Peer(connection)
        except (OSError, RuntimeError) as error:
            raise PeerLostError.not_connected(size - 1 - len(peers), timeout_s, error) from error
    return peers


def _call(connection: socket.socket, address: str, timeout_s: float) -> None:
    """Connect; wait while the listener's queue is full of other callers, which the listener rejects."""
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            connection.connect(address)
            return
        except BlockingIOError:
            if time.monotonic() > end_s:
                raise
        time.sleep(0.01)


def _caller(connection: socket.socket) -> int | None:
    """Return the rank in a caller's message; None for another user and for any other message."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        return None
    hello = connection.recv(_HELLO.size + 1)
    return _HELLO.unpack(hello)[0] if len(hello) == _HELLO.size else None


def _replace(region: _Region, num_bytes: int) -> None:
    _close(region)
    try:
        region.fd = os.memfd_create("batchinfer-rows")
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise too_many_files(_NO_SHARING) from None
        raise
    os.ftruncate(region.fd, num_bytes)  # pages are taken when they are first written
    region.memory, region.num_bytes = mmap.mmap(region.fd, num_bytes), num_bytes


def _close(region: _Region) -> None:
    if region.fd >= 0:
        os.close(region.fd)
    # tensors may still refer to the mapping, which ends with the last of them
    region.fd, region.memory, region.num_bytes = -1, None, 0
