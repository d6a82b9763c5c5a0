"""What a rank tells its controller about its steps: records, tokens per expert, spans, and its KV store's counts."""

import time
from collections import Counter

import numpy as np

from batchinfer.parallel.spans import Span, SpanLog
from batchinfer.protocol.feed import Feed
from batchinfer.protocol.messages import StepRecord
from batchinfer.rank.batch import StepResult
from batchinfer.rank.context import RankContext
from batchinfer.rank.step_vote import Agreed
from batchinfer.rank.stored_prefixes import StoredPrefixes
from batchinfer_kernels import registry

STORE_S = 5.0  # between reports of what the KV store has done
TRACED_STEPS = 50  # of each kind; enough to see the order of things, and a bound for the file


class Telemetry:
    """Counts since the rank started."""

    def __init__(self, context: RankContext) -> None:
        model = context.model
        self._model = model
        self._exchanges_rows = context.mesh.size > 1
        self._num_steps = 0
        self._num_expert_rows = model.num_expert_rows  # after the latest step
        self._num_fallbacks = registry.num_fallbacks()
        self._left_to_trace = Counter(prefill=TRACED_STEPS, decode=TRACED_STEPS) if context.traced else Counter()
        self._last_store_s = 0.0
        self.between_steps = SpanLog()
        self.expert_tokens = {
            phase: np.zeros((model.num_moe_layers, model.config.n_routed_experts), dtype=np.int64)
            for phase in ("prefill", "decode")
        }

    def record(self, agreed: Agreed, ran: StepResult, log: SpanLog, *, start_s: float, pages_used: int) -> StepRecord:
        """The record of the step that has just run."""
        kind = agreed.kind.value
        rows_before, self._num_expert_rows = self._num_expert_rows, self._model.num_expert_rows
        fallbacks_before, self._num_fallbacks = self._num_fallbacks, registry.num_fallbacks()
        self.expert_tokens[kind] += ran.output.expert_counts.cpu().numpy()
        self._num_steps += 1
        return StepRecord(
            step=self._num_steps - 1,
            kind=kind,
            start_s=start_s,
            duration_s=time.time() - start_s,
            num_requests=ran.num_requests,
            new_tokens=ran.new_tokens,
            cached_tokens=ran.cached_tokens,
            output_tokens=ran.output_tokens,
            kv_tokens=ran.kv_tokens,
            largest_kv_tokens=ran.largest_kv_tokens,
            pages_used=pages_used,
            micro_batches=2 if agreed.in_pairs else 1,
            expert_rows=self._num_expert_rows - rows_before,
            comm_s=log.communication_s() if self._exchanges_rows else 0.0,
            wait_comm_s=log.waiting_s() if self._exchanges_rows else 0.0,
            hidden_comm_s=log.hidden_communication_s() if self._exchanges_rows else 0.0,
            exposed_comm_s=log.exposed_communication_s() if self._exchanges_rows else 0.0,
            fallback_calls=self._num_fallbacks - fallbacks_before,
        )

    def traced(self, kind: str, log: SpanLog) -> list[Span]:
        """The spans of a step and of what was done before it; none once enough steps were traced."""
        between, self.between_steps = self.between_steps.spans, SpanLog()
        if self._left_to_trace[kind] <= 0:
            return []
        self._left_to_trace[kind] -= 1
        return between + log.spans

    def report_store(self, feed: Feed, stored: StoredPrefixes, *, is_last: bool = False) -> None:
        """Report problems of the KV store at once, and its counts now and then: a killed rank's are not lost."""
        problems, now_s = stored.take_problems(), time.monotonic()
        if problems or is_last or now_s - self._last_store_s >= STORE_S:
            self._last_store_s = now_s
            feed.send_store(stored.counts(), problems)
