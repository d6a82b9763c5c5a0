"""The connections of a job's ranks to their controller: who has called, what comes, what one rank tells the others."""

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
)


@dataclass(frozen=True, slots=True)
class _Connected:
    channel: Channel[FromRank]
    host: str


class RankConnections:
    """See module docstring.

    Args:
        places: all ranks.
        host: the address of this process at which ranks of other processes call; None: there are none.
    """

    def __init__(self, places: list[RankPlace], host: str | None) -> None:
        self._places = places
        self._callers: queue.Queue[tuple[Channel[FromRank], Hello]] = queue.Queue()
        self.credentials = "" if host is None else make_credentials()
        self.listener = None if host is None else Listener(host, self.credentials, self.greet)
        self._connected: dict[int, _Connected] = {}
        # a channel may be that of a rank which has called again since
        self._incoming: queue.Queue[tuple[int, Channel[FromRank], FromRank | None]] = queue.Queue()

    @property
    def hosts(self) -> dict[int, str]:
        """Where each rank runs that was let in."""
        return {rank: connected.host for rank, connected in self._connected.items()}

    def address(self, rank: int) -> str:
        """Where ranks of other hosts reach this one; "": there are none."""
        own = "" if self.listener is None else self.listener.host
        return self._connected[rank].channel.peer_address or own

    def greet(self, stream: Stream) -> None:
        """Wait until a rank has said which one it is; ends the connection if it says anything else."""
        channel = Channel(stream, decode_from_rank)
        try:
            hello = channel.receive()
        except (ChannelClosedError, MalformedMessageError):
            hello = None
        if isinstance(hello, Hello):
            self._callers.put((channel, hello))
        else:
            channel.close()

    def let_in(self, may_be: Callable[[int, int], bool], wait_s: float) -> None:
        """Take a rank that has called.

        Args:
            may_be: whether a rank can have this process number.

        Raises:
            queue.Empty: none called.
        """
        channel, hello = self._callers.get(timeout=wait_s)
        rank = hello.rank
        if not 0 <= rank < len(self._places) or not may_be(rank, hello.pid):
            channel.close()  # of an earlier start, ended meanwhile
            return
        if rank in self._connected:
            # another node has started its ranks once more: the latest one counts
            self._connected[rank].channel.close()
        self._connected[rank] = _Connected(channel, hello.host)
        # whatever a rank does, its controller never waits for it to take a message
        channel.send_on(lambda error: self._incoming.put((rank, channel, Failed(str(error)))), encodes_first=True)
        channel.read_on(
            lambda message: self._take(rank, channel, message),
            at_end=lambda reason: self._incoming.put((rank, channel, _last_word(reason))),
        )

    def send(self, rank: int, message: Message) -> None:
        """Send to one rank.

        Raises:
            ChannelClosedError: it is gone.
        """
        self._connected[rank].channel.send(message)

    def next(self, wait_s: float) -> tuple[int, FromRank | None]:
        """A rank's next message; None: it is gone.

        Raises:
            queue.Empty: there is none.
        """
        while True:
            rank, channel, message = self._incoming.get(wait_s > 0, wait_s)
            if rank in self._connected and self._connected[rank].channel is channel:
                return rank, message

    def put_back(self, rank: int, message: FromRank | None) -> None:
        """Have `next` return this again, after what has come since."""
        self._incoming.put((rank, self._connected[rank].channel, message))

    def end(self) -> None:
        """End all connections; ranks that call later are let in."""
        for connected in self._connected.values():
            connected.channel.close()
        self._connected.clear()

    def close(self) -> None:
        """End all connections, and answer no calls any more."""
        self.end()
        if self.listener is not None:
            self.listener.close()

    def _take(self, rank: int, channel: Channel[FromRank], message: FromRank) -> None:
        """Pass on what a rank tells the others of its group; keep all else for `next`."""
        if not isinstance(message, SharedValue):
            self._incoming.put((rank, channel, message))
            return
        connected = dict(self._connected)
        if rank not in connected or connected[rank].channel is not channel:
            return  # of an earlier start
        for place in self._places:
            if place.leader == self._places[rank].leader and place.rank != rank:
                with suppress(ChannelClosedError):  # it is gone, as what reads its channel will say
                    connected[place.rank].channel.send(message)


def _last_word(reason: Exception) -> Failed | None:
    """What the end of a connection says of the rank behind it; None: nothing, it is gone."""
    return Failed(str(reason)) if isinstance(reason, MalformedMessageError) else None
