"""Requests that go on at another rank, both ends of it. Called by the worker; their KV travels in kv/parcel.py.

A prefill rank packs the KV of each prompt that has run and goes on; it stops admitting prompts while the parcels that
nobody has read yet hold more than its share of the decode ranks' page budget. A decode rank gives away running requests
when it is asked to, and takes others in order, as pages come free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path

import torch

from batchinfer.kv.pages import pages_for
from batchinfer.kv.transfer import Parcel, pack_parcel, unpack_parcel
from batchinfer.parallel.spans import SpanLog
from batchinfer.protocol.messages import Adoption, Handover
from batchinfer.rank.prefill import PrefillQueue
from batchinfer.rank.sequence import Sequence
from batchinfer.records import Request, RequestKey


class Outbox:
    """The parcels of a rank that nobody has read yet.

    Args:
        max_bytes: a prefill rank admits no prompt while they hold more than this.
        folder: for parcels between hosts; None: anonymous memory.
    """

    def __init__(self, max_bytes: int, folder: Path | None) -> None:
        self._max_bytes = max_bytes
        self._folder = folder
        self._parcels: dict[RequestKey, Parcel] = {}
        self._num_bytes = 0

    @property
    def has_room(self) -> bool:
        return self._num_bytes <= self._max_bytes

    def num_fitting(self, requests: Iterable[Request], page_bytes: int) -> int:
        """How many of these requests, in order, may be prefilled now so that their parcels fit beside the others.

        At least one when nothing is under way: a share may be smaller than the largest prompt.
        """
        num_bytes, count = self._num_bytes, 0
        for request in requests:
            num_bytes += pages_for(len(request.token_ids)) * page_bytes
            if num_bytes > self._max_bytes:
                break
            count += 1
        return count or int(not self._parcels)

    def pack(self, sequence: Sequence, pages: torch.Tensor) -> Handover:
        """Copy the KV that is there so far out of the pages, which can be released then."""
        # the newest token has not run yet
        key, num_pages = sequence.request.key, pages_for(sequence.kv_tokens - 1)
        file = None if self._folder is None else self._folder / f"{key.shard}-{key.row}-{key.sample}.kv"
        parcel = pack_parcel(pages, sequence.pages[:num_pages], file=file)
        self._parcels[key] = parcel
        self._num_bytes += parcel.num_bytes
        return Handover(
            key=key,
            tokens=sequence.token_ids,
            logprobs=sequence.logprobs,
            times=sequence.times,
            cached=sequence.cached,
            parcel=parcel.path,
            num_bytes=parcel.num_bytes,
        )

    def free(self, key: RequestKey) -> None:
        """The parcel of this request has been read."""
        parcel = self._parcels.pop(key)
        self._num_bytes -= parcel.num_bytes
        parcel.close()


class AdoptionQueue:
    """Requests that wait for pages on a decode rank, in the order in which they came."""

    def __init__(self, queue: PrefillQueue, eos_token_ids: frozenset[int]) -> None:
        self.waiting: deque[Adoption] = deque()
        self._queue = queue
        self._eos_token_ids = eos_token_ids

    def take_in(self, pages: torch.Tensor, num_slots: int, log: SpanLog) -> list[Sequence]:
        """Read the KV of at most `num_slots` requests, as many as find pages."""
        taken: list[Sequence] = []
        while self.waiting and len(taken) < num_slots:
            handover = self.waiting[0].handover
            adopted = self._queue.adopt(self.waiting[0].request, handover.times)
            if adopted is None:
                break
            self.waiting.popleft()
            sequence, num_known = adopted
            sequence.cached = handover.cached
            page_ids = sequence.pages[: pages_for(sequence.num_prompt_tokens + len(handover.tokens) - 1)]
            with log.kv("KV in"):
                unpack_parcel(handover.parcel, pages, page_ids, first_page=num_known)
            for place, token in enumerate(handover.tokens):
                logprob = handover.logprobs[place] if handover.logprobs else None
                sequence.accept(token, logprob, self._eos_token_ids)
            taken.append(sequence)
        return taken
