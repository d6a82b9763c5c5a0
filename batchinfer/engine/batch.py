"""Turns sequences into the tensors of one model step. Called by prefill and decode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.engine.sequence import Sequence
from batchinfer.model.sampling import SamplingRows
from batchinfer.model.transformer import PrefillSpan, StepInput


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of one prompt that runs in this step: tokens start .. end - 1."""

    sequence: Sequence
    start: int
    end: int

    @property
    def completes_prompt(self) -> bool:
        return self.end == self.sequence.num_prompt_tokens


def prefill_step(chunks: list[Chunk], copies: dict[int, int]) -> StepInput:
    """One step over chunks of several prompts, packed one after the other; without chunks a step without tokens.

    Args:
        copies: KV slot to fill -> KV slot to copy from, in every layer before attention reads the pages.
    """
    tokens = _joined([np.asarray(chunk.sequence.request.token_ids[chunk.start : chunk.end]) for chunk in chunks])
    positions = _joined([np.arange(chunk.start, chunk.end) for chunk in chunks])
    slots = _joined([_slots(chunk.sequence.pages, chunk.start, chunk.end) for chunk in chunks])
    ends = np.cumsum([chunk.end - chunk.start for chunk in chunks])
    spans = tuple(
        PrefillSpan(
            start=int(end) - (chunk.end - chunk.start),
            num_tokens=chunk.end - chunk.start,
            context_tokens=chunk.end,
            page_ids=torch.tensor(chunk.sequence.pages[: -(-chunk.end // PAGE_TOKENS)]),
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


class DecodeTable:
    """The running sequences as arrays, rebuilt only when the set changes; a step then only counts up."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        most_pages = max((len(sequence.pages) for sequence in sequences), default=1)
        self._pages = np.zeros((len(sequences), most_pages), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            self._pages[row, : len(sequence.pages)] = sequence.pages
        self._kv_tokens = np.array([sequence.kv_tokens for sequence in sequences], dtype=np.int64)
        self.sampling = sampling_rows(sequences) if sequences else None
        self.num_new = np.array([len(sequence.token_ids) for sequence in sequences], dtype=np.int64)

    def next_step(self, rows: slice) -> StepInput:
        """One new token for each sequence of `rows`: the last generated one, at the end of its KV."""
        last_tokens = np.array([sequence.token_ids[-1] for sequence in self.sequences[rows]], dtype=np.int64)
        kv_tokens = self._kv_tokens[rows]
        positions = kv_tokens - 1
        page = self._pages[rows][np.arange(len(positions)), positions // PAGE_TOKENS]
        used_pages = -(-int(kv_tokens.max(initial=1)) // PAGE_TOKENS)
        return StepInput(
            tokens=torch.from_numpy(last_tokens),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(page * PAGE_TOKENS + positions % PAGE_TOKENS),
            logit_rows=torch.arange(len(positions)),
            page_table=torch.from_numpy(self._pages[rows, :used_pages]),
            kv_tokens=torch.from_numpy(kv_tokens.copy()),
        )

    @property
    def kv_tokens(self) -> int:
        return int(self._kv_tokens.sum())

    def advance(self) -> None:
        """Every sequence has one more token."""
        self._kv_tokens = self._kv_tokens + 1
        self.num_new = self.num_new + 1


def sampling_rows(sequences: list[Sequence]) -> SamplingRows:
    """The sampling parameters of some sequences as columns."""
    return SamplingRows.of(
        [sequence.request.sampling for sequence in sequences], [sequence.request.sampling_key for sequence in sequences]
    )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _slots(pages: list[int], start: int, end: int) -> np.ndarray:
    positions = np.arange(start, end)
    return np.asarray(pages)[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
