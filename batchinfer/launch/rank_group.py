"""The ranks of a job, for their controller: messages from them, and the end of all ranks when one is lost.

Ranks of other nodes are started by an agent there (agent.py); to the controller they look the same. When one rank is
lost the others cannot go on: all are ended and started again.
"""

import queue
import threading
import time
from contextlib import suppress
from typing import NoReturn

from batchinfer.config.rank_layout import RankPlace
from batchinfer.launch.dead_ranks import RanksDiedError, cause_of_death
from batchinfer.launch.local_ranks import LocalRanks
from batchinfer.launch.rank_connections import RankConnections
from batchinfer.protocol.channel import ChannelClosedError
from batchinfer.protocol.messages import Bye, Failed, FromRank, Leave, Message
from batchinfer.records import BatchinferError

CAUSE_S = 2.0  # after the first sign of a lost rank, for collecting the ranks' reports of the cause
LEAVE_S = 60.0  # for ranks to finish their step and leave
POLL_S = 0.2


class RankGroup:
    """All ranks of a job, which run and end together.

    Args:
        places: all ranks.
        local: the ranks that this process starts.
        host: the address at which ranks of other nodes connect to this process; None: there are no other nodes.
    """

    def __init__(self, places: list[RankPlace], local: LocalRanks, host: str | None) -> None:
        self.places, self.local = places, local
        self.keeps_ranks = False  # whether ranks stay after a job; KeptRanks sets it
        self.is_resting = False  # all ranks have left a job and wait for the next one
        self.connections = RankConnections(places, host)

    @property
    def ranks_of_role(self) -> dict[str, list[int]]:
        """The ranks of each group by role, in order."""
        ranks: dict[str, list[int]] = {}
        for place in self.places:
            ranks.setdefault(place.role, []).append(place.rank)
        return ranks

    def start(self) -> float:
        """Start the local ranks, see LocalRanks.start; agents start the others."""
        started_s = self.local.start()
        for stream in self.local.streams:
            threading.Thread(target=self.connections.greet, args=(stream,), name="rank greeting", daemon=True).start()
        return started_s

    def accept(self) -> None:
        """Accept a rank that has called; wait a moment for one.

        Raises:
            RanksDiedError: a rank of this process has ended.
            ConfigError: its program is of another version than this one.
        """
        try:
            self.connections.accept(self.local.may_be, POLL_S)
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
        """Send to every rank, see `send`."""
        for place in self.places:
            self.send(place.rank, message)

    def receive(self, wait_s: float = POLL_S) -> list[tuple[int, FromRank]]:
        """Return the messages that have come from ranks; wait a moment for the first one.

        Raises:
            RanksDiedError: a rank has ended without a farewell.
            BatchinferError: a rank reports that the job cannot run.
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
        # messages before the loss are used first
        self.connections.put_back(rank, message)
        if messages:
            return messages
        raise self._died()

    def give_up(self, reason: str) -> NoReturn:
        """End all ranks for a reason that they do not notice themselves.

        Raises:
            RanksDiedError: with this reason.
        """
        self.end()
        raise RanksDiedError(reason)

    def leave(self) -> list[tuple[int, FromRank]]:
        """Let all ranks finish their step, then exit or, if ranks are kept, wait for a job. Kill ranks that do neither.

        Returns:
            The last messages with their ranks.
        """
        for place in self.places:
            with suppress(ChannelClosedError):  # the rank has left with its group; its last message is here
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
        """Wake resting ranks for a job and return True; if one is lost or none rest, end all and return False."""
        is_well = False
        with suppress(RanksDiedError, BatchinferError):
            is_well = self.is_resting and not self.receive(wait_s=0.0)
        if not is_well:
            self.end()
        self.is_resting = False
        return is_well

    def end(self) -> None:
        """Kill the local ranks and close all connections, which ends the ranks of other nodes."""
        self.is_resting = False
        self.local.kill()
        self.connections.end()

    def close(self) -> None:
        """End all ranks and stop listening."""
        self.local.kill()
        self.connections.close()

    def _died(self) -> Exception:
        """End all ranks; return the exception to raise, which names the lost rank and the cause."""
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
        return cause_of_death(said, ended, silent)
