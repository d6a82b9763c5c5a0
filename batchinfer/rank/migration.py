"""Moves of requests between ranks, both ends; kv/transfer.py carries their KV.

A prefill rank sends each complete prompt that goes on to a decode rank. It stops admitting prompts while its unread
transfers exceed its share of the decode ranks' page budget, or the number of descriptors. A decode rank sends running
requests away when it is asked to, and takes others in order, as pages become free.
"""

import math
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

from batchinfer.kv.pages import pages_for
from batchinfer.kv.transfer import KvTransfer, most_in_memory, read_transfer, write_transfer
from batchinfer.parallel.spans import SpanLog
from batchinfer.protocol.messages import Adoption, Handover
from batchinfer.rank.bucket_transfer import BucketTransfers
from batchinfer.rank.context import RankContext
from batchinfer.rank.prompt_pages import PromptPages
from batchinfer.rank.sequence import Sequence
from batchinfer.records import Request, RequestKey


class KvMigration:
    """Outgoing KV transfers that are not read yet, and incoming requests that wait for pages (FIFO)."""

    def __init__(self, context: RankContext, prompt_pages: PromptPages) -> None:
        self.waiting: deque[Adoption] = deque()
        self._context = context
        self._prompt_pages = prompt_pages
        self._sent: dict[RequestKey, KvTransfer] = {}
        self._num_bytes = 0  # of the transfers in _sent
        self._most = most_in_memory() if context.transfers is None else math.inf

    @property
    def has_room(self) -> bool:
        """Whether the unread transfers are within their limits of bytes and number."""
        return self._num_bytes <= self._context.transfer_bytes and len(self._sent) < self._most

    def num_fitting(self, requests: Iterable[Request]) -> int:
        """Return the number of these requests, in order, whose KV fits next to the unread transfers.

        At least one if no transfer is unread: a share may be smaller than the largest prompt.
        """
        num_bytes, num_sent, count = self._num_bytes, len(self._sent), 0
        memory = self._context.memory
        for request in requests:
            if request.goes_on_after_prefill:
                num_bytes += pages_for(len(request.token_ids)) * memory.page_bytes + memory.state_bytes
                num_sent += 1
            if num_bytes > self._context.transfer_bytes or num_sent > self._most:
                break
            count += 1
        return count or int(not self._sent)

    def migrate_out(self, sequences: Iterable[Sequence], log: SpanLog) -> list[Handover]:
        """Copy the KV of these sequences out of their pages, and release the pages."""
        handovers = []
        for sequence in sequences:
            with log.kv("KV out"):
                handovers.append(self._send(sequence))
            self._prompt_pages.release(sequence)
        return handovers

    def free(self, keys: Iterable[RequestKey]) -> None:
        """Release the transfers of these requests, which have been read."""
        for key in keys:
            transfer = self._sent.pop(key)
            self._num_bytes -= transfer.num_bytes
            transfer.close()

    def migrate_in(self, num_slots: int, log: SpanLog) -> list[Sequence]:
        """Read the KV of at most `num_slots` waiting requests, as long as there are pages; return their sequences."""
        taken: list[Sequence] = []
        while self.waiting and len(taken) < num_slots:
            sequence = self._receive(self.waiting[0], log)
            if sequence is None:
                break
            self.waiting.popleft()
            taken.append(sequence)
        return taken

    def close(self) -> None:
        """Release the unread transfers at the end of the job."""
        self.free(list(self._sent))

    def _send(self, sequence: Sequence) -> Handover:
        # the newest token has not run yet
        key, num_pages = sequence.request.key, pages_for(sequence.kv_tokens - 1)
        place, name = self._context.transfers, f"{key.shard}-{key.row}-{key.sample}.kv"
        file = place / name if isinstance(place, Path) else None
        memory, pages, is_put = self._context.memory, sequence.pages[:num_pages], isinstance(place, BucketTransfers)
        transfer = write_transfer(memory, pages, sequence.state_slot, file=file, leaves_host=is_put)
        if isinstance(place, BucketTransfers):
            transfer = place.put(name, transfer)
        self._sent[key] = transfer
        self._num_bytes += transfer.num_bytes
        return Handover(
            key=key,
            tokens=sequence.token_ids,
            logprobs=sequence.logprobs,
            times=sequence.times,
            prompt_logprobs=sequence.prompt_logprobs,
            cached=sequence.cached,
            kv_path=transfer.path,
            num_bytes=transfer.num_bytes,
        )

    def _receive(self, adoption: Adoption, log: SpanLog) -> Sequence | None:
        """Read a request's KV into pages; return its sequence, None if it has to wait for pages."""
        request, handover = adoption.request, adoption.handover
        match = self._prompt_pages.match_adopted(request)
        if match is None:
            return None
        sequence = self._prompt_pages.adopt(request, match, handover.times)
        sequence.cached, sequence.prompt_logprobs = handover.cached, handover.prompt_logprobs
        page_ids = sequence.pages[: pages_for(sequence.num_prompt_tokens + len(handover.tokens) - 1)]
        place = self._context.transfers
        fetched = place.fetched if isinstance(place, BucketTransfers) else nullcontext
        with log.kv("KV in"), fetched(handover.kv_path) as path:
            read_transfer(path, self._context.memory, page_ids, sequence.state_slot, first_page=len(match.full))
        sequence.logprobs = handover.logprobs
        for token in handover.tokens:
            sequence.accept(token, self._context.eos_token_ids)
        return sequence
