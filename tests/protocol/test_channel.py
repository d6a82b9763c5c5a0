"""Messages between controller and ranks over a real connection."""

from __future__ import annotations

import math
import queue
import socket
import struct
import time

import numpy as np
import pytest
from msgspec.structs import replace

from batchinfer.net.stream import Stream
from batchinfer.protocol.channel import Channel, ChannelClosedError
from batchinfer.protocol.messages import (
    Adopt,
    Adoption,
    Bye,
    CachedTokens,
    Failed,
    Handover,
    Handovers,
    Hello,
    KvRead,
    Leave,
    MalformedMessageError,
    StepRecord,
    StepReport,
    Steps,
    StoreCounts,
    decode_from_controller,
    decode_from_rank,
    encode,
)
from batchinfer.records import Completion, Request, RequestKey, RequestTimes, Sampling, Span, TokenLogprobs

KEY = RequestKey(2, 1 << 40, 0)
TIMES = RequestTimes(1.5, 2.25, 0.0)
LOGPROBS = TokenLogprobs(2)
LOGPROBS.add(
    np.int32(7).tobytes(),
    np.float64(-math.inf).tobytes(),
    np.array([7, 8], np.int32).tobytes(),
    np.array([-math.inf, -0.5]).tobytes(),
)
COMPLETION = Completion(KEY, 3, "a\x00 \U0001f600", [1, 2], "stop", "</s>", 5, 1, 2, 9, TIMES, LOGPROBS)
SAMPLING = Sampling(16, 0.5, 1.0, 0, 0.0, 2, 0, ("\n",), (4, 5), False, None)
REQUEST = Request(KEY, 3, [9, 8], SAMPLING, (1 << 64) - 1, last_units=(4,), expected_tokens=12.5)
RECORD = StepRecord("decode", 1.5, 0.25, 2, 2, 0, 2, 99, 60, 4, 1, 0, 16, 0.0, 0.0, None, 0.0, 0)
HANDOVER = Handover(KEY, [1], LOGPROBS, None, TIMES, CachedTokens(1, 2, 3), "parcel", 10)
HELLO = Hello(0, 1, "host")


@pytest.fixture
def ends():
    """A rank's end and its controller's."""
    near_end, far_end = socket.socketpair()
    near, far = Channel(Stream(near_end), decode_from_controller), Channel(Stream(far_end), decode_from_rank)
    yield near, far
    near.close()
    far.close()


def test_messages_arrive_as_they_were_sent(ends):
    near, far = ends
    report = StepReport(RECORD, [COMPLETION], [KEY], [Span("compute", "ATTN", 1, 1.0, 2.0)])
    for message in (Steps([report]), Handovers([HANDOVER]), KvRead([KEY]), StoreCounts({"reads": 1.5}, ["full"])):
        near.send(message)
        assert far.receive() == message
    for message in (Adopt([Adoption(REQUEST, HANDOVER)]), Leave()):
        far.send(message)
        assert near.receive() == message


def test_a_logprob_that_is_no_number_stays_none_of_it(ends):
    near, far = ends
    columns = bytearray(np.int32(1).tobytes()), bytearray(np.float64(math.nan).tobytes())
    near.send(Steps([StepReport(RECORD, [replace(COMPLETION, logprobs=TokenLogprobs(0, *columns))])]))
    found = far.receive().reports[0].completions[0].logprobs
    assert len(found) == 1
    assert np.isnan(np.frombuffer(found.logprobs)).all()


def test_columns_of_logprobs_that_do_not_fit_together_are_malformed(ends):
    near, far = ends
    columns = TokenLogprobs(1)
    columns.top_logprobs += bytes(8)  # of no token
    near.send(Steps([StepReport(RECORD, [replace(COMPLETION, logprobs=columns)])]))
    with pytest.raises(MalformedMessageError, match="different lengths"):
        far.receive()


def test_numbers_of_numpy_arrive_as_numbers(ends):
    near, far = ends
    near.send(StoreCounts({"a": np.int64(3), "b": np.float32(0.5), "c": np.float64(1.5)}, []))
    counts = far.receive().counts
    assert counts == {"a": 3, "b": 0.5, "c": 1.5}
    assert isinstance(counts["a"], int)


def test_what_no_message_can_hold_is_refused(ends):
    near, _ = ends
    with pytest.raises(TypeError, match="a message cannot hold a object"):
        near.send(Failed(object()))


def test_a_thread_sends_all_in_order(ends):
    near, far = ends
    near.send(HELLO)
    near.send_on(at_fault=pytest.fail)
    for number in range(1000):
        near.send(Hello(number, 1, "host"))
    assert far.receive() == HELLO
    assert [far.receive().rank for _ in range(1000)] == list(range(1000))


