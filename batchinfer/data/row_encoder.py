"""A column of prompts as token ids, row by row: what a worker does with the model's tokenizer and template."""

from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from batchinfer.data.columns import ENCODED, python_values
from batchinfer.data.tokenizer import PromptTokenizer
from batchinfer.sanitize import clip

# chats that a sound template can take, whatever roles it knows
_TRIAL_CHATS = [
    [{"role": role, "content": "Hello there, 12 times."} for role in roles]
    for roles in (["user"], ["system", "user"], ["user", "assistant", "user"])
]


class RowEncoder:
    """Encodes the rows of a job's prompt column.

    Args:
        column: its name, for error sentences.
        kind: "prompt", "messages" or "token_ids" (nothing to encode then).
        most_tokens: a text that must have more tokens is refused without encoding it.
        control: input.control_tokens.

    Raises:
        ModelError: the job has messages, but the model folder no usable chat template.
    """

    def __init__(self, tokenizer: PromptTokenizer, column: str, kind: str, most_tokens: int, control: str) -> None:
        self._tokenizer, self._column, self._kind = tokenizer, column, kind
        self._most_tokens = most_tokens
        self._control = control
        if kind == "messages":
            tokenizer.chat_template()  # without one no row can work: fail before the first

    def try_out(self) -> None:
        """Encode harmless rows: a tokenizer or template that cannot even do that ends this process here."""
        if self._kind != "token_ids":
            chats = self._kind == "messages"
            self.encode(pa.array(_TRIAL_CHATS if chats else [chat[0]["content"] for chat in _TRIAL_CHATS]))

    def encode(self, column: pa.Array) -> pa.RecordBatch:
        """The rows of the column as ENCODED."""
        values = python_values(column)
        problems = map(_text_problem if self._kind == "prompt" else _chat_problem, values)
        errors = [None if problem is None else f"{self._column} {problem}" for problem in problems]
        good = [row for row, problem in enumerate(errors) if problem is None]
        encode = self._tokenizer.encode_prompts if self._kind == "prompt" else self._tokenizer.encode_chats
        lists: list[list[int]] = [[]] * len(values)
        for row, ids in zip(good, encode([values[row] for row in good], self._most_tokens, self._control), strict=True):
            if isinstance(ids, str):
                errors[row] = clip(ids)
            else:
                lists[row] = ids
        holds = np.zeros(len(values), dtype=bool)
        holds[good] = [self._tokenizer.control.first_in(values[row]) is not None for row in good]
        offsets = np.zeros(len(values) + 1, dtype=np.int32)
        np.cumsum([len(ids) for ids in lists], out=offsets[1:])
        flat = np.fromiter(chain.from_iterable(lists), dtype=np.uint32, count=int(offsets[-1]))
        token_ids = pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
        return pa.RecordBatch.from_arrays([token_ids, pa.array(errors, pa.string()), pa.array(holds)], schema=ENCODED)


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
