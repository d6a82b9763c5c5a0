"""A controller's reactions to misbehaving ranks, without any process of a rank."""

from __future__ import annotations

import re
import time

import msgspec
import pytest
from msgspec.structs import replace

from batchinfer.config.rank_layout import RankPlace
from batchinfer.launch import rank_group
from batchinfer.launch.dead_ranks import RanksDiedError
from batchinfer.launch.local_ranks import LocalRanks
from batchinfer.launch.rank_group import RankGroup
from batchinfer.net.tls import call
from batchinfer.protocol import messages
from batchinfer.protocol.channel import Channel, ChannelClosedError
from batchinfer.protocol.messages import (
    Bye,
    ExpertCounts,
    Failed,
    FromController,
    Hello,
    Leave,
    Message,
    NeedsRequests,
    SharedValue,
    decode_from_controller,
    own_version,
)
from batchinfer.records import ConfigError, ModelError, StoreError

PLACE = RankPlace(rank=0, role="both", group_rank=0, group_size=1)


@pytest.fixture
def ends(monkeypatch):
    """A rank's end, and the group that has let it in."""
    monkeypatch.setattr(rank_group, "CAUSE_S", 0.3)
    group = RankGroup([PLACE], LocalRanks(range(1)), "127.0.0.1")
    yield called(group, Hello(0, 1, "host")), group
    group.close()


def called(group: RankGroup, hello: Hello) -> Channel[FromController]:
    """The channel of a rank of this version that was let in."""
    connections = group.connections
    assert connections.listener is not None
    stream = call("127.0.0.1", connections.listener.port, connections.credentials, 5.0)
    rank = Channel(stream, decode_from_controller)
    rank.send(replace(hello, version=own_version()))
    while connections.hosts.get(hello.rank) != hello.host:
        group.accept()
    return rank


def send_for_ever(group, rank):
    while True:
        group.connections.send(rank, SharedValue("", b""))


def accept_for_ever(group):
    while True:
        group.accept()


def all_that_comes(group):
    while True:
        group.receive()


def test_a_malformed_message_is_told_with_the_rank_that_sent_it(ends):
    rank, group = ends
    rank._stream.send(b"\0\0\0\1\xc1")
    with pytest.raises(RanksDiedError, match=r"rank 0 failed: malformed message: .*invalid") as death:
        all_that_comes(group)
    assert death.value.has_reason


def test_the_end_of_a_connection_is_noticed_at_once_and_what_came_before_counts(ends):
    rank, group = ends
    rank.send(NeedsRequests(9))
    rank.close()
    begun_s = time.monotonic()
    assert group.receive() == [(0, NeedsRequests(9))]
    with pytest.raises(RanksDiedError, match="the connection to one of the ranks 0 was lost"):
        all_that_comes(group)
    assert time.monotonic() - begun_s < 5


@pytest.mark.parametrize("kind", [ModelError, ConfigError, StoreError])
def test_what_no_rank_can_run_is_refused_and_is_no_fault_of_a_request(ends, kind):
    rank, group = ends
    rank.send(Failed("no such tensor", kind.__name__))
    with pytest.raises(kind, match="no such tensor"):
        all_that_comes(group)


@pytest.mark.parametrize(
    ("told", "named"),
    [({"version": "0.0.9 (messages 1234)"}, r"0\.0\.9 \(messages 1234\)"), ({}, "an earlier version")],
)
def test_a_rank_of_another_version_is_refused(told, named):
    group = RankGroup([PLACE], LocalRanks(range(0)), "127.0.0.1")
    try:
        connections = group.connections
        stream = call("127.0.0.1", connections.listener.port, connections.credentials, 5.0)
        content = msgspec.msgpack.encode({"type": "Hello", "rank": 0, "pid": 1, "host": "far:boot:net", **told})
        stream.send(len(content).to_bytes(4, "big") + content)
        sentence = (
            rf"rank 0 on host far runs batchinfer {named}, its controller on host \S+ runs {re.escape(own_version())};"
        )
        with pytest.raises(ConfigError, match=sentence):
            accept_for_ever(group)
        with pytest.raises(ChannelClosedError):
            Channel(stream, decode_from_controller).receive()
    finally:
        group.close()


def test_the_version_tells_fields_in_another_order(monkeypatch):
    fields = [(name, int) for name in ("first", "second")]
    versions = []
    for order in (fields, fields[::-1]):
        steps = msgspec.defstruct("Steps", order, bases=(Message,), frozen=True)
        monkeypatch.setattr(messages, "FromRank", steps)
        versions.append(own_version.__wrapped__())
    assert len({own_version(), *versions}) == 3


def test_the_latest_call_of_a_rank_counts(ends):
    rank, group = ends
    rank.send(NeedsRequests(9))
    again = called(group, Hello(0, 2, "other"))
    again.send(NeedsRequests(9))
    assert group.receive() == [(0, NeedsRequests(9))]
    again.read_on(lambda message: again.send(Bye()) if message == Leave() else None, at_end=lambda reason: None)
    assert group.leave() == []


def test_what_a_rank_said_last_counts_though_it_left_before_it_was_asked_to():
    """Ranks of a group leave together, so the first one's Bye may come before the last one gets Leave."""
    places = [RankPlace(rank, "both", rank, 3) for rank in range(3)]
    group = RankGroup(places, LocalRanks(range(0)), "127.0.0.1")
    try:
        first, hasty, last = (called(group, Hello(rank, 1, f"host {rank}")) for rank in range(3))
        hasty.send(ExpertCounts(0, {"decode": [[1]]}, {"decode": [1]}))
        hasty.send_last(Bye())
        hasty.close()
        with pytest.raises(ChannelClosedError):
            send_for_ever(group, 1)
        for rank in (first, last):
            rank.read_on(lambda message, to=rank: to.send(Bye()) if message == Leave() else None, lambda reason: None)
        assert (1, ExpertCounts(0, {"decode": [[1]]}, {"decode": [1]})) in group.leave()
    finally:
        group.close()


def test_what_a_rank_tells_reaches_its_group_alone():
    places = [RankPlace(rank, "both", rank % 2, 2) for rank in range(4)]  # 0 and 1, 2 and 3
    group = RankGroup(places, LocalRanks(range(0)), "127.0.0.1")
    try:
        ranks = [called(group, Hello(rank, 1, f"host {rank}")) for rank in range(4)]
        ranks[1].send(SharedValue("from 1", b"\xff"))
        ranks[2].send(SharedValue("from 2", b""))
        assert ranks[0].receive() == SharedValue("from 1", b"\xff")
        assert ranks[3].receive() == SharedValue("from 2", b"")
        group.send_to_all(Leave())
        assert [rank.receive() for rank in ranks] == [Leave()] * 4
    finally:
        group.close()


def test_a_rank_that_says_nothing_of_itself_is_sent_away(ends):
    _, group = ends
    rank = Channel(call("127.0.0.1", group.connections.listener.port, group.connections.credentials, 5.0), bytes)
    rank.send(Bye())
    with pytest.raises(ChannelClosedError):
        rank.receive()
