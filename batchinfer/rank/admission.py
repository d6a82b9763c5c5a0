"""Admission of requests: a rank's vote before each step, and its demand for further requests."""

from batchinfer.config import FREE_SHARE
from batchinfer.model.fused.graph_size import DecodeBatch
from batchinfer.rank.context import RankContext
from batchinfer.rank.decode_table import DecodeTable
from batchinfer.rank.migration import KvMigration
from batchinfer.rank.prefill_queue import PrefillQueue
from batchinfer.rank.prompt_pages import PromptPages
from batchinfer.rank.sequence import pages_needed
from batchinfer.rank.step_vote import StepVote
from batchinfer.records import ConfigError


class Admission:
    """Decides by the waiting and running requests of a rank; changes nothing."""

    def __init__(
        self,
        context: RankContext,
        queue: PrefillQueue,
        running: DecodeTable,
        migration: KvMigration,
        prompt_pages: PromptPages,
    ) -> None:
        self._context, self._queue, self._running = context, queue, running
        self._migration, self._prompt_pages = migration, prompt_pages

    @property
    def num_free_slots(self) -> int:
        """Number of sequences that decode has room for."""
        return self._context.running_requests - len(self._running.sequences) - self._queue.num_kept_slots

    @property
    def num_to_admit(self) -> int | None:
        """Number of prompts that may begin now; None if decode ranks have enough to read, so that no prompt may run."""
        if self._context.place.runs_decode:
            return 0 if self._migration.waiting else self.num_free_slots  # requests from other ranks go first
        if not self._migration.has_room:
            return None
        return min(self._context.decode_requests, self._migration.num_fitting(self._queue.waiting))

    @property
    def needs_work(self) -> bool:
        """Whether less than two prefill steps, or sweeps, are waiting: one runs while further requests arrive."""
        context, queue = self._context, self._queue
        return (
            context.place.runs_prefill
            and queue.waiting_tokens < 2 * context.prefill_tokens * context.num_sweep_steps
            and len(queue.waiting) < context.running_requests
        )

    def vote(self, *, leave: bool, place: bool, calibrate: bool = False, deal: int = 0) -> StepVote:
        """Return this rank's vote for the next step."""
        num_running = len(self._running.sequences)
        prefill = self._should_prefill()
        both_halves = self._queue.fills_both_halves if prefill else num_running > 1
        return StepVote(
            leave=leave,
            prefill=prefill,
            decode=num_running > 0,
            fills_both_halves=both_halves,
            place=place,
            calibrate=calibrate,
            deal=deal,
            batch=self._batch(),
        )

    def refuse_request_that_never_fits(self) -> None:
        """Raise if the first waiting request does not fit although no request runs, so that all pages are free.

        Raises:
            ConfigError: the first waiting request needs more pages than the budget holds.
        """
        if self._prompt_pages.num_running:
            return
        waiting = [adoption.request for adoption in self._migration.waiting] or list(self._queue.waiting)[:1]
        if waiting and not self._prompt_pages.can_fit(waiting[0]):
            key = waiting[0].key
            raise ConfigError(
                f"row {key.row} of shard {key.shard} needs {pages_needed(waiting[0])} KV pages, but the budget holds "
                f"{self._context.num_pages}; raise cluster.page_bytes or lower max_tokens"
            )

    def _batch(self) -> DecodeBatch:
        """Return the size of a decode step of this rank, for the choice of a graph."""
        context, running = self._context, self._running
        return DecodeBatch() if context.graphs is None else context.graphs.batch(context.model, running.kv_lengths)

    def _should_prefill(self) -> bool:
        num_free = self.num_to_admit
        if num_free is None:
            return False
        is_idle = not self._running.sequences
        enough_free = num_free * FREE_SHARE >= self._context.decode_requests or is_idle
        return enough_free and self._queue.can_run(num_free, must_go_on=is_idle)
