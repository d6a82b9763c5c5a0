"""When the experts of this process's ranks are placed.

    before the first request   as plan/experts.parquet says, or by a calibration on pieces of the job's prompts
    while ranks compute        again, when what they count says that the busiest rank could have less to do

Moving costs: the ranks wait for it. So experts move when their loads have drifted from those they were placed for by
more than chance explains, when that is still so at the next look, with tokens that the new placement does not know, and
when what it saves of the time left is more than what moving takes. Outputs do not depend on it.
"""

import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from batchinfer.config import VALUE_BYTES, JobConfig
from batchinfer.controller.expert_history import ExpertHistory
from batchinfer.controller.expert_loads import ExpertLoads
from batchinfer.controller.expert_proposals import START, MoveCosts, Proposal, load_balancer
from batchinfer.model.config import ModelConfig
from batchinfer.progress import Count, note
from batchinfer.protocol.messages import ExpertCounts, ExpertSlots

LOOKS = 32  # at the ranks' counts in a job, about; but no more often than every
LEAST_TOKENS, MOST_TOKENS = 512, 65536  # tokens of a rank, and no less often
TRUST = 10.0  # loads are expected to stay as they are for this multiple of the time since the latest placement


class ExpertPlacer:
    """Looks at the ranks' counts now and then, and decides.

    Args:
        job_tokens: prompt tokens that the whole job computes.
        progress: requests of the job, for the time that is left.
    """

    def __init__(
        self, history: ExpertHistory, job: JobConfig, model: ModelConfig, progress: Count, *, job_tokens: int
    ) -> None:
        self.history, self._progress, self._num_ranks = history, progress, job.cluster.num_ranks
        least, most = LEAST_TOKENS * self._num_ranks, MOST_TOKENS * self._num_ranks
        self._interval = min(max(job_tokens / LOOKS, least), most)
        self._loads = ExpertLoads(history.groups, self._interval, model.num_experts_per_tok)
        value_bytes = {"fp8": 1, "int4": 0.5}.get(job.model.dtype, VALUE_BYTES[job.model.dtype])
        self._costs = MoveCosts(int(3 * model.hidden_size * model.moe_intermediate_size * value_bytes))
        self._num_tokens, self._next_look = 0, self._interval
        self._first_step_s: float | None = None
        self._placed_s = time.monotonic()
        self._may_calibrate = history.is_in_order
        self._calibrating: set[int] = set()  # ranks that run their part
        self._asked: set[int] = set()  # ranks whose counts are on their way
        self._placing: Future[dict[str, Proposal]] | None = None
        self._unproved: dict[str, Proposal] = {}  # by role: to be tried with tokens that they were not made for
        self._moving: list[str] = []  # groups whose ranks are to be told
        self._on_the_move: set[int] = set()  # ranks that were
        if self._may_calibrate:
            threading.Thread(target=load_balancer, name="load balancer", daemon=True).start()

    @property
    def is_preparing(self) -> bool:
        """Whether requests have to wait, since the calibration runs or experts move because of it."""
        return bool(self._calibrating or self._moving or self._on_the_move) and self._first_step_s is None

    def start_calibration(self, ranks: list[int]) -> bool:
        """Whether these ranks are to run a calibration now; it is tried once, whatever becomes of it."""
        wanted, self._may_calibrate = self._may_calibrate, False
        self._calibrating = set(ranks) if wanted else set()
        return wanted

    def calibrated(self, rank: int, tokens: list[list[int]]) -> None:
        """A rank has run its part; after the last one the experts are placed, before anything else happens."""
        self._loads.take_calibration(np.array(tokens, dtype=np.float64))
        self._calibrating.discard(rank)
        if not self._calibrating:
            # chance or not: nothing better is known, and nobody has to wait but the start
            known = {role: (load, 0.0) for role, (load, _) in self._loads.of_groups().items()}
            self._place(self.history.propose(known), "calibration", math.inf)

    def step(self, num_tokens: int) -> None:
        """A rank has ended a step of this number of tokens."""
        self._first_step_s = self._first_step_s or time.monotonic()
        self._num_tokens += num_tokens

    def should_count(self) -> bool:
        """Whether the ranks are to be asked for their counts now."""
        is_busy = self._asked or self._placing is not None
        if not self.history.groups or is_busy or self._num_tokens < self._next_look:
            return False
        self._next_look = self._num_tokens + self._interval
        self._asked = set(range(self._num_ranks))
        return True

    def add_counts(self, rank: int, counts: ExpertCounts) -> None:
        """What one rank has counted; when all that were asked have said it, it is looked at."""
        if not self.history.groups:
            return
        self._loads.take(rank, counts)
        if rank in self._asked:
            self._asked.discard(rank)
            if not self._asked:
                self._look()

    def moved(self, rank: int, seconds: float) -> None:
        """A rank has taken in the experts that it was told to hold."""
        self._on_the_move.discard(rank)
        self._costs.moved(seconds)

    def ranks_died(self) -> None:
        """What was on its way is lost; when they are started again their experts are where they should be."""
        self._asked.clear()
        self._calibrating.clear()
        self._moving.clear()
        self._on_the_move.clear()
        self._loads.ranks_died()

    def take_placed(self, ranks_of_role: Mapping[str, list[int]]) -> dict[int, ExpertSlots]:
        """Where ranks are to move their experts now; each is named once."""
        if self._placing is not None and self._placing.done():
            self._unproved, self._placing = self._placing.result(), None
            self._loads.start_window()
        slots_of_rank: dict[int, ExpertSlots] = {}
        for role in self._moving:
            slots = self.history.slots(role)
            assert slots is not None, "it has just been placed"
            slots_of_rank |= dict.fromkeys(ranks_of_role[role], slots)
        self._moving = []
        self._on_the_move |= slots_of_rank.keys()
        return slots_of_rank

    def _look(self) -> None:
        """Take what has proved better with tokens that it was not made for; look for something better elsewhere."""
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
        """Let the ranks move their experts, where it pays for the time for which loads are to stay as they are."""
        current = {role: self.history.current(role) for role in proposals}
        placed = {role: one for role, one in proposals.items() if self._costs.pays(current[role], one, left_s)}
        if proposals and not placed:
            self._interval *= 2  # the next look would say the same
        for role, proposal in placed.items():
            self._costs.start(current[role], proposal.tables)
            note(_told(role, made_by, proposal))
        self.history.add({role: proposal.tables for role, proposal in placed.items()}, made_by)
        self._moving += placed
        self._placed_s = time.monotonic() if placed else self._placed_s

    def _left_s(self) -> float:
        """Seconds for which loads are expected to stay as they are: at most until the job is done."""
        now_s = time.monotonic()
        worked_s = now_s - (self._first_step_s or now_s)
        done, total = self._progress.count, self._progress.total
        left_s = worked_s * (total - done) / done if done else worked_s
        return min(left_s, TRUST * (now_s - self._placed_s))


def _told(role: str, made_by: str, proposal: Proposal) -> str:
    """A placement for a person."""
    ranks = "" if role == "both" else f" of {role} ranks"
    by = "a calibration" if made_by == "calibration" else "the loads measured"
    return (
        f"experts{ranks} placed by {by}: busiest rank {proposal.tables.max_over_mean:.3f} times the mean, "
        f"{proposal.before:.3f} before"
    )
