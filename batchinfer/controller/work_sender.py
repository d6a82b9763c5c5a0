"""Messages to ranks: new requests, requests that move between ranks with their KV, and placements of experts."""

from dataclasses import dataclass, field

from batchinfer.balance.decode_loads import DecodeLoads, decode_request
from batchinfer.config import ClusterConfig
from batchinfer.controller.dealer import Dealer
from batchinfer.controller.experts.placer import ExpertPlacer
from batchinfer.controller.unit_queue import UnitQueue
from batchinfer.controller.waiting_pieces import TakenWork
from batchinfer.launch.rank_group import RankGroup
from batchinfer.progress import note
from batchinfer.protocol import messages
from batchinfer.protocol.messages import Adoption, Handover
from batchinfer.records import RequestKey
from batchinfer.run.session import Session


@dataclass(slots=True)
class WorkSender:
    """Sender of the decisions of the dealer, the decode loads and the expert placer."""

    cluster: ClusterConfig
    session: Session
    group: RankGroup
    units: UnitQueue
    dealer: Dealer
    loads: DecodeLoads[RequestKey]
    experts: ExpertPlacer
    _handovers: dict[RequestKey, tuple[int, Handover]] = field(default_factory=dict)  # and the rank that holds the KV
    _adoptions: dict[int, list[Adoption]] = field(default_factory=dict)  # by rank, sent at the end of the round
    _needs_work: set[int] = field(default_factory=set)  # ranks that ask for requests
    _has_noted_pages: bool = False
    _deal: int = 0  # number of the round
    _has_begun: bool = False  # whether requests were sent since the ranks' start

    def ranks_started(self) -> None:
        """Reset the ranks' demands, and start the calibration of experts if one is needed."""
        self._needs_work.clear()
        self._has_begun = False
        ranks = [place.rank for place in self.group.places if place.runs_prefill]
        if self.experts.start_calibration(ranks):
            pieces = self.units.prompt_pieces()
            for index, rank in enumerate(ranks):
                self.group.send(rank, messages.Calibrate(pieces[index :: len(ranks)]))

    def calibrated(self, rank: int, message: messages.Calibrated) -> None:
        """Take the result of a rank's part of the calibration."""
        self.session.calibration_tokens += message.num_tokens
        self.experts.calibrated(rank, message.tokens)

    def ranks_died(self) -> None:
        """Drop the records of requests that were moving or decoding, after the ranks died."""
        self._handovers.clear()
        self._adoptions.clear()
        self.loads.clear()
        self.experts.ranks_died()

    def needs_work(self, rank: int, num_pages: int) -> None:
        """Record that a rank with `num_pages` KV pages asks for requests."""
        self._needs_work.add(rank)
        self.dealer.keep_to_pages(num_pages)
        if self.dealer.has_uneven_steps and not self._has_noted_pages:
            self._has_noted_pages = True
            note(
                f"prefill steps are less even than planned: a rank has {num_pages:,} KV pages, too few to have several "
                "prompts under way; a larger cluster.page_bytes or more memory helps"
            )

    def pass_on(self, holder: int, handovers: list[Handover]) -> None:
        """Take requests that continue on another rank: choose one after prefill, or use the one chosen for a move."""
        for handover in handovers:
            self._handovers[handover.key] = (holder, handover)
            rank = self.loads.give_away(handover.key)
            if rank is None:
                self.loads.add_ready(decode_request(self.dealer.running_request(handover.key)))
            else:
                self.session.moves += 1
                self._adopt(handover.key, rank)

    def kv_read(self, rank: int, keys: list[RequestKey]) -> None:
        """Let the previous holders free the KV of requests that a rank has read."""
        free: dict[int, list[RequestKey]] = {}
        for key in keys:
            holder, handover = self._handovers.pop(key)
            self.loads.start(decode_request(self.dealer.running_request(key)), rank, len(handover.tokens))
            free.setdefault(holder, []).append(key)
        for holder, read in free.items():
            self.group.send(holder, messages.FreeKv(read))

    def deal(self) -> None:
        """Send requests to ranks that ask, opening units as needed; then adoptions and moves.

        In each call a rank gets at most one message of each kind.
        """
        if self.experts.is_preparing:
            return
        # ranks begin together: the first to get requests would run a step, in which the others take part idly
        self._has_begun = self._has_begun or len(self._needs_work) == self.cluster.num_prefill_ranks
        self._deal += 1
        fed: set[int] = set()
        is_all_dealt = self.dealer.is_isolating  # for this round
        asking = sorted(self._needs_work)
        for rank in asking if self._has_begun else []:
            work = self._take_for(rank)
            if not work.pieces and not is_all_dealt:
                is_all_dealt = not self.units.open_next() and not self._take_over(rank, asking)
                work = self._take_for(rank)
            while work.pieces and self._is_short(work) and not is_all_dealt:
                is_all_dealt = not self.units.open_next()
                self._take_more(rank, work)
            if work.pieces:
                self._needs_work.discard(rank)
                self.group.send(rank, messages.Requests(work.requests, work.pieces, self._deal))
                fed.add(rank)
        for key, rank in self.loads.assign_ready():
            self._adopt(key, rank)
        for rank, adoptions in self._adoptions.items():
            self.group.send(rank, messages.Adopt(adoptions, self._deal))
        self._wake_others(fed | self._adoptions.keys())
        self._adoptions.clear()
        asked: dict[int, list[RequestKey]] = {}
        for key, rank in self._moves():
            asked.setdefault(rank, []).append(key)
        for rank, keys in asked.items():
            self.group.send(rank, messages.GiveAway(keys))
        if not is_all_dealt and not all(map(self.dealer.has_waiting, fed)):
            self.units.open_next()  # while the ranks are busy: reading and dealing a unit takes seconds

    def place_experts(self) -> None:
        """Ask the ranks for their expert counts when due, and send new placements."""
        if self.dealer.num_unfinished and self.experts.should_count():
            self.group.send_to_all(messages.CountExperts())
        for rank, slots in self.experts.take_placed(self.group.ranks_of_role).items():
            self.group.send(rank, messages.PlaceExperts(slots))
        self.session.placements = self.experts.history.num_placed

    def _take_for(self, rank: int) -> TakenWork:
        """Return two prefill steps for a rank, or two sweeps, enough until it asks again."""
        return self.dealer.take(rank, self.cluster.running_requests, self.cluster.waiting_tokens)

    def _is_short(self, work: TakenWork) -> bool:
        """Return whether a rank that streams its weights could run more in its next sweeps; a unit may not fill one."""
        cluster = self.cluster
        return (
            cluster.weights == "stream"
            and work.num_tokens < cluster.waiting_tokens
            and len(work.requests) < cluster.running_requests
        )

    def _take_more(self, rank: int, work: TakenWork) -> None:
        """Add work of the unit that was opened last."""
        cluster = self.cluster
        num_requests = cluster.running_requests - len(work.requests)
        more = self.dealer.take(rank, num_requests, cluster.waiting_tokens - work.num_tokens)
        work.requests.extend(more.requests)
        work.pieces.extend(more.pieces)

    def _moves(self) -> list[tuple[RequestKey, int]]:
        """Return running requests to move, with the rank that has each; none where pages are few.

        There, a request that comes to a rank would displace a prefix that the rank's next prompts share.
        """
        is_short = self.cluster.mode == "colocated" and self.dealer.has_uneven_steps
        return [] if is_short else self.loads.moves()

    def _take_over(self, rank: int, asking: list[int]) -> bool:
        """Give a rank without work some of the busiest rank's; return False if there is none.

        Ranks ask one after the other, and their steps are planned to be even: nothing is taken over before all ranks
        with waiting work ask for it, too.

        Args:
            asking: the ranks that ask in this round.
        """
        ranks = [place.rank for place in self.group.places if place.runs_prefill]
        if any(self.dealer.has_waiting(other) and other not in asking for other in ranks):
            return False
        return self.dealer.take_over(rank)

    def _adopt(self, key: RequestKey, rank: int) -> None:
        adoption = Adoption(self.dealer.running_request(key), self._handovers[key][1])
        self._adoptions.setdefault(rank, []).append(adoption)

    def _wake_others(self, ranks: set[int]) -> None:
        """Wake the other ranks of the groups of `ranks`, since they take part in every step."""
        leaders = {self.group.places[rank].leader for rank in ranks}
        for place in self.group.places:
            if place.leader in leaders and place.rank not in ranks:
                self.group.send(place.rank, messages.Wake(self._deal))
