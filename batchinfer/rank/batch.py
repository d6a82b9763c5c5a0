"""What goes into a model step and comes out of it: chunks of prompts as tensors, new tokens for sequences."""

from dataclasses import dataclass, field

import numpy as np
import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.kv.pages import pages_for
from batchinfer.model.sampling import Sampled, SamplingRows
from batchinfer.model.step import PrefillSpan, StepInput, StepOutput
from batchinfer.rank.sequence import Sequence
from batchinfer.records import TokenLogprob


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of one prompt that runs in this step: tokens start .. end - 1."""

    sequence: Sequence
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def completes_prompt(self) -> bool:
        return self.end == self.sequence.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did on this rank; the counts are those of StepRecord."""

    output: StepOutput
    done_s: float  # Unix time when its tokens were there
    finished: list[Sequence]  # with it, no longer running
    num_requests: int
    new_tokens: int
    output_tokens: int
    kv_tokens: int
    largest_kv_tokens: int
    cached_tokens: int = 0
    started: list[Sequence] = field(default_factory=list)  # their prompt has run and they go on


def prefill_step(chunks: list[Chunk], copies: dict[int, int]) -> StepInput:
    """One step over chunks of several prompts, packed one after the other; without chunks a step without tokens.

    Args:
        copies: KV slot to fill -> KV slot to copy from, in every layer before attention reads the pages.
    """
    tokens = _joined([np.asarray(chunk.sequence.request.token_ids[chunk.start : chunk.end]) for chunk in chunks])
    positions = _joined([np.arange(chunk.start, chunk.end) for chunk in chunks])
    slots = _joined([_slots(chunk.sequence.pages, chunk.start, chunk.end) for chunk in chunks])
    ends = np.cumsum([chunk.num_tokens for chunk in chunks])
    spans = tuple(
        PrefillSpan(
            start=int(end) - chunk.num_tokens,
            num_tokens=chunk.num_tokens,
            context_tokens=chunk.end,
            page_ids=torch.tensor(chunk.sequence.pages[: pages_for(chunk.end)]),
        )
        for chunk, end in zip(chunks, ends, strict=True)
    )
    last_rows = [int(end) - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.completes_prompt]
    return StepInput(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        logit_rows=torch.tensor(last_rows, dtype=torch.int64),
        prefill=spans,
        copy_from=torch.tensor(list(copies.values()), dtype=torch.int64),
        copy_to=torch.tensor(list(copies), dtype=torch.int64),
    )


def sampling_rows(sequences: list[Sequence]) -> SamplingRows:
    """The sampling parameters of some sequences as columns."""
    return SamplingRows.of(
        [sequence.request.sampling for sequence in sequences], [sequence.request.sampling_key for sequence in sequences]
    )


def take_token(sequence: Sequence, sampled: Sampled, row: int, eos_token_ids: frozenset[int]) -> None:
    """Let a sequence decide about its new token, in this row."""
    if sampled.is_finite[row]:
        sequence.accept(int(sampled.tokens[row]), _logprob(sampled, row, sequence), eos_token_ids)
    else:
        sequence.fail("the model's logits are not finite for this prompt")


def _logprob(sampled: Sampled, row: int, sequence: Sequence) -> TokenLogprob | None:
    wanted = sequence.request.sampling.logprobs
    if wanted is None or sampled.logprobs is None or sampled.top_tokens is None or sampled.top_logprobs is None:
        return None
    top = zip(sampled.top_tokens[row][:wanted], sampled.top_logprobs[row][:wanted], strict=True)
    return TokenLogprob(int(sampled.tokens[row]), sampled.logprobs[row], tuple(top))


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _slots(pages: list[int], start: int, end: int) -> np.ndarray:
    positions = np.arange(start, end)
    return np.asarray(pages)[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
