"""Rows between ranks of several hosts, on CPUs: encrypted, over a connection for each pair of ranks (net/tls.py).

Each connection has a thread that sends and one that receives, so that rows travel while the caller computes. The end of
a rank ends its connections, which the others notice at once.
"""

# R ranks, C counts per rank

import queue
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from batchinfer.clock import unix_ns, unix_s
from batchinfer.net.listener import Listener
from batchinfer.net.stream import Stream
from batchinfer.net.tls import call
from batchinfer.parallel.exchange import Counts, PendingRows, ReceivedRows
from batchinfer.records import PeerLostError

CLOSE_S = 5.0
_HELLO = struct.Struct("!q")  # the caller's rank
# sequence number, sender's Unix time in ns, row bytes, number of counts; the counts and the rows follow
_HEADER = struct.Struct("!4q")
_LATEST_MESSAGES = 256  # by which a peer's clock is compared with this host's


class Meeting(NamedTuple):
    """The address at which a rank listens for other ranks, and the credentials of the group."""

    host: str
    credentials: str


class _Message(NamedTuple):
    sequence: int
    rows: torch.Tensor
    counts: list[int]
    ready_s: float  # when it was sent, by this host's clock; see PeerClock
    arrived_s: float


class PeerClock:
    """The clock of another host, compared with this host's clock by its messages.

    The fastest message is assumed to have taken no time. So converted times are late by the duration of the fastest
    message. What else delays a message (earlier rows on the line, a receiver without a core) is not in them.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_LATEST_MESSAGES)  # clocks drift, and are set

    def time_here(self, sent_s: float, seen_s: float) -> float:
        """Return the time at which a message was sent, by this host's clock.

        Args:
            sent_s: when it was sent, by the other clock.
            seen_s: when it was seen here.
        """
        self._latest.append(seen_s - sent_s)
        return sent_s + min(self._latest)


@dataclass(slots=True)
class _Peer:
    """The connection to another rank; None in a queue is its end."""

    stream: Stream
    outgoing: queue.SimpleQueue[tuple[bytes, torch.Tensor] | None] = field(default_factory=queue.SimpleQueue)
    arrived: queue.SimpleQueue[_Message | None] = field(default_factory=queue.SimpleQueue)

    sender: threading.Thread = field(init=False)

    def start(self) -> None:
        self.sender = threading.Thread(target=self._send, name="exchange sending", daemon=True)
        self.sender.start()
        threading.Thread(target=self._receive, name="exchange", daemon=True).start()

    def close(self) -> None:
        """End the connection once all is sent, or not taken by the other rank for CLOSE_S."""
        self.outgoing.put(None)
        self.sender.join(CLOSE_S)

    def _send(self) -> None:
        try:
            while (item := self.outgoing.get()) is not None:
                header, rows = item
                self.stream.send(header)
                self.stream.send(_bytes_of(rows))
        except OSError:  # the other rank is gone, as the receiving thread notices, too
            pass
        self.stream.shut_down()

    def _receive(self) -> None:
        clock = PeerClock()
        try:
            while True:
                sequence, sent_ns, row_bytes, num_counts = _HEADER.unpack(self.stream.receive(_HEADER.size))
                ready_s = clock.time_here(sent_ns / 1e9, unix_s())
                counts = list(struct.unpack(f"!{num_counts}q", self.stream.receive(8 * num_counts)))
                rows = torch.empty(sum(counts), row_bytes, dtype=torch.uint8)
                self.stream.fill(_bytes_of(rows))
                self.arrived.put(_Message(sequence, rows, counts, ready_s, unix_s()))
        except OSError:
            self.arrived.put(None)


class TlsExchange:
    """See module docstring and Exchange.

    Args:
        store: shared by the group, for the ranks' addresses.
        meeting: of this rank.
        timeout_s: deadline of each exchange, and of the first connection.

    Raises:
        PeerLostError: a rank did not connect in time.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, meeting: Meeting, *, timeout_s: float):
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self._sequence = 0  # of the next exchange to start
        self._peers = _connect(store, rank, size, meeting, timeout_s)

    def buffer(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """See Exchange."""
        return torch.empty(num_rows, row_bytes, dtype=torch.uint8)

    def start(self, rows: torch.Tensor, counts: Counts) -> PendingRows:
        """See Exchange."""
        assert not isinstance(counts, torch.Tensor), "rows of a GPU do not travel this way"
        sequence, now_ns = self._sequence, unix_ns()
        self._sequence += 1
        parts = rows.split([sum(rank_counts) for rank_counts in counts])
        for rank, peer in self._peers.items():
            header = _HEADER.pack(sequence, now_ns, rows.shape[1], len(counts[rank]))
            peer.outgoing.put((header + struct.pack(f"!{len(counts[rank])}q", *counts[rank]), parts[rank]))
        own = _Message(sequence, parts[self.rank], counts[self.rank], now_ns / 1e9, now_ns / 1e9)
        return PendingRows(partial(self._receive, own))

    def close(self) -> None:
        """See Exchange."""
        for peer in self._peers.values():
            peer.close()

    def _receive(self, own: _Message) -> ReceivedRows:
        end_s = time.monotonic() + self._timeout_s
        messages = [own if rank == self.rank else self._next(rank, end_s) for rank in range(self.size)]
        assert all(message.sequence == own.sequence for message in messages), "ranks are at different exchanges"
        return ReceivedRows(
            [message.rows for message in messages],
            [message.counts for message in messages],
            ready_s=max(message.ready_s for message in messages),
            arrived_s=max(message.arrived_s for message in messages),
        )

    def _next(self, rank: int, end_s: float) -> _Message:
        try:
            message = self._peers[rank].arrived.get(timeout=max(end_s - time.monotonic(), 0.0))
        except queue.Empty:
            raise PeerLostError(f"rank {rank} of the group did not answer within {self._timeout_s:g} s") from None
        if message is None:
            self._peers[rank].arrived.put(None)  # it stays so
            raise PeerLostError(f"rank {rank} of the group has ended")
        return message


def _connect(store: dist.Store, rank: int, size: int, meeting: Meeting, timeout_s: float) -> dict[int, _Peer]:
    """Connect to every other rank: call lower ranks, accept calls of higher ranks; return the connections."""
    called: queue.SimpleQueue[tuple[int, Stream]] = queue.SimpleQueue()

    def accept(stream: Stream) -> None:
        called.put((_HELLO.unpack(stream.receive(_HELLO.size))[0], stream))

    peers: dict[int, _Peer] = {}
    end_s = time.monotonic() + timeout_s
    listener = Listener(meeting.host, meeting.credentials, accept)
    try:
        store.set(f"tls/{rank}", f"{listener.port} {listener.host}")
        for lower in range(rank):
            port, _, host = store.get(f"tls/{lower}").decode().partition(" ")
            stream: Stream = call(host, int(port), meeting.credentials, max(end_s - time.monotonic(), 0.0))
            stream.send(_HELLO.pack(rank))
            peers[lower] = _Peer(stream)
        while len(peers) < size - 1:
            higher, caller = called.get(timeout=max(end_s - time.monotonic(), 0.0))
            peers[higher] = _Peer(caller)
    except (OSError, RuntimeError, queue.Empty) as error:
        raise PeerLostError.not_connected(size - 1 - len(peers), timeout_s, error) from error
    finally:
        listener.close()
    for peer in peers.values():
        peer.start()
    return peers


def _bytes_of(rows: torch.Tensor) -> memoryview:
    return rows.flatten().numpy().data
