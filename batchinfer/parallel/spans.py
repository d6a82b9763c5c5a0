"""What a rank did when during one step: computing, sending, receiving, and rows under way; written by layers.

Two lanes per rank. The computing lane holds ATTN, MLP and the like, and the moments in which the rank itself packs rows
("DISPATCH send") or waits for them and unpacks ("DISPATCH receive"). The communication lane holds the rows' flight:

    computing      | ATTN(1) |send| ATTN(0) |send|receive| MLP(1) |
    communication            |DISPATCH(1)····|DISPATCH(0)··|

A flight ends when the rows are here, whether or not the rank looks at them yet; the next one begins no earlier. What of
a flight lies beside a computing span is hidden communication; the rest, and all sending and receiving, is not.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

ReceivedT = TypeVar("ReceivedT", covariant=True)  # noqa: PLC0105

COMPUTE, SEND, RECEIVE, FLIGHT = "compute", "send", "receive", "flight"
KV = "kv"  # between ranks: a prompt's KV packed or taken in; not part of the expert exchange


class Arriving(Protocol[ReceivedT]):
    """Something under way that can be waited for."""

    def wait(self) -> ReceivedT:
        """It, once it is here."""
        ...

    @property
    def arrived_s(self) -> float | None:
        """After `wait`: Unix time when all of it was here; None where that is not known."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of time, Unix seconds."""

    kind: str
    name: str
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(slots=True)
class SpanLog:
    """The spans of one step of one rank; micro-batches write to it through `MicroBatchSpans`."""

    spans: list[Span] = field(default_factory=list)
    last_arrival_s: float = 0.0

    @contextmanager
    def kv(self, name: str) -> Iterator[None]:
        """The block moves KV out of or into the pages."""
        start_s = time.time()
        yield
        self.spans.append(Span(KV, name, 0, start_s, time.time()))

    def communication_s(self) -> float:
        """Seconds in which rows were packed, under way or waited for."""
        return _length(_union([span for span in self.spans if span.kind in (SEND, RECEIVE, FLIGHT)]))

    def hidden_communication_s(self) -> float:
        """Of these, seconds in which the rank computed."""
        flights = _union([span for span in self.spans if span.kind == FLIGHT])
        computing = _union([span for span in self.spans if span.kind == COMPUTE])
        return _overlap(flights, computing)


@dataclass(frozen=True, slots=True)
class MicroBatchSpans:
    """The span log as one micro-batch sees it."""

    log: SpanLog
    micro_batch: int = 0

    @contextmanager
    def compute(self, name: str) -> Iterator[None]:
        """The block computes."""
        start_s = time.time()
        yield
        self._add(COMPUTE, name, start_s, time.time())

    @contextmanager
    def send(self, name: str) -> Iterator[None]:
        """The block packs rows and starts sending them."""
        start_s = time.time()
        yield
        self._add(SEND, name, start_s, time.time())

    def receive(self, name: str, arriving: Arriving[ReceivedT]) -> ReceivedT:
        """Wait for what the latest `send` of this name and micro-batch started."""
        sent_s = next(
            span.end_s
            for span in reversed(self.log.spans)
            if span.kind == SEND and span.name == name and span.micro_batch == self.micro_batch
        )
        start_s = time.time()
        received = arriving.wait()
        end_s = time.time()
        arrived_s = end_s if arriving.arrived_s is None else min(max(arriving.arrived_s, sent_s), end_s)
        begin_s = max(sent_s, self.log.last_arrival_s)
        self.log.last_arrival_s = max(begin_s, arrived_s)
        self._add(FLIGHT, name, begin_s, self.log.last_arrival_s)
        self._add(RECEIVE, name, start_s, end_s)
        return received

    def _add(self, kind: str, name: str, start_s: float, end_s: float) -> None:
        self.log.spans.append(Span(kind, name, self.micro_batch, start_s, end_s))


def _union(spans: list[Span]) -> list[tuple[float, float]]:
    """The time covered by at least one span, as ascending intervals that do not touch."""
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
    """Seconds that lie in both; each ascending and disjoint."""
    total_s, place = 0.0, 0
    for start_s, end_s in first:
        while place < len(second) and second[place][1] <= start_s:
            place += 1
        for other_start_s, other_end_s in second[place:]:
            if other_start_s >= end_s:
                break
            total_s += min(end_s, other_end_s) - max(start_s, other_start_s)
    return total_s
