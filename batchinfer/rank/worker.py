"""One rank's step loop: read messages, agree with the other ranks, act, report."""

import time
from collections.abc import Callable, Iterable

import torch

from batchinfer.clock import unix_s
from batchinfer.config import PAGE_TOKENS
from batchinfer.kv.memory import KvMemory
from batchinfer.kv.pages import pages_for
from batchinfer.model.step import PrefillSpan, StepInput
from batchinfer.parallel.spans import SpanLog
from batchinfer.protocol.feed import Feed
from batchinfer.protocol.messages import ExpertSlots, StepReport
from batchinfer.rank.admission import Admission
from batchinfer.rank.batch import StepResult
from batchinfer.rank.context import RankContext
from batchinfer.rank.decode import decode_step
from batchinfer.rank.drafted_table import DraftedTable
from batchinfer.rank.drafter import Drafter
from batchinfer.rank.migration import KvMigration
from batchinfer.rank.overlap_rule import MeasuredOverlap
from batchinfer.rank.prefill import Prefill
from batchinfer.rank.prefill_queue import PrefillQueue
from batchinfer.rank.prompt_pages import PromptPages
from batchinfer.rank.sequence import Sequence
from batchinfer.rank.state_pages import StatePages
from batchinfer.rank.step_vote import Agreed, Kind, agree
from batchinfer.rank.stored_prefixes import StoredPrefixes
from batchinfer.rank.sweep import PromptPace, run_parts
from batchinfer.rank.telemetry import SweepShare, Telemetry
from batchinfer.records import Completion

# between votes; messages are read at once
WAIT_S = 0.5  # of idle ranks
LATE_S = 0.001  # of ranks of which one is about to get its work
WAITS_S = {Kind.WAIT: WAIT_S, Kind.LATE: LATE_S}


