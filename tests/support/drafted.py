"""Requests of every kind, and drafters that draft whatever it costs."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq

from batchinfer.config import SamplingConfig
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.rank.draft_rule import MOST_GUESSES, DraftRule
from batchinfer.rank.drafter import Drafter
from batchinfer.records import Request, RequestKey, sampling_key
from support.one_rank import Feed
from support.paths import SAMPLE_MODEL, SAMPLE_PROMPTS

TOKENIZER = load_tokenizer(SAMPLE_MODEL)
# every way in which a request is sampled and ends
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "seed": 2},
    {"temperature": 1.5, "seed": 3, "logprobs": 3, "ignore_eos": True},
    {"logprobs": 0},
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"max_tokens": 3, "ignore_eos": True},
    {"stop": ["own", "0"]},
    {"stop": ["1"], "min_tokens": 5, "ignore_eos": True},
    {"stop_token_ids": [40, 41, 42, 43], "ignore_eos": True},
    {"repetition_penalty": 1.3, "ignore_eos": True},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "temperature": 0.7},
    {"logit_bias": {"50": 3.0}, "bad_words": ["crowns"]},
    {"structured_outputs": {"regex": "[0-9]{1,6} crowns"}},
    {"ignore_eos": True, "max_tokens": 40},
]


class Always(DraftRule):
    """So many guesses whatever they cost."""

    def __init__(self, num_guesses: int) -> None:
        super().__init__()
        self._num_guesses = num_guesses

    def choose(self, num_requests: int) -> int:
        return self._num_guesses


class InTurn(DraftRule):
    """Another number of guesses in each step, none among them, for a few steps or for longer than states are kept."""

    def choose(self, num_requests: int) -> int:
        self._step += 1
        return self._step % (MOST_GUESSES + 1) if self._step % 120 < 60 else 0

    def may_pay(self, num_requests: int) -> bool:
        return True


# those of which nobody but the sequence is told, and that a token at a time
PLAIN_WAYS = [way for way in WAYS if not way.keys() & {"logprobs", "logit_bias", "structured_outputs", "min_tokens"}]
PLAIN_WAYS = [way for way in PLAIN_WAYS if not any(name.endswith("_penalty") for name in way)]


def requests_of(prompts: list[list[int]], *, max_tokens: int = 24, ways: list[dict[str, Any]] = WAYS) -> list[Request]:
    made = []
    for row, prompt in enumerate(prompts):
        how = {"max_tokens": max_tokens} | ways[row % len(ways)]
        sampling = SamplingConfig(**how).to_sampling()
        made.append(Request(RequestKey(0, row, 0), 0, prompt, sampling, sampling_key(7, str(row), 0, 0)))
    return made


def sample_requests(count: int = 2 * len(WAYS), **how: Any) -> list[Request]:
    messages = pq.read_table(SAMPLE_PROMPTS / "part-00000.parquet", columns=["messages"]).slice(0, count)
    prompts = TOKENIZER.encode_chats(messages.column(0).to_pylist())
    return requests_of(prompts, **how)  # type: ignore[arg-type]


def everything(feed: Feed) -> dict[RequestKey, tuple[Any, ...]]:
    """All of a row but its times and what the plan's order decides."""
    return {
        key: (done.token_ids, done.text, done.finish_reason, done.stop_reason, done.logprobs, done.error,
              done.kv_tokens_sum, done.structured_valid, done.reasoning)
        for key, done in feed.done.items()
    }  # fmt: skip


def counts(feed: Feed) -> tuple[int, int]:
    """Tokens drafted, and of these accepted."""
    return sum(one.drafted_tokens for one in feed.records), sum(one.accepted_tokens for one in feed.records)


def with_mtp(rule: DraftRule) -> Any:
    return lambda context: Drafter.of(context, rule)


def step_by_step(rule: DraftRule) -> Any:
    """A drafter whose steps are not one call."""
    return lambda context: Drafter(context.model, context.draft, rule)
