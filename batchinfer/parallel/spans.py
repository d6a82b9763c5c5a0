"""Spans of one rank in one step: computing, sending, receiving, and rows in flight; written by layers.

Two lanes per rank. The computing lane holds ATTN, MLP and the like, and the moments in which the rank itself packs rows
("DISPATCH send") or waits for them and unpacks ("DISPATCH receive"). The communication lane holds the rows' flight:

    computing      | ATTN(1) |send| ATTN(0) |send|receive| MLP(1) |
    communication            |DISPATCH(1)····|DISPATCH(0)··|

The time from sending to the arrival of all rows, whether or not the rank looks at them yet, has two parts. Until the
last of the other ranks has sent its rows, nothing moves: that is waiting for a late rank. From then on rows move: that
is the flight, and the next exchange begins no earlier than its end.

    DISPATCH(1)   |send|  waiting for others  |  moving  |receive|
                       sent              all have sent  here

The part of a flight during a computing span is hidden communication; the rest, and all packing and unpacking, is
exposed. Waiting is neither, whatever the rank does meanwhile.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from batchinfer.clock import unix_s
from batchinfer.records import COMPUTE, FLIGHT, KV, RECEIVE, SEND, WAIT, Span

ReceivedT = TypeVar("ReceivedT", covariant=True)  # noqa: PLC0105


class Arriving(Protocol[ReceivedT]):
    """A transfer under way."""

    def wait(self) -> ReceivedT:
        """Wait for the transfer and return its result."""
        ...

    @property
    def ready_s(self) -> float | None:
        """Unix time when the last of the other ranks had sent its part, after `wait`; None if not known."""
        ...

    @property
    def arrived_s(self) -> float | None:
        """Unix time when all parts had arrived, after `wait`; None if not known."""
        ...


@dataclass(slots=True)
class SpanLog:
    """The spans of one step of one rank; micro-batches write to it through `MicroBatchSpans`."""

    spans: list[Span] = field(default_factory=list)
    last_arrival_s: float = 0.0
    unpacking: list[Span] = field(default_factory=list)  # the ends of receiving spans, after the rows have arrived
    knows_waiting: bool = True  # whether the sending time of all arrived rows is known

    @contextmanager
    def kv(self, name: str) -> Iterator[None]:
        """Record a span of kind KV for the block, which moves KV out of or into the pages."""
        start_s = unix_s()
        yield
        self.spans.append(Span(KV, name, 0, start_s, unix_s()))

    def communication_s(self) -> float:
        """Return the seconds in which rows were packed, moving, waited for or unpacked."""
        return _length(self._covered(SEND, RECEIVE, FLIGHT, WAIT))

    def exposed_communication_s(self) -> float:
        """Return the seconds of communication in which the rank computed nothing."""
        return self.communication_s() - _overlap(self._covered(FLIGHT, WAIT), self._covered(COMPUTE))

    def waiting_s(self) -> float | None:
        """Return the seconds in which nothing moved, as another rank had not sent its rows; None if unknown."""
        if not self.knows_waiting:
            return None
        waiting = self._covered(WAIT)
        moving = _union([*self.unpacking, *(span for span in self.spans if span.kind in (SEND, FLIGHT))])
        return _length(waiting) - _overlap(waiting, moving)

    def hidden_communication_s(self) -> float | None:
        """Return the seconds of communication without waiting in which the rank computed; None if unknown."""
        return _overlap(self._covered(FLIGHT), self._covered(COMPUTE)) if self.knows_waiting else None

    def hideable_s(self) -> float | None:
        """Return the seconds of rows under way or waited for that another micro-batch's computing could have hidden.

        These are at most the seconds of computing, and 0 if rows never move while the rank computes. None if unknown.
        """
        if not self.knows_waiting:
            return None
        if not _length(self._covered(FLIGHT)):
            return 0.0
        computing, arriving = self._covered(COMPUTE), self._covered(FLIGHT, WAIT)
        return min(_length(arriving) - _overlap(arriving, computing), _length(computing))

    def _covered(self, *kinds: str) -> list[tuple[float, float]]:
        return _union([span for span in self.spans if span.kind in kinds])


@dataclass(frozen=True, slots=True)
class MicroBatchSpans:
    """The writer of one micro-batch's spans."""

    log: SpanLog
    micro_batch: int = 0

    @contextmanager
    def compute(self, name: str) -> Iterator[None]:
        """Record a span of kind COMPUTE for the block."""
        start_s = unix_s()
        yield
        self._add(COMPUTE, name, start_s, unix_s())

    @contextmanager
    def send(self, name: str) -> Iterator[None]:
        """Record a span of kind SEND for the block, which packs rows and starts sending them."""
        start_s = unix_s()
        yield
        self._add(SEND, name, start_s, unix_s())

    def receive(self, name: str, arriving: Arriving[ReceivedT]) -> ReceivedT:
        """Wait for the transfer that the latest `send` of this name and micro-batch started; record its spans."""
        sent_s = next(
            span.end_s
            for span in reversed(self.log.spans)
            if span.kind == SEND and span.name == name and span.micro_batch == self.micro_batch
        )
        start_s = unix_s()
        received = arriving.wait()
        end_s = unix_s()
        arrived_s = end_s if arriving.arrived_s is None else min(max(arriving.arrived_s, sent_s), end_s)
        begin_s = max(sent_s, self.log.last_arrival_s)
        here_s = self.log.last_arrival_s = max(begin_s, arrived_s)
        ready_s = begin_s if arriving.ready_s is None else min(max(arriving.ready_s, begin_s), here_s)
        self.log.knows_waiting = self.log.knows_waiting and arriving.ready_s is not None
        if ready_s > begin_s:
            self._add(WAIT, name, begin_s, ready_s)
        self._add(FLIGHT, name, ready_s, here_s)
        self._add(RECEIVE, name, start_s, end_s)
        self.log.unpacking.append(Span(RECEIVE, name, self.micro_batch, min(max(start_s, here_s), end_s), end_s))
        return received

    def _add(self, kind: str, name: str, start_s: float, end_s: float) -> None:
        self.log.spans.append(Span(kind, name, self.micro_batch, start_s, end_s))


def _union(spans: list[Span]) -> list[tuple[float, float]]:
    """Return the time covered by at least one span, as ascending intervals that do not touch."""
    covered: list[tuple[float, float]] = []
    for start_s, end_s in sorted((span.start_s, span.end_s) for span in spans):
        if covered and start_s <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(covered[-1][1], end_s))
        else:
            covered.append((start_s, end_s))
    return covered


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(end_s - start_s for start_s, end_s in intervals)


def _overlap(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    """Return the seconds that are in both lists of ascending, disjoint intervals."""
    total_s, place = 0.0, 0
    for start_s, end_s in first:
        while place < len(second) and second[place][1] <= start_s:
            place += 1
        for other_start_s, other_end_s in second[place:]:
            if other_start_s >= end_s:
                break
            total_s += min(end_s, other_end_s) - max(start_s, other_start_s)
    return total_s
