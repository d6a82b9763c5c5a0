"""Rows between ranks: arrival of any rows in any rhythm, and the errors after the loss of a rank.

The same rounds run on every exchange: on threads that meet at queues (so that the simulated mesh of other tests is one
too), on shared memory and on gloo.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from batchinfer.parallel.all_to_all import AllToAllDispatcher
from batchinfer.parallel.dispatch import LocalDispatcher
from batchinfer.parallel.exchange import MAX_UNDER_WAY, Exchange
from batchinfer.parallel.mesh import Mesh, Seat
from batchinfer.parallel.placement import Placement
from batchinfer.parallel.row_format import RowFormat
from batchinfer.parallel.shared_memory import SharedMemoryExchange
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog
from batchinfer.parallel.tls_exchange import PeerClock
from batchinfer.records import ConfigError, PeerLostError
from support.exchanges import DEADLINE_S, RankProcesses, ThreadedMesh, meeting, open_exchange, shared_memory_group
from support.open_files import no_more_open_files

KINDS = ("shared", "staged", "tls", "gloo")
NUM_ROUNDS = 40
MUCH_LATER_S = 600.0  # a deadline that no test waits for


class Round:
    """The rows of all ranks in one round, known to each rank, so that it can check the arriving rows."""

    def __init__(self, seed: int, number: int, size: int, most: int | None = None):
        random = np.random.default_rng([seed, number])
        self.number = number
        self.row_bytes = int(random.integers(1, 65)) * 8
        if most is None:  # usually a few rows, sometimes none, now and then enough for memory to grow
            most = int(random.choice([0, 1, 5, 100, 1000], p=[0.1, 0.3, 0.3, 0.2, 0.1]))
        self.counts = random.integers(0, most + 1, size=(size, size, random.integers(1, 5)))  # from, to, count
        self.counts[random.random((size, size)) < 0.3] = 0

    def rows_of(self, source: int) -> torch.Tensor:
        """Each byte tells of its round, rank, row and place in the row."""
        row = torch.arange(int(self.counts[source].sum())) * 13 + source * 37 + self.number * 71
        return (row % 251).to(torch.uint8)[:, None] + torch.arange(self.row_bytes).to(torch.uint8)

    def start(self, exchange: Exchange):
        rows = self.rows_of(exchange.rank)
        buffer = exchange.buffer(*rows.shape)
        buffer.copy_(rows)
        return exchange.start(buffer, self.counts[exchange.rank].tolist())

    def check(self, rank: int, received) -> None:
        assert received.counts == self.counts[:, rank].tolist()
        for source, rows in enumerate(received.rows):
            start = int(self.counts[source, :rank].sum())
            expected = self.rows_of(source)[start : start + int(self.counts[source, rank].sum())]
            assert torch.equal(rows, expected), f"round {self.number}, rows from {source} to {rank}"


def run_rounds(exchange: Exchange, seed: int, num_rounds: int = NUM_ROUNDS) -> None:
    """Rounds in a rhythm of this rank's own: one or more under way, as it happens."""
    random = np.random.default_rng([seed, 1000 + exchange.rank])
    under_way: deque = deque()
    for number in range(num_rounds):
        this = Round(seed, number, exchange.size)
        under_way.append((this, this.start(exchange)))
        while len(under_way) == MAX_UNDER_WAY or (under_way and random.random() < 0.3):
            earlier, pending = under_way.popleft()
            earlier.check(exchange.rank, pending.wait())
    for earlier, pending in under_way:
        earlier.check(exchange.rank, pending.wait())


def rounds_of_a_process(rank, size, store, kind, seed):
    exchange = open_exchange(kind, store, rank, size, DEADLINE_S)
    run_rounds(exchange, seed)
    exchange.close()


# --- what arrives -----------------------------------------------------------------------------------------------------


def test_worked_example():
    # rank 0 sends one row to itself and two to rank 1; rank 1 one to rank 0, none to itself
    #            for rank 0   for rank 1
    #   rank 0   [1]          [2] [3]
    #   rank 1   [4]
    with shared_memory_group(2) as (first, second):
        sent = first.buffer(3, 1)
        sent.copy_(torch.tensor([[1], [2], [3]]))
        to_first = first.start(sent, [[1, 0], [0, 2]])
        sent = second.buffer(1, 1)
        sent.copy_(torch.tensor([[4]]))
        to_second = second.start(sent, [[0, 1], [0, 0]])
        at_first, at_second = to_first.wait(), to_second.wait()
        assert [rows.tolist() for rows in at_first.rows] == [[[1]], [[4]]]
        assert at_first.counts == [[1, 0], [0, 1]]
        assert [rows.tolist() for rows in at_second.rows] == [[[2], [3]], []]
        assert at_second.counts == [[0, 2], [0, 0]]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_rows_arrive_between_threads(size, seed):
    ThreadedMesh(size).run(lambda exchange: run_rounds(exchange, seed))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [2, 3, 6])
