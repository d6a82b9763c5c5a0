"""Training batches in which all rows of a task share one instruction; made by train.py, read by model.py.

A segment is one task: its prefix once, then B rows of S tokens, each continuing the prefix:

    prefix            positions 0 .. P - 1
    row 0 .. B - 1    positions P .. P + S - 1      <User>question<Assistant>answer<end>, then padding
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from chat import ASSISTANT_ID, EOS_ID, USER_ID, encode, prefix_text
from tasks import GENERATORS, Example, draw_example
from tokenizers import Tokenizer

SECOND_TURN_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Segment:
    """Sizes of one task's part of a batch."""

    task: str
    num_prefix: int
    num_rows: int
    row_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens in the flat batch, padding included."""
        return self.num_prefix + self.num_rows * self.row_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """All segments flat, one after the other; T tokens, M answer tokens."""

    segments: list[Segment]
    tokens: torch.Tensor  # [T] int64
    next_tokens: torch.Tensor  # [T] int64, the token that follows (of every row, behind the prefix: the user token)
    positions: torch.Tensor  # [T] int64
    counted: torch.Tensor  # [T] bool, no padding
    places: torch.Tensor  # [M] int64, tokens whose next token belongs to an answer
    task_of_place: torch.Tensor  # [M] int64, index into the segments
    after_next: torch.Tensor  # [M] int64, what follows that answer token, or -100 where the answer ends


class BatchMaker:
    """Draws batches from the training part of the tasks; a batch depends on seed and step alone."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self.tokenizer = tokenizer
        self._prefixes = {task: encode(tokenizer, prefix_text(task)) for task in GENERATORS}
        self._seed = seed

    def draw(self, step: int, num_rows: dict[str, int], prefix_tokens: int | None = None) -> Batch:
        """Draw the batch of one training step, on whole instructions or their begin token and last `prefix_tokens`.

        Args:
            num_rows: examples of each task.
        """
        rng = random.Random(f"{self._seed} {step}")
        conversations = {}
        for task, count in num_rows.items():
            turns = 2 if rng.random() < SECOND_TURN_SHARE else 1  # of all rows, so that there is little padding
            conversations[task] = [
                [draw_example(task, rng, held_out=False) for _ in range(turns)] for _ in range(count // turns)
            ]
        return self.pack(conversations, prefix_tokens)

    def prefix_lengths(self) -> list[int]:
        """Tokens of each task's instruction."""
        return [len(prefix) for prefix in self._prefixes.values()]

    def pack(self, conversations: dict[str, list[list[Example]]], prefix_tokens: int | None = None) -> Batch:
        """One segment per task from conversations, each one or more examples long."""
        segments, tokens, following, positions, counted, places, task_of, after_next = [], [], [], [], [], [], [], []
        for task, rows in conversations.items():
            prefix = self._prefixes[task]
            if prefix_tokens is not None:
                prefix = [*prefix[:1], *prefix[-prefix_tokens:]]
            encoded = [self._encode_row(row) for row in rows]
            width = max(len(ids) for ids, _ in encoded)
            segment = Segment(task, len(prefix), len(rows), width)
            tokens += prefix
            following += [*prefix[1:], USER_ID]
            positions += range(len(prefix))
            counted += [True] * len(prefix)
            for ids, is_answer in encoded:
                padding = width - len(ids)
                for place in range(len(ids) - 1):
                    if is_answer[place + 1]:
                        places.append(len(tokens) + place)
                        task_of.append(len(segments))
                        goes_on = place + 2 < len(ids) and is_answer[place + 2]
                        after_next.append(ids[place + 2] if goes_on else -100)
                tokens += ids + [EOS_ID] * padding
                following += ids[1:] + [EOS_ID] * (padding + 1)
                positions += range(len(prefix), len(prefix) + width)
                counted += [True] * len(ids) + [False] * padding
            segments.append(segment)
        lists = (tokens, following, positions, counted, places, task_of, after_next)
        return Batch(segments, *(torch.tensor(values) for values in lists))

    def _encode_row(self, row: list[Example]) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation, and which of them the model must write itself."""
        ids: list[int] = []
        is_answer: list[bool] = []
        for example in row:
            asked = [USER_ID, *encode(self.tokenizer, example.question), ASSISTANT_ID]
            answered = [*encode(self.tokenizer, example.answer), EOS_ID]
            ids += asked + answered
            is_answer += [False] * len(asked) + [True] * len(answered)
        return ids, is_answer
