"""Inputs and results of a model step: chunks of prompts as tensors, new tokens for sequences."""

from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.kv.pages import pages_for
from batchinfer.model.sampling import Sampled, SamplingRows
from batchinfer.model.scores import Scores
from batchinfer.model.step import PrefillSpan, StateMoves, StepInput
from batchinfer.rank.drafts import depths_of
from batchinfer.rank.held_logprobs import add_logprobs
from batchinfer.rank.sequence import Sequence
from batchinfer_kernels.transfer import to_host

NOT_FINITE = "the model's logits are not finite for this prompt"


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
    def attention_work(self) -> float:
        """(query, key) pairs: each token attends to all tokens up to itself."""
        return self.num_tokens * (self.start + (self.num_tokens + 1) / 2)

    @property
    def completes_prompt(self) -> bool:
        return self.end == self.sequence.num_prompt_tokens

    @property
    def is_sampled(self) -> bool:
        """Whether the step samples the first new token after this chunk."""
        return self.completes_prompt and self.sequence.request.sampling.max_tokens > 0

    @property
    def scored_tokens(self) -> list[int]:
        """Prompt tokens that this chunk scores, each by the logits of the token before it."""
        request = self.sequence.request
        return request.token_ids[max(self.start + 1, request.score_from) : self.end + 1] if request.score_from else []


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of one step of this rank; the counts are those of StepRecord."""

    expert_counts: torch.Tensor  # see StepOutput
    done_s: float  # Unix time when the step's tokens were on the host
    finished: list[Sequence]  # sequences that ended in this step
    num_requests: int
    new_tokens: int
    output_tokens: int
    kv_tokens: int
    largest_kv_tokens: int
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    attention_work: float = 0.0
    started: list[Sequence] = field(default_factory=list)  # sequences whose prompt is complete and that go on


def prefill_step(
    chunks: list[Chunk], copies: dict[int, int], *, num_alternatives: int = 0, num_states: int = 0
) -> StepInput:
    """Build one step of chunks of several prompts, packed one after the other; without chunks a step without tokens.

    Args:
        copies: KV slot to fill -> KV slot to copy from, in every layer before attention reads the pages.
        num_alternatives: most likely tokens to report with each scored token.
        num_states: largest number of last tokens of each complete prompt whose states are returned, see `state_counts`.
    """
    tokens = _joined([np.asarray(chunk.sequence.request.token_ids[chunk.start : chunk.end]) for chunk in chunks])
    positions = _joined([np.arange(chunk.start, chunk.end) for chunk in chunks])
    slots = _joined([_slots(chunk.sequence.pages, chunk.start, chunk.end) for chunk in chunks])
    ends = np.cumsum([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    placed = list(zip(chunks, ends.tolist(), strict=True))
    pages = [chunk.sequence.pages[: pages_for(chunk.end)] for chunk in chunks]
    # one tensor for all prompts, cut into views: a tensor for each would take longer
    page_ids = torch.tensor(list(chain.from_iterable(pages)), dtype=torch.int64).split(list(map(len, pages)))
    of_chunks = [_spans(chunk, end - chunk.num_tokens, ids) for (chunk, end), ids in zip(placed, page_ids, strict=True)]
    last_rows = [end - 1 for chunk, end in placed if chunk.is_sampled]
    with_scores = [(chunk, end) for chunk, end in placed if chunk.sequence.request.score_from]
    scored_rows = _joined([_scored_rows(chunk, end) for chunk, end in with_scores])
    scored = [token for chunk, _ in with_scores for token in chunk.scored_tokens]
    counts = state_counts(chunks, num_states)
    state_rows = np.repeat(ends - counts, counts) + depths_of(counts)
    return StepInput(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        logit_rows=torch.from_numpy(_joined([np.array(last_rows, dtype=np.int64), scored_rows, state_rows])),
        scored=torch.tensor(scored, dtype=torch.int64) if scored else None,
        num_alternatives=num_alternatives,
        num_states=len(state_rows),
        prefill=tuple(chain.from_iterable(of_chunks)),
        copy_from=torch.tensor(list(copies.values()), dtype=torch.int64),
        copy_to=torch.tensor(list(copies), dtype=torch.int64),
        state_slots=_state_slots(
            [chunk.sequence.state_slot for chunk, spans in zip(chunks, of_chunks, strict=True) for _ in spans]
        ),
    )


def _spans(chunk: Chunk, row: int, page_ids: torch.Tensor) -> list[PrefillSpan]:
    """Return a chunk's spans, cut after tokens whose state is kept; `row` of the step is the first span's start.

    Args:
        page_ids: pages of the sequence up to the chunk's end.
    """
    sequence = chunk.sequence
    if sequence.state_slot is None:
        return [PrefillSpan(row, chunk.num_tokens, chunk.end, page_ids)]
    kept = {*sequence.kept_slots, *sequence.stored_states}
    cuts = sorted(place for place in kept if chunk.start < place < chunk.end)
    spans = []
    for start, end in pairwise([chunk.start, *cuts, chunk.end]):
        moves = sequence.moves.get(start, StateMoves())
        moves = moves._replace(keep_in=sequence.kept_slots.get(end), keep_as=sequence.stored_states.get(end))
        spans.append(PrefillSpan(row + start - chunk.start, end - start, end, page_ids[: pages_for(end)], moves))
    return spans


def state_counts(chunks: list[Chunk], most: int) -> np.ndarray:
    """Return [number of chunks] the number of last rows of each chunk whose states are kept; 0 unless it is sampled."""
    return np.array([min(most, chunk.num_tokens) if chunk.is_sampled else 0 for chunk in chunks], dtype=np.int64)


def sampling_rows(sequences: list[Sequence]) -> SamplingRows:
    """Return the sampling parameters of some sequences as columns."""
    return SamplingRows.of(
        [sequence.request.sampling for sequence in sequences], [sequence.request.sampling_key for sequence in sequences]
    )


def take_token(sequence: Sequence, sampled: Sampled, row: int, eos_token_ids: frozenset[int]) -> None:
    """Give a sequence its new token, in this row; the sequence decides whether it ends."""
    if sampled.is_finite[row]:
        if sequence.logprobs is not None:
            columns = sampled.tokens, sampled.logprobs, sampled.top_tokens, sampled.top_logprobs
            add_logprobs(sequence.logprobs, *(column[row : row + 1] for column in columns if column is not None))
        sequence.accept(int(sampled.tokens[row]), eos_token_ids)
    else:
        sequence.fail(NOT_FINITE)


def take_tokens(sequence: Sequence, tokens: list[int], is_finite: bool, eos_token_ids: frozenset[int]) -> int:
    """Give a sequence several new tokens without log-probabilities; return the number that it took before it ended.

    Args:
        tokens: at least one; only the last one can end a sequence that does not look at every token.
        is_finite: whether the logits of the last one are finite.
    """
    *first, last = tokens
    if not sequence.looks_at_every_token:
        sequence.token_ids += first
        first = []
    for count, token in enumerate(first, 1):
        sequence.accept(token, eos_token_ids)
        if sequence.finish_reason is not None:
            return count
    if is_finite:
        sequence.accept(last, eos_token_ids)
    else:
        sequence.fail(NOT_FINITE)
    return len(tokens)


def take_scores(chunks: list[Chunk], scores: Scores) -> None:
    """Add the scores of these chunks' tokens to their sequences."""
    columns = (values.numpy() for values in to_host(scores.logprobs, scores.top_tokens, scores.top_logprobs))
    logprobs, top_tokens, top_logprobs = columns
    place = 0
    for chunk in chunks:
        sequence, tokens = chunk.sequence, np.array(chunk.scored_tokens, dtype=np.int64)
        if sequence.prompt_logprobs is None or not len(tokens):
            continue
        part = slice(place, place + len(tokens))
        if not np.isfinite(logprobs[part]).all():
            sequence.fail(NOT_FINITE)
        add_logprobs(sequence.prompt_logprobs, tokens, logprobs[part], top_tokens[part], top_logprobs[part])
        place += len(tokens)


def _state_slots(slots: list[int | None]) -> torch.Tensor | None:
    """Return the slots of a step's requests; None if they have no state."""
    held = [slot for slot in slots if slot is not None]
    return torch.tensor(held) if held else None


def _scored_rows(chunk: Chunk, end: int) -> np.ndarray:
    """Return the rows of the step whose logits score a chunk's tokens; the chunk ends before row `end`."""
    last = end - chunk.completes_prompt  # the last token has no next one to score
    return np.arange(last - len(chunk.scored_tokens), last)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _slots(pages: list[int], start: int, end: int) -> np.ndarray:
    positions = np.arange(start, end)
    return np.asarray(pages)[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
