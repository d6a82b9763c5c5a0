"""A rank's reports to its controller, and their frequency."""

from __future__ import annotations

import queue

import pytest

from batchinfer.protocol import feed as feed_module
from batchinfer.protocol.feed import Feed
from batchinfer.protocol.messages import StepRecord, StepReport, Steps

RECORD = StepRecord(**dict.fromkeys(StepRecord.__struct_fields__, 1) | {"kind": "decode"})


class Sent(list):
    """A channel that keeps what is sent."""

    send = list.append


@pytest.mark.parametrize(("num_ranks", "reports_per_message"), [(2, 6), (320, 33)])
def test_the_more_ranks_the_more_steps_are_told_together(monkeypatch, num_ranks, reports_per_message):
    """One report each 10 ms: every 0.05 s, or every ms for each rank of the job."""
    now_s = 0.0
    monkeypatch.setattr(feed_module.time, "monotonic", lambda: now_s)
    sent = Sent()
    feed = Feed(sent, queue.SimpleQueue(), {}, num_ranks)
    for step in range(100):
        now_s = step * 0.01
        feed.send(StepReport(RECORD, [], [], []))
    assert {type(message) for message in sent} == {Steps}
    assert max(len(message.reports) for message in sent) == reports_per_message
    feed.send_steps()
    assert sum(len(message.reports) for message in sent) == 100


def test_steps_are_told_at_once_when_many_requests_have_come_or_gone(monkeypatch):
    """An eighth of those that the controller knows of: 64 -> 56 are not yet more, 55 are; then 49, 42."""
    monkeypatch.setattr(feed_module.time, "monotonic", lambda: 0.0)
    sent = Sent()
    feed = Feed(sent, queue.SimpleQueue(), {})
    told = []
    for num_running in [64, *range(63, -1, -1)]:
        feed.send(StepReport(RECORD, [], [], []), num_running=num_running)
        if sent:
            told.append(num_running)
            sent.clear()
    assert told[:5] == [64, 55, 48, 41, 35]
    assert told[-3:] == [2, 1, 0]
    feed.send(StepReport(RECORD, [], [], []), num_running=0)
    assert not sent, "a rank without requests has nothing new to tell"