class RankWorker:
    """The loop of prefill and decode steps, run together with the other ranks of the group.

    Args:
        place_experts: moves this rank's experts; None for a lone rank.
        open_prefixes: opens the KV store for the pages of a rank that runs prefill; None: no store.
        drafter: drafts tokens; None: this rank does not.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        place_experts: Callable[[ExpertSlots], None] | None = None,
        open_prefixes: Callable[[KvMemory], StoredPrefixes] | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._context, self._drafter = context, drafter
        self._stored = (
            open_prefixes(context.memory) if open_prefixes is not None and context.place.runs_prefill else None
        )
        self._prompt_pages = StatePages(context) if context.num_slots else PromptPages(context)
        self._queue = PrefillQueue(self._prompt_pages, self._stored, context.prefill_tokens)
        self._prefill = Prefill(context, self._queue, self._prompt_pages, self._stored, drafter)
        self._running = DraftedTable(context.eos_token_ids)
        self._migration = KvMigration(context, self._prompt_pages)
        self._admission = Admission(context, self._queue, self._running, self._migration, self._prompt_pages)
        self.telemetry = Telemetry(context)
        self._place_experts = place_experts
        self._expert_slots: ExpertSlots | None = None  # to be placed
        self._pieces: list[list[int]] | None = None  # of the calibration
        self._leave = False
        self._pace: PromptPace | None = None  # of sweeps
        stream = context.model.stream
        self._num_streamed = 0 if stream is None else stream.num_bytes  # before this sweep; reads go on between sweeps
        self._deal = 0  # number of the latest deal of work that it knows of
        self._overlap = MeasuredOverlap() if context.overlap == "auto" else context.overlap

    def run(self, feed: Feed) -> None:
        """Step until the controller ends the job.

        Raises:
            PeerLostError: another rank of the group has ended.
            ConfigError: a request does not fit the page budget.
        """
        wait_s = 0.0
        while True:
            self._take_in(feed, wait_s)
            vote = self._admission.vote(
                leave=self._leave,
                place=self._expert_slots is not None,
                calibrate=self._pieces is not None,
                deal=self._deal,
            )
            context = self._context
            agreed = agree(context.mesh, vote, overlap=self._overlap, graphs=context.graphs)
            if agreed.kind is Kind.LEAVE:
                break
            if agreed.kind is Kind.CALIBRATE:
                self._calibrate(feed)
            elif agreed.kind is Kind.PLACE:
                self._move_experts(feed)
            elif agreed.kind not in WAITS_S and context.model.stream is not None:
                self._sweep(feed)
            elif agreed.kind not in WAITS_S:
                self._step(agreed, feed)
            wait_s = WAITS_S.get(agreed.kind, 0.0)
        self._migration.close()
        if self._stored is not None:
            self._stored.close()
            self.telemetry.report_store(feed, self._stored, is_last=True)

    def _take_in(self, feed: Feed, wait_s: float) -> None:
        """Read messages, ask for further requests, and give pages to requests from other ranks."""
        inbox, migration, log = feed.receive(wait_s), self._migration, self.telemetry.between_steps
        self._leave, self._deal = self._leave or inbox.leave, inbox.deal or self._deal
        self._expert_slots = inbox.expert_slots or self._expert_slots
        self._pieces = self._pieces if inbox.calibrate is None else inbox.calibrate
        if inbox.count_experts:
            feed.send_experts()
        self._queue.add(inbox.requests, inbox.pieces)
        if self._stored is not None:
            self._stored.read_ahead(inbox.requests)
        migration.waiting.extend(inbox.adoptions)
        migration.free(inbox.adopted)
        if inbox.give_away:
            # requests that have finished meanwhile are no longer here
            given_away = self._running.remove(set(inbox.give_away))
            feed.hand_over(migration.migrate_out(given_away, log))
            if self._drafter is not None:
                self._drafter.drop(given_away)
        if self._admission.needs_work:
            feed.ask_for_requests(self._context.num_pages)
        taken = migration.migrate_in(self._admission.num_free_slots, log)
        if taken:
            self._running.add(taken)
            feed.confirm_adopted([sequence.request.key for sequence in taken])
        self._admission.refuse_request_that_never_fits()

    def _calibrate(self, feed: Feed) -> None:
        """Run pieces of prompts to count their experts, before the first request."""
        assert self._pieces is not None
        num_tokens, counts = count_experts(self._context, self._pieces)
        self._pieces = None
        self.telemetry.skip_rows()
        feed.send_calibrated(num_tokens, counts)

    def _move_experts(self, feed: Feed) -> None:
        """Report the expert counts so far, move the experts, and restart the counts."""
        assert self._place_experts is not None
        assert self._expert_slots is not None
        feed.send_experts()
        started_s = time.monotonic()
        self._place_experts(self._expert_slots)
        if self._context.graphs is not None:
            self._context.graphs.clear()
        self.telemetry.restart_counts(self._expert_slots.placement)
        self._expert_slots = None
        feed.send_placed(time.monotonic() - started_s)

    def _step(self, agreed: Agreed, feed: Feed) -> None:
        """Run a step; requests whose prompt it completes continue on this rank or on another one."""
        start_s, log = unix_s(), SpanLog()
        if agreed.kind is Kind.PREFILL:
            ran = self._prefill.step(self._admission.num_to_admit, log, in_pairs=agreed.in_pairs)
        else:
            ran = decode_step(
                self._context,
                self._running,
                log,
                in_pairs=agreed.in_pairs,
                drafter=self._drafter,
                graph=agreed.graph,
            )
        if isinstance(self._overlap, MeasuredOverlap):
            self._overlap.measure(ran.new_tokens, unix_s() - start_s, log)
        self._deliver(agreed, ran, log, feed, start_s=start_s)

    def _sweep(self, feed: Feed) -> None:
        """Run one sweep: a decode step of every running sequence, and all prompts that fit, layer by layer."""
        stream = self._context.model.stream
        assert stream is not None
        start_s, wait_s = unix_s(), stream.wait_s
        if self._pace is None:
            self._pace = PromptPace(stream, self._context.prefill_tokens)
        context, running, goes_on = self._context, self._running, feed.goes_on
        parts = run_parts(context, self._prefill, running, self._admission, goes_on, self._pace, self._drafter)
        share = (unix_s() - start_s) / (sum(part.seconds for part in parts) or 1.0)
        num_bytes, wait_s = stream.num_bytes - self._num_streamed, stream.wait_s - wait_s
        self._num_streamed += num_bytes
        for part in parts:
            # experts of a lone rank compute all of its tokens
            rows_L = None if context.mesh.size == 1 else part.expert_rows_L
            of_part = SweepShare(part.seconds * share, num_bytes, wait_s, rows_L)
            self._deliver(Agreed(part.kind, in_pairs=False), part.ran, part.log, feed, start_s=start_s, share=of_part)
            start_s, num_bytes, wait_s = start_s + of_part.duration_s, 0, 0.0
        if self._context.prompts_alone and parts:
            assert not self._running.sequences, "no request goes on after its prompt"
            self._prompt_pages.drop_known()  # their KV is that of the last layer

    def _deliver(
        self,
        agreed: Agreed,
        ran: StepResult,
        log: SpanLog,
        feed: Feed,
        *,
        start_s: float,
        share: SweepShare | None = None,
    ) -> None:
        """Start decoding the prompts that a step completed, or hand them over, and report the step."""
        started, handovers = [], []
        if self._context.place.runs_decode:
            self._running.add(ran.started)
            started = [sequence.request.key for sequence in ran.started]
        else:
            handovers = self._migration.migrate_out(ran.started, log)
        completions = self._finish(ran.finished, ran.done_s)
        pages_used = self._prompt_pages.pool.num_used
        record = self.telemetry.record(agreed, ran, log, start_s=start_s, pages_used=pages_used, share=share)
        report = StepReport(record, completions, started, self.telemetry.traced(agreed.kind.value, log))
        feed.send(report, num_running=len(self._running.sequences))
        if handovers:
            feed.hand_over(handovers)
        if self._stored is not None and agreed.kind is Kind.PREFILL:
            self.telemetry.report_store(feed, self._stored)

    def _finish(self, sequences: Iterable[Sequence], done_s: float) -> list[Completion]:
        completions = []
        for sequence in sequences:
            sequence.times.finished_s = done_s
            self._prompt_pages.release(sequence)
            completions.append(sequence.completion(self._context.tokenizer))
        return completions


def count_experts(context: RankContext, pieces: list[list[int]]) -> tuple[int, list[list[int]]]:
    """Run pieces of prompts as one prefill step and drop its results; all ranks of the group do so together.

    Every token is finished, so that the last layer counts all of them, too. No page may be in use.

    Returns:
        The number of tokens that ran, as many as fit into a step and the pages.
        [L, E] the number of times that each expert was chosen.
    """
    spans: list[PrefillSpan] = []
    tokens: list[int] = []
    slots: list[int] = []
    first_page = 0
    for piece in pieces:
        num_pages = pages_for(len(piece))
        if len(tokens) + len(piece) > context.prefill_tokens or first_page + num_pages > context.num_pages:
            break
        if context.num_slots and len(spans) == context.num_slots:
            break
        page_ids = torch.arange(first_page, first_page + num_pages)
        spans.append(PrefillSpan(len(tokens), len(piece), len(piece), page_ids))
        slots += range(first_page * PAGE_TOKENS, first_page * PAGE_TOKENS + len(piece))
        tokens += piece
        first_page += num_pages
    step = StepInput(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.tensor([place for span in spans for place in range(span.num_tokens)], dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        logit_rows=torch.arange(len(tokens)),
        prefill=tuple(spans),
        state_slots=torch.arange(len(spans)) if context.num_slots else None,
    )
    output = context.model.forward(step, context.pages, context.schedule)
    return len(tokens), output.expert_counts.tolist()
