"""Progress of a job: in rows for people, and in tokens for the time left.

The rows of a job are known, while the number of output tokens is an estimate until the end. Rows that are not
computed (duplicates, bad rows) count in proportion to the finished requests.

The plan has the prompt tokens to compute and the expected output tokens of the whole job. A request that ended here
counts with its real tokens. Other requests count with their share of the plan's figures for their unit. So the progress
reaches 100 % whatever the lengths of the outputs are.

    tokens    elsewhere, or before this command  | ran here             | left
              by the plan                        | counted by the ranks | by the plan, corrected
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batchinfer.clock import unix_s
from batchinfer.config import ClusterConfig
from batchinfer.host_info import task_name
from batchinfer.progress import Bar, Count, Meter, duration
from batchinfer.protocol.messages import StepRecord
from batchinfer.records import PHASES, Completion
from batchinfer.run.units.planned_tokens import planned_tokens
from batchinfer.sanitize import count_text

SPEED_S = 5.0  # window of the displayed speed


@dataclass(slots=True)
class Pace:
    """Seconds per prompt token in prefill, seconds per output token in decode, and recent tokens per second."""

    cluster: ClusterConfig
    tokens_per_s: float = 0.0
    _busy_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # mean over the ranks
    _tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    _recent_tokens: int = 0
    _recent_since_s: float | None = None  # None: no step since the ranks' start
    _has_measured: bool = False  # over a whole window

    def add(self, record: StepRecord) -> None:
        """Add a step of a rank."""
        is_prefill, now_s = record.kind == "prefill", time.monotonic()
        num_ranks = self.cluster.num_prefill_ranks if is_prefill else self.cluster.num_decode_ranks
        self._busy_s[record.kind] += record.duration_s / num_ranks
        self._tokens[record.kind] += record.new_tokens if is_prefill else record.output_tokens
        if self._recent_since_s is None:
            self._recent_tokens, self._recent_since_s = 0, now_s - record.duration_s
        self._recent_tokens += record.new_tokens
        seconds = now_s - self._recent_since_s
        is_enough = seconds >= SPEED_S
        if is_enough or not self._has_measured:
            self.tokens_per_s = self._recent_tokens / max(seconds, 1e-3)
        if is_enough:
            self._recent_tokens, self._recent_since_s, self._has_measured = 0, now_s, True

    def ranks_ended(self) -> None:
        """Reset the recent speed until the ranks have started again."""
        self._recent_since_s = None

    def seconds(self, left: np.ndarray) -> float | None:
        """Return the seconds for [2] prompt and output tokens; None: a needed phase has not been measured yet."""
        parts = []
        for phase, tokens in zip(PHASES, left.tolist(), strict=True):
            if tokens and not self._tokens[phase]:
                return None
            parts.append(tokens * self._busy_s[phase] / max(self._tokens[phase], 1))
        return sum(parts) if self.cluster.mode == "colocated" else max(parts)


@dataclass(slots=True)
class SweepCount:
    """Counts of the sweeps of ranks that stream their weights; `planned` is the forecast, None without one."""

    planned: int | None = None
    num_ranks: int = 1
    num_bytes: int = 0
    wait_s: float = 0.0
    _num_begun: int = 0  # steps that were the first of their rank's sweep
    _seconds: float = 0.0

    def add(self, record: StepRecord) -> None:
        """Add a step; the first one of each sweep has the sweep's bytes and waiting."""
        self._num_begun += record.streamed_bytes > 0
        self.num_bytes += record.streamed_bytes
        self.wait_s += record.weights_wait_s
        self._seconds += record.duration_s

    def figures(self) -> dict[str, Any]:
        """Return the number of the current sweep, the bytes read per second of a rank, and its seconds of waiting."""
        speed = self.num_bytes / self._seconds if self._seconds else None
        return {
            "sweep": self._num_begun // self.num_ranks + 1,
            "planned_sweeps": self.planned,
            "read_bytes_per_s": speed,
            "waited_s": self.wait_s / self.num_ranks,
        }


