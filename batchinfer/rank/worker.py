"""One rank: its model, its pages and its step loop. The controller feeds it requests and takes what is finished."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable

import numpy as np
import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.data.tokenizer import PromptTokenizer
from batchinfer.kv.pages import PagePool
from batchinfer.kv.transfer import parcel_bytes
from batchinfer.model.sampling import sample
from batchinfer.model.transformer import Point, StepOutput, Transformer
from batchinfer.parallel.layout import RankPlace
from batchinfer.parallel.mesh import Mesh
from batchinfer.parallel.overlap import run_prefill_pair, run_to_end
from batchinfer.parallel.spans import MicroBatchSpans, Span, SpanLog
from batchinfer.protocol.feed import Feed
from batchinfer.protocol.messages import ExpertSlots, Handover, StepRecord, StepReport
from batchinfer.rank.agreement import Agreed, Kind, Wish, agree
from batchinfer.rank.batch import Chunk, prefill_step, sampling_rows, take_token
from batchinfer.rank.decode import DecodeBatch, joined
from batchinfer.rank.decode_graphs import DecodeGraphs
from batchinfer.rank.micro_batches import halve_copies, halve_prefill
from batchinfer.rank.migration import AdoptionQueue, Outbox
from batchinfer.rank.prefill import PrefillQueue
from batchinfer.rank.sequence import Sequence, pages_needed
from batchinfer.rank.stored_prefixes import StoredPrefixes
from batchinfer.records import Completion, ConfigError, RequestKey
from batchinfer_kernels.transfer import wait_for

FREE_SHARE = 8  # prefill waits until this fraction (1/8) of the decode slots is free, so that its steps are not tiny
WAIT_S = 0.5  # a rank with nothing to do looks at its messages at once, at the other ranks this often
STORE_S = 5.0  # between reports of what the KV store has done
TRACED_STEPS = 50  # of each kind; enough to see the order of things, and a bound for the file

ALONE = RankPlace(rank=0, role="both", group_rank=0, group_size=1)


class RankWorker:
    """Runs prefill and decode steps together with the other ranks of its group.

    Args:
        mesh: the group; None for a rank alone.
        overlap: run two micro-batches in turn when there is work for both.
        outbox: for requests that go on at another rank; None for a rank alone.
        place_experts: moves this rank's experts; None for a rank alone.
        open_store: opens the KV store of a rank that runs prefill, for its pages; None: no store.
        traced: report the spans of the first steps.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: PromptTokenizer,
        *,
        num_pages: int,
        prefill_tokens: int,
        decode_requests: int,
        place: RankPlace = ALONE,
        mesh: Mesh | None = None,
        overlap: bool = False,
        outbox: Outbox | None = None,
        place_experts: Callable[[ExpertSlots], None] | None = None,
        traced: bool = False,
        share_prefixes: bool = True,
        open_store: Callable[[torch.Tensor], StoredPrefixes] | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._place = place
        self._mesh = mesh or Mesh.alone()
        self._overlap = overlap
        has_graphs = place.runs_decode and model.can_be_recorded
        self._pages = model.new_pages(num_pages + has_graphs)  # the last one belongs to no request then
        graphs = DecodeGraphs(model, self._pages, filler_page=num_pages) if has_graphs else None
        self._pool = PagePool(num_pages)
        self._stored = open_store(self._pages) if open_store is not None and place.runs_prefill else None
        self._queue = PrefillQueue(
            self._pool,
            tokenizer,
            max_step_tokens=prefill_tokens,
            prompt_only=not place.runs_decode,
            share_prefixes=share_prefixes,
            stored=self._stored,
        )
        self._decode = DecodeBatch(tokenizer.eos_token_ids, graphs)
        self._adoptions = AdoptionQueue(self._queue, tokenizer.eos_token_ids)
        self._outbox = outbox
        self._place_experts = place_experts
        self._expert_slots: ExpertSlots | None = None  # to be placed
        self._prefill_tokens = prefill_tokens
        self._decode_requests = decode_requests
        self._num_steps = 0
        self._num_expert_rows = model.num_expert_rows  # after the latest step
        self._left_to_trace = Counter(prefill=TRACED_STEPS, decode=TRACED_STEPS) if traced else Counter()
        self._between_steps = SpanLog()
        self._leave = False
        self._last_store_s = 0.0
        self.expert_tokens = {
            phase: np.zeros((model.num_moe_layers, model.config.n_routed_experts), dtype=np.int64)
            for phase in ("prefill", "decode")
        }

    def run(self, feed: Feed) -> None:
        """Step until the controller says that this is over.

        Raises:
            PeerLostError: another rank of the group has ended.
            ConfigError: a request does not fit the page budget.
        """
        wait_s = 0.0
        while True:
            self._take_in(feed, wait_s)
            agreed = agree(self._mesh, self._wish(), overlap=self._overlap)
            if agreed.kind is Kind.LEAVE:
                if self._stored is not None:
                    self._stored.close()
                    feed.send_store(self._stored.counts(), self._stored.take_problems())
                return
            if agreed.kind is Kind.PLACE:
                assert self._place_experts is not None
                assert self._expert_slots is not None
                self._place_experts(self._expert_slots)
                self._expert_slots = None
            elif agreed.kind is Kind.PREFILL:
                report, handovers = self._prefill(agreed)
                feed.send(report)
                if handovers:
                    feed.hand_over(handovers)
                self._tell_of_store(feed)
            elif agreed.kind is Kind.DECODE:
                feed.send(self._decode_once(agreed))
            wait_s = WAIT_S if agreed.kind is Kind.WAIT else 0.0

    def _tell_of_store(self, feed: Feed) -> None:
        """Report problems of the KV store at once, and its counts now and then: a killed rank's are not lost."""
        if self._stored is None:
            return
        problems, now_s = self._stored.take_problems(), time.monotonic()
        if problems or now_s - self._last_store_s >= STORE_S:
            self._last_store_s = now_s
            feed.send_store(self._stored.counts(), problems)

    def _take_in(self, feed: Feed, wait_s: float) -> None:
        """Look at what came, ask for more, and give adopted requests pages."""
        inbox = feed.receive(wait_s)
        self._leave = self._leave or inbox.leave
        self._expert_slots = inbox.expert_slots or self._expert_slots
        if inbox.count_experts:
            feed.send_experts()
        self._queue.add(inbox.requests)
        if self._stored is not None:
            self._stored.read_ahead(inbox.requests)
        self._adoptions.waiting.extend(inbox.adoptions)
        if self._outbox is not None:
            for key in inbox.adopted:
                self._outbox.free(key)
            if inbox.give_away:
                feed.hand_over(self._give_away(self._outbox, inbox.give_away))
        if self._place.runs_prefill and self._is_running_out():
            feed.want_requests()
        taken = self._adoptions.take_in(self._pages, self._num_free_slots, self._between_steps)
        if taken:
            self._decode.add(taken)
            feed.confirm_adopted([sequence.request.key for sequence in taken])
        self._refuse_what_never_fits()

    def _give_away(self, outbox: Outbox, keys: list[RequestKey]) -> list[Handover]:
        """Pack running requests; those that have finished meanwhile are not there any more."""
        handovers = []
        for sequence in self._decode.remove(set(keys)):
            with self._between_steps.kv("KV out"):
                handovers.append(outbox.pack(sequence, self._pages))
            self._queue.release(sequence)
        return handovers

    def _is_running_out(self) -> bool:
        """Whether less is waiting than two prefill steps take: one runs while more come; others would only lie here."""
        queue = self._queue
        return queue.waiting_tokens < 2 * self._prefill_tokens and len(queue.waiting) < self._decode_requests

    def _wish(self) -> Wish:
        prefill = self._should_prefill()
        decode = self._decode.num_running > 0
        if prefill:
            # one long prompt fills both halves, too: it is cut between them
            both_halves = self._queue.has_cut_prompt or len(self._queue.waiting[0].token_ids) > 1
        else:
            both_halves = self._decode.num_running > 1
        return Wish(
            leave=self._leave,
            prefill=prefill,
            decode=decode,
            fills_both_halves=both_halves,
            place=self._expert_slots is not None,
        )

    @property
    def _num_free_slots(self) -> int:
        return self._decode_requests - self._decode.num_running

    @property
    def _num_to_admit(self) -> int:
        """Prompts that may begin now: none while adopted requests wait here, or decode ranks have enough to read."""
        if self._place.runs_decode:
            return 0 if self._adoptions.waiting else self._num_free_slots
        assert self._outbox is not None
        page_bytes = parcel_bytes(self._pages, 1)
        return min(self._decode_requests, self._outbox.num_fitting(self._queue.waiting, page_bytes))

    @property
    def _may_prefill(self) -> bool:
        return self._place.runs_decode or (self._outbox is not None and self._outbox.has_room)

    def _should_prefill(self) -> bool:
        if not self._may_prefill:
            return False
        if self._queue.has_cut_prompt:
            return True
        num_free = self._num_to_admit
        enough_free = num_free * FREE_SHARE >= self._decode_requests or not self._decode.num_running
        return enough_free and num_free > 0 and self._queue.can_admit()

    def _refuse_what_never_fits(self) -> None:
        """With nothing running all pages can be had: what does not fit then never will."""
        if self._decode.num_running or self._queue.num_running:
            return
        waiting = [adoption.request for adoption in self._adoptions.waiting] or list(self._queue.waiting)[:1]
        if waiting and not self._queue.can_fit(waiting[0]):
            request = waiting[0]
            raise ConfigError(
                f"row {request.key.row} of shard {request.key.shard} needs {pages_needed(request)} KV pages, but the "
                f"budget holds {self._pool.num_pages}; raise cluster.page_bytes or lower max_tokens"
            )

    def _prefill(self, agreed: Agreed) -> tuple[StepReport, list[Handover]]:
        """One prefill step; returns its report, and the requests that another rank is to decode."""
        start_s, log = time.time(), SpanLog()
        # a rank may take part for the others' sake alone
        chunks, copies = self._queue.next_step(self._num_to_admit) if self._may_prefill else ([], {})
        computing_s = time.time()
        output, complete = self._run_prefill(chunks, copies, log, in_pairs=agreed.in_pairs)
        if self._stored is not None:
            wait_for(self._model.device)
            self._stored.note_step(chunks, time.time() - computing_s)
        self._queue.end_step()
        if complete:
            num_new = np.zeros(len(complete), dtype=np.int64)
            sampled = sample(output.logits, sampling_rows(complete), num_new, self._model.logit_ops)
            for row, sequence in enumerate(complete):
                take_token(sequence, sampled, row, self._tokenizer.eos_token_ids)
        now_s = time.time()
        for sequence in complete:
            sequence.times.first_token_s = now_s
        finished = [sequence for sequence in complete if sequence.finish_reason is not None]
        running = [sequence for sequence in complete if sequence.finish_reason is None]
        handovers: list[Handover] = []
        if self._place.runs_decode:
            self._decode.add(running)
            started = [sequence.request.key for sequence in running]
        else:
            assert self._outbox is not None
            started = []
            for sequence in running:
                with log.kv("KV out"):
                    handovers.append(self._outbox.pack(sequence, self._pages))
                self._queue.release(sequence)
        completions = self._finish(finished, now_s)
        record = self._record(
            agreed,
            start_s,
            output,
            log,
            num_requests=len(chunks),
            new_tokens=sum(chunk.end - chunk.start for chunk in chunks),
            # tokens found in memory are counted where the sequence's own prefill begins
            cached_tokens=sum(chunk.start for chunk in chunks if chunk.sequence.num_prefill_steps == 1),
            output_tokens=len(complete),
            kv_tokens=sum(chunk.end for chunk in chunks),
        )
        return StepReport(record, completions, started, self._traced(log, "prefill")), handovers

    def _run_prefill(
        self, chunks: list[Chunk], copies: dict[int, int], log: SpanLog, *, in_pairs: bool
    ) -> tuple[StepOutput, list[Sequence]]:
        """Run the chunks; returns the output and the sequences whose prompt is complete, one per row of logits."""
        if in_pairs:
            first, second = halve_prefill(chunks)
            first_copies, second_copies = halve_copies(copies, first, PAGE_TOKENS)
            # the earlier half is micro-batch 1, whose attention goes first in every layer
            outputs: tuple[StepOutput, ...] = run_prefill_pair(
                self._prefill_points(first, first_copies, MicroBatchSpans(log, 1)),
                self._prefill_points(second, second_copies, MicroBatchSpans(log, 0)),
            )
            chunks = first + second
        else:
            outputs = (run_to_end(self._prefill_points(chunks, copies, MicroBatchSpans(log, 0))),)
        return joined(outputs), [chunk.sequence for chunk in chunks if chunk.completes_prompt]

    def _prefill_points(
        self, chunks: list[Chunk], copies: dict[int, int], spans: MicroBatchSpans
    ) -> Generator[Point, None, StepOutput]:
        return self._model.forward_points(prefill_step(chunks, copies), self._pages, spans)

    def _decode_once(self, agreed: Agreed) -> StepReport:
        start_s, log = time.time(), SpanLog()
        count = self._decode.num_running
        step = self._decode.step(self._model, self._pages, log, in_pairs=agreed.in_pairs)
        completions = self._finish(step.finished, time.time())
        record = self._record(
            agreed,
            start_s,
            step.output,
            log,
            num_requests=count,
            new_tokens=count,
            cached_tokens=0,
            output_tokens=count,
            kv_tokens=step.kv_tokens,
        )
        return StepReport(record, completions, spans=self._traced(log, "decode"))

    def _record(self, agreed: Agreed, start_s: float, output: StepOutput, log: SpanLog, **counts: int) -> StepRecord:
        kind = agreed.kind.value
        rows_before, self._num_expert_rows = self._num_expert_rows, self._model.num_expert_rows
        self.expert_tokens[kind] += output.expert_counts.cpu().numpy()
        self._num_steps += 1
        return StepRecord(
            step=self._num_steps - 1,
            kind=kind,
            start_s=start_s,
            duration_s=time.time() - start_s,
            pages_used=self._pool.num_used,
            micro_batches=2 if agreed.in_pairs else 1,
            expert_rows=self._num_expert_rows - rows_before,
            comm_s=log.communication_s() if self._mesh.size > 1 else 0.0,
            hidden_comm_s=log.hidden_communication_s() if self._mesh.size > 1 else 0.0,
            **counts,
        )

    def _traced(self, log: SpanLog, kind: str) -> list[Span]:
        between, self._between_steps = self._between_steps.spans, SpanLog()
        if self._left_to_trace[kind] <= 0:
            return []
        self._left_to_trace[kind] -= 1
        return between + log.spans

    def _finish(self, sequences: Iterable[Sequence], now_s: float) -> list[Completion]:
        completions = []
        for sequence in sequences:
            sequence.times.finished_s = now_s
            self._queue.release(sequence)
            completions.append(sequence.completion(self._tokenizer))
        return completions
