"""Prompts to compute: of a row with choices, one prompt per choice, which is the row's prompt and the choice."""

# B rows, K prompts

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from batchinfer.data.columns import list_lengths
from batchinfer.plan.prefix.prompt_parts import offsets_of

MOST_TOKENS = 1 << 23  # of the prompts yielded together, at least one


@dataclass(frozen=True, slots=True)
class Prompts:
    """Some prompts in input order."""

    token_ids: np.ndarray  # flat
    offsets: np.ndarray  # [K + 1] int64
    row: np.ndarray  # [K] int64, position of the prompt's row in the batch
    choice: np.ndarray  # [K] int32, 0 for a row without choices
    score_from: np.ndarray  # [K] int64, where the choice begins; 0 for a row without choices


def prompts_of(token_ids: pa.Array, choices: pa.Array) -> Iterator[Prompts]:
    """Yield the prompts of good rows.

    Args:
        token_ids: [B] lists of tokens.
        choices: [B] lists of lists of tokens, null for a row without choices.
    """
    tokens, lengths = token_ids.flatten().to_numpy(), list_lengths(token_ids)
    if choices.null_count == len(choices):
        none = np.zeros(len(lengths), dtype=np.int64)
        yield Prompts(tokens, offsets_of(lengths), np.arange(len(lengths)), none.astype(np.int32), none)
        return
    starts, flat = offsets_of(lengths)[:-1], choices.flatten()
    row = np.repeat(np.arange(len(lengths)), list_lengths(choices))
    choice = np.arange(len(row)) - np.searchsorted(row, row)
    of_choice = list_lengths(flat)
    totals, choice_tokens, choice_starts = lengths[row] + of_choice, flat.flatten().to_numpy(), offsets_of(of_choice)
    ends = np.cumsum(totals)
    first = 0
    while first < len(row):
        base = ends[first - 1] if first else 0
        end = max(int(np.searchsorted(ends, base + MOST_TOKENS, side="right")), first + 1)
        part = slice(first, end)
        offsets = offsets_of(totals[part])
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], totals[part])
        begin = np.repeat(lengths[row[part]], totals[part])  # of the choice
        is_prompt = place < begin
        joined = np.empty(offsets[-1], dtype=tokens.dtype)
        joined[is_prompt] = tokens[(np.repeat(starts[row[part]], totals[part]) + place)[is_prompt]]
        joined[~is_prompt] = choice_tokens[
            (np.repeat(choice_starts[:-1][part], totals[part]) + place - begin)[~is_prompt]
        ]
        yield Prompts(joined, offsets, row[part], choice[part].astype(np.int32), lengths[row[part]])
        first = end
