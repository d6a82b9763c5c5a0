"""Every message between a controller and its ranks, in both directions, and its encoding (MessagePack).

A message is a struct, named in its bytes. Each end accepts only messages that the other end may send, with all fields
of their types: anything else is a MalformedMessageError.
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from batchinfer import __version__
from batchinfer.equal_rows import EqualRows
from batchinfer.model_code import model_code
from batchinfer.records import Completion, Request, RequestKey, RequestTimes, Span, TokenLogprobs


class MalformedMessageError(Exception):
    """The other end sent bytes that are none of its messages."""


class Message(Struct, frozen=True, tag=True):
    """Base class of messages; the tag on the wire is the name of the class."""


class StepRecord(Struct, frozen=True, array_like=True):
    """The record of one model step of one rank; a row of stats/steps, which the controller numbers."""

    kind: str
    start_s: float
    duration_s: float
    num_requests: int
    new_tokens: int
    cached_tokens: int
    output_tokens: int
    kv_tokens: int
    largest_kv_tokens: int
    pages_used: int
    micro_batches: int
    placement: int
    expert_rows: int
    comm_s: float
    wait_comm_s: float | None
    hidden_comm_s: float | None
    exposed_comm_s: float
    fallback_calls: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    graph: str | None = None
    graph_rows: int = 0
    no_graph: str | None = None
    attention_work: float = 0.0  # of prefill: (query, key) pairs of the new tokens
    streamed_bytes: int = 0  # weights read from disk in its sweep, in the first of the sweep's steps
    weights_wait_s: float = 0.0  # seconds in which that sweep waited for them, likewise


class StepReport(Struct, frozen=True):
    """The record, completions, started requests and spans of a step."""

    record: StepRecord
    completions: list[Completion] = []
    started: list[RequestKey] = []  # requests whose prompt is complete, which decode here from now on
    spans: list[Span] = []  # empty unless traced


class CachedTokens(Struct, frozen=True):
    """Counts of a request's prompt tokens that were not computed for it, and that were computed again."""

    memory: int = 0
    disk: int = 0
    replicated: int = 0  # see Completion, as the next two
    recomputed: int = 0
    computed: int = 0


class Handover(Struct, frozen=True):
    """A request for another rank to continue: its tokens so far and its KV."""

    key: RequestKey
    tokens: list[int]
    logprobs: TokenLogprobs | None  # of each token; None unless asked for
    prompt_logprobs: TokenLogprobs | None  # of the prompt's tokens that were scored
    times: RequestTimes
    cached: CachedTokens
    kv_path: str  # where its KV is (kv/transfer.py)
    num_bytes: int


class Adoption(Struct, frozen=True):
    """A handover with its request, for the decoding rank."""

    request: Request
    handover: Handover


class ExpertSlots(Struct, frozen=True):
    """Expert and share of each slot per MoE layer, [L, P] each, and the number of this placement in the session."""

    expert_of_slot: list[list[int]]
    share_of_slot: list[list[float]]
    placement: int = 0


# in both directions


class SharedValue(Message, frozen=True):
    """A value that one rank sends to all others of its group through the controller, such as its address."""

    key: str
    value: bytes


# from a rank: while it starts


class Hello(Message, frozen=True):
    """The first message of a rank; `pid` and `host` identify its process.

    version: of its program, see `own_version`. Controllers of other versions read this message, too: fields may only be
        added, with defaults.
    """

    rank: int
    pid: int
    host: str
    version: str = "an earlier version"


class CanRun(Message, frozen=True):
    """Backend, exchange and dtype run here; nothing but weights is missing."""


class Loading(Message, frozen=True):
    """Bytes of weights that this rank has read, and that it reads in all."""

    num_bytes: int
    total_bytes: int


class Ready(Message, frozen=True):
    """The model is loaded; Start may come.

    moe_layers: the decoder layers that mix experts.
    no_drafts: why no tokens are drafted although the model has a layer for it and the job leaves it open.
    graphs: whether decode steps run as CUDA graphs or why not, a sentence; None: nobody expects them of this rank.
    no_cpp: why a model on a CPU runs in plain PyTorch although the job leaves the C++ operations open.
    sharing: how many ranks share a GPU, a sentence; None: each has its own, or computes on a CPU.
    """

    device: str
    moe_layers: list[int]
    equal_rows: EqualRows
    no_drafts: str | None = None
    graphs: str | None = None
    no_cpp: str | None = None
    sharing: str | None = None


# from a rank: while it works


class NeedsRequests(Message, frozen=True):
    """Few requests are left; sent again only after some came.

    num_pages: number of KV pages of the rank.
    """

    num_pages: int


class Steps(Message, frozen=True):
    """Reports of the steps since the last message."""

    reports: list[StepReport]


class Handovers(Message, frozen=True):
    """Requests that this rank hands over; it keeps their KV until FreeKv."""

    handovers: list[Handover]


class KvRead(Message, frozen=True):
    """The rank goes on with these requests: their KV has been read."""

    keys: list[RequestKey]


class ExpertCounts(Message, frozen=True):
    """Expert counts of a rank under its current placement.

    tokens: the rank's tokens by phase, MoE layer and expert.
    rows: (token, expert) rows of all ranks that its experts computed, by phase and MoE layer.
    """

    placement: int
    tokens: dict[str, list[list[int]]]
    rows: dict[str, list[int]]


