"""The loop between claims, ranks and results.

The controller imports no torch and computes nothing. It holds the requests that the ranks have not finished. Any rank
may die at any time; the controller then starts all ranks again and repeats the unfinished requests.
"""

import threading
from dataclasses import dataclass

from batchinfer.controller.rank_failures import RankFailures
from batchinfer.controller.rank_start import RankStart
from batchinfer.controller.reports import Reports
from batchinfer.controller.unit_queue import UnitQueue
from batchinfer.controller.work_sender import WorkSender
from batchinfer.launch.dead_ranks import RanksDiedError
from batchinfer.launch.rank_group import RankGroup
from batchinfer.progress import note
from batchinfer.protocol.messages import (
    Calibrated,
    ExpertCounts,
    ExpertsPlaced,
    FromRank,
    Handovers,
    KvRead,
    NeedsRequests,
    Steps,
    StoreCounts,
)
from batchinfer.sanitize import count_text
from batchinfer.stop_signals import StopSignal

WAIT_S = 0.2  # between attempts to claim a unit


@dataclass(frozen=True, slots=True)
class Controller:
    """Dispatcher of the ranks' messages to the parts that answer them.

    commit_s: seconds between commits.
    """

    stop: StopSignal
    commit_s: float
    group: RankGroup
    start_ranks: RankStart
    units: UnitQueue
    sender: WorkSender
    reports: Reports
    deaths: RankFailures

    def run(self) -> None:
        """Start the ranks and work until every unit is done or a stop signal comes."""
        try:
            while not self._is_done():
                try:
                    self.stop.graceful = True
                    if self.units.can_claim:
                        self._wait_for_unit()
                    if self._is_done():
                        break
                    self.start_ranks()
                    self.sender.ranks_started()
                    self.deaths.ranks_started()
                    while not self._is_done():
                        self._serve()
                    for rank, message in self.group.leave():
                        self._take(rank, message)
                except RanksDiedError as death:
                    self._ranks_died(death)
        finally:
            # a further signal, as clusters send them, must not cut this short
            self.stop.graceful = True
            if not self.group.is_resting:
                self.group.end()
            self.reports.commit()
            self.stop.graceful = False

    def _is_done(self) -> bool:
        return self.stop.requested or self.units.is_done()

    def _wait_for_unit(self) -> None:
        """Wait until a unit is claimed: loading ranks takes long, and there may be no work for them."""
        pause = threading.Event()  # never set
        while not self._is_done() and not self.units.num_unfinished and not self.units.open_next():
            pause.wait(WAIT_S)

    def _serve(self) -> None:
        """Run one round: handle the messages received, deal to ranks that ask, commit when it is time."""
        messages = self.group.receive()
        for rank, message in messages:
            self._take(rank, message)
        silence = self.deaths.silence(has_heard=bool(messages))
        if silence is not None:
            self.group.give_up(silence)
        self.sender.place_experts()
        self.sender.deal()
        self.reports.commit(after_s=self.commit_s)

    def _take(self, rank: int, message: FromRank) -> None:
        match message:
            case Steps():
                self.deaths.step_ended()
                self.reports.take_steps(rank, message.reports)
            case NeedsRequests():
                self.sender.needs_work(rank, message.num_pages)
            case Handovers():
                self.sender.pass_on(rank, message.handovers)
            case KvRead():
                self.sender.kv_read(rank, message.keys)
            case StoreCounts():
                self.reports.take_store(rank, message)
            case Calibrated():
                self.sender.calibrated(rank, message)
            case ExpertsPlaced():
                self.sender.experts.moved(rank, message.seconds)
            case _:
                assert isinstance(message, ExpertCounts), f"rank {rank} sent {message}"
                self.reports.take_experts(rank, message)

    def _ranks_died(self, death: RanksDiedError) -> None:
        """Put back the running requests; give up a request that is the cause."""
        self.reports.ranks_died()
        self.sender.ranks_died()
        given_up = self.deaths.ranks_died(death)
        if given_up is not None:
            self.reports.give_up(given_up)
        self.reports.commit(after_s=self.commit_s)
        left = self.units.num_unfinished
        goes_on = f"{count_text(left, 'request')} {'goes' if left == 1 else 'go'} on"
        note(f"warning: {death}; starting the ranks again, {goes_on}")
