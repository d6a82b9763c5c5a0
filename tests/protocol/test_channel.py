"""What a message between controller and ranks carries, over a real connection."""

from __future__ import annotations

import math
import queue
import socket
import struct
import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from batchinfer.parallel.spans import Span
from batchinfer.protocol.channel import Channel, ChannelClosedError, part
from batchinfer.protocol.channel_feed import ChannelFeed, with_nouns
from batchinfer.protocol.feed import Adoption, CachedTokens, Handover, StepRecord, StepReport
from batchinfer.records import Completion, Request, RequestKey, RequestTimes, Sampling, TokenLogprob

KEY = RequestKey(2, 1 << 40, 0)
TIMES = RequestTimes(1.5, 2.25, 0.0)
LOGPROBS = (TokenLogprob(7, -math.inf, ((7, -math.inf), (8, -0.5))),)
COMPLETION = Completion(KEY, 3, "a\x00 \U0001f600", [1, 2], "stop", "</s>", 5, 1, 2, 9, TIMES, LOGPROBS)
SAMPLING = Sampling(16, 0.5, 1.0, 0, 0.0, 2, 0, ("\n",), (4, 5), False, None)
REQUEST = Request(KEY, 3, [9, 8], SAMPLING, (1 << 64) - 1, last_units=(4,), expected_tokens=12.5)
RECORD = StepRecord(0, "decode", 1.5, 0.25, 2, 2, 0, 2, 99, 4, 1, 16, 0.0, 0.0, 0)


@pytest.fixture
def ends():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = Channel.connect("127.0.0.1", server.getsockname()[1], 5.0)
        far = Channel(server.accept()[0])
    yield near, far
    near.close()
    far.close()


def test_nouns_arrive_as_they_were_sent(ends):
    near, far = ends
    report = StepReport(RECORD, [COMPLETION], [KEY], [Span("compute", "ATTN", 1, 1.0, 2.0)])
    handover = Handover(KEY, [1], [*LOGPROBS], TIMES, CachedTokens(1, 2, 3), "parcel", 10)
    near.send({"type": "all", "reports": [report], "adoptions": [Adoption(REQUEST, handover)], "keys": [KEY]})
    message = far.receive()
    assert message["type"] == "all"
    assert part(message, "reports", list[StepReport]) == [report]
    assert part(message, "adoptions", list[Adoption]) == [Adoption(REQUEST, handover)]
    assert part(message, "keys", list[RequestKey]) == [KEY]


def test_a_logprob_that_is_no_number_stays_none_of_it(ends):
    near, far = ends
    near.send({"type": "one", "item": replace(COMPLETION, logprobs=(TokenLogprob(1, math.nan),))})
    (logprob,) = part(far.receive(), "item", Completion).logprobs
    assert math.isnan(logprob.logprob)


def test_numbers_of_numpy_arrive_as_numbers(ends):
    near, far = ends
    near.send({"type": "numbers", "values": [np.int64(3), np.float32(0.5), np.float64(1.5)]})
    assert far.receive()["values"] == [3, 0.5, 1.5]


def test_what_no_message_can_hold_is_refused(ends):
    near, _ = ends
    with pytest.raises(TypeError, match="a message cannot hold a object"):
        near.send({"type": "odd", "value": object()})


def test_a_thread_sends_all_in_order(ends):
    near, far = ends
    near.send({"type": "first"})
    near.send_on(at_fault=pytest.fail)
    for number in range(1000):
        near.send({"type": "numbered", "number": number})
    assert far.receive() == {"type": "first"}
    assert [far.receive()["number"] for _ in range(1000)] == list(range(1000))


def test_closing_sends_what_was_taken_before(ends):
    near, far = ends
    near.send_on(at_fault=pytest.fail)
    content = "x" * (1 << 22)  # more than the system takes at once
    got = []
    far.read_on(got.append, at_end=lambda: got.append({"type": "end"}))
    near.send({"type": "large", "content": content})
    near.send({"type": "bye"})
    near.close()
    deadline = time.monotonic() + 30
    while len(got) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert got == [{"type": "large", "content": content}, {"type": "bye"}, {"type": "end"}]


def test_a_thread_that_cannot_send_any_more_says_so(ends):
    near, far = ends
    near.send_on(at_fault=pytest.fail)
    far.close()

    def send_much() -> None:
        for _ in range(1000):
            near.send({"type": "large", "content": "x" * (1 << 16)})
            time.sleep(0.01)

    with pytest.raises(ChannelClosedError):
        send_much()


def test_a_message_that_cannot_be_sent_is_told(ends, capsys):
    near, far = ends
    near.send_on(at_fault=lambda error: near.send_now({"type": "failed", "error": str(error)}))
    near.send({"type": "odd", "value": object()})
    assert far.receive() == {"type": "failed", "error": "a message cannot hold a object"}
    assert "TypeError: a message cannot hold a object" in capsys.readouterr().err


def test_a_message_that_cannot_be_taken_ends_the_reading(ends, capsys):
    near, far = ends
    told = queue.SimpleQueue()

    def refuse(message: dict) -> None:
        raise ValueError(f"what is {message['type']}?")

    near.read_on(refuse, at_end=lambda: told.put("end"))
    far.send({"type": "this"})
    assert told.get(timeout=30) == "end"
    assert "ValueError: what is this?" in capsys.readouterr().err


def test_the_end_after_the_last_message_is_no_news(ends):
    near, far = ends
    told = queue.SimpleQueue()
    near.read_on(told.put, at_end=lambda: told.put("end"))
    near.send_on(at_fault=told.put)
    far.send({"type": "first"})
    assert told.get(timeout=30) == {"type": "first"}
    near.send_last({"type": "bye"})
    assert far.receive() == {"type": "bye"}
    far.close()
    with pytest.raises(queue.Empty):
        told.get(timeout=0.3)


def test_odd_nouns_are_raised_where_they_are_received():
    messages = queue.SimpleQueue()
    messages.put(with_nouns({"type": "adopted", "keys": [{"shard": 1}]}))
    with pytest.raises(msgspec.ValidationError, match="missing required field `row`"):
        ChannelFeed(None, messages, {}).receive()


def test_a_part_of_another_shape_is_refused(ends):
    near, far = ends
    near.send({"type": "adopted", "keys": [{"shard": 1, "row": "two", "sample": 0}]})
    with pytest.raises(msgspec.ValidationError, match="row"):
        part(far.receive(), "keys", list[RequestKey])


@pytest.mark.parametrize("content", [b"\xc1", b"\x93\x01\x02\x03", b""], ids=["damaged", "no dictionary", "empty"])
def test_other_peoples_bytes_end_the_connection(content):
    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger = socket.create_connection(server.getsockname())
        far = Channel(server.accept()[0])
    stranger.sendall(struct.pack("=I", len(content)) + content)
    with pytest.raises(ChannelClosedError):
        far.receive()
    stranger.close()
    far.close()
