"""The order in which a GPU's streams meet around an exchange, on fakes of torch.cuda that record their calls.

There is nothing here on which the real ones could run.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from batchinfer.parallel.exchange import DistributedExchange, ReceivedRows, TravelStream

CPU = torch.device("cpu")


class Group:
    """A group of this rank alone, as far as an exchange asks it."""

    def rank(self):
        return 0

    def size(self):
        return 1


@pytest.fixture
def notes(monkeypatch):
    """Calls of the streams in the order of time."""
    noted: list[str] = []
    current = threading.local()

    class Stream:
        def __init__(self, device, name="travelling"):
            self.name, self.num_events = name, 0

        def record_event(self):
            self.num_events += 1
            noted.append(f"{self.name} records {self.name}-{self.num_events}")
            return f"{self.name}-{self.num_events}"

        def wait_event(self, event):
            noted.append(f"{self.name} waits for {event}")

    computing = Stream(CPU, "computing")

    @contextmanager
    def stream(one):
        current.stream = one
        yield
        current.stream = computing

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: getattr(current, "stream", computing))
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, one: noted.append(f"{one.name} uses {len(tensor)} rows")
    )
    return noted


def test_rows_travel_on_a_stream_of_their_own_while_the_caller_s_goes_on(notes, monkeypatch):
    exchange = DistributedExchange(Group())
    exchange._stream = TravelStream(CPU)
    may_send = threading.Event()

    def all_to_all(rows, counts):
        may_send.wait(60)
        notes.append(f"rows are sent on {torch.cuda.current_stream(CPU).name}")
        return ReceivedRows([rows[:2]], [[2]], ready_s=0.5, arrived_s=1.0)

    monkeypatch.setattr(exchange, "_all_to_all", all_to_all)
    pending = exchange.start(torch.zeros(3, 4), torch.ones(1, 5, dtype=torch.int64))
    notes.append("the caller computes something else")
    may_send.set()
    received = pending.wait()
    exchange.close()
    assert (received.ready_s, received.arrived_s) == (None, None), "the host does not know when"
    waits = notes.index("travelling waits for computing-1")
    assert waits > notes.index("computing records computing-1")
    notes.pop(waits)  # before or after what the caller does meanwhile
    assert notes == [
        "travelling uses 3 rows",
        "travelling uses 1 rows",
        "computing records computing-1",
        "the caller computes something else",
        "rows are sent on travelling",
        "travelling records travelling-1",
        "computing waits for travelling-1",
        "computing uses 2 rows",
    ]
