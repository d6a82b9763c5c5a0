"""Decision when the experts of this process's ranks move.

    before the first request   as plan/experts.parquet says, or by a calibration on pieces of the job's prompts
    while ranks compute        again, when their counts show that the busiest rank could have less work

Ranks wait while experts move. So experts move only under three conditions: their loads have drifted from the placed
ones by more than chance explains; the next check, with tokens that the new placement was not made for, confirms it;
and the time saved over the rest of the job exceeds the time of moving. Outputs do not depend on placement.
"""

import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from batchinfer.config import VALUE_BYTES, JobConfig
from batchinfer.controller.experts.history import ExpertHistory
from batchinfer.controller.experts.loads import ExpertLoads
from batchinfer.controller.experts.proposals import START, MoveCosts, Proposal, compile_balancer
from batchinfer.model.config import ModelConfig
from batchinfer.progress import Count, note
from batchinfer.protocol.messages import ExpertCounts, ExpertSlots

NUM_CHECKS = 32  # of the ranks' counts in a job, about, but with an interval within
LEAST_TOKENS, MOST_TOKENS = 512, 65536  # tokens per rank
TRUST = 10.0  # loads are expected to last for this multiple of the time since the latest placement


class ExpertPlacer:
    """Scheduler of the calibration, of counts and of moves.

    Args:
        job_tokens: prompt tokens that the whole job computes.
        progress: requests of the job, to estimate the time left.
    """

    def __init__(
        self, history: ExpertHistory, job: JobConfig, model: ModelConfig, progress: Count, *, job_tokens: int
    ) -> None:
        self.history, self._progress, self._num_ranks = history, progress, job.cluster.num_ranks
        least, most = LEAST_TOKENS * self._num_ranks, MOST_TOKENS * self._num_ranks
        self._interval = min(max(job_tokens / NUM_CHECKS, least), most)
        self._loads = ExpertLoads(history.groups, self._interval, model.num_experts_per_tok)
        value_bytes = {"fp8": 1, "int4": 0.5, "fp4": 0.5}.get(job.model.dtype, VALUE_BYTES[job.model.dtype])
        self._costs = MoveCosts(int(3 * model.hidden_size * model.moe_intermediate_size * value_bytes))
        self._num_tokens, self._next_check = 0, self._interval
        self._first_step_s: float | None = None
        self._placed_s = time.monotonic()
        self._stays = job.cluster.weights == "stream"  # each rank's reads are those of the experts that it began with
        self._may_calibrate = history.is_in_order and not self._stays
        self._calibrating: set[int] = set()  # ranks that run their part of the calibration
        self._counting: set[int] = set()  # ranks that have not sent their counts yet
        self._placing: Future[dict[str, Proposal]] | None = None
        self._unproved: dict[str, Proposal] = {}  # by role: to be confirmed with later tokens
        self._to_move: list[str] = []  # groups whose ranks have not been sent their slots
        self._moving_ranks: set[int] = set()  # ranks that have not reported the end of the move
        if self._may_calibrate:
            threading.Thread(target=compile_balancer, name="compile balancer", daemon=True).start()

    @property
    def is_preparing(self) -> bool:
        """Whether requests must wait for the calibration or for the moves that it causes."""
        return bool(self._calibrating or self._to_move or self._moving_ranks) and self._first_step_s is None

    def start_calibration(self, ranks: list[int]) -> bool:
        """Return whether these ranks must run the calibration now. It is tried once, even if the ranks die in it."""
        wanted, self._may_calibrate = self._may_calibrate, False
        self._calibrating = set(ranks) if wanted else set()
        return wanted

    def calibrated(self, rank: int, tokens: list[list[int]]) -> None:
        """Add the counts of a rank's part of the calibration; after the last rank, place the experts."""
        self._loads.take_calibration(np.array(tokens, dtype=np.float64))
        self._calibrating.discard(rank)
        if not self._calibrating:
            # chance counts 0: no better loads are known, and no request waits yet
            known = {role: (load, 0.0) for role, (load, _) in self._loads.of_groups().items()}
            self._place(self.history.propose(known), "calibration", math.inf)

    def step(self, num_tokens: int) -> None:
        """Count the tokens of a step."""
        self._first_step_s = self._first_step_s or time.monotonic()
        self._num_tokens += num_tokens

    def should_count(self) -> bool:
        """Return whether to ask the ranks for their counts now; True marks all of them as asked."""
        is_busy = self._counting or self._placing is not None
        if not self.history.groups or self._stays or is_busy or self._num_tokens < self._next_check:
            return False
        self._next_check = self._num_tokens + self._interval
        self._counting = set(range(self._num_ranks))
        return True

    def add_counts(self, rank: int, counts: ExpertCounts) -> None:
        """Add the counts of a rank; check the placement after the last rank's answer."""
        if not self.history.groups:
            return
        self._loads.take(rank, counts)
        if rank in self._counting:
            self._counting.discard(rank)
            if not self._counting:
                self._check()

    def moved(self, rank: int, seconds: float) -> None:
        """Note that a rank has received its experts, in this number of seconds."""
        self._moving_ranks.discard(rank)
        self._costs.moved(seconds)

    def ranks_died(self) -> None:
        """Forget requests to the ranks: restarted ranks load their experts by the active placement."""
        self._counting.clear()
        self._calibrating.clear()
        self._to_move.clear()
        self._moving_ranks.clear()
        self._loads.ranks_died()

    def take_placed(self, ranks_of_role: Mapping[str, list[int]]) -> dict[int, ExpertSlots]:
        """Return the new slots of the ranks that must move experts now; each rank is returned once."""
        if self._placing is not None and self._placing.done():
            self._unproved, self._placing = self._placing.result(), None
            self._loads.start_window()
        slots_of_rank: dict[int, ExpertSlots] = {}
        for role in self._to_move:
            slots = self.history.slots(role)
            assert slots is not None, "the group has just been placed"
            slots_of_rank |= dict.fromkeys(ranks_of_role[role], slots)
        self._to_move = []
        self._moving_ranks |= slots_of_rank.keys()
        return slots_of_rank

    def _check(self) -> None:
        """Accept proposals that later tokens confirm; otherwise start to compute new proposals in a thread."""
        proved = {}
        for role, load in self._loads.window().items():
            proposal = self._unproved.get(role)
            if proposal is not None:
                before, after = self.history.current(role).with_load(load), proposal.tables.with_load(load)
                gain = before.max_over_mean - after.max_over_mean
                if gain >= START:
                    proved[role] = replace(proposal, before=before.max_over_mean, gain=gain)
        self._unproved = {}
        if proved:
            self._place(proved, "loads", self._left_s())
        else:
            thread = ThreadPoolExecutor(1, "place experts")
            self._placing = thread.submit(self.history.propose, self._loads.of_groups())
            thread.shutdown(wait=False)

    def _place(self, proposals: dict[str, Proposal], made_by: str, left_s: float) -> None:
        """Have ranks move their experts where the gain over `left_s` seconds exceeds the cost."""
        current = {role: self.history.current(role) for role in proposals}
        placed = {role: one for role, one in proposals.items() if self._costs.pays(current[role], one, left_s)}
        if proposals and not placed:
            self._interval *= 2  # the next check would find the same
        for role, proposal in placed.items():
            self._costs.start(current[role], proposal.tables)
            note(_sentence(role, made_by, proposal))
        self.history.add({role: proposal.tables for role, proposal in placed.items()}, made_by)
        self._to_move += placed
        self._placed_s = time.monotonic() if placed else self._placed_s

    def _left_s(self) -> float:
        """Return the seconds for which the loads are expected to last, at most until the job is done."""
        now_s = time.monotonic()
        worked_s = now_s - (self._first_step_s or now_s)
        done, left = self._progress.count - self._progress.earlier, self._progress.total - self._progress.count
        left_s = worked_s * left / done if done > 0 else worked_s
        return min(left_s, TRUST * (now_s - self._placed_s))


def _sentence(role: str, made_by: str, proposal: Proposal) -> str:
    """Return the note on a new placement."""
    ranks = "" if role == "both" else f" of {role} ranks"
    by = "a calibration" if made_by == "calibration" else "the loads measured"
    return (
        f"experts{ranks} placed by {by}: busiest rank {proposal.tables.max_over_mean:.3f} times the mean, "
        f"{proposal.before:.3f} before"
    )