class Calibrated(Message, frozen=True):
    """Tokens of the calibration by MoE layer and expert; no layers: nothing was run."""

    num_tokens: int
    tokens: list[list[int]]


class ExpertsPlaced(Message, frozen=True):
    """The experts have moved as PlaceExperts asked; with the seconds that it took."""

    seconds: float


class StoreCounts(Message, frozen=True):
    """Counters of the KV store since the rank's start (columns of stats/kv), and its problems for the user."""

    counts: dict[str, int | float]
    problems: list[str]


class Failed(Message, frozen=True):
    """The rank ends because of this error. error_class: its name if it is one of records.py, else ""."""

    error: str
    error_class: str = ""


class Bye(Message, frozen=True):
    """The rank has ended its last step and ends, or waits for the next Start if Leave asked for it."""


# from the controller: while ranks start


class Join(Message, frozen=True):
    """The job and the group, by which a rank loads its model.

    job: the JobConfig as JSON.
    slots_of_role: the expert of each slot, by role; missing or None: in order.
    host, credentials: address to listen at for ranks of other hosts, and the group's credentials; "": no other hosts.
    num_local_ranks: number of ranks on this host.
    most_tokens, largest_tokens: as of Start, for memory that is split while loading; 0: not known yet.
    """

    job: str
    slots_of_role: dict[str, ExpertSlots | None]
    host: str = ""
    credentials: str = ""
    num_local_ranks: int = 1
    group_on_one_host: bool = True
    all_on_one_host: bool = True
    most_tokens: int = 0
    largest_tokens: int = 0


class Start(Message, frozen=True):
    """Step from now on.

    job: the JobConfig as JSON; model, dtype and cluster are those of Join.
    most_tokens, largest_tokens: KV tokens of all requests of the run together, and of the largest one.
    transfer_folder: for KV on its way to another host.
    run_id: tells this run's blocks in the KV store from those of others.
    """

    job: str
    most_tokens: int
    largest_tokens: int
    transfer_folder: str
    traced: bool
    model_digests: dict[str, str]
    run_id: str = ""


# from the controller: while ranks work


class PromptPiece(Struct, frozen=True, array_like=True):
    """A part of a prompt that runs in one prefill step."""

    key: RequestKey
    end: int  # prompt tokens whose KV is there after it
    num_tokens: int  # to compute, as planned
    begins: bool = True  # the prompt's first piece
    ends_step: bool = False  # the last piece of a planned step


class Requests(Message, frozen=True):
    """Requests in the order of their prompts' first pieces, and pieces of prompts in the order of running.

    Pieces may belong to requests of earlier messages. deal: number of this round of messages, in which every rank of a
    group gets one if any does.
    """

    requests: list[Request]
    pieces: list[PromptPiece]
    deal: int = 0


class Adopt(Message, frozen=True):
    """Go on with these requests of other ranks."""

    adoptions: list[Adoption]
    deal: int = 0


class FreeKv(Message, frozen=True):
    """Another rank has read the KV of these handovers."""

    keys: list[RequestKey]


class GiveAway(Message, frozen=True):
    """Hand these running requests over."""

    keys: list[RequestKey]


class Calibrate(Message, frozen=True):
    """Run these pieces of prompts before the first request and report the experts that they choose."""

    pieces: list[list[int]]


class CountExperts(Message, frozen=True):
    """Report the tokens per expert now."""


class PlaceExperts(Message, frozen=True):
    """Place the experts so, as soon as all ranks of the group have this message."""

    slots: ExpertSlots


class Wake(Message, frozen=True):
    """Another rank of the group has work: take part in its step."""

    deal: int = 0


class Leave(Message, frozen=True):
    """End after this step; unfinished requests are run again later.

    stay: keep the model for another Start.
    """

    stay: bool = False


FromRank = (
    Hello | SharedValue | CanRun | Ready | NeedsRequests | Steps | Handovers | KvRead | ExpertCounts | StoreCounts
) | (Loading | Calibrated | ExpertsPlaced | Failed | Bye)
FromController = (SharedValue | Join | Start | Requests | Adopt | FreeKv | GiveAway | Calibrate | CountExperts) | (
    PlaceExperts | Wake | Leave
)


@functools.cache
def own_version() -> str:
    """Return the version of this process's program, with digests of its messages' fields and of its model code.

    Two checkouts may have one version and other messages: records are arrays, in which one field would be taken for
    another without an error. With other model code, a row's bits would depend on the rank.
    """
    form = repr(msgspec.inspect.type_info(FromRank | FromController)).encode()
    return f"{__version__} (messages {hashlib.blake2b(form, digest_size=4).hexdigest()}, model {model_code()})"


def _plain_number(value: Any) -> object:
    if hasattr(value, "item") and not getattr(value, "shape", ()):  # of numpy, which takes long to import
        return value.item()
    raise TypeError(f"a message cannot hold a {type(value).__name__}")


def _decoder(kind: Any) -> Callable[[bytes | bytearray], Any]:
    decode = msgspec.msgpack.Decoder(kind).decode

    def decode_message(content: bytes | bytearray) -> Any:
        try:
            return decode(content)
        except msgspec.DecodeError as error:
            raise MalformedMessageError(f"malformed message: {error}") from None

    return decode_message


encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder(enc_hook=_plain_number).encode
decode_from_rank: Callable[[bytes | bytearray], FromRank] = _decoder(FromRank)
decode_from_controller: Callable[[bytes | bytearray], FromController] = _decoder(FromController)
