"""The nouns of batchinfer and its errors, used by every room."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

PHASES = ("prefill", "decode")  # the two kinds of steps of the model, which are counted apart
COMPUTE, SEND, RECEIVE, FLIGHT, WAIT = "compute", "send", "receive", "flight", "wait"  # kinds of Span, of experts' rows
KV = "kv"  # a kind of Span: a prompt's KV sent or received between ranks; not part of the expert exchange


class ExitCode:
    """Exit codes of commands."""

    OK = 0
    INTERNAL = 1
    BAD_JOB = 2
    ROW_ERRORS = 3
    INTERRUPTED = 75


class BatchinferError(Exception):
    """A failure that is reported to the user as a sentence; `exit_code` is that of the command."""

    exit_code = ExitCode.INTERNAL

    @property
    def sentences(self) -> list[str]:
        return [str(self)]


class ConfigError(BatchinferError):
    """The job file, an option or a path is wrong."""

    exit_code = ExitCode.BAD_JOB


class ConfigErrors(ConfigError):
    """Several wrong settings, each reported as a sentence on a separate line."""

    def __init__(self, sentences: list[str]) -> None:
        super().__init__("\n".join(sentences))

    @property
    def sentences(self) -> list[str]:
        return str(self).split("\n")


class RunBusyError(ConfigError):
    """Another process plans or finishes the run."""


class DamagedFileError(ConfigError):
    """A file that the program wrote is missing or has another content."""

    def __init__(self, path: Path, reason: str, *, remedy: str = "restore it or delete it") -> None:
        super().__init__(f"{path} is damaged: {reason}; {remedy}")
        self.path, self.reason = path, reason


class InputError(BatchinferError):
    """An input shard cannot be used (with --strict, or when no other shard can)."""

    exit_code = ExitCode.BAD_JOB


class ModelError(BatchinferError):
    """The model folder is missing something, contradicts itself or is not supported."""

    exit_code = ExitCode.BAD_JOB


class StoreError(BatchinferError):
    """An object store, or another file system named by URI, cannot be reached, read or written."""

    exit_code = ExitCode.BAD_JOB


class RunMismatchError(BatchinferError):
    """The run folder belongs to another job, or an input changed under a running one."""

    exit_code = ExitCode.BAD_JOB


class IncompleteRunError(BatchinferError):
    """Rows are still missing when `finish` runs."""

    exit_code = ExitCode.INTERNAL


class PeerLostError(BatchinferError):
    """Another rank of the group has ended or does not answer: this one cannot go on, either."""

    @classmethod
    def not_connected(cls, missing: int, timeout_s: float, error: Exception) -> "PeerLostError":
        """Return the error for ranks that did not connect in time."""
        ranks = "1 rank" if missing == 1 else f"{missing} ranks"
        return cls(f"{ranks} of the group did not connect within {timeout_s:g} s: {error}")


class GroupEndedError(BatchinferError):
    """The first process of a group ended with an error, which is that of all its processes."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(f"the first process of this group ended: {reason}")
        self.exit_code = exit_code


class InterruptedRunError(BaseException):
    """A signal stopped the run; finished work is kept and the same command goes on from there.

    Not an Exception: code that turns the failure of one row into an error row must let it pass.
    """

    exit_code = ExitCode.INTERRUPTED


@dataclass(frozen=True, slots=True)
class Shard:
    """One input file at the time of planning."""

    index: int
    path: str  # absolute, or a URI
    name: str  # below the common folder of all shards, without a leading slash; outputs/<name> mirrors it
    size_bytes: int
    footer: str  # hex digest of the Parquet footer, for other formats of all bytes; "" if the file could not be read
    num_rows: int
    problem: str | None = None  # why the file cannot be read
    version: str = ""  # of an object: its ETag, or its time of writing; "" for a file
    format: str = "parquet"  # or jsonl, csv, arrow, openai
    schema: str = ""  # Arrow schema of the columns in base64 (data/shard_schemas.py); "" if the file could not be read
    written_ns: int = 0  # of a file: when it was last written
    content: str = ""  # of a Parquet file: hex digest of all bytes, known when it is tokenised; "" in earlier versions

    def changed(self) -> RunMismatchError:
        """Return the error for a file that changed after planning."""
        return RunMismatchError(
            f"{self.path} changed after it was planned; restore it, or plan into another output.dir"
        )


