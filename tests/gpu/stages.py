"""Device times of each stage of a step, recorded in place of a step's span log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from batchinfer.parallel.spans import Arriving, MicroBatchSpans, ReceivedT, SpanLog


def _new_log() -> SpanLog:
    return SpanLog()


@dataclass(frozen=True, slots=True)
class StageEvents(MicroBatchSpans):
    """Two events around each stage; inside a captured graph they are taken again by every replay.

    The exchange is what packing, copying and summing take here: "DISPATCH" and "COMBINE".

    Args:
        is_timed: False on a CPU, where only the names are kept.
    """

    log: SpanLog = field(default_factory=_new_log)
    is_timed: bool = True
    events: list[tuple[str, Any, Any]] = field(default_factory=list)

    @contextmanager
    def compute(self, name: str) -> Iterator[None]:
        """The block computes."""
        start = self._event()
        yield
        self.events.append((name, start, self._event()))

    def send(self, name: str) -> Any:
        """The block packs and copies rows."""
        return self.compute(name)

    def receive(self, name: str, arriving: Arriving[ReceivedT]) -> ReceivedT:
        """Take rows in."""
        with self.compute(name):
            return arriving.wait()

    def names(self) -> Counter[str]:
        """Return the number of occurrences of each stage."""
        return Counter(name for name, _, _ in self.events)

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage in the latest run, which must have ended."""
        total: Counter[str] = Counter()
        for name, start, end in self.events:
            total[name] += start.elapsed_time(end) / 1e3
        return dict(total)

    def _event(self) -> Any:
        if not self.is_timed:
            return None
        event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
        event.record()
        return event
