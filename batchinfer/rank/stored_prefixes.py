"""Prompt prefixes on disk for one rank's prefill: read before a prompt runs, written after it has run.

The plan's order gives the blocks that are needed next. While earlier prompts run, the rank reads the blocks of a
waiting prompt that memory is not expected to hold. When the prompt is admitted they are copied into its pages, instead
of being computed. After a step the writer gets the blocks that it has completed, up to the first that is not finite.
"""

# B blocks of one prompt

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.kv.memory import KvMemory
from batchinfer.kv_store.disk import DiskStore
from batchinfer.kv_store.reader import Allocate, BlockRead, Reader, pageable
from batchinfer.kv_store.reuse import ReuseRule
from batchinfer.kv_store.writer import Writer
from batchinfer.rank.batch import Chunk
from batchinfer.rank.sequence import Sequence
from batchinfer.records import Request, RequestKey

CLOSE_S = 10.0  # for writing the last blocks at the end


@dataclass(slots=True)
class StoredPrompt:
    """A prompt that waits or runs."""

    names: list[bytes]  # [B] of its whole blocks
    first: int  # block from which on `read` reads
    read: BlockRead | None
    older: list[bool] = field(default_factory=list)  # whether each block that was read is older than this run

    def older_tokens(self, start: int, end: int, block_tokens: int) -> int:
        """Return the number of tokens from `start` to `end` in blocks that are older than this run."""
        num_older = 0
        for number, is_older in enumerate(self.older, self.first):
            begin, stop = max(start, number * block_tokens), min(end, (number + 1) * block_tokens)
            num_older += is_older * max(0, stop - begin)
        return num_older