SAMPLING_LISTS = ("stop", "stop_token_ids", "bad_words")  # of Sampling: tuples there, lists in TOML and JSON


class Sampling(Struct, frozen=True, array_like=True):
    """The sampling settings of one request; the defaults are in config.SamplingConfig."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int  # 0: off
    min_p: float
    n: int
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None  # number of alternatives to report with the chosen token; None: no logprobs
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, value added to its logit)
    thinking_budget: int | None = None  # tokens
    structured: tuple[str, str] | None = None  # required form of the answer: kind and text of structured_outputs
    prompt_logprobs: int | None = None  # alternatives to report with each prompt token; None: no prompt logprobs

    @property
    def changes_logits(self) -> bool:
        """Whether anything but the model's own logits affects the choice of tokens."""
        return bool(
            self.min_tokens
            or self.bad_words
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.thinking_budget is not None
            or self.structured
        )

    @property
    def is_greedy(self) -> bool:
        """Whether no token is drawn at random."""
        return self.temperature == 0.0 or self.max_tokens == 0


class RequestKey(NamedTuple):
    """The key of results: never the id, which may repeat. A tuple, since it is hashed many times per request."""

    shard: int
    row: int
    sample: int


class Request(Struct, frozen=True, array_like=True):
    """One prompt x one sample, ready to run."""

    key: RequestKey
    unit: int
    token_ids: list[int]
    sampling: Sampling
    sampling_key: int  # 64 bits from (seed, id, occurrence, sample), see `sampling_key`
    cached_tokens: int = 0  # prompt tokens that an earlier request of the plan computes
    shared_tokens: int = 0  # prompt tokens shared with the request before it, in the order of all ranks together
    replicated_tokens: int = 0  # shared tokens that its own rank is not expected to have and computes again
    counted_tokens: int = 0  # leading prompt tokens that earlier requests and results count; at least shared_tokens
    kept_tokens: int = 0  # leading prompt tokens shared with another request: worth keeping in a KV store
    # for each block, from the first that no earlier request computes: the last unit that needs it, if a later one
    last_units: tuple[int, ...] = ()
    prompt_group: int = 0  # equal for prompts with a long common start: their answers are expected to be alike
    expected_tokens: float | None = None  # output tokens of this group in an earlier run
    score_from: int = 0  # the prompt's tokens from this index on are scored; 0: none is
    # numbers of leading tokens after which later prompts of its rank branch off; for models with states of requests
    branch_points: tuple[int, ...] = ()

    @property
    def most_cached_tokens(self) -> int:
        """Most leading prompt tokens whose KV may come from a cache; later ones run, since their logits are needed."""
        return (self.score_from or len(self.token_ids)) - 1

    @property
    def num_alternatives(self) -> int:
        """Number of most likely tokens to report with each scored token; 1 for a choice (`choice_is_greedy`)."""
        return 1 if self.sampling.prompt_logprobs is None else self.sampling.prompt_logprobs

    @property
    def goes_on_after_prefill(self) -> bool:
        """Whether decode steps may follow; the prompt's own step gives the first token."""
        return self.sampling.max_tokens > 1


class RequestTimes(Struct, array_like=True):
    """Unix seconds of a request's milestones; 0.0 until reached."""

    admitted_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0


class Span(Struct, frozen=True, array_like=True):
    """A stretch of time of one rank in one step, Unix seconds."""

    kind: str  # COMPUTE, SEND, RECEIVE, FLIGHT, WAIT or KV
    name: str
    micro_batch: int
    start_s: float
    end_s: float


