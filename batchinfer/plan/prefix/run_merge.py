"""Merging sorted runs from disk into one sorted sequence, part by part, in bounded memory."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from batchinfer.plan.prefetch import prefetched
from batchinfer.plan.prefix.prompt_parts import SortedPrompts, join_parts, offsets_of
from batchinfer.plan.prefix.prompt_sort import common_prefix, count_up_to, merge_sorted, take_tails
from batchinfer.plan.prefix.sorted_runs import read_run


def merge_runs(files: list[Path], part_bytes: int) -> Iterator[SortedPrompts]:
    """Yield all prompts of the runs in sorted order, part by part; equal prompts in input order.

    A part of each run is in memory. The prompts up to the smallest of the parts' last prompts are complete: what is
    still on disk comes after them. They are merged and handed out, and the runs whose parts are used up read on.

    Args:
        files: runs of consecutive pieces of the input, in input order.
        part_bytes: memory for the parts over all runs; as many again are read ahead.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            per_run = part_bytes // max(len(files), 1)
            cursors = [_RunCursor(prefetched(read_run(file, per_run), pool)) for file in files]
            last: np.ndarray | None = None
            while cursors := [cursor for cursor in cursors if cursor.has_prompts()]:
                merged = _merge(_complete_pieces(cursors))
                merged.shared[0] = 0 if last is None else common_prefix(last, merged.prompt(0))
                last = merged.prompt(-1).copy()
                yield merged
        finally:
            pool.shutdown(cancel_futures=True)


class _RunCursor:
    """A place in one run: a part of it in memory, and the first prompt of that part not handed out yet."""

    def __init__(self, parts: Iterator[SortedPrompts]) -> None:
        self._parts = parts
        self._part: SortedPrompts | None = None
        self._first = 0
        self.last_prompt = np.zeros(0, dtype=np.uint32)  # of the part in memory
        self.last_key = b""  # the same as big-endian bytes, which sort like it

    def has_prompts(self) -> bool:
        """Return whether prompts are left; load the next part if the one in memory is used up."""
        if self._part is None or self._first == len(self._part):
            self._part, self._first = next(self._parts, None), 0
            if self._part is not None:
                self.last_prompt = self._part.prompt(-1)
                self.last_key = self.last_prompt.astype(">u4").tobytes()
        return self._part is not None

    def take_up_to(self, limit: np.ndarray, *, takes_equal: bool) -> SortedPrompts:
        """Return the next prompts of the part in memory that are at most `limit` ([num_tokens] integers)."""
        part, first = self._part, self._first
        assert part is not None
        end = first + count_up_to(part.token_ids, part.offsets, first, limit, takes_equal)
        self._first = end
        begin = part.offsets[first]
        return SortedPrompts(
            index=part.index[first:end],
            token_ids=part.token_ids[begin : part.offsets[end]],
            offsets=part.offsets[first : end + 1] - begin,
            shared=part.shared[first:end],
        )


def _complete_pieces(cursors: list[_RunCursor]) -> list[SortedPrompts]:
    """Return the prompts of each run's part in memory that no prompt on disk precedes.

    The limit is the smallest of the parts' last prompts; the run that has it gives its whole part.

    Of equal prompts those of earlier runs come first, so a later run keeps its prompts equal to the limit.
    """
    limit = min(range(len(cursors)), key=lambda run: (cursors[run].last_key, run))
    last_prompt = cursors[limit].last_prompt
    return [cursor.take_up_to(last_prompt, takes_equal=run <= limit) for run, cursor in enumerate(cursors)]


def _merge(pieces: list[SortedPrompts]) -> SortedPrompts:
    """Merge sorted pieces; of equal prompts those of earlier pieces come first."""
    pieces = [piece for piece in pieces if len(piece)]
    joined = join_parts(pieces)
    bounds = offsets_of(np.array([len(piece) for piece in pieces]))
    order, shared = merge_sorted(joined.token_ids, joined.offsets, np.arange(len(joined)), joined.shared, bounds)
    return SortedPrompts(
        index=joined.index[order],
        token_ids=take_tails(joined.token_ids, joined.offsets, order, np.zeros_like(order)),
        offsets=offsets_of(np.diff(joined.offsets)[order]),
        shared=shared,
    )
