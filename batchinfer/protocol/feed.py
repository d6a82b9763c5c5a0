"""A rank's connection to its controller: incoming requests, outgoing reports."""

import queue
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from batchinfer.protocol import messages
from batchinfer.protocol.channel import Channel
from batchinfer.protocol.messages import (
    Adoption,
    ExpertCounts,
    ExpertSlots,
    FromController,
    Handover,
    PromptPiece,
    StepReport,
)
from batchinfer.records import Request, RequestKey

EXPERTS_S = 5.0  # between reports of the tokens per expert
STEPS_S = 0.05  # short steps are reported together, this often,
STEPS_S_PER_RANK = 0.001  # or, so that many ranks do not keep their controller from its work, this often for each
CHANGED_SHARE = 8  # or at once when this fraction (1/8) of a rank's requests has come or gone: others may have to move


@dataclass(slots=True)
class Inbox:
    """Messages from the controller since the last call of `receive`."""

    requests: list[Request] = field(default_factory=list)  # in the order in which their prompts begin
    pieces: list[PromptPiece] = field(
        default_factory=list
    )  # of new and earlier prompts, in the order in which they run
    adoptions: list[Adoption] = field(default_factory=list)
    adopted: list[RequestKey] = field(default_factory=list)  # handovers whose KV has been read: free it
    give_away: list[RequestKey] = field(default_factory=list)  # running requests to hand over to another rank
    calibrate: list[list[int]] | None = None  # run these pieces of prompts, as soon as all ranks know
    expert_slots: ExpertSlots | None = None  # the experts' next placement, as soon as all ranks know
    deal: int = 0  # number of the latest deal of work of which a message has come; 0: none has
    count_experts: bool = False  # report the tokens per expert now
    leave: bool = False  # end after this step; unfinished requests are dropped and run again later


class Feed:
    """A rank's requests and reports to its controller, and its inbox.

    Args:
        received: messages that a reading thread has taken from the channel.
        expert_counts: returns the rank's counts, which are sent now and then; None: the rank counts nothing.
        num_ranks: number of ranks of the job.
    """

    def __init__(
        self,
        channel: Channel[FromController],
        received: queue.SimpleQueue[FromController],
        expert_counts: Callable[[], ExpertCounts] | None,
        num_ranks: int = 1,
    ) -> None:
        self._channel = channel
        self._received = received
        self._expert_counts = expert_counts
        self._has_asked = False
        self._leave: messages.Leave | None = None
        self._steps_s = max(STEPS_S, STEPS_S_PER_RANK * num_ranks)
        self._inbox = Inbox()  # messages that `goes_on` has read
        self._steps: list[StepReport] = []  # not reported yet
        self._last_steps_s = self._last_experts_s = time.monotonic()
        self._num_running = self._num_running_told = 0

    def receive(self, wait_s: float = 0.0) -> Inbox:
        """Return all messages that have come; wait at most `wait_s` for the first one."""
        inbox, self._inbox = self._inbox, Inbox()
        if wait_s > 0:
            self.send_steps()
        with suppress(queue.Empty):
            self._sort_in(self._received.get(wait_s > 0, wait_s or None), inbox)
        self._take_all(inbox)
        return inbox

    def goes_on(self) -> bool:
        """Show in the middle of a long step that this rank lives; return whether the job goes on after it."""
        if time.monotonic() - self._last_experts_s >= EXPERTS_S:
            self.send_experts()
        self._take_all(self._inbox)
        return not self._inbox.leave

    def wait_for_leave(self) -> messages.Leave:
        """Wait for the last message of a job and return it; another rank of the group may get its own earlier."""
        while self._leave is None:
            self._sort_in(self._received.get(), Inbox())
        return self._leave

    def ask_for_requests(self, num_pages: int) -> None:
        """Ask for requests and report the number of KV pages for them; ask once until some come."""
        if not self._has_asked:
            self._has_asked = True
            self._channel.send(messages.NeedsRequests(num_pages))

    def send(self, report: StepReport, num_running: int = 0) -> None:
        """Add the results of a step to the next report.

        Args:
            num_running: requests that the rank decodes now.
        """
        self._steps.append(report)
        self._num_running = num_running
        now_s = time.monotonic()
        has_changed = abs(num_running - self._num_running_told) * CHANGED_SHARE > self._num_running_told
        if has_changed or now_s - self._last_steps_s >= self._steps_s:
            self.send_steps()
        if now_s - self._last_experts_s >= EXPERTS_S:
            self.send_experts()

    def send_steps(self) -> None:
        """Report all steps since the last report; call it before a pause and at the end, also after an error."""
        self._last_steps_s = time.monotonic()
        self._num_running_told = self._num_running
        if self._steps:
            reports, self._steps = self._steps, []
            self._channel.send(messages.Steps(reports))

    def send_experts(self) -> None:
        """Report the tokens per expert under the current placement."""
        self.send_steps()
        self._last_experts_s = time.monotonic()
        if self._expert_counts is not None:
            self._channel.send(self._expert_counts())

    def send_calibrated(self, num_tokens: int, tokens: list[list[int]]) -> None:
        """Report the tokens per layer and expert of the calibration."""
        self._channel.send(messages.Calibrated(num_tokens, tokens))

    def send_placed(self, seconds: float) -> None:
        """Report that the experts have moved, and the seconds that it took."""
        self._channel.send(messages.ExpertsPlaced(seconds))

    def send_store(self, counts: dict[str, float], problems: list[str]) -> None:
        """Report the KV store's counters since the start, and its problems for the user."""
        self._channel.send(messages.StoreCounts(counts, problems))

    def hand_over(self, handovers: list[Handover]) -> None:
        """Hand requests over to the controller, which passes them on to other ranks."""
        self.send_steps()
        self._channel.send(messages.Handovers(handovers))

    def confirm_adopted(self, keys: list[RequestKey]) -> None:
        """Report that the KV of these requests has been read, so that its holder may free it."""
        self.send_steps()
        self._channel.send(messages.KvRead(keys))

    def _take_all(self, inbox: Inbox) -> None:
        """Sort in all messages that have come."""
        with suppress(queue.Empty):
            while True:
                self._sort_in(self._received.get_nowait(), inbox)

    def _sort_in(self, message: FromController, inbox: Inbox) -> None:
        if isinstance(message, messages.Requests | messages.Adopt | messages.Wake):
            inbox.deal = message.deal
        match message:
            case messages.Requests():
                self._has_asked = False
                inbox.requests += message.requests
                inbox.pieces += message.pieces
            case messages.Adopt():
                inbox.adoptions += message.adoptions
            case messages.FreeKv():
                inbox.adopted += message.keys
            case messages.Calibrate():
                inbox.calibrate = message.pieces
            case messages.PlaceExperts():
                inbox.expert_slots = message.slots
            case messages.CountExperts():
                inbox.count_experts = True
            case messages.GiveAway():
                inbox.give_away += message.keys
            case messages.Leave():
                inbox.leave = True
                self._leave = message
            case _:
                assert isinstance(message, messages.Wake), f"the controller sent {message}"