class TokenLogprobs(Struct, array_like=True):
    """Log-probabilities of N tokens under the raw logits, and of the K most likely alternatives of each, in columns.

    The columns are the bytes of arrays, so that a token costs no objects.
    """

    num_top: int  # K
    token_ids: bytearray = msgspec.field(default_factory=bytearray)  # [N] int32
    logprobs: bytearray = msgspec.field(default_factory=bytearray)  # [N] float64
    top_token_ids: bytearray = msgspec.field(default_factory=bytearray)  # [N, K] int32, most likely first
    top_logprobs: bytearray = msgspec.field(default_factory=bytearray)  # [N, K] float64

    def __post_init__(self) -> None:
        num_tokens = len(self)
        sizes = 4 * num_tokens, 8 * num_tokens, 4 * num_tokens * self.num_top, 8 * num_tokens * self.num_top
        if sizes != tuple(map(len, self.columns)):
            raise ValueError("columns of log-probabilities have different lengths")

    def __len__(self) -> int:
        return len(self.token_ids) // 4

    @property
    def columns(self) -> tuple[bytearray, bytearray, bytearray, bytearray]:
        """The columns in the order of the fields."""
        return self.token_ids, self.logprobs, self.top_token_ids, self.top_logprobs

    def add(self, *parts: bytes) -> None:
        """Add tokens: the bytes of each column."""
        for column, part in zip(self.columns, parts, strict=True):
            column.extend(part)

    def cut(self, num_tokens: int) -> None:
        """Drop all but the first tokens."""
        for column, width in zip(self.columns, (4, 8, 4 * self.num_top, 8 * self.num_top), strict=True):
            del column[width * num_tokens :]


class Completion(Struct, frozen=True, array_like=True):
    """The result that a rank returns for one request."""

    key: RequestKey
    unit: int
    text: str
    token_ids: list[int]
    finish_reason: str  # 'stop' | 'length' | 'error'
    stop_reason: str | None  # the stop string, or the stop token id in digits
    prompt_tokens: int
    cached_memory_tokens: int
    cached_disk_tokens: int
    kv_tokens_sum: int  # sum over output tokens of the KV length each one attended to
    times: RequestTimes = msgspec.field(default_factory=RequestTimes)
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    replicated_tokens: int = 0  # prompt tokens that another rank computed, too; below 0: memory had more than planned
    recomputed_tokens: int = 0  # prompt tokens that its rank had computed before and had to drop, short of pages
    computed_tokens: int = 0  # prompt tokens that ran for it, replicated and recomputed ones included
    reasoning: str | None = None  # the thinking before the text; None: there was none, or it was not requested
    reasoning_tokens: int = 0  # of token_ids
    prompt_logprobs: TokenLogprobs | None = None  # of the prompt's scored tokens
    structured_valid: bool | None = None  # whether it is complete by structured_outputs; None: no form was required


def slots_per_rank(num_experts: int, num_redundant: int, num_ranks: int) -> int:
    """Return the expert slots of each rank when experts and redundant experts are spread evenly.

    Raises:
        ConfigError: they do not spread evenly; the message names a number of redundant experts that does.
    """
    num_slots = num_experts + num_redundant
    if num_slots % num_ranks:
        raise ConfigError(
            f"{num_experts} experts and {num_redundant} redundant ones do not spread evenly over {num_ranks} ranks; "
            f"set cluster.redundant_experts = {num_redundant + -num_slots % num_ranks} or another number of ranks"
        )
    return num_slots // num_ranks


def sampling_key(seed: int, row_id: str, occurrence: int, sample: int) -> int:
    """Return the 64-bit key of one request's random draws, which depends only on the row and the seed.

    Args:
        seed: the job's or the row's seed.
        row_id: the row's id as text; `<shard name>:<row>` when the id is null.
        occurrence: how many rows with the same id come before this one in input order.
        sample: 0 .. n - 1.
    """
    text = f"{seed}\x1f{row_id}\x1f{occurrence}\x1f{sample}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def sampling_to_json(sampling: Sampling) -> str:
    """Convert one row's resolved sampling to the text stored in the plan; equal samplings give equal text."""
    return json.dumps(msgspec.structs.asdict(sampling), sort_keys=True)


def sampling_from_json(text: str) -> Sampling:
    """Parse the text of `sampling_to_json`."""
    values = json.loads(text)
    values |= {name: tuple(values[name]) for name in SAMPLING_LISTS}
    values["logit_bias"] = tuple((token, bias) for token, bias in values["logit_bias"])
    values["structured"] = None if values["structured"] is None else tuple(values["structured"])
    return Sampling(**values)
