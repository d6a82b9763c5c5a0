"""What goes between a rank and its controller, as the rank sees it; channel_feed.py is the real one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from batchinfer.parallel.spans import Span
from batchinfer.records import Completion, Request, RequestKey, RequestTimes, TokenLogprob


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one model step of one rank did; a row of stats/steps."""

    step: int
    kind: str
    start_s: float
    duration_s: float
    num_requests: int
    new_tokens: int
    cached_tokens: int
    output_tokens: int
    kv_tokens: int
    pages_used: int
    micro_batches: int
    expert_rows: int
    comm_s: float
    hidden_comm_s: float
    fallback_calls: int


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens of a request that were not computed for it, and some that were although others have them."""

    memory: int = 0
    disk: int = 0
    replicated: int = 0  # see Completion


@dataclass(frozen=True, slots=True)
class Handover:
    """A request that another rank is to go on with: what it has generated so far, and its KV."""

    key: RequestKey
    tokens: list[int]
    logprobs: list[TokenLogprob]  # of each token; empty unless asked for
    times: RequestTimes
    cached: CachedTokens
    parcel: str  # where its KV lies (kv/parcel.py)
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Adoption:
    """A handover as the decoding rank gets it."""

    request: Request
    handover: Handover


@dataclass(frozen=True, slots=True)
class ExpertSlots:
    """Expert and share of each slot, per mixture-of-experts layer: [L, P] each."""

    expert_of_slot: list[list[int]]
    share_of_slot: list[list[float]]


@dataclass(slots=True)
class Inbox:
    """What has come from the controller since the last look."""

    requests: list[Request] = field(default_factory=list)  # in the order in which to run them
    adoptions: list[Adoption] = field(default_factory=list)
    adopted: list[RequestKey] = field(default_factory=list)  # handovers whose KV has been read: free it
    give_away: list[RequestKey] = field(default_factory=list)  # running requests that another rank is to go on with
    expert_slots: ExpertSlots | None = None  # place the experts like this as soon as all ranks know
    count_experts: bool = False  # report the tokens per expert now
    leave: bool = False  # end after this step; unfinished requests are dropped and run again later


@dataclass(slots=True)
class StepReport:
    """What a step gave."""

    record: StepRecord
    completions: list[Completion] = field(default_factory=list)
    started: list[RequestKey] = field(default_factory=list)  # prompts that have run and that decode here from now on
    spans: list[Span] = field(default_factory=list)  # empty unless traced


class Feed(Protocol):
    """The controller as a rank sees it."""

    def receive(self, wait_s: float = 0.0) -> Inbox:
        """Everything that has come; waits that long for the first message when there is none yet."""

    def want_requests(self) -> None:
        """Say that requests are running out; called again only after some came."""

    def send(self, report: StepReport) -> None:
        """Hand over what a step gave."""

    def hand_over(self, handovers: list[Handover]) -> None:
        """Give up requests, which the controller passes on to other ranks."""

    def send_experts(self) -> None:
        """Report the tokens per expert since the start."""

    def send_store(self, counts: dict[str, float], problems: list[str]) -> None:
        """Report what the KV store has done so far, and what the user should know of it."""

    def confirm_adopted(self, keys: list[RequestKey]) -> None:
        """The KV of these requests has been read; their parcels can go."""
