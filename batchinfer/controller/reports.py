"""Distribution of the ranks' reports to results, progress and statistics."""

import time
from dataclasses import dataclass, field

from batchinfer.balance.decode_loads import DecodeLoads, decode_request
from batchinfer.balance.output_lengths import OutputLengths
from batchinfer.controller.dealer import Dealer
from batchinfer.controller.experts.placer import ExpertPlacer
from batchinfer.controller.experts.statistics import ExpertStatistics
from batchinfer.controller.results import Results
from batchinfer.controller.work_progress import WorkProgress
from batchinfer.progress import note
from batchinfer.protocol.messages import ExpertCounts, StepReport, StoreCounts
from batchinfer.records import Completion, RequestKey
from batchinfer.run.session import Session
from batchinfer.run.trace import Tracer

COMPLETE_S = 1.0  # between commits of complete units, each of which writes several files


@dataclass(slots=True)
class Reports:
    """Receivers of the ranks' reports."""

    session: Session
    tracer: Tracer
    progress: WorkProgress
    results: Results
    dealer: Dealer
    loads: DecodeLoads[RequestKey]
    lengths: OutputLengths
    experts: ExpertPlacer
    expert_statistics: ExpertStatistics
    _reported: set[str] = field(default_factory=set)  # problems of the KV store
    _has_complete_unit: bool = False  # that is not marked done

    def take_steps(self, rank: int, reports: list[StepReport]) -> None:
        """Record some steps of a rank and the requests that ended in them."""
        if self.session.first_prefill_s is None and reports:
            self.session.first_prefill_s = reports[0].record.start_s
            self.session.record("running")
        self.results.add_steps(rank, [report.record for report in reports])
        for report in reports:
            record = report.record
            self.tracer.add_step(rank, record.kind, record.start_s, record.duration_s, report.spans)
            self.experts.step(record.new_tokens)
            if record.kind == "decode":
                self.loads.step(rank)
            if not self.loads.is_lone_rank:
                for key in report.started:
                    self.loads.start(decode_request(self.dealer.running_request(key)), rank)
            self.progress.step(record)
        self._finish([completion for report in reports for completion in report.completions])

    def give_up(self, completion: Completion) -> None:
        """Record the error row of a request."""
        self._finish([completion])

    def take_experts(self, rank: int, counts: ExpertCounts) -> None:
        """Record the expert counts of a rank."""
        self.expert_statistics.take(rank, counts)
        self.experts.add_counts(rank, counts)

    def take_store(self, rank: int, message: StoreCounts) -> None:
        """Record the counts of a rank's KV store; warn once of a problem, which every rank finds."""
        self.results.set_store_counts(rank, message.counts)
        for problem in message.problems:
            if problem not in self._reported:
                self._reported.add(problem)
                note(f"warning: {problem}")

    def ranks_died(self) -> None:
        """Close the counts of this start, since restarted ranks count from zero."""
        self.results.ranks_ended()
        self.progress.ranks_ended()
        self.expert_statistics.ranks_ended()
        self.session.restarts += 1

    def commit(self, *, after_s: float = 0.0) -> None:
        """Write finished requests to disk, if the last commit was `after_s` seconds ago or a unit is complete.

        Of complete units only the last ones are written at once: the others wait until COMPLETE_S after a commit.
        """
        if self._has_complete_unit:
            after_s = min(after_s, COMPLETE_S) if self.dealer.num_unfinished else 0.0
        if time.monotonic() - self.results.last_commit_s >= after_s:
            with self.tracer.span("commit", "controller"):
                self.progress.committed()
                self.results.commit()
                self.expert_statistics.write()
            self._has_complete_unit = False

    def _finish(self, completions: list[Completion]) -> None:
        if not completions:
            return
        for completion in completions:
            request = self.dealer.running_request(completion.key)
            self.lengths.finish(request.prompt_group, len(completion.token_ids))
            counted_from = None if completion.error is not None else completion.cached_memory_tokens
            self.dealer.finish(completion.unit, completion.key, counted_from)
            if not self.loads.is_lone_rank:
                self.loads.finish(completion.key)
        self.progress.finished(completions)
        self._has_complete_unit = self.results.add(completions) or self._has_complete_unit
