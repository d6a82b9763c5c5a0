"""The choice between whole steps and steps in two micro-batches: the faster way, by measured step times.

Two micro-batches hide the exchange of rows behind computing, and they cost: every operation runs twice, on half the
rows. Which of both weighs more is measured. A group begins with whole steps. As long as these wait for the exchange
for less than a twentieth of their time, or nothing moves while a rank computes (shared memory), there is nothing to
gain, and no step runs otherwise. Else some steps are tried both ways:

    whole, halves | halves, whole | whole, halves | ...

Each pair of neighbours gives one comparison of the time per row, which noise of the machine disturbs less than it does
a mean over many steps. The trial ends when one way leads by four comparisons, or at once when one way is far quicker.
It is repeated now and then; all trials together take at most a fiftieth of the time. Decode steps of other sizes are
decided apart; until there is time for their own trial, they run as the nearest size does.

All ranks of a group have to run the same way. So each rank tells the others what it measured in the vote before a step
(step_vote.py), and each feeds the measurements of all ranks to a rule of its own. Every operation here is exact or
rounds alike on all machines, so equal rules come to equal conclusions.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from batchinfer.parallel.spans import SpanLog

LEAST_GAIN = 1.03  # least ratio of the times of whole steps and of steps in halves at which halves win
_FAR_GAIN = 1.25  # ratio at which, or at whose inverse, two comparisons are enough
_LEAD = 4  # comparisons by which the faster way has to lead
_MOST_PAIRS = 11  # comparisons after which the majority decides; odd
_LEAST_HIDEABLE = 1 / 20  # least share of a whole step that computing could hide, for a trial
_LATEST_STEPS = 5  # steps whose median share counts
_TRIAL_SHARE = 1 / 50  # largest share of time for trials
_LARGEST_RATIO = 2.0  # between the rows of steps that are compared
UNKNOWN = -1


class StepTime(NamedTuple):
    """Measurements of one rank's latest step; all 0 if there is none.

    hideable_us: time in which the rank waited for rows that could have travelled while it computed; at most the time
        for which it computed. UNKNOWN: the rank cannot tell, as on a GPU.
    """

    rows: int = 0
    step_us: int = 0
    hideable_us: int = 0


class Way(NamedTuple):
    """The way in which the next step runs; during a trial no CUDA graph is used or recorded, for a fair comparison."""

    in_pairs: bool
    is_trial: bool


def is_quicker_in_pairs(gains: Sequence[float]) -> bool | None:
    """Return whether steps are quicker in two micro-batches; None when more comparisons are needed.

    Args:
        gains: the ratio of each comparison: time of the whole step / time of the step in halves.
    """
    if len(gains) == 2 and all(gain >= _FAR_GAIN for gain in gains):
        return True
    if len(gains) == 2 and all(gain * _FAR_GAIN <= 1 for gain in gains):
        return False
    lead = sum(1 if gain >= LEAST_GAIN else -1 for gain in gains)
    return lead > 0 if abs(lead) >= _LEAD or len(gains) >= _MOST_PAIRS else None


@dataclass(slots=True)
class _Step:
    """The time and rows of a step that is compared with another, run whole or in two micro-batches (`in_pairs`)."""

    in_pairs: bool
    rows: int
    seconds: float

    @property
    def row_s(self) -> float:
        return self.seconds / self.rows


@dataclass(slots=True)
class _Trial:
    """Steps of one size that are run both ways."""

    gains: list[float] = field(default_factory=list)
    last: _Step | None = None  # waits for a step of the other way to be compared with
    next_in_pairs: bool = False

    def add(self, step: _Step) -> None:
        """Compare the step with the one before, if that ran the other way and was of about the same size."""
        last = self.last
        if last is None or last.in_pairs == step.in_pairs or not _are_alike(last, step):
            self.last, self.next_in_pairs = step, not step.in_pairs
            return
        whole, halves = (last, step) if step.in_pairs else (step, last)
        self.gains.append(whole.row_s / halves.row_s)
        self.last, self.next_in_pairs = None, step.in_pairs  # alternating the order cancels steady changes


@dataclass(slots=True)
class _Size:
    """Measurements and decision of steps of about one size."""

    decision: bool | None = None
    trial: _Trial | None = None
    hideable: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST_STEPS))  # shares of whole steps
    run_s: float = 0.0
    trial_s: float = 0.0

    @property
    def may_gain(self) -> bool:
        """Whether whole steps, as far as they ran, waited long enough for rows that computing could hide."""
        return not self.hideable or statistics.median(self.hideable) >= _LEAST_HIDEABLE


class OverlapRule:
    """The decision for steps of one kind, by all ranks' measurements of earlier steps.

    Args:
        by_size: decide separately for steps of different numbers of rows.
    """

    def __init__(self, *, by_size: bool) -> None:
        self._by_size = by_size
        self._sizes: dict[int, _Size] = {}
        self._latest: int | None = None  # size of the latest step; the coming one is taken to be like it

    def choose(self) -> Way:
        """Return the way of the next step."""
        if self._latest is None:
            return Way(in_pairs=False, is_trial=True)  # the first step of a kind warms up, and is not compared
        trial = self._sizes[self._latest].trial
        if trial is not None:
            return Way(trial.next_in_pairs, is_trial=True)
        return Way(self._decision(self._latest), is_trial=False)

    def note(self, times: Sequence[StepTime], *, in_pairs: bool) -> None:
        """Take in each rank's measurements of a step that could have run either way."""
        rows, seconds = max(time.rows for time in times), max(time.step_us for time in times) / 1e6
        if rows == 0 or seconds == 0:
            return
        name = rows.bit_length() if self._by_size else 0
        before, self._latest = self._latest, name
        size = self._sizes.setdefault(name, _Size())
        if size.trial is not None and name != before:
            size.trial.last = None  # steps that are compared follow each other
        size.run_s += seconds
        if not in_pairs:
            size.hideable.append(max(map(_hideable_share, times)))
        step = _Step(in_pairs, rows, seconds)
        if size.trial is not None:
            self._try(size, size.trial, step)
        elif self._may_try(size):
            size.trial = _Trial()
            if before is not None:
                size.trial.add(step)

    def _try(self, size: _Size, trial: _Trial, step: _Step) -> None:
        size.trial_s += step.seconds
        trial.add(step)
        decision = is_quicker_in_pairs(trial.gains)
        if decision is not None:
            size.decision, size.trial = decision, None

    def _may_try(self, size: _Size) -> bool:
        """Return whether a trial of this size begins: time can be gained, and trials are within their share."""
        if not size.may_gain:
            return False
        sizes = self._sizes.values()
        run_s, trial_s = sum(other.run_s for other in sizes), sum(other.trial_s for other in sizes)
        return trial_s <= _TRIAL_SHARE * run_s and size.trial_s <= _TRIAL_SHARE * size.run_s

    def _decision(self, name: int) -> bool:
        """Return the decision for this size, else for the nearest size that has one."""
        own = self._sizes[name]
        if not own.may_gain and own.decision is None:
            return False
        decided = [(abs(other - name), other) for other, size in self._sizes.items() if size.decision is not None]
        return bool(decided) and bool(self._sizes[min(decided)[1]].decision)


