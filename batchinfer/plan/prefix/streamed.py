"""The global prefix plan in bounded memory: the same plan as plan/prefix/in_memory.py, whatever the number of prompts.

Prompts that fit into memory are planned there. Others are sorted piece by piece into runs on disk (sorted_runs), and
the runs are merged twice: once for the plan, once for the token ids (run_merge).
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np

from batchinfer.plan.prefetch import prefetched
from batchinfer.plan.prefix.in_memory import PrefixPlan, check_prompts, plan_prefixes, prefix_plan
from batchinfer.plan.prefix.prompt_parts import SortedPrompts, bytes_of, index_type, num_that_fit, offsets_of
from batchinfer.records import ConfigError

PART_BYTES = 2 << 20  # handed out at once from memory; places of tokens take up to 24 times as much
MERGE_COPIES = 4
NUM_WRITERS = 2  # threads that sort; each holds one run


class PrefixStream:
    """Prompts handed in piece by piece, their plan, and the prompts again in its order.

    Use as a context manager: files of an earlier process that was killed go at the start, its own at the end. The
    plan depends on the prompts only, not on the memory or on the pieces.

    Args:
        scratch: folder for the runs; made when they are needed, and deleted with all that is in it.
        block_tokens: as for `plan_prefixes`.
        memory_bytes: for token ids; besides these about 40 bytes per prompt are needed for the plan. A run has a
            quarter of it (one is filled while others are sorted), a merge of all runs half of it.
        token_type: unsigned integers in which token ids are held and written.
    """

    def __init__(
        self, scratch: Path, *, block_tokens: int, memory_bytes: int, token_type: np.typing.DTypeLike = np.uint32
    ) -> None:
        self._scratch = scratch
        self._block_tokens = block_tokens
        self._run_bytes = memory_bytes // 4
        self._token_type = np.dtype(token_type)
        self._buffer = _Buffer(self._run_bytes, self._token_type, first_index=0)
        self._runs: list[Path] = []
        self._num_prompts = 0
        self._plan_in_memory: PrefixPlan | None = None
        self._writers = ThreadPoolExecutor(max_workers=NUM_WRITERS)
        self._being_written: deque[Future[None]] = deque()

    def __enter__(self) -> PrefixStream:
        self._remove_files()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writers.shutdown(cancel_futures=True)
        self._remove_files()

    def add(self, token_ids: np.ndarray, offsets: np.ndarray) -> None:
        """Add the next prompts of the input.

        Args:
            token_ids: flat [num_tokens] integers; copied.
            offsets: [N + 1] int64, prompt i is token_ids[offsets[i]:offsets[i + 1]].

        Raises:
            ValueError: as for `plan_prefixes`, or a token id is too large for the stream's type.
            ConfigError: the scratch folder cannot be written.
        """
        offsets = np.asarray(offsets, dtype=np.int64)
        check_prompts(token_ids, offsets, self._block_tokens, largest=np.iinfo(self._token_type).max)
        first, num_prompts = 0, len(offsets) - 1
        while first < num_prompts:
            num_taken = self._buffer.fill(token_ids, offsets, first)
            first += num_taken
            self._num_prompts += num_taken
            if first < num_prompts:
                self._write_buffer()

    def plan(self) -> PrefixPlan:
        """Return the plan of all prompts, equal to that of `plan_prefixes`; no prompt can be added afterwards.

        Raises:
            ConfigError: the scratch folder cannot be written.
        """
        if not self._runs:
            token_ids, offsets = self._buffer.prompts()
            self._plan_in_memory = plan_prefixes(token_ids, offsets, block_tokens=self._block_tokens)
            return self._plan_in_memory
        self._write_buffer()
        self._wait_for_writers(0)
        order = np.empty(self._num_prompts, dtype=index_type(self._num_prompts))
        shared, lengths = (np.empty(self._num_prompts, dtype=np.int32) for _ in range(2))
        done = 0
        for part in self._merged():
            order[done : done + len(part)] = part.index
            shared[part.index] = part.shared
            lengths[part.index] = np.diff(part.offsets)
            done += len(part)
        return prefix_plan(order, shared, lengths)

    def in_order(self) -> Iterator[SortedPrompts]:
        """Yield all prompts in the plan's order, part by part. Call `plan` first."""
        if self._plan_in_memory is not None:
            yield from _parts_of(*self._buffer.prompts(), self._plan_in_memory)
            return
        with ThreadPoolExecutor(max_workers=1) as pool:
            yield from prefetched(self._merged(), pool)

    def _merged(self) -> Iterator[SortedPrompts]:
        # numba takes its time to load: small jobs do without it
        from batchinfer.plan.prefix.run_merge import merge_runs

        # parts in use, read ahead, joined, merged and merged ahead
        return merge_runs(self._runs, self._run_bytes // MERGE_COPIES)

    def _write_buffer(self) -> None:
        """Pass the full buffer to a writer thread, which sorts and writes it, and start an empty one."""
        self._wait_for_writers(NUM_WRITERS - 1)
        target = self._scratch / f"{len(self._runs):05d}.arrow"
        self._runs.append(target)
        self._being_written.append(self._writers.submit(_write_run, target, self._buffer))
        self._buffer = _Buffer(self._run_bytes, self._token_type, first_index=self._num_prompts)

    def _wait_for_writers(self, most_busy: int) -> None:
        while len(self._being_written) > most_busy:
            self._being_written.popleft().result()

    def _remove_files(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)


class _Buffer:
    """Prompts of one run in input order."""

    def __init__(self, num_bytes: int, token_type: np.dtype, *, first_index: int) -> None:
        self.first_index = first_index  # place of its first prompt in the input
        self._free_bytes = num_bytes
        self._token_ids = np.empty(num_bytes // token_type.itemsize, dtype=token_type)
        self._num_tokens = 0
        self._lengths: list[np.ndarray] = []

    def fill(self, token_ids: np.ndarray, offsets: np.ndarray, first: int) -> int:
        """Copy the prompts from `first` on that fit, at least one into an empty buffer; return their number."""
        token_bytes = self._token_ids.itemsize
        count = num_that_fit(offsets, first, self._free_bytes, token_bytes)
        if count == 0 and not self._lengths:
            count = 1
            self._token_ids = np.empty(offsets[first + 1] - offsets[first], dtype=self._token_ids.dtype)
        if count == 0:
            return 0
        taken = offsets[first : first + count + 1]
        end = self._num_tokens + int(taken[-1] - taken[0])
        self._token_ids[self._num_tokens : end] = token_ids[taken[0] : taken[-1]]
        self._num_tokens = end
        self._lengths.append(np.diff(taken))
        self._free_bytes = max(self._free_bytes - bytes_of(count, int(taken[-1] - taken[0]), token_bytes), 0)
        return count

    def prompts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the prompts as flat token ids and [N + 1] int64 offsets."""
        lengths = np.concatenate(self._lengths) if self._lengths else np.zeros(0, np.int64)
        return self._token_ids[: self._num_tokens], offsets_of(lengths)


def _write_run(target: Path, buffer: _Buffer) -> None:
    from batchinfer.plan.prefix.sorted_runs import write_run

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_run(target, *buffer.prompts(), buffer.first_index)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot write {target}: {reason}; free space or choose another output.dir") from None


def _parts_of(token_ids: np.ndarray, offsets: np.ndarray, plan: PrefixPlan) -> Iterator[SortedPrompts]:
    """Yield prompts in memory in the plan's order, in parts of about PART_BYTES."""
    lengths = np.diff(offsets)[plan.order]
    ordered_offsets = offsets_of(lengths)
    first = 0
    while first < len(lengths):
        end = first + max(num_that_fit(ordered_offsets, first, PART_BYTES, token_ids.itemsize), 1)
        index = plan.order[first:end]
        part_offsets = ordered_offsets[first : end + 1] - ordered_offsets[first]
        place_shift = np.repeat(offsets[index] - part_offsets[:-1], lengths[first:end])
        taken = token_ids[np.arange(part_offsets[-1]) + place_shift]
        yield SortedPrompts(index, taken, part_offsets, plan.shared_tokens[index])
        first = end
