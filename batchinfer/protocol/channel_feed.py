"""The controller as a rank sees it, over a channel. Called by the rank program."""

from __future__ import annotations

import queue
import time
from typing import Any

import msgspec
import numpy as np

from batchinfer.protocol.channel import Channel, Message, part
from batchinfer.protocol.feed import Adoption, ExpertSlots, Handover, Inbox, StepReport
from batchinfer.records import Request, RequestKey

EXPERTS_S = 5.0  # between reports of the tokens per expert
STEPS_S = 0.05  # short steps are reported together, this often


_PARTS: dict[str, tuple[str, Any]] = {
    "requests": ("requests", list[Request]),
    "adopt": ("adoptions", list[Adoption]),
    "adopted": ("keys", list[RequestKey]),
    "give_away": ("keys", list[RequestKey]),
}


def with_nouns(message: Message) -> Message:
    """The message with the nouns that stand in it; for the reading thread, so that no step waits for this.

    What is wrong with them comes as a message, too: whoever receives it raises it.
    """
    if message["type"] in _PARTS:
        name, kind = _PARTS[message["type"]]
        try:
            message[name] = part(message, name, kind)
        except msgspec.ValidationError as error:
            return {"type": "odd", "error": error}
    return message


class ChannelFeed:
    """See feed.Feed.

    Args:
        messages: what a reading thread has taken from the channel, `with_nouns`.
        expert_tokens: the worker's counts by phase, sent now and then.
    """

    def __init__(
        self, channel: Channel, messages: queue.SimpleQueue[Message], expert_tokens: dict[str, np.ndarray]
    ) -> None:
        self._channel = channel
        self._messages = messages
        self._expert_tokens = expert_tokens
        self._has_asked = False
        self._steps: list[StepReport] = []  # not told yet
        self._last_steps_s = self._last_experts_s = time.monotonic()

    def receive(self, wait_s: float = 0.0) -> Inbox:
        """See Feed."""
        inbox = Inbox()
        if wait_s > 0:
            self.send_steps()
        try:
            self._sort_in(self._messages.get(wait_s > 0, wait_s or None), inbox)
            while True:
                self._sort_in(self._messages.get_nowait(), inbox)
        except queue.Empty:
            return inbox

    def want_requests(self) -> None:
        """See Feed."""
        if not self._has_asked:
            self._has_asked = True
            self._channel.send({"type": "want"})

    def send(self, report: StepReport) -> None:
        """See Feed."""
        self._steps.append(report)
        now_s = time.monotonic()
        if now_s - self._last_steps_s >= STEPS_S:
            self.send_steps()
        if now_s - self._last_experts_s >= EXPERTS_S:
            self.send_experts()

    def send_steps(self) -> None:
        """Tell of all steps so far; also called before a pause and at the end, however that comes."""
        self._last_steps_s = time.monotonic()
        if self._steps:
            reports, self._steps = self._steps, []
            self._channel.send({"type": "steps", "reports": reports})

    def send_experts(self) -> None:
        """See Feed."""
        self.send_steps()
        self._last_experts_s = time.monotonic()
        tokens = {phase: counts.tolist() for phase, counts in self._expert_tokens.items()}
        self._channel.send({"type": "experts", "tokens": tokens})

    def send_store(self, counts: dict[str, float], problems: list[str]) -> None:
        """See Feed."""
        self._channel.send({"type": "kv_store", "counts": counts, "problems": problems})

    def hand_over(self, handovers: list[Handover]) -> None:
        """See Feed."""
        self.send_steps()
        self._channel.send({"type": "handovers", "handovers": handovers})

    def confirm_adopted(self, keys: list[RequestKey]) -> None:
        """See Feed."""
        self.send_steps()
        self._channel.send({"type": "adopted", "keys": keys})

    def _sort_in(self, message: Message, inbox: Inbox) -> None:
        kind = message["type"]
        if kind == "requests":
            self._has_asked = False
            inbox.requests += message["requests"]
        elif kind == "adopt":
            inbox.adoptions += message["adoptions"]
        elif kind == "adopted":
            inbox.adopted += message["keys"]
        elif kind == "place_experts":
            inbox.expert_slots = ExpertSlots(message["expert_of_slot"], message["share_of_slot"])
        elif kind == "count_experts":
            inbox.count_experts = True
        elif kind == "give_away":
            inbox.give_away += message["keys"]
        elif kind == "leave":
            inbox.leave = True
        elif kind == "odd":
            raise message["error"]
        else:
            assert kind == "wake", f"the controller sent {kind!r}"