def test_all_rows_arrive_through_shared_memory(size, seed):
    with shared_memory_group(size) as members, ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda exchange: run_rounds(exchange, seed), members))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_arrive_between_processes(kind, size, tmp_path):
    with RankProcesses(tmp_path, size, rounds_of_a_process, (kind, size)) as ranks:
        assert ranks.results() == [None] * size


def test_a_slow_rank_finds_what_a_fast_one_sent_long_ago():
    # the fast rank is as far ahead as the slow one's messages let it: it has started all that it may before the slow
    # one looks at the first
    with shared_memory_group(2) as (slow, fast):
        rounds = [Round(3, number, 2) for number in range(30)]
        behind = [this.start(slow) for this in rounds[:MAX_UNDER_WAY]]
        ahead = [this.start(fast) for this in rounds[:MAX_UNDER_WAY]]
        for number, this in enumerate(rounds[:-MAX_UNDER_WAY]):
            this.check(fast.rank, ahead[number].wait())
            ahead.append(rounds[number + MAX_UNDER_WAY].start(fast))
            if number % MAX_UNDER_WAY == MAX_UNDER_WAY - 1:
                for late in range(number + 1 - MAX_UNDER_WAY, number + 1):
                    rounds[late].check(slow.rank, behind[late].wait())
                behind += [later.start(slow) for later in rounds[len(behind) : len(ahead)]]
        assert len(behind) == 30


def test_more_exchanges_under_way_than_allowed_are_refused():
    with shared_memory_group(2) as (first, _):
        for number in range(MAX_UNDER_WAY):
            Round(0, number, 2).start(first)
        with pytest.raises(AssertionError, match="too many exchanges under way"):
            first.buffer(1, 8)


def test_rows_of_another_exchange_are_not_taken():
    with shared_memory_group(2) as (first, second):
        Round(0, 0, 2).start(second)
        first._sequence = 1  # as if it had missed one
        pending = Round(0, 1, 2).start(first)
        with pytest.raises(AssertionError, match="rank 1 is at exchange 0, this rank at 1"):
            pending.wait()


def test_rows_are_here_when_the_last_rank_has_sent_them_whenever_this_rank_looks():
    with shared_memory_group(2) as (first, second):
        pending = Round(0, 0, 2).start(first)
        earlier_s = time.time()
        Round(0, 0, 2).start(second)
        later_s = time.time()
        assert earlier_s <= pending.wait().arrived_s <= later_s


def spans_beside_a_late_rank(rank, size, store, kind, late_s):
    """Four exchanges for which rank 1 is late; rank 0 computes most of that time."""
    exchange, log = open_exchange(kind, store, rank, size, DEADLINE_S), SpanLog()
    spans = MicroBatchSpans(log)
    for number in range(5):
        if rank == 1:
            time.sleep(late_s)
        this = Round(0, number, size, most=50)
        with spans.send("DISPATCH"):
            pending = this.start(exchange)
        if rank == 0:
            with spans.compute("ATTN"):
                time.sleep(0.8 * late_s)
        this.check(rank, spans.receive("DISPATCH", Looked(pending)))
        if number == 0:
            log.spans.clear()  # the group has met
            log.unpacking.clear()
    exchange.close()
    return [log.communication_s(), log.waiting_s(), log.hidden_communication_s()]


class Looked:
    """Rows under way, and afterwards when they came."""

    def __init__(self, pending):
        self._pending, self.ready_s, self.arrived_s = pending, None, None

    def wait(self):
        received = self._pending.wait()
        self.ready_s, self.arrived_s = received.ready_s, received.arrived_s
        return received


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_rank_is_waited_for_and_hides_nothing(kind, tmp_path):
    late_s = 0.25
    with RankProcesses(tmp_path, 2, spans_beside_a_late_rank, (kind, late_s)) as ranks:
        (comm_s, waiting_s, hidden_s), (_, waited_s, _) = ranks.results()
    print(f"\n{kind}: 0 waited {waiting_s:.3f} of {comm_s:.3f} s, hid {hidden_s:.4f}; 1 waited {waited_s:.3f}")
    assert waiting_s >= 4 * late_s * 0.9
    assert waited_s < waiting_s
    # rank 0 computed for most of the time that it waited, which by the clock alone was hidden
    assert hidden_s <= comm_s - waiting_s
    assert hidden_s < waiting_s / 2


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0, -0.75])
def test_another_host_s_clock_is_compared_by_the_quickest_message(ahead_s):
    # sent each second by a clock that is ahead by this, seen after the time on the way, 0.02 s at least
    clock, ways_s = PeerClock(), [0.05, 0.02, 0.4, 0.03]
    found = [clock.time_here(second + ahead_s, second + way_s) for second, way_s in enumerate(ways_s)]
    assert found == pytest.approx([0.05, 1.02, 2.02, 3.02])


