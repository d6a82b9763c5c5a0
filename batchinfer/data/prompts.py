"""The prompts of a batch of rows as token ids; what is wrong with one is a sentence at its row."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.config import JobConfig
from batchinfer.data.columns import python_values, token_lists
from batchinfer.data.tokenizer import PromptTokenizer


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What the model can take."""

    window: int  # most tokens of prompt and output together
    vocab_size: int  # token ids are below it


@dataclass(slots=True)
class RowBatch:
    """R rows on their way through the checks; `errors` holds the first problem of each bad row."""

    columns: pa.RecordBatch
    num_rows: int
    errors: dict[int, str] = field(default_factory=dict)

    def blame(self, row: int, sentence: str) -> None:
        self.errors.setdefault(row, sentence)

    def blame_all(self, sentence: str) -> None:
        for row in range(self.num_rows):
            self.errors.setdefault(row, sentence)


class PromptChecks:
    """From the job's prompt column to token ids that the model can take."""

    def __init__(self, job: JobConfig, tokenizer: PromptTokenizer, limits: PromptLimits) -> None:
        self._prompt, self._kind = job.input.prompt_column, job.input.prompt_kind
        self._tokenizer = tokenizer
        self._limits = limits
        if self._kind == "messages":
            tokenizer.chat_template()  # without one no row can work: fail before the first

    def checked(self, batch: RowBatch) -> pa.Array:
        """[R] lists of token ids; what is wrong with them is blamed."""
        column = batch.columns[self._prompt]
        if self._kind == "token_ids":
            prompts = token_lists(column)
            for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
                batch.blame(row, f"{self._prompt} is null")
        else:
            values = python_values(column)
            find_problem = _text_problem if self._kind == "prompt" else _chat_problem
            for row, value in enumerate(values):
                problem = find_problem(value)
                if problem is not None:
                    batch.blame(row, f"{self._prompt} {problem}")
            prompts = self._encoded(values, batch)
        self._check_range(prompts, batch)
        lengths, window = token_counts(prompts), self._limits.window
        for row in np.flatnonzero(lengths == 0).tolist():
            batch.blame(row, "the prompt has no tokens")
        for row in np.flatnonzero(lengths >= window).tolist():
            batch.blame(row, f"the prompt has {lengths[row]} tokens, no room for a new one in the window of {window}")
        return prompts

    def _encoded(self, values: list[Any], batch: RowBatch) -> pa.Array:
        good = [row for row in range(batch.num_rows) if row not in batch.errors]
        encode = self._tokenizer.encode_prompts if self._kind == "prompt" else self._tokenizer.encode_chats
        lists: list[list[int]] = [[]] * batch.num_rows
        for row, ids in zip(good, encode([values[row] for row in good], self._limits.window), strict=True):
            if isinstance(ids, str):
                batch.blame(row, ids)
            else:
                lists[row] = ids
        offsets = np.zeros(batch.num_rows + 1, dtype=np.int32)
        np.cumsum([len(ids) for ids in lists], out=offsets[1:])
        flat = np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=int(offsets[-1]))
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))

    def _check_range(self, prompts: pa.Array, batch: RowBatch) -> None:
        """Blame null, negative and too large token ids: the model's table has rows for ids below vocab_size only."""
        ids = prompts.flatten()
        kind = pa.uint64() if ids.type == pa.uint64() else pa.int64()
        too_large = pc.greater_equal(ids, pa.scalar(self._limits.vocab_size, kind))
        is_bad = pc.or_kleene(pc.less(ids, pa.scalar(0, kind)), too_large).fill_null(True)
        positions = np.flatnonzero(is_bad.to_numpy(zero_copy_only=False))
        if len(positions) == 0:
            return
        rows, first = np.unique(
            np.repeat(np.arange(batch.num_rows), token_counts(prompts))[positions], return_index=True
        )
        for row, position in zip(rows.tolist(), positions[first].tolist(), strict=True):
            value = ids[position].as_py()
            limit = self._limits.vocab_size
            shown = "null" if value is None else f"{value}, which is not in [0, {limit})"
            batch.blame(row, f"a token id is {shown}")


def _text_problem(text: Any) -> str | None:
    if text is None:
        return "is null"
    if isinstance(text, UnicodeDecodeError):
        return "is not valid UTF-8"
    return None if text else "is empty"


def _chat_problem(messages: Any) -> str | None:
    if not messages:
        return "is null" if messages is None else "is an empty list"
    if isinstance(messages, UnicodeDecodeError):
        return "is not valid UTF-8"
    for index, message in enumerate(messages):
        if message is None:
            return f"has a null in place of message {index}"
        if message["role"] is None:
            return f"has no role in message {index}"
        # an assistant that only called a tool said nothing
        if message["content"] is None and message.get("tool_calls") is None:
            return f"has no content in message {index}"
    return None


def token_counts(lists: pa.Array) -> np.ndarray:
    """[R] tokens per row; 0 for null."""
    return pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
