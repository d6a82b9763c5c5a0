"""Prompt prefixes on disk for models whose requests have states: blocks of rows, and states after some of the blocks.

    tokens    | block 0 | block 1 | block 2 | block 3 | …      blocks by their chain, as for other models
    states              ^                   ^                  by the name of the block before them

A prompt goes on after the longest prefix whose blocks and whose state are all there and intact. States are written
where the plan knows that prompts branch, rounded down to whole blocks, and after the last whole block of each prompt if
everything is to be written. A step ends a span of its prompt there, and copies the state out.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import torch

from batchinfer.kv.memory import KvMemory, as_bytes
from batchinfer.kv_store.disk import DiskStore
from batchinfer.kv_store.reader import BlockRead, Reader
from batchinfer.kv_store.writer import Writer
from batchinfer.model.step import StateMoves, StateParts
from batchinfer.rank.batch import Chunk
from batchinfer.rank.sequence import Sequence
from batchinfer.rank.stored_prefixes import StoredPrefixes, StoredPrompt, allocator
from batchinfer.records import Request, RequestKey


class _StateRead(NamedTuple):
    """Blocks `first` to `end - 1` of a prompt and the state after them, on their way from disk."""

    first: int
    end: int
    rows: BlockRead
    state: BlockRead

    def close(self) -> None:
        self.rows.close()
        self.state.close()


class StoredStates(StoredPrefixes):
    """The KV store of one rank whose model's requests have states.

    Args:
        store: of the blocks.
        states: of the states after them, in the same folder.
    """

    def __init__(
        self,
        store: DiskStore,
        states: DiskStore,
        memory: KvMemory,
        *,
        persist: Literal["shared", "all", "none"],
        reuse: Literal["auto", "always"],
        wait_s: float,
    ) -> None:
        super().__init__(store, memory, persist=persist, reuse=reuse, wait_s=wait_s)
        self._states = states
        self._state_reader = Reader(states, num_threads=2, allocate=allocator(memory.device))
        self._state_writer = Writer(states, num_threads=1)
        self._reads: dict[RequestKey, _StateRead] = {}

    def read_ahead(self, requests: Iterable[Request]) -> None:
        """Begin to read the blocks and the state of the next prompts that memory is not expected to hold."""
        for request in requests:
            prompt = StoredPrompt(self._store.identity.chain(request.token_ids), 0, None)
            self._prompts[request.key] = prompt
            expected = max(0, request.shared_tokens - max(0, request.replicated_tokens))
            read = self._ask_longest(request, prompt.names, expected)
            if read is not None:
                self._reads[request.key] = read

    def fill_sequence(self, sequence: Sequence, num_known_pages: int) -> int:
        """Copy the blocks of an admitted prompt that are on disk into its pages, and let it begin with their state.

        Args:
            sequence: `num_computed` of its tokens are in memory, with the state after them.
            num_known_pages: number of first pages that it shares with others.

        Returns:
            The number of tokens, from the first on, whose KV is in the pages now; 0 if the disk adds nothing.
        """
        request, known = sequence.request, sequence.num_computed
        prompt = self._prompts[request.key]
        self._later_uses.note(request, prompt.names)
        read = self._reads.pop(request.key, None)
        if read is not None and not read.first * self._block_tokens <= known < read.end * self._block_tokens:
            # memory holds more, or less, than the plan expected
            read.close()
            read = None
        read = read or self._ask_longest(request, prompt.names, known)
        while read is not None:
            is_taken = self._take(read, sequence, prompt, num_known_pages)
            read.close()
            if is_taken:
                return read.end * self._block_tokens
            read = self._ask_longest(request, prompt.names, known, below=read.end)
        return 0

    def prepare(self, sequence: Sequence, end: int) -> None:
        """Mark the states to copy out in the next step, in which a sequence runs up to token `end`."""
        if self._persist == "none" or not self._states.is_writable:
            return
        names = self._prompts[sequence.request.key].names
        for block in self._blocks_before_states(sequence.request):
            place = block * self._block_tokens
            if sequence.num_computed < place <= end and not self._states.find([self._state_after(names, block)]):
                sequence.stored_states[place] = self._memory.empty_stored()

    def note_step(self, chunks: list[Chunk], compute_s: float) -> None:
        """Queue the complete blocks and the states of a prefill step for writing, and add to the time per token."""
        names = [self._prompts[chunk.sequence.request.key].names for chunk in chunks]
        super().note_step(chunks, compute_s)
        for chunk, of_prompt in zip(chunks, names, strict=True):
            for place, parts in chunk.sequence.stored_states.items():
                self._write_state(self._state_after(of_prompt, place // self._block_tokens), parts)
            chunk.sequence.stored_states.clear()

    def take_problems(self) -> list[str]:
        """Return new sentences for the user, each once."""
        return list(dict.fromkeys([*super().take_problems(), *iter(self._states.take_problem, None)]))

    def counts(self) -> dict[str, float]:
        """Return the counters of both stores together, with a state as a block."""
        of_states = self._states.counters.as_dict()
        return {name: count + of_states[name] for name, count in super().counts().items()}

    def close(self) -> None:
        """Write the waiting blocks and states, for CLOSE_S each at most, and close both stores."""
        for read in self._reads.values():
            read.close()
        super().close()
        self._state_reader.close()
        self._state_writer.close()
        self._states.close()

    def _ask_longest(
        self, request: Request, names: list[bytes], known: int, *, below: int | None = None
    ) -> _StateRead | None:
        """Begin to read the longest stored prefix of more than `known` tokens, and fewer than `below` blocks."""
        if self._has_ended_reading:
            return None
        num_rows = self._store.find(names[: request.most_cached_tokens // self._block_tokens])
        if below is not None:
            num_rows = min(num_rows, below - 1)
        first = known // self._block_tokens
        for end in range(num_rows, first, -1):
            state = self._state_after(names, end)
            if self._states.find([state]):
                return _StateRead(first, end, self._reader.ask(names[first:end]), self._state_reader.ask([state]))
        return None

    def _take(self, read: _StateRead, sequence: Sequence, prompt: StoredPrompt, num_known_pages: int) -> bool:
        """Wait for a read and use it; return False if a part of it is missing or damaged."""
        started_s = time.monotonic()
        rows, state = read.rows.wait(self._wait_s), read.state.wait(self._wait_s)
        is_whole = len(rows) == read.end - read.first and len(state) == 1
        num_tokens = read.end * self._block_tokens if is_whole else 0
        num_new = max(0, num_tokens - sequence.num_computed)
        if is_whole:
            skipped = num_known_pages - read.first * self._pages_per_block
            page_ids = sequence.pages[num_known_pages : read.end * self._pages_per_block]
            self._memory.put_blocks(rows, page_ids, skip_pages=skipped)
            parts = self._memory.stored_parts(torch.from_numpy(state[0]))
            sequence.moves = {num_tokens: StateMoves(begin_with=parts)}
            sequence.num_branched = num_tokens - 1  # later prompts may branch off right there
            spans = read.rows.spans
            prompt.first = read.first
            prompt.older = [not self._store.is_own(span) for span in spans for _ in range(span.start, span.stop)]
        self._judge(rows.nbytes + state.nbytes, num_new, time.monotonic() - started_s)
        return is_whole

    def _blocks_before_states(self, request: Request) -> list[int]:
        """Return the numbers of leading blocks of a prompt after which states are written, rising."""
        places = [request.kept_tokens, *request.branch_points]
        if self._persist == "all":
            places.append(request.most_cached_tokens)
        blocks = {min(place, request.most_cached_tokens) // self._block_tokens for place in places}
        return sorted(blocks - {0})

    def _tokens_to_keep(self, request: Request) -> int:
        return max(self._blocks_before_states(request), default=0) * self._block_tokens

    def _state_after(self, names: list[bytes], num_blocks: int) -> bytes:
        return self._states.identity.name_of_state(names[num_blocks - 1])

    def _write_state(self, name: bytes, parts: StateParts) -> None:
        """Queue a state for writing, unless a value of it is not finite."""
        if all(bool(part.isfinite().all()) for layer in parts for part in layer):
            self._state_writer.put([name], 0, as_bytes(parts).numpy().reshape(1, -1))

    def _report_uses(self, uses: Mapping[bytes, int | None]) -> None:
        """Set when blocks are needed next; the states after them are needed as long."""
        super()._report_uses(uses)
        self._states.set_next_uses({self._states.identity.name_of_state(name): use for name, use in uses.items()})