def test_another_host_s_clock_that_was_set_back_is_followed():
    clock = PeerClock()
    clock.time_here(0.0, 0.02)
    for second in range(1, 400):  # messages from before are forgotten
        found = clock.time_here(second - 5.0, second + 0.02)
    assert found == pytest.approx(399.02)


def test_memory_grows_with_the_rows():
    with shared_memory_group(2) as members, ThreadPoolExecutor(2) as pool:
        for number in range(16):
            this = Round(0, number, 2, most=2**number)
            pending = list(pool.map(this.start, members))
            for member, rows in zip(members, pending, strict=True):
                this.check(member.rank, rows.wait())
        assert sum(int(self_counts.sum()) for self_counts in this.counts) * this.row_bytes > 2 * 2**20


# --- leftovers --------------------------------------------------------------------------------------------------------


def open_files():
    """Return the targets of this process's file descriptors."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(descriptor))
        except FileNotFoundError:
            continue  # that of the listing itself
    return sorted(links)


def mapped_regions():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "batchinfer-rows" in line]


def test_shared_memory_has_no_name_and_nothing_is_left_after_close():
    before = open_files()
    with shared_memory_group(3) as members, ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda exchange: run_rounds(exchange, 1), members))
        during = open_files()
        assert sum(link.startswith("socket:") for link in during) == 6 + sum(
            link.startswith("socket:") for link in before
        )
        assert any("memfd:batchinfer-rows" in link for link in during)
        assert not any(link.startswith("/dev/shm") for link in during if link not in before)
        assert mapped_regions()
        assert all("/memfd:" in line for line in mapped_regions())
    del members
    assert open_files() == before
    assert mapped_regions() == []


def test_a_rank_that_cannot_connect_leaves_nothing_open():
    before = open_files()
    with pytest.raises(PeerLostError):
        SharedMemoryExchange(dist.HashStore(), 0, 2, timeout_s=0.1)
    assert open_files() == before


@pytest.mark.parametrize("round_before", [False, True], ids=["the first region", "one that has grown"])
def test_without_a_free_descriptor_no_rows_of_an_older_region_are_taken(round_before):
    with shared_memory_group(2) as (first, second):
        for number in range(2 * MAX_UNDER_WAY if round_before else 0):
            small = Round(0, number, 2, most=5)
            pending = [small.start(member) for member in (first, second)]
            small.check(0, pending[0].wait())
            small.check(1, pending[1].wait())
        rows = torch.ones(1 << 18, 8, dtype=torch.uint8)
        for member in (first, second):
            member.buffer(*rows.shape).copy_(rows)
        pending = first.start(rows, [[0], [len(rows)]])
        second.start(rows, [[len(rows)], [0]])
        with no_more_open_files(), pytest.raises(ConfigError, match=r"no file descriptor is left \(`ulimit -n` is \d+"):
            pending.wait()


def test_memory_that_the_limit_of_open_files_forbids_is_refused_with_the_limit():
    with shared_memory_group(2) as (first, _), no_more_open_files(), pytest.raises(ConfigError, match="ulimit -n"):
        first.buffer(1, 8)


# --- a rank is lost ---------------------------------------------------------------------------------------------------


def rounds_until_the_last_rank_is_lost(rank, size, store, kind, signal_number, timeout_s):
    """Some rounds; then the last rank sends itself the signal and the others go on: what do they see?"""
    exchange = open_exchange(kind, store, rank, size, timeout_s)
    try:
        run_rounds(exchange, seed=1, num_rounds=5)  # what a rank started last may die with it
        if rank == size - 1:
            os.kill(os.getpid(), signal_number)
        for number in range(5, 10):
            this = Round(1, number, size)
            this.check(rank, this.start(exchange).wait())
    except PeerLostError as error:
        exchange.close()
        return str(error)
    return None


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_when_a_rank_is_killed_the_others_notice_long_before_the_deadline(kind, size, tmp_path):
    arguments = (kind, int(signal.SIGKILL), MUCH_LATER_S)
    with RankProcesses(tmp_path, size, rounds_until_the_last_rank_is_lost, arguments) as ranks:
        messages = ranks.results(range(size - 1))
        assert ranks.exit_code(size - 1) == -signal.SIGKILL
    ended = r"rank \d of the group has ended"
    says = {"shared": ended, "staged": ended, "tls": ended, "gloo": r"the exchange between ranks failed: .+"}[kind]
    assert all(re.fullmatch(says, message) for message in messages), messages


def test_a_rank_that_closes_is_lost_for_those_that_still_wait():
    with shared_memory_group(3) as (first, second, third):
        pending = Round(0, 0, 3).start(first)
        Round(0, 0, 3).start(second)
        third.close()
        with pytest.raises(PeerLostError, match="rank 2 of the group has ended"):
            pending.wait()
        with pytest.raises(PeerLostError, match="rank 2 of the group has ended"):
            Round(0, 1, 3).start(second)


def test_what_a_rank_sent_before_it_left_still_arrives():
    with shared_memory_group(2) as (first, second):
        this = Round(0, 3, 2, most=50)
        pending = this.start(first)
        this.check(1, this.start(second).wait())
        second.close()
        this.check(0, pending.wait())


def test_a_rank_that_never_comes_is_lost_at_the_deadline():
    nobody_called, nobody_there = dist.HashStore(), dist.HashStore()
    nobody_there.set_timeout(timedelta(seconds=0.1))
    for store, rank in ((nobody_called, 0), (nobody_there, 1)):
        with pytest.raises(PeerLostError, match=r"1 rank of the group did not connect within 0\.1 s"):
            SharedMemoryExchange(store, rank, 2, timeout_s=0.1)


# --- strangers --------------------------------------------------------------------------------------------------------


def call(address: bytes) -> socket.socket:
    """Connect as a process that has read the address in /proc/net/unix."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(DEADLINE_S)
    connection.connect(b"\0" + address)
    return connection


