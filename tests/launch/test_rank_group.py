"""What a controller makes of ranks that misbehave, without any process of a rank."""

from __future__ import annotations

import time

import pytest

from batchinfer.launch import rank_group
from batchinfer.launch.rank_group import RankGroup, RanksDiedError
from batchinfer.launch.rank_listener import RankListener
from batchinfer.launch.rank_watcher import LocalRanks
from batchinfer.parallel.layout import RankPlace
from batchinfer.protocol.channel import Channel
from batchinfer.protocol.messages import Bye, Failed, Hello, Leave, NeedsRequests, decode_from_controller
from batchinfer.records import ModelError

PLACE = RankPlace(rank=0, role="both", group_rank=0, group_size=1)


@pytest.fixture
def ends(monkeypatch):
    """A rank's end, and the group that has let it in."""
    monkeypatch.setattr(rank_group, "CAUSE_S", 0.3)
    listener = RankListener("127.0.0.1")
    local = LocalRanks(range(1), "127.0.0.1", listener.port, listener.token, one_host=True)
    group = RankGroup([PLACE], local, listener)
    rank = Channel.connect("127.0.0.1", listener.port, listener.token, decode_from_controller, 5.0)
    rank.send(Hello(0, 1, "host"))
    while not group.hosts:
        group.let_in()
    yield rank, group
    group.end()
    listener.close()


def all_that_comes(group):
    while True:
        group.receive()


def test_a_malformed_message_is_told_with_the_rank_that_sent_it(ends):
    rank, group = ends
    rank._connection.send_bytes(b"\xc1")
    with pytest.raises(RanksDiedError, match=r"rank 0 failed: malformed message: .*invalid") as death:
        all_that_comes(group)
    assert death.value.has_reason


def test_the_end_of_a_connection_is_noticed_at_once_and_what_came_before_counts(ends):
    rank, group = ends
    rank.send(NeedsRequests())
    rank.close()
    begun_s = time.monotonic()
    assert group.receive() == [(0, NeedsRequests())]
    with pytest.raises(RanksDiedError, match="the connection to one of the ranks 0 was lost"):
        all_that_comes(group)
    assert time.monotonic() - begun_s < 5


def test_what_no_rank_can_run_is_refused(ends):
    rank, group = ends
    rank.send(Failed("no such tensor", "ModelError"))
    with pytest.raises(ModelError, match="no such tensor"):
        all_that_comes(group)


def test_the_latest_call_of_a_rank_counts(ends):
    rank, group = ends
    rank.send(NeedsRequests())
    again = Channel.connect("127.0.0.1", group.listener.port, group.listener.token, decode_from_controller, 5.0)
    again.send(Hello(0, 2, "other"))
    while group.hosts != {0: "other"}:
        group.let_in()
    again.send(NeedsRequests())
    assert group.receive() == [(0, NeedsRequests())]
    again.read_on(lambda message: again.send(Bye()) if message == Leave() else None, at_end=lambda reason: None)
    assert group.leave() == []
