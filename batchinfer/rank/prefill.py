"""Prefill: admits requests whose pages fit, shares what is in memory, cuts long prompts. Called by the worker."""

from __future__ import annotations

import time
from collections import deque

from batchinfer.config import PAGE_TOKENS
from batchinfer.data.tokenizer import PromptTokenizer
from batchinfer.kv.pages import PagePool, pages_for
from batchinfer.kv.prefix_tree import Match, PrefixTree
from batchinfer.protocol.messages import CachedTokens
from batchinfer.rank.batch import Chunk
from batchinfer.rank.sequence import Sequence, pages_needed
from batchinfer.rank.stored_prefixes import StoredPrefixes
from batchinfer.records import Request, RequestTimes

NO_MATCH = Match((), None, 0)


class PrefillQueue:
    """Requests in the plan's order, and the one prompt that may be cut in the middle."""

    def __init__(
        self,
        pool: PagePool,
        tokenizer: PromptTokenizer,
        *,
        max_step_tokens: int,
        prompt_only: bool = False,
        share_prefixes: bool = True,
        stored: StoredPrefixes | None = None,
    ) -> None:
        self.waiting: deque[Request] = deque()  # `add` and `next_step` change it
        self.waiting_tokens = 0  # prompt tokens of these that are to be computed, by the plan
        self._prompt_only = prompt_only  # another rank decodes
        self._pool = pool
        self._tree = PrefixTree(pool)
        self._tokenizer = tokenizer
        self._max_step_tokens = max_step_tokens
        self._share_prefixes = share_prefixes
        self._stored = stored
        self._cut: Sequence | None = None  # its prompt goes on in the next step
        self._copied_pages: list[int] = []  # held until the step that copies from them is over
        self.num_running = 0  # admitted or adopted, and not released yet

    @property
    def has_cut_prompt(self) -> bool:
        return self._cut is not None

    def add(self, requests: list[Request]) -> None:
        """Requests behind those that wait already."""
        self.waiting.extend(requests)
        self.waiting_tokens += sum(map(_new_tokens, requests))

    def can_admit(self) -> bool:
        """Whether the first waiting request's pages can be had now."""
        if not self.waiting:
            return False
        return self._match_with_room(self.waiting[0]) is not None

    def can_fit(self, request: Request) -> bool:
        """Whether the pool is large enough for a request when nothing else runs."""
        return self._num_pages(request) <= self._pool.num_pages

    def next_step(self, num_slots: int) -> tuple[list[Chunk], dict[int, int]]:
        """Pack the next prefill step: at most `max_step_tokens` tokens, at most `num_slots` new sequences.

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
            budget -= chunks[0].end - chunks[0].start
        while budget > 0 and num_slots > 0 and self.waiting and self._cut is None:
            sequence = self._admit(self.waiting[0], copies)
            if sequence is None:
                break
            self.waiting_tokens -= _new_tokens(self.waiting.popleft())
            num_slots -= 1
            chunk = self._next_chunk(sequence, budget)
            budget -= chunk.end - chunk.start
            chunks.append(chunk)
        return chunks, copies

    def end_step(self) -> None:
        """The step has run: pages that were copied from need not be held any longer."""
        self._tree.release(self._copied_pages)
        self._copied_pages.clear()

    def release(self, sequence: Sequence) -> None:
        """Give a finished sequence's pages back; prompt pages known to the tree stay until room is needed."""
        self._tree.release(sequence.pages)
        self.num_running -= 1

    def adopt(self, request: Request, times: RequestTimes) -> tuple[Sequence, int] | None:
        """Pages for a request whose prompt another rank has run; None when it has to wait.

        Returns:
            The sequence, and how many of its first pages hold their content already; the caller fills the others.
        """
        match = self._tree.match(request.token_ids) if self._share_prefixes else NO_MATCH
        match = Match(match.full, None, 0)
        if not self._make_room(request, match):
            return None
        sequence = self._new_sequence(request, match, times)
        sequence.num_computed = sequence.num_prompt_tokens
        if self._share_prefixes:
            num_pages = pages_for(sequence.num_prompt_tokens)
            self._tree.insert(request.token_ids, sequence.pages[:num_pages])
        return sequence, len(match.full)

    def _admit(self, request: Request, copies: dict[int, int]) -> Sequence | None:
        match = self._match_with_room(request)
        if match is None:
            return None
        sequence = self._new_sequence(request, match, RequestTimes(admitted_s=time.time()))
        num_stored = 0
        if self._stored is not None:
            num_stored = self._stored.fill(request, len(match.full), sequence.pages)
        sequence.cached = self._cached(request, match.num_tokens, num_stored)
        if num_stored > match.num_tokens:
            sequence.num_computed = num_stored
        elif match.branch is not None:
            self._copy_branch(match, sequence.pages[len(match.full)], copies)
        return sequence

    def _cached(self, request: Request, num_known: int, num_stored: int) -> CachedTokens:
        """How the tokens count that are in memory, and those that the disk has up to a place.

        The plan's order shares `shared_tokens` with earlier prompts. What the own rank has not of these is computed
        again or read; what the disk has beyond them has never been computed in this run.
        """
        shared = request.shared_tokens
        found = max(num_known, min(num_stored, shared))
        return CachedTokens(
            # without a store a row says what the plan says, so that it is the same after any restart
            memory=request.cached_tokens if self._stored is None else shared,
            disk=max(0, num_stored - max(num_known, shared)),
            # what is missing beyond what other ranks have is not on purpose: it counts as wasted
            replicated=min(request.replicated_tokens, shared - found),
        )

    def _new_sequence(self, request: Request, match: Match, times: RequestTimes) -> Sequence:
        held = self._tree.hold(match)
        self.num_running += 1
        return Sequence(
            request=request,
            pages=held + self._pool.reserve(self._num_pages(request) - len(held)),
            num_computed=match.num_tokens,
            times=times,
            stream=self._tokenizer.stream() if request.sampling.stop else None,
        )

    def _num_pages(self, request: Request) -> int:
        return pages_needed(request, prompt_only=self._prompt_only)

    def _match_with_room(self, request: Request) -> Match | None:
        """What the request shares, with the rest of its pages made free; None when it has to wait."""
        match = self._tree.match(request.token_ids) if self._share_prefixes else NO_MATCH
        if self._make_room(request, match):
            return match
        # with nothing running no page will come free: do without the page that would be copied from
        without_branch = Match(match.full, None, 0)
        if self.num_running == 0 and match.branch is not None and self._make_room(request, without_branch):
            return without_branch
        return None

    def _make_room(self, request: Request, match: Match) -> bool:
        keep = match.full if match.branch is None else (*match.full, match.branch)
        return self._tree.make_room(self._num_pages(request) - len(match.full), keep=keep)

    def _copy_branch(self, match: Match, target: int, copies: dict[int, int]) -> None:
        assert match.branch is not None
        source = match.branch.page
        self._tree.hold(Match((match.branch,), None, 0))
        self._copied_pages.append(source)
        for offset in range(match.num_branch_tokens):
            slot = source * PAGE_TOKENS + offset
            # the source may itself be filled by a copy in this step: then take it from where that one does
            copies[target * PAGE_TOKENS + offset] = copies.get(slot, slot)

    def _next_chunk(self, sequence: Sequence, budget: int) -> Chunk:
        start = sequence.num_computed
        end = min(sequence.num_prompt_tokens, start + budget)
        sequence.num_computed = end
        sequence.num_prefill_steps += 1
        is_complete = end == sequence.num_prompt_tokens
        self._cut = None if is_complete else sequence
        # of a cut prompt only whole pages are made known: the last one is still being filled
        known = end if is_complete else end // PAGE_TOKENS * PAGE_TOKENS
        if self._share_prefixes:
            self._tree.insert(sequence.request.token_ids[:known], sequence.pages[: pages_for(known)])
        return Chunk(sequence, start, end)


def _new_tokens(request: Request) -> int:
    return len(request.token_ids) - request.cached_tokens
