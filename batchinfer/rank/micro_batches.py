"""Cuts a step into the two micro-batches that overlap, equal in attention work."""

from __future__ import annotations

import numpy as np

from batchinfer.config import PAGE_TOKENS
from batchinfer.rank.batch import Chunk


def halve_prefill(chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
    """The earlier and the later half of a packed step; one prompt may be cut between them.

    A token's attention work is the number of tokens it attends to. Chunks keep their order, so whatever a chunk shares
    with an earlier one is written by the half that runs first.

    Returns:
        Micro-batch 1 (earlier) and micro-batch 0 (later); either may be empty.
    """
    done = np.concatenate([np.zeros(1, dtype=np.int64), *(np.arange(c.start, c.end) + 1 for c in chunks)]).cumsum()
    num_first = int(np.argmin(np.abs(done - done[-1] / 2)))  # rows whose work is nearest to half of all
    first: list[Chunk] = []
    second: list[Chunk] = []
    for chunk in chunks:
        cut = min(max(chunk.start + num_first, chunk.start), chunk.end)
        num_first -= cut - chunk.start
        if cut > chunk.start:
            first.append(Chunk(chunk.sequence, chunk.start, cut))
        if cut < chunk.end:
            second.append(Chunk(chunk.sequence, cut, chunk.end))
    return first, second


def halve_copies(copies: dict[int, int], first: list[Chunk]) -> tuple[dict[int, int], dict[int, int]]:
    """Give each copy (KV slot to fill -> slot to copy from) to the micro-batch in which its sequence begins."""
    first_pages = {page for chunk in first for page in chunk.sequence.pages}
    earlier = {to: source for to, source in copies.items() if to // PAGE_TOKENS in first_pages}
    return earlier, {to: source for to, source in copies.items() if to not in earlier}


def halve_decode(kv_tokens: np.ndarray) -> tuple[np.ndarray, int]:
    """Two sets of running sequences, equal in number and nearly equal in KV tokens: longest first, 0 1 1 0 0 1 1 0 …

    Args:
        kv_tokens: [S] of each sequence.

    Returns:
        ([S] sequences, those of micro-batch 0 first, and how many these are).
    """
    longest_first = np.argsort(-kv_tokens, kind="stable")
    micro_batch = (np.arange(len(kv_tokens)) + 1) // 2 % 2
    halves = [longest_first[micro_batch == half] for half in (0, 1)]
    return np.concatenate(halves), len(halves[0])
