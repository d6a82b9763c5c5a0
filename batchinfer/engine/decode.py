"""Decode: all running sequences take one token per step and come and go between steps. Called by the worker."""

from __future__ import annotations

import numpy as np
import torch

from batchinfer.engine.batch import DecodeTable
from batchinfer.engine.sequence import Sequence
from batchinfer.model.sampling import Sampled, SamplingRows, sample
from batchinfer.model.transformer import StepOutput, Transformer
from batchinfer.records import TokenLogprob


class DecodeBatch:
    """The running sequences of a rank."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self.sequences: list[Sequence] = []
        self._eos_token_ids = eos_token_ids
        self._table: DecodeTable | None = None

    def add(self, sequences: list[Sequence]) -> None:
        """Sequences with at least one generated token join."""
        self.sequences += sequences
        self._table = None

    def step(self, model: Transformer, pages: torch.Tensor) -> tuple[list[Sequence], StepOutput, int]:
        """Generate one token for every running sequence.

        Returns:
            The sequences that finished (they have left the batch), the model's output, and the KV tokens attended to.
        """
        if self._table is None:
            self._table = DecodeTable(self.sequences)
        table = self._table
        output = model.forward(table.next_step(), pages)
        kv_tokens = table.kv_tokens
        take_tokens(self.sequences, output.logits, table.sampling, table.num_new, self._eos_token_ids)
        table.advance()
        finished = [sequence for sequence in self.sequences if sequence.finish_reason is not None]
        if finished:
            self.sequences = [sequence for sequence in self.sequences if sequence.finish_reason is None]
            self._table = None
        return finished, output, kv_tokens


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
