"""Requests that wait for prefill, in the plan's order: which tokens run in the next step, and what is cut."""

import time
from collections import deque

from batchinfer.config import PAGE_TOKENS
from batchinfer.protocol.messages import CachedTokens
from batchinfer.rank.batch import Chunk
from batchinfer.rank.prompt_pages import PromptPages
from batchinfer.rank.sequence import Sequence
from batchinfer.rank.stored_prefixes import StoredPrefixes
from batchinfer.records import Request, RequestTimes


class PrefillQueue:
    """Waiting requests, and the one prompt that may be cut in the middle."""

    def __init__(self, pages: PromptPages, stored: StoredPrefixes | None, max_step_tokens: int) -> None:
        self.waiting: deque[Request] = deque()  # `add` and `next_step` change it
        self.waiting_tokens = 0  # prompt tokens of these that are to be computed, by the plan
        self._pages = pages
        self._stored = stored
        self._max_step_tokens = max_step_tokens
        self._cut: Sequence | None = None  # its prompt goes on in the next step

    @property
    def has_cut_prompt(self) -> bool:
        return self._cut is not None

    @property
    def num_kept_slots(self) -> int:
        """Decode slots that the cut prompt will take: the request was admitted, but does not run yet."""
        return int(self._cut is not None and self._cut.request.goes_on_after_prefill)

    def add(self, requests: list[Request]) -> None:
        """Requests behind those that wait already."""
        self.waiting.extend(requests)
        self.waiting_tokens += sum(map(_new_tokens, requests))

    def can_admit(self) -> bool:
        """Whether the first waiting request's pages can be had now."""
        return bool(self.waiting) and self._pages.match(self.waiting[0]) is not None

    def next_step(self, num_slots: int) -> tuple[list[Chunk], dict[int, int]]:
        """Pack the next prefill step: at most `max_step_tokens` tokens, at most `num_slots` new sequences that go on.

        Requests are admitted strictly in order; the first that does not fit waits and so do those behind it. A prompt
        may share pages that are written in this very step: every layer writes all latents before attention reads any.

        Returns:
            The chunks, and the KV slots to copy (to -> from) where prompts branch inside a page.
        """
        chunks: list[Chunk] = []
        copies: dict[int, int] = {}
        budget = self._max_step_tokens
        if self._cut is not None:
            chunks.append(self._next_chunk(self._cut, budget))
            budget -= chunks[0].num_tokens
        while budget > 0 and num_slots > 0 and self.waiting and self._cut is None:
            sequence = self._admit(self.waiting[0], copies)
            if sequence is None:
                break
            self.waiting_tokens -= _new_tokens(self.waiting.popleft())
            num_slots -= sequence.request.goes_on_after_prefill
            chunks.append(self._next_chunk(sequence, budget))
            budget -= chunks[-1].num_tokens
        return chunks, copies

    def _admit(self, request: Request, copies: dict[int, int]) -> Sequence | None:
        match = self._pages.match(request)
        if match is None:
            return None
        sequence = self._pages.open(request, match, RequestTimes(admitted_s=time.time()))
        num_stored = 0
        if self._stored is not None:
            num_stored = self._stored.fill(request, len(match.full), sequence.pages)
        sequence.cached = self._cached(request, match.num_tokens, num_stored)
        if num_stored > match.num_tokens:
            sequence.num_computed = num_stored
        elif match.branch is not None:
            self._pages.copy_branch(match, sequence, copies)
        return sequence

    def _cached(self, request: Request, num_known: int, num_stored: int) -> CachedTokens:
        """How the first `num_known` tokens, in memory, and the first `num_stored`, on disk, are counted.

        The plan's order shares `shared_tokens` with earlier prompts. What the own rank has not of these is computed
        again or read; what the disk has beyond them has not been computed in this run, or by a session that was killed:
        then it was needed once, and is no hit. What is computed again is replicated where only another rank has had it,
        and recomputed where this one has had it:

          prompt   [ found           )[ replicated )[ recomputed )[ of results )[ new    )
                   0              known             ^ any order   shared        counted  end

        What results of killed ranks and sessions count beyond that is no more needed: where it runs again it is wasted.
        """
        shared, counted = request.shared_tokens, max(request.shared_tokens, request.counted_tokens)
        # below 0: memory has more than was expected
        missing = max(shared, min(num_known, counted)) - max(num_known, min(num_stored, shared))
        replicated = min(request.replicated_tokens, missing)
        stored = self._stored
        return CachedTokens(
            # without a store a row says what the plan says, so that it is the same after any restart
            memory=request.cached_tokens if stored is None else counted,
            disk=0 if stored is None else stored.older_tokens(request, max(num_known, counted), num_stored),
            replicated=replicated,
            recomputed=missing - replicated,
            computed=len(request.token_ids) - max(num_known, num_stored),
        )

    def _next_chunk(self, sequence: Sequence, budget: int) -> Chunk:
        start = sequence.num_computed
        end = min(sequence.num_prompt_tokens, start + budget)
        sequence.num_computed = end
        sequence.num_prefill_steps += 1
        is_complete = end == sequence.num_prompt_tokens
        self._cut = None if is_complete else sequence
        # of a cut prompt only whole pages are made known: the last one is still being filled
        self._pages.make_known(sequence, end if is_complete else end // PAGE_TOKENS * PAGE_TOKENS)
        return Chunk(sequence, start, end)


def _new_tokens(request: Request) -> int:
    return len(request.token_ids) - request.cached_tokens