class WorkProgress(Meter):
    """Progress of this controller, and of other controllers by the units that they complete.

    Args:
        rows: all units, rows of plan/units, without reused answers.
        open_units: units that are not done.
        counts: counts of the plan.
        started_s: Unix time when the command started; None: now.
    """

    def __init__(
        self,
        rows: list[dict[str, Any]],
        open_units: list[int],
        counts: dict[str, Any],
        cluster: ClusterConfig,
        *,
        started_s: float | None = None,
    ) -> None:
        self._plan_U2 = planned_tokens(rows, counts)
        self._requests_U = np.array([row["num_requests"] for row in rows], dtype=np.int64)
        self._work_s: float | None = counts["work_s"]
        self._pace = Pace(cluster)
        num_requests = int(self._requests_U.sum())
        self.requests = Count("work", num_requests, earlier=num_requests - int(self._requests_U[open_units].sum()))
        self.rows: int = counts["rows"]
        self._started_s = unix_s() if started_s is None else started_s
        self._delivered = 0  # tokens of prompts, cached ones included, and of outputs in the ranks' steps
        self._planned = self._plan_U2.sum(axis=0)  # prompt and output tokens, as in all pairs below
        self._elsewhere = self._planned - self._plan_U2[open_units].sum(axis=0)
        self._earlier = self._elsewhere.copy()  # done before this command
        self._ran, self._kept, self._committed = np.zeros(2), np.zeros(2), np.zeros(2)
        self._planned_of_kept = np.zeros(2)
        self._phase: str | None = None  # of the latest step since the ranks' start
        self.sweeps: SweepCount | None = None  # where weights are streamed
        self.tokens = Count("tokens", int(self._planned.sum()), done=int(self._elsewhere.sum()))

    @property
    def has_counted(self) -> bool:  # type: ignore[override]
        return bool(self._ran.any() or self._kept.any())

    def done_elsewhere(self, unit: int, num_requests: int | None = None) -> None:
        """Count a unit that another controller completed, or `num_requests` that one finished of a unit held here."""
        count = int(self._requests_U[unit]) if num_requests is None else num_requests
        tokens = self._plan_U2[unit] * (count / max(self._requests_U[unit], 1))
        self._elsewhere += tokens
        if num_requests is not None:
            self._earlier += tokens
        self.requests.advance(count)

    def opened(self, unit: int, num_missing: int) -> None:
        """Record that this controller works on a unit with `num_missing` requests without a result."""
        num_planned = int(self._requests_U[unit])
        not_accepted = max(0, num_missing - num_planned)  # reused answers
        self.requests.set(self.requests.count, self.requests.total + not_accepted)
        self.done_elsewhere(unit, max(0, num_planned - num_missing))

    def reopened(self, units: list[int]) -> None:
        """Count done units as open again."""
        self._elsewhere -= self._plan_U2[units].sum(axis=0)
        self.requests.advance(-int(self._requests_U[units].sum()))

    def step(self, record: StepRecord) -> None:
        """Count a step of a rank."""
        self._phase = record.kind
        prompt_tokens = record.new_tokens if record.kind == "prefill" else 0
        self._ran += (prompt_tokens, record.output_tokens)
        self._delivered += prompt_tokens + record.cached_tokens * (record.kind == "prefill") + record.output_tokens
        self._pace.add(record)
        if self.sweeps is not None:
            self.sweeps.add(record)
        if self.tokens.is_due:
            self._update()

    def finished(self, completions: list[Completion]) -> None:
        """Count requests that have ended, with an output or an error row."""
        if not completions:
            return
        computed = sum(completion.computed_tokens for completion in completions)
        self._kept += (computed, sum(len(completion.token_ids) for completion in completions))
        for unit, count in Counter(completion.unit for completion in completions).items():
            self._planned_of_kept += self._plan_U2[unit] * (count / max(self._requests_U[unit], 1))
        self.requests.advance(len(completions))
        if self.tokens.is_due:
            self._update()

    def committed(self) -> None:
        """Note that all ended requests are on disk."""
        self._committed = self._kept.copy()

    def ranks_ended(self) -> None:
        """Subtract the tokens of requests that have not ended, since they run again."""
        self._ran, self._phase = self._kept.copy(), None
        self._pace.ranks_ended()

    @property
    def done(self) -> np.ndarray:
        """[2] done prompt and output tokens of the job."""
        return self._elsewhere + self._ran

    @property
    def planned(self) -> np.ndarray:
        """[2] prompt and output tokens of the job: planned ones, corrected by those of ended requests."""
        return np.maximum(self._planned + self._kept - self._planned_of_kept, self.done)

    def left_s(self) -> float | None:
        """Return the seconds until the job is done if all controllers keep their speed; None if not known yet."""
        alone_s = self._alone_s()
        own = float(self._ran.sum())
        others = float((self._elsewhere - self._earlier).sum())
        return None if alone_s is None else alone_s * (own / (own + others) if own else 1.0)

    def _alone_s(self) -> float | None:
        """Return the seconds that these ranks alone need for the rest: planned at first, later by measured speeds."""
        planned, done = self.planned, self.done
        left = planned - done
        share = float(done.sum() / planned.sum()) if planned.sum() else 1.0
        by_plan_s = None if self._work_s is None else self._work_s * (1 - share)
        # outputs to come are expected to deviate from the plan as the ended ones do, the more of them have ended
        if self._planned_of_kept[1]:
            known = float(self._planned_of_kept[1] / max(self._planned[1], 1.0))
            left[1] *= 1 - known + known * self._kept[1] / self._planned_of_kept[1]
        measured_s = self._pace.seconds(left)
        if measured_s is None:
            return by_plan_s
        return measured_s if by_plan_s is None else share * measured_s + (1 - share) * by_plan_s

    @property
    def rows_done(self) -> int:
        """Output rows of the job that are done."""
        if not self.requests.total:
            return self.rows
        return self.rows * min(self.requests.count, self.requests.total) // self.requests.total

    @property
    def _tokens_per_s(self) -> float:
        """Tokens of prompts and outputs per second since the command's start, end to end."""
        return self._delivered / max(unix_s() - self._started_s, 1e-3)

    def line(self) -> str:
        done, total = self.rows_done, self.rows
        if self._phase is None and not self.has_counted:
            return f"to come: at most {count_text(total - done, 'row')}{self._left()}"
        rows = f"{done / total if total else 1.0:.0%}, {done:,} of {total:,} rows"
        parts = [f"{'waiting' if self._phase is None else 'computing'}: {rows}", *self._details()]
        return "; ".join(parts) + self._left()

    def _details(self) -> tuple[str, str]:
        """Return the speed, and the tokens that ran here."""
        is_alone = task_name() is None and np.array_equal(self._elsewhere, self._earlier)
        prompts, outputs = self._ran.tolist()
        ran = f"{prompts:,.0f} prompt and {outputs:,.0f} output tokens{'' if is_alone else ' by this task'}"
        return f"{self._tokens_per_s:,.0f} tokens/s", ran

    def _left(self) -> str:
        seconds = self.left_s()
        return "" if not seconds else f", {duration(seconds)} left"

    def bars(self) -> list[Bar]:
        if self._phase is None or not self.rows:
            return [Bar(self.line())]
        left = self._left().removeprefix(", ")
        return [Bar("computing", self.rows_done, self.rows, "rows", left, self._details())]

    def figures(self) -> dict[str, Any]:
        in_flight = np.maximum(self._ran - self._committed, 0.0)
        return {
            "phase": self._phase or "waiting",
            "own_tokens": round(float(self._ran.sum())),
            "prompt_tokens_in_flight": round(float(in_flight[0])),
            "output_tokens_in_flight": round(float(in_flight[1])),
            "tokens_per_s": self._pace.tokens_per_s if self._phase is not None else None,
            "alone_s": self._alone_s(),
            **({} if self.sweeps is None else self.sweeps.figures()),
        }

    def _update(self) -> None:
        self.tokens.set(int(self.done.sum()), int(self.planned.sum()))

    def __exit__(self, *error: Any) -> None:
        self._update()
        self.requests.tell()
        self.tokens.tell()
        super().__exit__(*error)
