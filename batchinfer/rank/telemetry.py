"""A rank's reports to its controller: step records, expert counts, spans, and counters of its KV store."""

# L MoE layers, E experts

import time
from collections import Counter
from typing import NamedTuple

import numpy as np

from batchinfer.clock import unix_s
from batchinfer.parallel.spans import SpanLog
from batchinfer.protocol.feed import Feed
from batchinfer.protocol.messages import ExpertCounts, StepRecord
from batchinfer.rank.batch import StepResult
from batchinfer.rank.context import RankContext
from batchinfer.rank.step_vote import Agreed
from batchinfer.rank.stored_prefixes import StoredPrefixes
from batchinfer.records import PHASES, Span
from batchinfer_kernels import registry

STORE_S = 5.0  # between reports of the KV store's counters
TRACED_STEPS = 50  # of each kind; enough to see the order of spans, and a bound for the file


class SweepShare(NamedTuple):
    """A step's share of a sweep: seconds by the time that it computed; bytes and waiting in the first step alone."""

    duration_s: float
    streamed_bytes: int
    wait_s: float
    expert_rows_L: np.ndarray | None = None  # [L] that this rank's experts computed; None: those of all its tokens


class Telemetry:
    """Counts since the rank started; expert counts since the latest change of placement."""

    def __init__(self, context: RankContext) -> None:
        model = context.model
        self._model = model
        self._exchanges_rows = context.mesh.size > 1
        self._no_graphs = context.no_graphs
        self.placement = context.placement  # number of the current one
        self._rows_L = model.expert_rows  # after the latest step
        self._num_fallbacks = registry.num_fallbacks()
        self._left_to_trace = Counter(prefill=TRACED_STEPS, decode=TRACED_STEPS) if context.traced else Counter()
        self._last_store_s = 0.0
        self.between_steps = SpanLog()
        self.restart_counts(self.placement)

    def restart_counts(self, placement: int) -> None:
        """Restart expert counts for this placement of the experts."""
        self.placement = placement
        num_layers, num_experts = self._model.num_moe_layers, self._model.config.n_routed_experts
        self._tokens_LE = {phase: np.zeros((num_layers, num_experts), dtype=np.int64) for phase in PHASES}
        self._new_rows_L = {phase: np.zeros(num_layers, dtype=np.int64) for phase in PHASES}

    def skip_rows(self) -> None:
        """Count the experts' rows since the latest step for no step."""
        self._rows_L = self._model.expert_rows

    def expert_counts(self) -> ExpertCounts:
        """Return the counts under the current placement of the experts."""
        tokens = {phase: counts.tolist() for phase, counts in self._tokens_LE.items()}
        return ExpertCounts(self.placement, tokens, {phase: rows.tolist() for phase, rows in self._new_rows_L.items()})

    def record(
        self,
        agreed: Agreed,
        ran: StepResult,
        log: SpanLog,
        *,
        start_s: float,
        pages_used: int,
        share: SweepShare | None = None,
    ) -> StepRecord:
        """Return the record of the step that has just run, and add its expert counts.

        Args:
            share: of a step in a sweep.
        """
        kind = agreed.kind.value
        before_L = self._rows_L
        self._rows_L, counts_LE = self._model.read_rows(ran.expert_counts)
        fallbacks_before, self._num_fallbacks = self._num_fallbacks, registry.num_fallbacks()
        self._tokens_LE[kind] += counts_LE
        rows_L = self._rows_L - before_L
        if share is not None:
            rows_L = counts_LE.sum(1) if share.expert_rows_L is None else share.expert_rows_L
        self._new_rows_L[kind] += rows_L
        return StepRecord(
            kind=kind,
            start_s=start_s,
            duration_s=unix_s() - start_s if share is None else share.duration_s,
            num_requests=ran.num_requests,
            new_tokens=ran.new_tokens,
            cached_tokens=ran.cached_tokens,
            output_tokens=ran.output_tokens,
            kv_tokens=ran.kv_tokens,
            largest_kv_tokens=ran.largest_kv_tokens,
            pages_used=pages_used,
            micro_batches=2 if agreed.in_pairs else 1,
            placement=self.placement,
            expert_rows=int(rows_L.sum()),
            comm_s=log.communication_s() if self._exchanges_rows else 0.0,
            wait_comm_s=log.waiting_s() if self._exchanges_rows else 0.0,
            hidden_comm_s=log.hidden_communication_s() if self._exchanges_rows else 0.0,
            exposed_comm_s=log.exposed_communication_s() if self._exchanges_rows else 0.0,
            fallback_calls=self._num_fallbacks - fallbacks_before,
            drafted_tokens=ran.drafted_tokens,
            accepted_tokens=ran.accepted_tokens,
            attention_work=ran.attention_work,
            streamed_bytes=0 if share is None else share.streamed_bytes,
            weights_wait_s=0.0 if share is None else share.wait_s,
            graph=None if agreed.graph is None else "recorded" if agreed.records else "replayed",
            graph_rows=0 if agreed.graph is None else agreed.graph.num_rows,
            no_graph=agreed.no_graph and (self._no_graphs or agreed.no_graph),
        )

    def traced(self, kind: str, log: SpanLog) -> list[Span]:
        """Return the spans of a step and of the time before it; none after TRACED_STEPS steps of its kind."""
        between, self.between_steps = self.between_steps.spans, SpanLog()
        if self._left_to_trace[kind] <= 0:
            return []
        self._left_to_trace[kind] -= 1
        return between + log.spans

    def report_store(self, feed: Feed, stored: StoredPrefixes, *, is_last: bool = False) -> None:
        """Report problems of the KV store at once, and its counters every STORE_S, so that a killed rank loses few."""
        problems, now_s = stored.take_problems(), time.monotonic()
        if problems or is_last or now_s - self._last_store_s >= STORE_S:
            self._last_store_s = now_s
            feed.send_store(stored.counts(), problems)
