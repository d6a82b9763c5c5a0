"""Decode: all running sequences take one token per step and come and go between steps. Called by the worker."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np
import torch

from batchinfer.engine.batch import DecodeTable
from batchinfer.engine.micro_batches import halve_decode
from batchinfer.engine.sequence import Sequence
from batchinfer.model.sampling import Sampled, SamplingRows, sample
from batchinfer.model.transformer import StepOutput, Transformer
from batchinfer.parallel.overlap import run_decode_pair, run_to_end
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog
from batchinfer.records import RequestKey, TokenLogprob


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What a decode step did: the sequences that finished (they have left the batch), and its totals."""

    finished: list[Sequence]
    output: StepOutput
    kv_tokens: int  # attended to


class DecodeBatch:
    """The running sequences of a rank, micro-batch 0 first."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self.sequences: list[Sequence] = []
        self._eos_token_ids = eos_token_ids
        self._table: DecodeTable | None = None
        self._num_first = 0  # sequences of micro-batch 0

    def add(self, sequences: list[Sequence]) -> None:
        """Sequences with at least one generated token join."""
        self.sequences += sequences
        self._table = None

    def remove(self, keys: Container[RequestKey]) -> list[Sequence]:
        """Take those of these requests that still run out of the batch."""
        removed = [sequence for sequence in self.sequences if sequence.request.key in keys]
        if removed:
            self.sequences = [sequence for sequence in self.sequences if sequence.request.key not in keys]
            self._table = None
        return removed

    def step(self, model: Transformer, pages: torch.Tensor, log: SpanLog, *, in_pairs: bool) -> DecodeStep:
        """Generate one token for every running sequence (there may be none: then only take part).

        Args:
            log: receives what was done when.
            in_pairs: run two micro-batches in turn.
        """
        if self._table is None:
            first, second = halve_decode(self.sequences)
            self.sequences, self._num_first = first + second, len(first)
            self._table = DecodeTable(self.sequences)
        table = self._table
        halves = (slice(0, self._num_first), slice(self._num_first, None)) if in_pairs else (slice(None),)
        points = [
            model.forward_points(table.next_step(rows), pages, MicroBatchSpans(log, micro_batch))
            for micro_batch, rows in enumerate(halves)
        ]
        output = joined(run_decode_pair(*points) if in_pairs else (run_to_end(points[0]),))
        kv_tokens = table.kv_tokens
        if table.sampling is not None:
            take_tokens(self.sequences, output.logits, table.sampling, table.num_new, self._eos_token_ids)
        table.advance()
        finished = [sequence for sequence in self.sequences if sequence.finish_reason is not None]
        if finished:
            self.sequences = [sequence for sequence in self.sequences if sequence.finish_reason is None]
            self._table = None
        return DecodeStep(finished, output, kv_tokens)


def joined(outputs: tuple[StepOutput, ...]) -> StepOutput:
    """The outputs of a step's micro-batches, in the order of their tokens, as one."""
    if len(outputs) == 1:
        return outputs[0]
    first, second = outputs
    return StepOutput(torch.cat([first.logits, second.logits]), first.expert_counts + second.expert_counts)


def take_tokens(
    sequences: list[Sequence],
    logits: torch.Tensor,
    rows: SamplingRows,
    num_new: np.ndarray,
    eos_token_ids: frozenset[int],
) -> None:
    """Sample one token per sequence and let each decide whether it goes on.

    Args:
        logits: [S, V] float32, one row per sequence.
        num_new: [S] tokens each has generated so far.
    """
    sampled = sample(logits, rows, num_new)
    for index, sequence in enumerate(sequences):
        if not sampled.is_finite[index]:
            sequence.fail("the model's logits are not finite for this prompt")
        else:
            sequence.accept(sampled.tokens[index], _logprob(sampled, index, sequence), eos_token_ids)


def _logprob(sampled: Sampled, index: int, sequence: Sequence) -> TokenLogprob | None:
    wanted = sequence.request.sampling.logprobs
    if wanted is None or sampled.logprobs is None or sampled.top_tokens is None or sampled.top_logprobs is None:
        return None
    top = zip(sampled.top_tokens[index][:wanted], sampled.top_logprobs[index][:wanted], strict=True)
    return TokenLogprob(sampled.tokens[index], sampled.logprobs[index], tuple(top))