class MeasuredOverlap:
    """A rank's decisions for steps of all kinds; equal on all ranks of a group."""

    def __init__(self) -> None:
        self._rules = {"prefill": OverlapRule(by_size=False), "decode": OverlapRule(by_size=True)}
        self._running: tuple[str, bool] | None = None  # kind and way of the step that was chosen last
        self._latest = StepTime()

    def measure(self, rows: int, seconds: float, log: SpanLog) -> None:
        """Keep this rank's measurements of the latest step for its next vote."""
        hideable_s = log.hideable_s()
        hideable_us = UNKNOWN if hideable_s is None else round(1e6 * hideable_s)
        self._latest = StepTime(rows, round(1e6 * seconds), hideable_us)

    def take_latest(self) -> StepTime:
        """Return this rank's latest measurements, once."""
        latest, self._latest = self._latest, StepTime()
        return latest

    def choose(self, kind: str, *, can_pair: bool) -> Way:
        """Return the way of the next step.

        Args:
            kind: "prefill" or "decode".
            can_pair: whether some rank has rows for two micro-batches; else the step runs whole and is not compared.
        """
        if not can_pair:
            self._running = None
            return Way(in_pairs=False, is_trial=False)
        way = self._rules[kind].choose()
        self._running = kind, way.in_pairs
        return way

    def learn(self, times: Sequence[StepTime]) -> None:
        """Take in each rank's measurements of the step that was chosen last."""
        if self._running is not None:
            kind, in_pairs = self._running
            self._running = None
            self._rules[kind].note(times, in_pairs=in_pairs)


def _are_alike(one: _Step, other: _Step) -> bool:
    return max(one.rows, other.rows) <= _LARGEST_RATIO * min(one.rows, other.rows)


def _hideable_share(time: StepTime) -> float:
    if time.hideable_us == UNKNOWN:
        return 1.0
    return time.hideable_us / time.step_us if time.step_us else 0.0
