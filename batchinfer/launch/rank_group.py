"""The ranks of a job as their controller sees them: what they say, and the end of all of them when one is lost.

Those of other nodes are started by an agent there (agent.py); to the controller they look the same. When one rank is
lost the others cannot go on: all are ended and all start anew.
"""

import queue
import threading
import time
from contextlib import suppress
from typing import NoReturn

from batchinfer.config.rank_layout import RankPlace
from batchinfer.launch.rank_connections import RankConnections
from batchinfer.launch.rank_watcher import LocalRanks
from batchinfer.protocol.channel import ChannelClosedError
from batchinfer.protocol.messages import Bye, Failed, FromRank, Leave, Message
from batchinfer.records import BatchinferError, ConfigError, ModelError, PeerLostError, StoreError

CAUSE_S = 2.0  # after the first sign of a death, how long to collect what ranks say about it
LEAVE_S = 60.0  # for ranks to finish their step and leave
POLL_S = 0.2
# what ends the job when a rank says it: no request is the cause, and a rank that is started again meets the same
REFUSALS: dict[str, type[BatchinferError]] = {kind.__name__: kind for kind in (ConfigError, ModelError, StoreError)}


class RanksDiedError(Exception):
    """One rank was lost, and all were ended with it; the message says which one and why.

    has_reason: the rank itself said what went wrong.
    """

    def __init__(self, text: str, *, has_reason: bool = False) -> None:
        super().__init__(text)
        self.has_reason = has_reason


class RankGroup:
    """See module docstring.

    Args:
        places: all ranks.
        local: those that this process starts itself.
        host: the address of this process at which ranks of other nodes call; None: there are none.
    """

    def __init__(self, places: list[RankPlace], local: LocalRanks, host: str | None) -> None:
        self.places, self.local = places, local
        self.keeps_ranks = False  # once they have left a job; set by who has another one for them
        self.is_resting = False  # all ranks have left a job and wait for the next one
        self.connections = RankConnections(places, host)

    @property
    def ranks_of_role(self) -> dict[str, list[int]]:
        """The ranks of each group by what it runs, in their order."""
        ranks: dict[str, list[int]] = {}
        for place in self.places:
            ranks.setdefault(place.role, []).append(place.rank)
        return ranks

    def start(self) -> float:
        """See LocalRanks.start; those of other nodes are started there."""
        started_s = self.local.start()
        for stream in self.local.streams:
            threading.Thread(target=self.connections.greet, args=(stream,), name="rank greeting", daemon=True).start()
        return started_s

    def let_in(self) -> None:
        """Take a rank that has called; waits a moment for one.

        Raises:
            RanksDiedError: a rank of this process has ended.
        """
        try:
            self.connections.let_in(self.local.may_be, POLL_S)
        except queue.Empty:
            if self.local.ended():
                raise self._died() from None

    def send(self, rank: int, message: Message) -> None:
        """Send to one rank.

        Raises:
            RanksDiedError: it is gone.
        """
        try:
            self.connections.send(rank, message)
        except ChannelClosedError:
            raise self._died() from None

    def send_to_all(self, message: Message) -> None:
        """See `send`."""
        for place in self.places:
            self.send(place.rank, message)

    def receive(self, wait_s: float = POLL_S) -> list[tuple[int, FromRank]]:
        """What has come from ranks; waits a moment for the first message.

        Raises:
            RanksDiedError: a rank has ended without a farewell.
            BatchinferError: a rank says that the job cannot run.
        """
        messages: list[tuple[int, FromRank]] = []
        try:
            rank, message = self.connections.next(wait_s)
            while message is not None and not isinstance(message, Failed):
                messages.append((rank, message))
                rank, message = self.connections.next(0.0)
        except queue.Empty:  # everything that has come is taken
            if not messages and self.local.ended():
                raise self._died() from None
            return messages
        # what came before it is used first
        self.connections.put_back(rank, message)
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
        """Ask all ranks to finish their step and go or rest; returns their last messages. Kills those that do not."""
        for place in self.places:
            with suppress(ChannelClosedError):  # it has left with others of its group; what it said last is here
                self.connections.send(place.rank, Leave(self.keeps_ranks))
        last: list[tuple[int, FromRank]] = []
        deadline = time.monotonic() + LEAVE_S
        said: dict[int, Bye | Failed | None] = {}
        while len(said) < len(self.places) and time.monotonic() < deadline:
            try:
                rank, message = self.connections.next(POLL_S)
            except queue.Empty:
                continue
            if message is None or isinstance(message, Bye | Failed):
                said[rank] = message
            else:
                last.append((rank, message))
        self.is_resting = self.keeps_ranks and [type(word) for word in said.values()] == [Bye] * len(self.places)
        if not self.is_resting:
            self.end()
        return last

    def wake(self) -> bool:
        """Whether all ranks rest and are well: they wait for a job, and rest no more. Otherwise all are ended."""
        is_well = False
        with suppress(RanksDiedError, BatchinferError):
            is_well = self.is_resting and not self.receive(wait_s=0.0)
        if not is_well:
            self.end()
        self.is_resting = False
        return is_well

    def end(self) -> None:
        """End all ranks at once: those of other nodes notice that their connection is closed."""
        self.is_resting = False
        self.local.kill()
        self.connections.end()

    def close(self) -> None:
        """End all ranks and answer no calls any more."""
        self.local.kill()
        self.connections.close()

    def _died(self) -> Exception:
        """End all ranks; the exception to raise, which names the rank that was lost first and why."""
        said: dict[int, Failed] = {}
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline:
            try:
                rank, message = self.connections.next(POLL_S)
            except queue.Empty:
                if self.local.ended():
                    break
                continue
            if isinstance(message, Failed):
                said.setdefault(rank, message)
        ended = self.local.ended()
        silent = [rank for rank in self.connections.hosts if rank not in said]
        self.end()
        return _cause(said, ended, silent)


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
