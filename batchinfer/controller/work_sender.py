"""Sends ranks their work: requests to those that ask, those that go on at another rank with their KV, and experts."""

from dataclasses import dataclass, field

from batchinfer.balance.decode_loads import DecodeLoads, decode_request
from batchinfer.config import ClusterConfig
from batchinfer.controller.dealer import Dealer
from batchinfer.controller.expert_placer import ExpertPlacer
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
    """Tells ranks what the dealer, the decode loads and the expert placer have decided."""

    cluster: ClusterConfig
    session: Session
    group: RankGroup
    units: UnitQueue
    dealer: Dealer
    loads: DecodeLoads[RequestKey]
    experts: ExpertPlacer
    _handovers: dict[RequestKey, tuple[int, Handover]] = field(default_factory=dict)  # with the rank that holds the KV
    _adoptions: dict[int, list[Adoption]] = field(default_factory=dict)  # by rank, to be sent at the end of the round
    _needs_work: set[int] = field(default_factory=set)  # ranks that ask for requests
    _has_told_of_pages: bool = False
    _has_begun: bool = False  # whether any rank has got one since they were started

    def ranks_started(self) -> None:
        """No rank has asked for anything yet. What is to be known of the experts before is found out now."""
        self._needs_work.clear()
        self._has_begun = False
        ranks = [place.rank for place in self.group.places if place.runs_prefill]
        if self.experts.start_calibration(ranks):
            pieces = self.units.prompt_pieces()
            for index, rank in enumerate(ranks):
                self.group.send(rank, messages.Calibrate(pieces[index :: len(ranks)]))

    def calibrated(self, rank: int, message: messages.Calibrated) -> None:
        """A rank has run its part of the calibration."""
        self.session.calibration_tokens += message.num_tokens
        self.experts.calibrated(rank, message.tokens)

    def ranks_died(self) -> None:
        """What was on its way or decoding is lost."""
        self._handovers.clear()
        self._adoptions.clear()
        self.loads.clear()
        self.experts.ranks_died()

    def needs_work(self, rank: int, num_pages: int) -> None:
        """A rank asks for requests; it has room for so many KV pages."""
        self._needs_work.add(rank)
        self.dealer.keep_to_pages(num_pages)
        if self.dealer.has_uneven_steps and not self._has_told_of_pages:
            self._has_told_of_pages = True
            note(
                f"prefill steps are less even than planned: a rank has {num_pages:,} KV pages, too few to have several "
                "prompts under way; a larger cluster.page_bytes or more memory helps"
            )

    def pass_on(self, holder: int, handovers: list[Handover]) -> None:
        """Requests that go on elsewhere: prompts that have run wait for a rank, moved requests have one."""
        for handover in handovers:
            self._handovers[handover.key] = (holder, handover)
            rank = self.loads.give_away(handover.key)
            if rank is None:
                self.loads.add_ready(decode_request(self.dealer.running_request(handover.key)))
            else:
                self.session.moves += 1
                self._adopt(handover.key, rank)

    def kv_read(self, rank: int, keys: list[RequestKey]) -> None:
        """A rank goes on with requests; whoever holds their KV may free it."""
        free: dict[int, list[RequestKey]] = {}
        for key in keys:
            holder, handover = self._handovers.pop(key)
            self.loads.start(decode_request(self.dealer.running_request(key)), rank, len(handover.tokens))
            free.setdefault(holder, []).append(key)
        for holder, read in free.items():
            self.group.send(holder, messages.FreeKv(read))

    def deal(self) -> None:
        """Requests for the ranks that ask; opens the next unit when one has got its last. Passes on and moves others.

        However much there is to say in a round, a rank gets at most one message of each kind.
        """
        if self.experts.is_preparing:
            return
        # they begin together: who got requests first would run a step, and the others would have to take part idly
        self._has_begun = self._has_begun or len(self._needs_work) == self.cluster.num_prefill_ranks
        fed: set[int] = set()
        is_all_dealt = self.dealer.is_isolating  # for this round
        for rank in sorted(self._needs_work) if self._has_begun else []:
            work = self._take_for(rank)
            if not work.pieces and not is_all_dealt:
                is_all_dealt = not self.units.open_next() and not self.dealer.take_over(rank)
                work = self._take_for(rank)
            if work.pieces:
                self._needs_work.discard(rank)
                self.group.send(rank, messages.Requests(work.requests, work.pieces))
                fed.add(rank)
        for key, rank in self.loads.assign_ready():
            self._adopt(key, rank)
        for rank, adoptions in self._adoptions.items():
            self.group.send(rank, messages.Adopt(adoptions))
        self._wake_others(fed | self._adoptions.keys())
        self._adoptions.clear()
        asked: dict[int, list[RequestKey]] = {}
        for key, rank in self.loads.moves():
            asked.setdefault(rank, []).append(key)
        for rank, keys in asked.items():
            self.group.send(rank, messages.GiveAway(keys))
        if not is_all_dealt and not all(map(self.dealer.has_waiting, fed)):
            self.units.open_next()  # while the ranks run what they have got: reading and dealing a unit takes seconds

    def place_experts(self) -> None:
        """Ask the ranks for their counts now and then; when their experts are to be elsewhere, let them move."""
        if self.dealer.num_unfinished and self.experts.should_count():
            self.group.send_to_all(messages.CountExperts())
        for rank, slots in self.experts.take_placed(self.group.ranks_of_role).items():
            self.group.send(rank, messages.PlaceExperts(slots))
        self.session.placements = self.experts.history.num_placed

    def _take_for(self, rank: int) -> TakenWork:
        """What keeps a rank busy until it asks again: two prefill steps."""
        return self.dealer.take(rank, self.cluster.decode_requests, 2 * self.cluster.prefill_tokens)

    def _adopt(self, key: RequestKey, rank: int) -> None:
        adoption = Adoption(self.dealer.running_request(key), self._handovers[key][1])
        self._adoptions.setdefault(rank, []).append(adoption)

    def _wake_others(self, ranks: set[int]) -> None:
        """These ranks have got something: wake the others of their groups, since they take part in every step."""
        leaders = {self.group.places[rank].leader for rank in ranks}
        for place in self.group.places:
            if place.leader in leaders and place.rank not in ranks:
                self.group.send(place.rank, messages.Wake())
