"""Decode: all running sequences take one token per step and come and go between steps."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch

from batchinfer.model.sampling import sample
from batchinfer.model.schedules import Schedule
from batchinfer.model.step import StepOutput
from batchinfer.model.transformer import Transformer
from batchinfer.parallel.spans import SpanLog
from batchinfer.rank.decode_table import DecodeTable
from batchinfer.rank.sequence import Sequence
from batchinfer.records import RequestKey


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What a decode step did: the sequences that finished (they have left the batch), and its totals."""

    finished: list[Sequence]
    output: StepOutput
    kv_tokens: int  # attended to


class DecodeBatch:
    """The running sequences of a rank."""

    def __init__(self, eos_token_ids: frozenset[int], schedule: Schedule) -> None:
        self._table = DecodeTable(eos_token_ids)
        self._schedule = schedule

    @property
    def num_running(self) -> int:
        return len(self._table.sequences)

    def add(self, sequences: list[Sequence]) -> None:
        """Sequences with at least one generated token join."""
        self._table.add(sequences)

    def remove(self, keys: Container[RequestKey]) -> list[Sequence]:
        """Take those of these requests that still run out of the batch."""
        return self._table.remove(keys)

    def step(self, model: Transformer, pages: torch.Tensor, log: SpanLog, *, in_pairs: bool) -> DecodeStep:
        """Generate one token for every running sequence (there may be none: then only take part).

        Args:
            log: receives what was done when.
            in_pairs: run two micro-batches in turn.
        """
        table = self._table
        step = table.next_halves() if in_pairs else table.next_step()
        output = model.forward(step, pages, self._schedule, log)
        kv_tokens = table.kv_tokens
        finished = []
        if self.num_running:
            finished = table.accept(sample(output.logits, table.sampling, table.num_new, model.logit_ops))
        return DecodeStep(finished, output, kv_tokens)
