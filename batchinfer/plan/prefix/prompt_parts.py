"""Flat arrays of a part of the sorted prompts, and their size in memory."""

from dataclasses import dataclass

import numpy as np

TOKEN_BYTES = 4
PROMPT_BYTES = 48  # index, offset and shared tokens, and the order and shared tokens before and after a merge


@dataclass(frozen=True, slots=True)
class SortedPrompts:
    """P consecutive prompts of the sorted order.

    Attributes:
        index: [P] int64, their places in the input.
        token_ids: flat unsigned integers, the prompts one after the other.
        offsets: [P + 1] int64, prompt k is token_ids[offsets[k]:offsets[k + 1]].
        shared: [P] int64, tokens that each shares with the prompt before it in the order, also across parts.
    """

    index: np.ndarray
    token_ids: np.ndarray
    offsets: np.ndarray
    shared: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that these prompts take during a merge."""
        return bytes_of(len(self), len(self.token_ids), self.token_ids.itemsize)

    def prompt(self, place: int) -> np.ndarray:
        """Return the token ids of one prompt by its index in this part (negative: from the end)."""
        place %= len(self)
        return self.token_ids[self.offsets[place] : self.offsets[place + 1]]


def bytes_of(num_prompts: int, num_tokens: int, token_bytes: int = TOKEN_BYTES) -> int:
    """Return the bytes of memory that prompts take while they are sorted or merged."""
    return token_bytes * num_tokens + PROMPT_BYTES * num_prompts


def join_parts(parts: list[SortedPrompts]) -> SortedPrompts:
    """Concatenate parts, at least one."""
    if len(parts) == 1:
        return parts[0]
    return SortedPrompts(
        index=np.concatenate([part.index for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        offsets=offsets_of(np.concatenate([np.diff(part.offsets) for part in parts])),
        shared=np.concatenate([part.shared for part in parts]),
    )


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return [N + 1] int64, the starts of N consecutive items by their lengths, and the end of the last one."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def index_type(num_items: int) -> type[np.signedinteger]:
    """Return the integer type for indices of `num_items` items: int32 if it is large enough, else int64."""
    return np.int32 if num_items <= np.iinfo(np.int32).max else np.int64


def num_that_fit(offsets: np.ndarray, first: int, num_bytes: int, token_bytes: int = TOKEN_BYTES) -> int:
    """Return the number of prompts from prompt `first` on that take at most `num_bytes` together."""
    # a window that surely holds them, so that the cost is that of what fits
    window = offsets[first : first + num_bytes // PROMPT_BYTES + 2]
    taken = token_bytes * (window - window[0]) + PROMPT_BYTES * np.arange(len(window))
    return int(np.searchsorted(taken, num_bytes, side="right")) - 1