def hang_up_in_words(connection):
    connection.send(b"hello")
    connection.close()


STRANGERS = {
    "says too little": lambda connection: connection.send(b"\x01"),
    "says too much": lambda connection: connection.send(struct.pack("=2q", 1, 1)),
    "claims a rank that calls nobody": lambda connection: connection.send(struct.pack("=q", 0)),
    "claims a rank beyond the group": lambda connection: connection.send(struct.pack("=q", 2)),
    "claims no rank": lambda connection: connection.send(struct.pack("=q", -1)),
    "says nothing and leaves": lambda connection: connection.close(),
    "says something and leaves": hang_up_in_words,
}


def meet_with_a_stranger(behave, *, timeout_s=DEADLINE_S):
    """Rank 0 of two waits; a stranger calls and behaves; then rank 1 comes. Both exchanges."""
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(SharedMemoryExchange, store, 0, 2, timeout_s=timeout_s)
        stranger = call(store.get("shared_memory/0"))
        try:
            behave(stranger)
            second = SharedMemoryExchange(store, 1, 2, timeout_s=timeout_s)
            return first.result(DEADLINE_S), second
        finally:
            stranger.close()


def run_rounds_of(members):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda exchange: run_rounds(exchange, 1, num_rounds=5), members))
    for member in members:
        member.close()


