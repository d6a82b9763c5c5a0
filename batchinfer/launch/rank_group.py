"""The ranks of a job as their controller sees them: what they say, and the end of all of them when one is lost.

Those of other nodes are started by an agent there (agent.py); to the controller they look the same. When one rank is
lost the others cannot go on: all are ended and all start anew.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from typing import NoReturn

from batchinfer.launch.rank_listener import RankListener
from batchinfer.launch.rank_watcher import LocalRanks
from batchinfer.parallel.layout import RankPlace
from batchinfer.protocol.channel import Channel
from batchinfer.protocol.handshake import ChannelClosedError
from batchinfer.protocol.messages import Bye, Failed, FromRank, Leave, MalformedMessageError, Message
from batchinfer.records import BatchinferError, ConfigError, ModelError, PeerLostError

CAUSE_S = 2.0  # after the first sign of a death, how long to collect what ranks say about it
LEAVE_S = 60.0  # for ranks to finish their step and leave
POLL_S = 0.2
REFUSALS: dict[str, type[BatchinferError]] = {kind.__name__: kind for kind in (ConfigError, ModelError)}


class RanksDiedError(Exception):
    """One rank was lost, and all were ended with it; the message says which one and why.

    has_reason: the rank itself said what went wrong.
    """

    def __init__(self, text: str, *, has_reason: bool = False) -> None:
        super().__init__(text)
        self.has_reason = has_reason


@dataclass(frozen=True, slots=True)
class _Connected:
    channel: Channel[FromRank]
    host: str


class RankGroup:
    """See module docstring.

    Args:
        places: all ranks.
        local: those that this process starts itself.
        listener: where ranks call.
    """

    def __init__(self, places: list[RankPlace], local: LocalRanks, listener: RankListener) -> None:
        self.places, self.local, self.listener = places, local, listener
        self._connected: dict[int, _Connected] = {}
        # a channel may be that of a rank which has called again since
        self._incoming: queue.Queue[tuple[int, Channel[FromRank], FromRank | None]] = queue.Queue()

    @property
    def hosts(self) -> dict[int, str]:
        """Where each rank runs that has called."""
        return {rank: connected.host for rank, connected in self._connected.items()}

    def let_in(self) -> None:
        """Take a rank that has called; waits a moment for one.

        Raises:
            RanksDiedError: a rank of this process has ended.
        """
        try:
            channel, hello = self.listener.callers.get(timeout=POLL_S)
        except queue.Empty:
            if self.local.ended():
                raise self._died() from None
            return
        rank = hello.rank
        if not 0 <= rank < len(self.places) or not self.local.may_be(rank, hello.pid):
            channel.close()  # of an earlier start, ended meanwhile
            return
        if rank in self._connected:
            # another node has started its ranks once more: the latest one counts
            self._connected[rank].channel.close()
        self._connected[rank] = _Connected(channel, hello.host)
        channel.read_on(
            lambda message: self._incoming.put((rank, channel, message)),
            at_end=lambda reason: self._incoming.put((rank, channel, _last_word(reason))),
        )

    def send(self, rank: int, message: Message) -> None:
        """Send to one rank.

        Raises:
            RanksDiedError: it is gone.
        """
        try:
            self._connected[rank].channel.send(message)
        except ChannelClosedError:
            raise self._died() from None

    def send_to_all(self, message: Message) -> None:
        """See `send`."""
        for place in self.places:
            self.send(place.rank, message)

    def receive(self) -> list[tuple[int, FromRank]]:
        """What has come from ranks; waits a moment for the first message.

        Raises:
            RanksDiedError: a rank has ended without a farewell.
            BatchinferError: a rank says that the job cannot run.
        """
        messages: list[tuple[int, FromRank]] = []
        try:
            rank, message = self._next(POLL_S)
            while message is not None and not isinstance(message, Failed):
                messages.append((rank, message))
                rank, message = self._next(0.0)
        except queue.Empty:  # everything that has come is taken
            if not messages and self.local.ended():
                raise self._died() from None
            return messages
        # what came before it is used first
        self._incoming.put((rank, self._connected[rank].channel, message))
        if messages:
            return messages
        raise self._died()

    def give_up(self, reason: str) -> NoReturn:
        """End all ranks because of something they do not notice themselves.

        Raises:
            RanksDiedError: with this reason.
        """
        self.end()
        raise RanksDiedError(reason)

    def leave(self) -> list[tuple[int, FromRank]]:
        """Ask all ranks to finish their step and go; returns their last messages. Those that do not are killed."""
        last: list[tuple[int, FromRank]] = []
        try:
            self.send_to_all(Leave())
            deadline = time.monotonic() + LEAVE_S
            gone: set[int] = set()
            while len(gone) < len(self.places) and time.monotonic() < deadline:
                try:
                    rank, message = self._next(POLL_S)
                except queue.Empty:
                    continue
                if message is None or isinstance(message, Bye | Failed):
                    gone.add(rank)
                else:
                    last.append((rank, message))
        except RanksDiedError:  # they are on their way out in any case
            pass
        self.end()
        return last

    def end(self) -> None:
        """End all ranks at once: those of other nodes notice that their connection is closed."""
        self.local.kill()
        for connected in self._connected.values():
            connected.channel.close()
        self._connected.clear()

    def _next(self, wait_s: float) -> tuple[int, FromRank | None]:
        """A rank's next message; None: it is gone.

        Raises:
            queue.Empty: there is none.
        """
        while True:
            rank, channel, message = self._incoming.get(wait_s > 0, wait_s)
            if rank in self._connected and self._connected[rank].channel is channel:
                return rank, message

    def _died(self) -> Exception:
        """End all ranks; the exception to raise, which names the rank that was lost first and why."""
        said: dict[int, Failed] = {}
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline:
            try:
                rank, message = self._next(POLL_S)
            except queue.Empty:
                if self.local.ended():
                    break
                continue
            if isinstance(message, Failed):
                said.setdefault(rank, message)
        ended = self.local.ended()
        silent = [rank for rank in self._connected if rank not in said]
        self.end()
        return _cause(said, ended, silent)


def _last_word(reason: Exception) -> Failed | None:
    """What the end of a connection says of the rank behind it; None: nothing, it is gone."""
    return Failed(str(reason)) if isinstance(reason, MalformedMessageError) else None


def _cause(said: dict[int, Failed], ended: dict[int, str], silent: list[int]) -> Exception:
    """Why the ranks ended.

    Args:
        said: by rank, the error that it ended with.
        ended: by rank, how its process ended.
        silent: ranks that said nothing.
    """
    for message in said.values():
        if message.error_class in REFUSALS:
            return REFUSALS[message.error_class](message.error)
    # a rank that complains about another one is not the cause
    culprits = {rank: how for rank, how in ended.items() if rank not in said}
    if culprits:
        return RanksDiedError("; ".join(f"rank {rank} {how}" for rank, how in culprits.items()))
    for rank, message in said.items():
        if message.error_class != PeerLostError.__name__:
            return RanksDiedError(f"rank {rank} failed: {message.error}", has_reason=True)
    for rank, message in said.items():
        return RanksDiedError(f"rank {rank}: {message.error}")
    return RanksDiedError(f"the connection to one of the ranks {', '.join(map(str, silent))} was lost")
