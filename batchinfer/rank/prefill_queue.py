"""The queue of prompts that wait for prefill or are partly computed, packed into steps."""

from collections import deque

from batchinfer.clock import unix_s
from batchinfer.config import PAGE_TOKENS
from batchinfer.protocol.messages import CachedTokens, PromptPiece
from batchinfer.rank.batch import Chunk
from batchinfer.rank.prompt_pages import PromptPages
from batchinfer.rank.sequence import Sequence
from batchinfer.rank.stored_prefixes import StoredPrefixes
from batchinfer.records import Request, RequestKey, RequestTimes


class PrefillQueue:
    """Waiting requests, partly computed prompts, and the pieces of both in the order in which they run."""

    def __init__(self, pages: PromptPages, stored: StoredPrefixes | None, max_step_tokens: int) -> None:
        self.waiting: deque[Request] = deque()  # not begun; `add` and `next_step` change it
        self.waiting_tokens = 0  # prompt tokens of waiting pieces, as planned
        self._pieces: deque[PromptPiece] = deque()
        self._open: dict[RequestKey, Sequence] = {}  # partly computed
        self._pages = pages
        self._stored = stored
        self._max_step_tokens = max_step_tokens

    @property
    def num_kept_slots(self) -> int:
        """Decode slots that partly computed prompts will take: their requests were admitted, but do not run yet."""
        return sum(sequence.request.goes_on_after_prefill for sequence in self._open.values())

    @property
    def fills_both_halves(self) -> bool:
        """Whether the next step has at least two tokens: one prompt may be cut between the halves of a step."""
        return len(self._pieces) > 1 or any(piece.num_tokens > 1 for piece in self._pieces)

    def add(self, requests: list[Request], pieces: list[PromptPiece]) -> None:
        """Append requests and pieces of prompts."""
        self.waiting.extend(requests)
        self._pieces.extend(pieces)
        self.waiting_tokens += sum(piece.num_tokens for piece in pieces)

    def can_run(self, num_slots: int, *, must_go_on: bool) -> bool:
        """Return whether the next piece can run now.

        Args:
            num_slots: number of prompts that may begin.
            must_go_on: nothing else runs that could make room; partly computed prompts then overtake a waiting one.
        """
        self._drop_done()
        if not self._pieces or self._pieces[0].key in self._open or (must_go_on and self._open):
            return bool(self._pieces)
        return num_slots > 0 and self._pages.match(self.waiting[0]) is not None

    def next_step(self, num_slots: int) -> tuple[list[Chunk], dict[int, int]]:
        """Pack the next prefill step: at most `max_step_tokens` tokens, at most `num_slots` new sequences that go on.

        A step has the pieces that were planned for it, and the pieces of the next planned step if they fit, too.
        Prompts begin strictly in order. If the first prompt finds no room, and no piece can run, partly computed
        prompts run to their ends, which makes room. A prompt may share pages that this very step writes: every layer
        writes all latents before attention reads any.

        Returns:
            The chunks, and the KV slots to copy (to -> from) where prompts branch inside a page.
        """
        chunks: dict[RequestKey, Chunk] = {}
        copies: dict[int, int] = {}
        planned = taken = 0
        while self._pieces and taken < self._max_step_tokens:
            self._drop_done()
            if not self._pieces:
                break
            piece = self._pieces[0]
            if piece.key not in self._open:
                sequence = self._admit(self.waiting[0], copies) if num_slots > 0 else None
                if sequence is None:
                    self._go_on(chunks)
                    break
                num_slots -= self.waiting.popleft().goes_on_after_prefill
                self._open[piece.key] = sequence
            is_whole, num_tokens = self._run(piece.key, piece.end, chunks, self._max_step_tokens - taken)
            taken += num_tokens
            if not is_whole:
                break
            self._drop_first()
            planned += piece.num_tokens
            if piece.ends_step and not self._fits(self._max_step_tokens - taken, taken / max(1, planned)):
                break
        return list(chunks.values()), copies

    def end_open(self) -> list[Chunk]:
        """Pack a step of partly computed prompts alone, up to their ends if they fit; empty if there are none."""
        chunks: dict[RequestKey, Chunk] = {}
        # the first piece may have run in part; others of prompts that end here begin none, see `_drop_done`
        was_open = bool(self._pieces) and self._pieces[0].key in self._open
        self._go_on(chunks)
        if was_open and self._pieces[0].key not in self._open:
            self._drop_first()
        return list(chunks.values())

    def _run(self, key: RequestKey, end: int, chunks: dict[RequestKey, Chunk], budget: int) -> tuple[bool, int]:
        """Add a prompt up to token `end` to the step's chunks, as far as the budget of tokens allows.

        Returns:
            Whether all of it was added, and the number of tokens.
        """
        sequence = self._open[key]
        before = chunks.get(key)
        if before is not None and self._pages.runs_in_order and next(reversed(chunks)) != key:
            return False, 0  # its tokens would run before chunks that began earlier: the next step has them
        start = sequence.num_computed if before is None else before.start
        wanted, end = end, min(end, sequence.num_computed + budget)
        num_tokens = max(0, end - sequence.num_computed)
        if num_tokens:
            if self._stored is not None:
                self._stored.prepare(sequence, end)
            sequence.num_prefill_steps += before is None
            sequence.num_computed = end
            chunks[key] = Chunk(sequence, start, end)
            is_complete = end == sequence.num_prompt_tokens
            if is_complete:
                del self._open[key]
            # of a cut prompt only whole pages are made known: the last one is still being filled
            self._pages.make_known(sequence, end if is_complete else end // PAGE_TOKENS * PAGE_TOKENS)
        return sequence.num_computed >= wanted, num_tokens

    def _go_on(self, chunks: dict[RequestKey, Chunk]) -> None:
        """Run partly computed prompts to their ends if the step has no chunk; their later pieces are then done."""
        budget = 0 if chunks else self._max_step_tokens
        for key, sequence in list(self._open.items()):
            budget -= self._run(key, sequence.num_prompt_tokens, chunks, budget)[1]

    def _fits(self, budget: int, computed_share: float) -> bool:
        """Return whether the next planned step fits, if the same share of it has to be computed as of this one."""
        num_tokens = 0
        for piece in self._pieces:
            num_tokens += piece.num_tokens
            if piece.ends_step:
                return num_tokens * computed_share <= budget
        return False

    def _drop_done(self) -> None:
        """Drop the first pieces as long as their prompts are complete already."""
        while self._pieces and not self._pieces[0].begins and self._pieces[0].key not in self._open:
            self._drop_first()

    def _drop_first(self) -> None:
        self.waiting_tokens -= self._pieces.popleft().num_tokens

    def _admit(self, request: Request, copies: dict[int, int]) -> Sequence | None:
        match = self._pages.match(request)
        if match is None:
            return None
        sequence = self._pages.open(request, match, RequestTimes(admitted_s=unix_s()))
        num_stored = 0
        if self._stored is not None:
            num_stored = self._stored.fill_sequence(sequence, match.num_shared_pages)
        sequence.cached = _cached(request, match.num_tokens, num_stored, self._stored)
        if num_stored > match.num_tokens:
            sequence.num_computed = num_stored
        elif match.branch is not None:
            self._pages.copy_branch(match, sequence, copies)
        return sequence


def _cached(request: Request, num_known: int, num_stored: int, stored: StoredPrefixes | None) -> CachedTokens:
    """Return the counts of a prompt whose first `num_known` tokens are in memory and first `num_stored` on disk.

    The plan's order shares `shared_tokens` with earlier prompts. The tokens of these that this rank lacks are computed
    again or read. Tokens on disk beyond `shared_tokens` were not computed in this run, or by a killed session of it;
    then they were needed once, and are no hit. Tokens computed again are replicated if only another rank has had
    them, and recomputed if this rank has had them:

      prompt   [ found           )[ replicated )[ recomputed )[ of results )[ new    )
               0              known             ^ any order   shared        counted  end

    Tokens that results of killed ranks and sessions count beyond that are wasted if they run again.
    """
    shared, counted = request.shared_tokens, max(request.shared_tokens, request.counted_tokens)
    # below 0: memory has more than the plan expected
    missing = max(shared, min(num_known, counted)) - max(num_known, min(num_stored, shared))
    replicated = min(request.replicated_tokens, missing)
    return CachedTokens(
        # without a store a row has the plan's counts, so that it is the same after any restart
        memory=request.cached_tokens if stored is None else counted,
        disk=0 if stored is None else stored.older_tokens(request, max(num_known, counted), num_stored),
        replicated=replicated,
        recomputed=missing - replicated,
        computed=len(request.token_ids) - max(num_known, num_stored),
    )