@pytest.mark.parametrize("behave", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_sent_away_and_the_group_meets(behave):
    members = meet_with_a_stranger(behave)
    run_rounds_of(members)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can call as somebody else")
def test_a_caller_of_another_user_is_sent_away_whatever_it_says():
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(SharedMemoryExchange, store, 0, 2, timeout_s=DEADLINE_S)
        address = store.get("shared_memory/0")
        os.seteuid(65534)
        try:
            stranger = call(address)
        finally:
            os.seteuid(0)
        with suppress(BrokenPipeError), stranger:  # hung up already, or soon
            stranger.send(struct.pack("=q", 1))
        members = SharedMemoryExchange(store, 1, 2, timeout_s=DEADLINE_S), first.result(DEADLINE_S)
    run_rounds_of(members)


def test_a_silent_stranger_cannot_hold_a_rank_up_beyond_its_deadline():
    with pytest.raises(PeerLostError, match=r"1 rank of the group did not connect within 0\.2 s: timed out"):
        meet_with_a_stranger(lambda connection: None, timeout_s=0.2)


def test_nobody_can_call_once_the_group_has_met():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        members = list(pool.map(lambda rank: SharedMemoryExchange(store, rank, 2, timeout_s=DEADLINE_S), range(2)))
    for rank in range(2):
        with pytest.raises(ConnectionRefusedError):
            call(store.get(f"shared_memory/{rank}"))
    for member in members:
        member.close()


# --- the group --------------------------------------------------------------------------------------------------------


def agree_in_a_mesh(rank, size, store, kind):
    seat = Seat(rank, size, kind, one_host=kind != "tls", timeout_s=DEADLINE_S, meeting=meeting(store, rank))
    mesh = Mesh.join(seat, store, torch.device("cpu"))
    agreed = [mesh.agree([rank, 10 * rank + number, -(2**62) - rank]) for number in range(10)]
    dispatchers = mesh.dispatchers(
        [Placement.in_order(6, size)] * 2, RowFormat("float32"), max_tokens=5, hidden=8, topk=2
    )
    mesh.close()
    return mesh.rank, mesh.size, mesh.kind, agreed, [type(dispatcher).__name__ for dispatcher in dispatchers]


@pytest.mark.parametrize(
    ("kind", "opened"), [("auto", "shared"), ("shared", "shared"), ("tls", "tls"), ("gloo", "gloo")]
)
def test_a_mesh_agrees_on_what_every_rank_says(kind, opened, tmp_path):
    with RankProcesses(tmp_path, 3, agree_in_a_mesh, (kind,)) as ranks:
        results = ranks.results()
    agreed = [[[rank, 10 * rank + number, -(2**62) - rank] for rank in range(3)] for number in range(10)]
    assert results == [[rank, 3, opened, agreed, [AllToAllDispatcher.__name__] * 2] for rank in range(3)]


def interface_of_gloo(rank, size, store):
    seat = Seat(rank, size, "gloo", one_host=False, timeout_s=DEADLINE_S, meeting=meeting(store, rank))
    mesh = Mesh.join(seat, store, torch.device("cpu"))
    mesh.agree([rank])  # the other one has joined, too
    mesh.close()
    return seat.meeting.host, os.environ["GLOO_SOCKET_IFNAME"]


def test_gloo_listens_where_ranks_of_other_hosts_call(tmp_path):
    """The host's name may mean nothing, or 127.0.1.1."""
    with RankProcesses(tmp_path, 2, interface_of_gloo) as ranks:
        assert ranks.results() == [["127.0.0.1", "lo"]] * 2


def join_a_mesh_nobody_else_comes_to(rank, size, store, kind):
    try:
        seat = Seat(rank, 2, kind, one_host=kind != "tls", timeout_s=1.0, meeting=meeting(store, rank))
        Mesh.join(seat, store, torch.device("cpu"))
    except PeerLostError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_that_a_rank_does_not_come_to_cannot_be_joined(kind, tmp_path):
    with RankProcesses(tmp_path, 1, join_a_mesh_nobody_else_comes_to, (kind,)) as ranks:
        (message,) = ranks.results()
    assert message is not None


def test_a_rank_alone_agrees_with_itself_and_keeps_its_rows():
    for mesh in (
        Mesh.alone(),
        Mesh.join(Seat(0, 1, "auto", one_host=True, timeout_s=1.0), dist.HashStore(), torch.device("cpu")),
    ):
        assert mesh.agree([3, 4]) == [[3, 4]]
        (dispatcher,) = mesh.dispatchers(
            [Placement.in_order(6, 1)], RowFormat("bfloat16"), max_tokens=5, hidden=8, topk=2
        )
        assert isinstance(dispatcher, LocalDispatcher)
        mesh.close()


@pytest.mark.parametrize(
    ("exchange", "one_host", "message"),
    [
        ("tls", True, r"'tls', but all ranks are started by one process; use 'auto'"),
        ("shared", False, r"'shared', but the ranks are on several hosts .*; use 'auto'"),
        ("nccl", True, r"'nccl', which needs GPUs, but the ranks compute on CPUs; use 'auto'"),
        ("deepep", False, r"'deepep', which needs GPUs, but the ranks compute on CPUs; use 'auto'"),
    ],
)
def test_an_exchange_that_cannot_run_here_is_refused_with_a_remedy(exchange, one_host, message):
    seat = Seat(0, 2, exchange, one_host=one_host, timeout_s=1.0)
    with pytest.raises(ConfigError, match=message):
        Mesh.join(seat, dist.HashStore(), torch.device("cpu"))


def test_gloo_on_an_interface_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    seat = Seat(0, 2, "gloo", one_host=True, timeout_s=1.0)
    with pytest.raises(ConfigError, match=r"interface nosuch0 \(GLOO_SOCKET_IFNAME\) is not there or has no address"):
        Mesh.join(seat, dist.HashStore(), torch.device("cpu"))
