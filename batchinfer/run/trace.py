"""Spans of a run as Chrome/Perfetto JSON (`--trace`); a no-op when off."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchinfer.checked_json import parse_json
from batchinfer.clock import unix_s
from batchinfer.records import COMPUTE, FLIGHT, KV, RECEIVE, SEND, WAIT, DamagedFileError, Span
from batchinfer.run.store.interface import Storage
from batchinfer.whole_files import publish_text

LANES = {COMPUTE: "computing", SEND: "computing", RECEIVE: "computing", KV: "KV"} | dict.fromkeys(
    (WAIT, FLIGHT), "communication"
)
MAX_EVENTS = 200_000  # about 30 MB of JSON; later spans are dropped and counted


class Tracer:
    """Collects complete events ("ph": "X", microseconds) on named lanes."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._events: list[dict[str, Any]] = []
        self._lanes: dict[str, int] = {}
        self._dropped = 0

    @contextmanager
    def span(self, name: str, lane: str, **args: Any) -> Iterator[None]:
        """Time the block as one event called `name` on `lane`."""
        if not self.enabled:
            yield
            return
        start = unix_s()
        try:
            yield
        finally:
            self._add(name, lane, start, unix_s() - start, args)

    def add(self, name: str, lane: str, start_s: float, end_s: float) -> None:
        """Add an event that was timed elsewhere, in Unix seconds."""
        if self.enabled:
            self._add(name, lane, start_s, end_s - start_s, {})

    def add_step(self, rank: int, kind: str, start_s: float, duration_s: float, spans: list[Span]) -> None:
        """Add a step of a rank, on the rank's own lanes.

        Args:
            spans: what happened in it; lanes for computing (with sending and receiving), rows under way, KV.
        """
        if not self.enabled:
            return
        self._add(kind, f"rank {rank} steps", start_s, duration_s, {})
        for span in spans:
            lane = f"rank {rank} {LANES[span.kind]}"
            name = f"{span.name} {span.kind}" if span.kind in (SEND, RECEIVE, WAIT) else span.name
            self._add(name, lane, span.start_s, span.end_s - span.start_s, {"micro_batch": span.micro_batch})

    def go_on(self, storage: Storage) -> None:
        """Keep what earlier commands have written to the run's trace, here or on a node that has put it in the store.

        Raises:
            DamagedFileError: it is no trace.
        """
        if not self.enabled:
            return
        path = storage.run.trace
        is_here = path.exists()
        content = path.read_bytes() if is_here else storage.get(path)
        if content is None:
            return
        remedy = "delete it" if is_here else f"delete {storage.run.shown}/{path.name}"
        document = parse_json(content, path, remedy=remedy)
        try:
            self._dropped += document["otherData"]["dropped_events"]
            for event in document["traceEvents"]:
                if event["ph"] == "M":
                    self._lanes[event["args"]["name"]] = event["tid"]
                else:
                    self._events.append(event)
        except (KeyError, TypeError):
            raise DamagedFileError(path, "it is no trace", remedy=remedy) from None

    def write(self, path: Path) -> None:
        """Publish everything collected so far; open it in ui.perfetto.dev."""
        if not self.enabled:
            return
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": lane}}
            for lane, tid in self._lanes.items()
        ]
        document = {"traceEvents": names + self._events, "otherData": {"dropped_events": self._dropped}}
        publish_text(path, json.dumps(document))

    def _add(self, name: str, lane: str, start_s: float, duration_s: float, args: dict[str, Any]) -> None:
        if len(self._events) >= MAX_EVENTS:
            self._dropped += 1
            return
        tid = self._lanes.setdefault(lane, len(self._lanes))
        event = {
            "name": name,
            "ph": "X",
            "ts": start_s * 1e6,
            "dur": duration_s * 1e6,
            "pid": 0,
            "tid": tid,
            "args": args,
        }
        self._events.append(event)
