"""What a controller sends in one round, however many ranks there are and whatever all of them want at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from batchinfer.balance.decode_loads import DecodeLoads
from batchinfer.balance.output_lengths import OutputLengths
from batchinfer.balance.request_load import RequestLoad
from batchinfer.config import ClusterConfig, SamplingConfig
from batchinfer.config.rank_layout import RankPlace, rank_places
from batchinfer.controller.dealer import Dealer
from batchinfer.controller.waiting_pieces import RankRoom
from batchinfer.controller.work_sender import WorkSender
from batchinfer.protocol.messages import CachedTokens, Handover, Message
from batchinfer.records import Request, RequestKey, RequestTimes

NUM_PAGES = 10**6  # enough for everything
GREEDY = SamplingConfig(max_tokens=8).to_sampling()


@dataclass
class Sent:
    """Keeps what ranks are sent instead of sending it."""

    places: list[RankPlace]
    messages: list[tuple[int, Message]] = field(default_factory=list)

    def send(self, rank: int, message: Message) -> None:
        self.messages.append((rank, message))

    def take(self) -> Counter[tuple[str, int]]:
        taken, self.messages = self.messages, []
        return Counter((type(message).__name__, rank) for rank, message in taken)


@dataclass
class NoUnits:
    """All units are open; counts how often somebody asks for one."""

    num_asked: int = 0

    def open_next(self) -> bool:
        self.num_asked += 1
        return False


class NoCalibration:
    """The experts stay where they are."""

    is_preparing = False

    def start_calibration(self, ranks: list[int]) -> bool:
        return False


def make_sender(num_prefill: int, num_decode: int) -> tuple[WorkSender, Sent, NoUnits]:
    return sender_of(ClusterConfig(mode="disaggregated", prefill_ranks=num_prefill, decode_ranks=num_decode))


def sender_of(cluster: ClusterConfig) -> tuple[WorkSender, Sent, NoUnits]:
    num_prefill, num_decode = cluster.num_prefill_ranks, cluster.num_decode_ranks
    sent, units = Sent(rank_places(cluster)), NoUnits()
    dealer = Dealer(range(num_prefill), room=RankRoom.of(cluster))
    decode_ranks = range(num_prefill, num_prefill + num_decode)
    loads = DecodeLoads(decode_ranks, OutputLengths(), max_requests=64, request_load=RequestLoad(1.0), move_steps=4.0)
    sender = WorkSender(cluster, SimpleNamespace(moves=0), sent, units, dealer, loads, experts=NoCalibration())
    sender.ranks_started()
    return sender, sent, units


def requests(number):
    return [Request(RequestKey(0, row, 0), 0, [row, *range(20)], GREEDY, 0) for row in range(number)]


def handed_over(request):
    times = RequestTimes(0.0, 0.0)
    return Handover(request.key, [1], [], [], times, CachedTokens(0, 0, 0), "", 0)


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(8, 16), (32, 320)])
def test_a_round_takes_each_rank_at_most_one_message_of_each_kind(num_prefill, num_decode):
    sender, sent, _ = make_sender(num_prefill, num_decode)
    prompts = requests(4 * num_decode)
    sender.dealer.add_unit(0, prompts)
    for rank in range(num_prefill):
        sender.needs_work(rank, NUM_PAGES)
    sender.deal()
    assert sent.take() == {("Requests", rank): 1 for rank in range(num_prefill)}

    sender.pass_on(0, [handed_over(request) for request in prompts])
    sender.deal()
    decode_ranks = range(num_prefill, num_prefill + num_decode)
    assert sent.take() == {("Adopt", rank): 1 for rank in decode_ranks}, "each has something, so none is woken"

    sender.kv_read(num_prefill, [request.key for request in prompts])  # all on one rank: some must go
    assert sent.take() == {("FreeKv", 0): 1}


def test_where_nothing_is_left_a_round_asks_for_units_once():
    sender, sent, units = make_sender(64, 1)
    sender.dealer.add_unit(0, requests(1))
    for rank in range(64):
        sender.needs_work(rank, NUM_PAGES)
    sender.deal()
    assert units.num_asked == 1
    assert Counter(kind for kind, _ in sent.take()) == {"Requests": 1, "Wake": 63}
    sender.deal()
    assert units.num_asked == 2
    assert not sent.take()


def test_the_next_unit_is_opened_while_a_rank_runs_the_last_that_waited_for_it():
    sender, sent, units = make_sender(1, 1)
    sender.dealer.add_unit(0, requests(sender.cluster.decode_requests + 1))  # one more than it takes at a time
    for num_asked in (0, 1):
        sender.needs_work(0, NUM_PAGES)
        sender.deal()
        assert sent.take()["Requests", 0] == 1
        assert units.num_asked == num_asked


def test_work_is_taken_over_only_when_those_who_have_it_ask_too():
    sender, sent, _ = make_sender(2, 1)
    # of long requests a rank gets fewer in a round than wait for it
    long = [Request(RequestKey(0, row, 0), 0, [row] * 10_000, GREEDY, 0) for row in range(32)]
    sender.dealer.add_unit(0, long)
    while sender.dealer.has_waiting(1):
        sender.dealer.take(1, 64)
    assert sender.dealer.has_waiting(0)
    sender.needs_work(0, NUM_PAGES)
    sender.needs_work(1, NUM_PAGES)
    sender.deal()
    first = sent.take()
    assert first["Requests", 0] == 1
    assert first["Requests", 1] == 1  # both ask: half of what waits goes to the idle one
    while sender.dealer.has_waiting(1):
        sender.dealer.take(1, 64)
    assert sender.dealer.has_waiting(0)
    sender.needs_work(1, NUM_PAGES)
    sender.deal()
    assert sent.take()["Requests", 1] == 0  # the other one has enough to do and will ask for its own
    sender.needs_work(0, NUM_PAGES)
    sender.deal()
    assert sent.take()["Requests", 1] == 1


class AlwaysMoving:
    """Wants to move a request in every round."""

    def assign_ready(self) -> list[tuple[RequestKey, int]]:
        return []

    def moves(self) -> list[tuple[RequestKey, int]]:
        return [(RequestKey(0, 0, 0), 0)]


@pytest.mark.parametrize(("num_pages", "num_moves"), [(NUM_PAGES, 1), (160, 0)])
def test_running_requests_move_only_where_pages_are_not_short(num_pages, num_moves):
    sender, sent, _ = make_sender(2, 1)
    sender.cluster = ClusterConfig(prefill_ranks=2)
    sender.loads = AlwaysMoving()
    # each prompt has 157 pages: of two under way 160 hold only one
    long = [Request(RequestKey(0, row, 0), 0, [row] * 10_000, GREEDY, 0) for row in range(8)]
    sender.dealer.add_unit(0, long)
    for rank in range(2):
        sender.needs_work(rank, num_pages)
    sender.deal()
    assert sum(count for (kind, _), count in sent.take().items() if kind == "GiveAway") == num_moves


@pytest.mark.parametrize(
    ("weights", "num_begun", "num_opened"),
    [
        ("stream", 13, 2),  # two sweeps of 16 steps of 10 tokens: 15 prompts of 21 tokens, and 13 are all there are
        ("resident", 5, 1),  # two steps; the next unit is opened while they run
    ],
)
def test_a_rank_that_streams_gets_its_sweeps_full_from_as_many_units_as_that_takes(weights, num_begun, num_opened):
    sender, sent, units = sender_of(ClusterConfig(weights=weights, prefill_tokens=10 if weights == "stream" else 100))
    prompts, opened = requests(13), []

    def open_next():
        first = 5 + 4 * len(opened)
        if first >= len(prompts):
            return False
        opened.append(first)
        sender.dealer.add_unit(len(opened), prompts[first : first + 4])
        return True

    units.open_next = open_next
    sender.dealer.add_unit(0, prompts[:5])
    sender.needs_work(0, NUM_PAGES)
    sender.deal()
    (begun,) = [message.requests for _, message in sent.messages if hasattr(message, "requests")]
    assert len(begun) == num_begun
    assert len(opened) == num_opened


@pytest.mark.parametrize(("num_ranks", "is_said"), [(1, False), (2, True)])
def test_uneven_steps_for_want_of_pages_are_said_where_ranks_wait_for_each_other(num_ranks, is_said, capsys):
    sender, _, _ = sender_of(ClusterConfig(mode="disaggregated", prefill_ranks=num_ranks, decode_ranks=1))
    sender.dealer.add_unit(0, requests(4 * num_ranks))
    for rank in range(num_ranks):
        sender.needs_work(rank, 1)
    assert sender.dealer.has_uneven_steps is is_said
    assert ("less even than planned: a rank has 1 KV pages" in capsys.readouterr().err) is is_said
