"""The connections of a job's ranks to their controller: accepted calls, incoming messages, values between ranks."""

import queue
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from batchinfer.config.rank_layout import RankPlace
from batchinfer.net.credentials import make_credentials
from batchinfer.net.listener import Listener
from batchinfer.net.stream import Stream
from batchinfer.protocol.channel import Channel, ChannelClosedError
from batchinfer.protocol.messages import (
    Failed,
    FromRank,
    Hello,
    MalformedMessageError,
    Message,
    SharedValue,
    decode_from_rank,
    own_version,
)
from batchinfer.records import ConfigError
from batchinfer.run.liveness import this_host


@dataclass(frozen=True, slots=True)
class _Connected:
    channel: Channel[FromRank]
    host: str


class RankConnections:
    """The connections of all ranks of a job.

    Args:
        places: all ranks.
        host: the address at which ranks of other processes connect to this one; None: there are no such ranks.
    """

    def __init__(self, places: list[RankPlace], host: str | None) -> None:
        self._places = places
        self._callers: queue.Queue[tuple[Channel[FromRank], Hello]] = queue.Queue()
        self.credentials = "" if host is None else make_credentials()
        self.listener = None if host is None else Listener(host, self.credentials, self.greet)
        self._connected: dict[int, _Connected] = {}
        # a message may come from an old channel of a rank that has connected again since
        self._incoming: queue.Queue[tuple[int, Channel[FromRank], FromRank | None]] = queue.Queue()

    @property
    def hosts(self) -> dict[int, str]:
        """Host of each connected rank."""
        return {rank: connected.host for rank, connected in self._connected.items()}

    def address(self, rank: int) -> str:
        """Return the address at which ranks of other hosts reach this one; "" if there are no other hosts."""
        own = "" if self.listener is None else self.listener.host
        return self._connected[rank].channel.peer_address or own

    def greet(self, stream: Stream) -> None:
        """Wait for a rank's Hello; close the connection if another message comes."""
        channel = Channel(stream, decode_from_rank)
        try:
            hello = channel.receive()
        except (ChannelClosedError, MalformedMessageError):
            hello = None
        if isinstance(hello, Hello):
            self._callers.put((channel, hello))
        else:
            channel.close()

    def accept(self, may_be: Callable[[int, int], bool], wait_s: float) -> None:
        """Accept a rank that has called.

        Args:
            may_be: whether a rank can have this process number.

        Raises:
            queue.Empty: none called.
            ConfigError: its program is of another version than this one.
        """
        channel, hello = self._callers.get(timeout=wait_s)
        rank = hello.rank
        if not 0 <= rank < len(self._places) or not may_be(rank, hello.pid):
            channel.close()  # a rank of an earlier start, ended meanwhile
            return
        if hello.version != own_version():
            channel.close()
            raise ConfigError(
                f"rank {rank} on host {_name_of(hello.host)} runs batchinfer {hello.version}, its controller on host "
                f"{_name_of(this_host())} runs {own_version()}; install the same batchinfer and msgspec for both, then "
                "run the same command again"
            )
        if rank in self._connected:
            # another node has started its ranks once more: the latest one counts
            self._connected[rank].channel.close()
        self._connected[rank] = _Connected(channel, hello.host)
        # a separate thread sends: the controller never waits until a rank reads its messages
        channel.send_on(lambda error: self._incoming.put((rank, channel, Failed(str(error)))), encodes_first=True)
        channel.read_on(
            lambda message: self._take(rank, channel, message),
            at_end=lambda reason: self._incoming.put((rank, channel, _last_word(reason))),
        )

    def send(self, rank: int, message: Message) -> None:
        """Send to one rank.

        Raises:
            ChannelClosedError: the connection has ended.
        """
        self._connected[rank].channel.send(message)

    def next(self, wait_s: float) -> tuple[int, FromRank | None]:
        """Return the next message of any rank, None in its place if the rank is gone.

        Raises:
            queue.Empty: there is none.
        """
        while True:
            rank, channel, message = self._incoming.get(wait_s > 0, wait_s)
            if rank in self._connected and self._connected[rank].channel is channel:
                return rank, message

    def put_back(self, rank: int, message: FromRank | None) -> None:
        """Have `next` return this message again, after all messages that have come since."""
        self._incoming.put((rank, self._connected[rank].channel, message))

    def end(self) -> None:
        """End all connections; ranks that call later are accepted."""
        for connected in self._connected.values():
            connected.channel.close()
        self._connected.clear()

    def close(self) -> None:
        """End all connections and stop listening."""
        self.end()
        if self.listener is not None:
            self.listener.close()

    def _take(self, rank: int, channel: Channel[FromRank], message: FromRank) -> None:
        """Forward a SharedValue to the other ranks of its group; keep all other messages for `next`."""
        if not isinstance(message, SharedValue):
            self._incoming.put((rank, channel, message))
            return
        connected = dict(self._connected)
        if rank not in connected or connected[rank].channel is not channel:
            return  # from a rank of an earlier start
        for place in self._places:
            if place.leader == self._places[rank].leader and place.rank != rank:
                with suppress(ChannelClosedError):  # the rank is gone, as the thread that reads its channel will report
                    connected[place.rank].channel.send(message)


def _last_word(reason: Exception) -> Failed | None:
    """Convert the end of a connection to a message: Failed if its last bytes were malformed, else None."""
    return Failed(str(reason)) if isinstance(reason, MalformedMessageError) else None


def _name_of(host: str) -> str:
    """Return the name of a host, without what tells its containers apart; see this_host."""
    return host.partition(":")[0]