class StoredPrefixes:
    """The KV store of one rank.

    Args:
        store: opened for this model.
        memory: of the rank, with the page pool.
        persist: the blocks to write: blocks that several requests share, all, or none.
        reuse: "auto" ends reading when it turns out slower than computing.
        wait_s: time after which a read that the disk does not answer is abandoned.
    """

    def __init__(
        self,
        store: DiskStore,
        memory: KvMemory,
        *,
        persist: Literal["shared", "all", "none"],
        reuse: Literal["auto", "always"],
        wait_s: float,
    ) -> None:
        self._store, self._memory, self._persist, self._wait_s = store, memory, persist, wait_s
        self._block_tokens = store.identity.block_tokens
        self._reader = Reader(store, allocate=allocator(memory.device))
        self._writer = Writer(store)
        self._rule = ReuseRule(reuse)
        self._has_ended_reading = False
        self._prompts: dict[RequestKey, StoredPrompt] = {}
        self._computed_tokens, self._compute_s = 0, 0.0
        self._later_uses = _LaterUses(store.identity.block_tokens, self._report_uses)

    def read_ahead(self, requests: Iterable[Request]) -> None:
        """Begin to read the blocks of the next prompts that memory is not expected to hold."""
        for request in requests:
            names = self._store.identity.chain(request.token_ids)
            num_usable = request.most_cached_tokens // self._block_tokens
            expected = max(0, request.shared_tokens - max(0, request.replicated_tokens))
            first = min(expected // self._block_tokens, num_usable)
            self._prompts[request.key] = StoredPrompt(names, first, self._ask(names[:num_usable], first))

    def fill(self, request: Request, num_known_pages: int, page_ids: list[int]) -> int:
        """Copy the blocks of an admitted prompt that are on disk into its pages.

        Args:
            num_known_pages: number of first pages that hold their content already.
            page_ids: the pages of the whole prompt.

        Returns:
            The number of tokens, from the first on, whose KV is in the pages now; 0 if the disk adds nothing.
        """
        prompt = self._prompts[request.key]
        self._later_uses.note(request, prompt.names)
        num_known = num_known_pages * PAGE_TOKENS // self._block_tokens  # blocks
        if prompt.first > num_known:
            # memory holds less than the plan expected: read the blocks between, too
            if prompt.read is not None:
                prompt.read.close()
            num_usable = request.most_cached_tokens // self._block_tokens
            prompt.first, prompt.read = num_known, self._ask(prompt.names[:num_usable], num_known)
        read, prompt.read = prompt.read, None
        if read is None:
            return 0
        started_s = time.monotonic()
        content = read.wait(self._wait_s)
        num_tokens = 0
        skipped = num_known_pages - prompt.first * self._pages_per_block
        if len(content) * self._pages_per_block > skipped:
            end_page = (prompt.first + len(content)) * self._pages_per_block
            self._memory.put_blocks(content, page_ids[num_known_pages:end_page], skip_pages=skipped)
            num_tokens = end_page * PAGE_TOKENS
            prompt.older = [not self._store.is_own(span) for span in read.spans for _ in range(span.start, span.stop)]
        read.close()
        self._judge(content.nbytes, num_tokens - num_known_pages * PAGE_TOKENS, time.monotonic() - started_s)
        return num_tokens

    def fill_sequence(self, sequence: Sequence, num_known_pages: int) -> int:
        """Call `fill` for a sequence that has just received its pages."""
        return self.fill(sequence.request, num_known_pages, sequence.pages)

    def prepare(self, sequence: Sequence, end: int) -> None:
        """Prepare for the next step, in which a sequence runs up to token `end`; overridden for states."""

    def older_tokens(self, request: Request, start: int, end: int) -> int:
        """Return the number of tokens from `start` to `end` of a filled prompt that the store had before this run.

        The other tokens were computed by a killed session of this run, or by other ranks or nodes of it.
        """
        return self._prompts[request.key].older_tokens(start, end, self._block_tokens)

    def note_step(self, chunks: list[Chunk], compute_s: float) -> None:
        """Queue the complete blocks of a prefill step for writing, and add to the time per token."""
        self._computed_tokens += sum(chunk.num_tokens for chunk in chunks)
        self._compute_s += compute_s
        for chunk in chunks:
            request = chunk.sequence.request
            prompt = self._prompts.pop(request.key) if chunk.completes_prompt else self._prompts[request.key]
            if self._persist != "none" and self._store.is_writable:
                worthwhile = min(chunk.end, self._tokens_to_keep(request))
                self._write(chunk, prompt.names[: worthwhile // self._block_tokens])

    def take_problems(self) -> list[str]:
        """Return new sentences for the user, each once."""
        return list(iter(self._store.take_problem, None))

    def counts(self) -> dict[str, float]:
        """Return the store's counters of this rank (kv_store/session.py)."""
        return self._store.counters.as_dict()

    def close(self) -> None:
        """Write the waiting blocks, for CLOSE_S at most, and close the store."""
        for prompt in self._prompts.values():
            if prompt.read is not None:
                prompt.read.close()
        self._reader.close()
        self._writer.close(CLOSE_S)
        self._store.close()

    def _tokens_to_keep(self, request: Request) -> int:
        return len(request.token_ids) if self._persist == "all" else request.kept_tokens

    def _report_uses(self, uses: Mapping[bytes, int | None]) -> None:
        self._store.set_next_uses(uses)

    @property
    def _pages_per_block(self) -> int:
        return self._block_tokens // PAGE_TOKENS

    def _ask(self, names: list[bytes], first: int) -> BlockRead | None:
        if first >= len(names) or self._has_ended_reading or not self._store.find(names[first : first + 1]):
            return None
        return self._reader.ask(names[first:])

    def _judge(self, num_bytes: int, num_tokens: int, read_s: float) -> None:
        """Compare a read's time with computing the same tokens; end reading if it turns out slower."""
        if not self._computed_tokens:
            return
        self._rule.note(
            num_bytes=num_bytes,
            read_s=read_s,
            num_tokens=max(0, num_tokens),
            compute_s_per_token=self._compute_s / self._computed_tokens,
        )
        if not self._rule.is_worthwhile and not self._has_ended_reading:
            self._has_ended_reading = True
            self._store.session.problems.append(
                f"reading KV from {self._store.store.root} is slower than computing it: nothing more is read; "
                'kv.reuse = "always" reads on'
            )

    def _write(self, chunk: Chunk, names: list[bytes]) -> None:
        """Queue the blocks that this step has completed for writing, unless they are in the store."""
        first = chunk.start // self._block_tokens
        while first < len(names) and self._store.find(names[first : first + 1]):
            first += 1
        if first < len(names):
            page_ids = chunk.sequence.pages[first * self._pages_per_block : len(names) * self._pages_per_block]
            blocks = self._memory.take_blocks(page_ids, len(names) - first)
            num_finite = finite_blocks(blocks, self._memory.dtype)
            if num_finite:
                self._writer.put(names[: first + num_finite], first, blocks[:num_finite])


def finite_blocks(blocks: np.ndarray, dtype: torch.dtype) -> int:
    """Count the leading blocks that hold only finite numbers; rows in FP8 (uint8) are not checked.

    Args:
        blocks: [num_blocks, block_bytes] uint8, as `KvMemory.take_blocks` returns them.
        dtype: of the pages.
    """
    if not dtype.is_floating_point:
        return len(blocks)
    # a sum that is finite has finite terms, and needs one pass
    wide = torch.float64 if dtype is torch.float32 else torch.float32
    is_finite = torch.from_numpy(blocks).view(dtype).sum(dim=1, dtype=wide).isfinite()
    return int(is_finite.to(torch.int8).cumprod(0).sum())


class _LaterUses:
    """Reports the blocks that later units need to the store, which evicts other blocks first.

    Args:
        report: gets the unit that needs a block next, by the block's name; None: no unit needs it.
    """

    def __init__(self, block_tokens: int, report: Callable[[Mapping[bytes, int | None]], None]) -> None:
        self._block_tokens, self._report = block_tokens, report
        self._unit = -1
        self._last_unit: dict[bytes, int] = {}  # of blocks that later units need

    def note(self, request: Request, names: list[bytes]) -> None:
        """Take in a request that begins; `names` are the blocks of its prompt."""
        if request.unit > self._unit:
            self._unit = request.unit
            over = [name for name, unit in self._last_unit.items() if unit <= self._unit]
            for name in over:
                del self._last_unit[name]
            self._report(dict.fromkeys(over) | dict.fromkeys(self._last_unit, self._unit + 1))
        first = request.cached_tokens // self._block_tokens
        needed = dict(zip(names[first:], request.last_units, strict=False))
        if needed:
            self._last_unit |= needed
            self._report(dict.fromkeys(needed, self._unit + 1))


def allocator(device: torch.device) -> Allocate:
    """Return how host memory is allocated for bytes to this device."""
    return _pinned if device.type == "cuda" else pageable


def _pinned(shape: tuple[int, int]) -> np.ndarray:
    return torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
