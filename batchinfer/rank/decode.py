"""Decode: all running sequences take one token per step and come and go between steps. Called by the worker."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch

from batchinfer.model.sampling import sample
from batchinfer.model.transformer import StepOutput, Transformer
from batchinfer.parallel.overlap import run_decode_pair, run_to_end
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog
from batchinfer.rank.decode_graphs import DecodeGraphs
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

    def __init__(self, eos_token_ids: frozenset[int], graphs: DecodeGraphs | None = None) -> None:
        self._table = DecodeTable(eos_token_ids)
        self._graphs = graphs  # None: every step is started operation by operation

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
        if self._graphs is not None and self.num_running and not in_pairs:
            with MicroBatchSpans(log).compute("DECODE"):
                output = self._graphs.run(table.next_step(slice(None)))
        elif model.decodes_at_once and not in_pairs:
            with MicroBatchSpans(log).compute("DECODE"):
                output = model.decode(table.next_step(slice(None)), pages)
        else:
            output = self._run_points(model, pages, log, in_pairs=in_pairs)
        kv_tokens = table.kv_tokens
        finished = []
        if self.num_running:
            finished = table.accept(sample(output.logits, table.sampling, table.num_new, model.logit_ops))
        return DecodeStep(finished, output, kv_tokens)

    def _run_points(self, model: Transformer, pages: torch.Tensor, log: SpanLog, *, in_pairs: bool) -> StepOutput:
        """The step of all sequences, operation by operation."""
        table = self._table
        halves = table.halves() if in_pairs else (slice(None),)
        points = [
            model.forward_points(table.next_step(rows), pages, MicroBatchSpans(log, micro_batch))
            for micro_batch, rows in enumerate(halves)
        ]
        return joined(run_decode_pair(*points) if in_pairs else (run_to_end(points[0]),))


def joined(outputs: tuple[StepOutput, ...]) -> StepOutput:
    """The outputs of a step's micro-batches, in the order of their tokens, as one."""
    if len(outputs) == 1:
        return outputs[0]
    first, second = outputs
    return StepOutput(torch.cat([first.logits, second.logits]), first.expert_counts + second.expert_counts)