def test_closing_sends_what_was_taken_before(ends):
    near, far = ends
    near.send_on(at_fault=pytest.fail)
    content = "x" * (1 << 22)  # more than the system takes at once
    got = []
    far.read_on(got.append, at_end=lambda reason: got.append(type(reason)))
    near.send(Failed(content))
    near.send(Bye())
    near.close()
    deadline = time.monotonic() + 30
    while len(got) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert got == [Failed(content), Bye(), ChannelClosedError]


def test_a_channel_that_got_no_thread_can_be_closed(ends, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    near, _ = ends
    monkeypatch.setattr("threading.Thread.start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        near.send_on(at_fault=print)
    near.close()


def test_a_thread_that_cannot_send_any_more_says_so(ends):
    near, far = ends
    near.send_on(at_fault=pytest.fail)
    far.close()

    def send_much() -> None:
        for _ in range(1000):
            near.send(Failed("x" * (1 << 16)))
            time.sleep(0.01)

    with pytest.raises(ChannelClosedError):
        send_much()


def test_a_message_that_cannot_be_sent_is_told(ends, capsys):
    near, far = ends
    near.send_on(at_fault=lambda error: near.send_now(Failed(str(error))))
    near.send(Failed(object()))
    assert far.receive() == Failed("a message cannot hold a object")
    assert "TypeError: a message cannot hold a object" in capsys.readouterr().err


def test_who_does_not_read_keeps_nobody_waiting_and_gets_what_was_sent(ends):
    near, far = ends
    near.send_on(at_fault=pytest.fail, encodes_first=True)
    words = ["x" * (1 << 20)]
    report = KvRead([KEY])
    for _ in range(16):  # more than the system takes
        near.send(Failed(words[0]))
    near.send(report)
    report.keys.clear()  # it is in bytes already
    assert [far.receive() for _ in range(17)] == [Failed(words[0])] * 16 + [KvRead([KEY])]


def test_what_is_sent_at_once_and_what_has_to_wait_stay_in_order(ends):
    near, far = ends
    near.send_on(at_fault=pytest.fail, encodes_first=True)
    sizes = np.random.default_rng(0).integers(0, 100_000, 500)
    got = []
    far.read_on(got.append, at_end=pytest.fail)
    for number, size in enumerate(sizes):
        near.send(Failed("x" * int(size), str(number)))
    end_s = time.monotonic() + 30
    while len(got) < len(sizes) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert [(len(message.error), message.error_class) for message in got] == [
        (size, str(number)) for number, size in enumerate(sizes)
    ]
    far._is_ending = True


def test_a_message_that_cannot_be_taken_ends_the_reading(ends, capsys):
    near, far = ends
    told = queue.SimpleQueue()

    def refuse(message) -> None:
        raise ValueError(f"what is {message}?")

    near.read_on(refuse, at_end=told.put)
    far.send(Leave())
    assert str(told.get(timeout=30)) == "what is Leave(stay=False)?"
    assert "ValueError: what is Leave(stay=False)?" in capsys.readouterr().err


def test_the_end_after_the_last_message_is_no_news(ends):
    near, far = ends
    told = queue.SimpleQueue()
    near.read_on(told.put, at_end=told.put)
    near.send_on(at_fault=told.put)
    far.send(Leave())
    assert told.get(timeout=30) == Leave()
    near.send_last(Bye())
    assert far.receive() == Bye()
    far.close()
    with pytest.raises(queue.Empty):
        told.get(timeout=0.3)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "truncated"),
        (b"\xc1", "invalid opcode"),
        (b"\x93\x01\x02\x03", "Expected `object`"),
        (encode(Leave()), "Invalid value 'Leave'"),  # what only a controller sends
        (encode(KvRead([RequestKey(1, "two", 0)])), r"Expected `int`, got `str` - at `\$.keys\[0\]\[1\]`"),
        (encode(KvRead([KEY]))[:-1], "truncated"),
    ],
    ids=["empty", "damaged", "no message", "the other way", "another shape", "cut"],
)
def test_a_malformed_message_is_refused_by_name_and_ends_the_reading(ends, content, what):
    near, far = ends
    told = queue.SimpleQueue()
    far.read_on(told.put, at_end=told.put)
    near._stream.send(struct.pack("!I", len(content)) + content)
    reason = told.get(timeout=30)
    assert isinstance(reason, MalformedMessageError)
    with pytest.raises(MalformedMessageError, match=f"malformed message: .*{what}"):
        raise reason


def test_more_than_a_message_can_have_ends_the_connection_before_memory_is_taken(ends, monkeypatch):
    near, far = ends
    asked, plain = [], Stream.receive
    monkeypatch.setattr(Stream, "receive", lambda stream, size: asked.append(size) or plain(stream, min(size, 1000)))
    near._stream.send(struct.pack("!I", (1 << 32) - 1) + b"x" * 1000)
    with pytest.raises(ChannelClosedError):
        far.receive()
    assert asked == [4]  # the length alone
