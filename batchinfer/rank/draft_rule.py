"""The number of tokens to draft for each running request, by the times and guesses measured so far on this rank.

A step over B requests with J guesses each runs B * (1 + J) rows and gives 1 + c1 + c1 c2 + ... tokens a request, where
c is the share of guesses that are right among those whose predecessors were right. Where a step waits for weights, or
for the work around it, more rows cost little; where it computes they cost as much as they give.

A step without guesses is measured first. So that guesses are tried, they are assumed to be right at first, and more
rows than were measured to cost as much per row as the last ones, or nothing if one number of rows or none is known.
Old measurements expire, and an unused guess is trusted a little more with every step. Where guesses do not pay nothing
is measured for a while, each time longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

MOST_GUESSES = 4
LEAST_GAIN = 1.15  # least ratio of tokens per second with and without guesses at which guesses pay: times vary
_MOST_AGE = 512  # steps after which a time is forgotten
_PLAIN_AGE = 64  # steps with guesses after which one without is measured again
_TIMES = 9  # latest times kept of a size; the least counts, as other processes only add to them
_LEAST_TIMES = 3
_KEPT_STEPS = 8  # for which a decision for guesses holds
_LONGEST_REST = 512  # steps for which a decision against guesses holds, without measurement; at first _PLAIN_AGE
_FEW_REQUESTS = 4  # up to this number more rows are tried at once; with more requests once in _TRIAL_STEPS
_TRIAL_STEPS = 64
_LEAST_NEWS = 1 / 32  # least weight of a new guess in the mean of all guesses
_HOPE = 1 / 4096


Point = tuple[int, float]  # size of a step, seconds


class StepTimes:
    """Seconds of steps by their size.

    Args:
        most_age: steps after which a time is forgotten; None: none is.
    """

    def __init__(self, most_age: int | None = None) -> None:
        self._most_age = most_age
        self._times: dict[int, deque[float]] = {}
        self._least: dict[int, float] = {}  # of sizes with enough times
        self._last: dict[int, int] = {}  # the step in which the latest time came

    def note(self, size: int, seconds: float, step: int) -> None:
        """Take in the time of a step of this size."""
        name = _class_of(size)
        if self._is_old(name, step):
            self._times.pop(name)
            self._least.pop(name, None)
        times = self._times.setdefault(name, deque(maxlen=_TIMES))
        times.append(seconds)
        self._last[name] = step
        if len(times) >= _LEAST_TIMES:
            self._least[name] = min(times)

    def of(self, size: int, step: int, least: Point | None = None) -> float | None:
        """Return the measured seconds of a size, interpolated between its neighbours; None if they are not known.

        Args:
            least: a size and its seconds, which replace the measurements of this size and of smaller ones.
        """
        known = self._known(step, least)
        below = max((other for other in known if other <= _class_of(size)), default=None)
        above = min((other for other in known if other >= _class_of(size)), default=None)
        if below is None or above is None:
            return None
        share = (_class_of(size) - below) / (above - below) if above > below else 0.0
        return known[below] + share * (known[above] - known[below])

    def hoped(self, size: int, step: int, least: Point | None = None) -> float | None:
        """Return the seconds of a size as `of` does, extrapolated to twice the largest size.

        The two largest sizes give the slope; with a single known size it is 0.
        """
        found = self.of(size, step, least)
        known = sorted((other, seconds) for other, seconds in self._known(step, least).items() if other <= size)
        if found is not None or not known or _class_of(size) > 2 * known[-1][0]:
            return found
        (last, seconds), before = known[-1], known[-2:-1]
        if not before:
            return seconds
        return seconds + (size - last) * max(0.0, seconds - before[0][1]) / (last - before[0][0])

    def age(self, size: int, step: int) -> int:
        """Return the number of steps since this size was measured, or since the first step if it was not."""
        return step - self._last.get(_class_of(size), 0)

    def _known(self, step: int, least: Point | None) -> dict[int, float]:
        known = {name: seconds for name, seconds in self._least.items() if not self._is_old(name, step)}
        if least is None:
            return known
        first, seconds = _class_of(least[0]), least[1]
        return {first: seconds} | {name: known[name] for name in known if name > first}

    def _is_old(self, name: int, step: int) -> bool:
        return self._most_age is not None and step - self._last.get(name, step) > self._most_age


class DraftRule:
    """The choice of the number of guesses by measured decode steps; it changes the speed and never a token."""

    def __init__(self) -> None:
        self._step = 0
        self._plain = StepTimes(_MOST_AGE)  # by requests
        self._drafted = StepTimes(_MOST_AGE)  # by rows
        self._drafts = [StepTimes() for _ in range(MOST_GUESSES)]  # by requests
        self._right = [1.0] * MOST_GUESSES  # share of right guesses, among those whose predecessors were right
        self._tried = [0] * MOST_GUESSES
        self._hoped_step = 0  # up to which guesses are trusted more for not being used
        self._kept: dict[int, _Decision] = {}  # by requests
        self._rests: dict[int, int] = {}  # steps, by requests
        self._last_trial = 0  # the step

    def choose(self, num_requests: int) -> int:
        """Return the guesses, 0 .. MOST_GUESSES, for each request in the next step; call it once for each step."""
        num_guesses = self._decision(num_requests).num_guesses
        self._step += 1
        return num_guesses

    def may_pay(self, num_requests: int) -> bool:
        """Return whether guesses are made in the next step, or may still turn out to pay."""
        decision = self._decision(num_requests)
        return decision.is_open or decision.num_guesses > 0

    def note_step(self, num_requests: int, seconds: float) -> None:
        """Take in the time of a step without guesses, with all work around it."""
        self._plain.note(num_requests, seconds, self._step)

    def note_drafted_step(self, num_rows: int, seconds: float) -> None:
        """Take in the time of a step with guesses, with all work around it but the drafting; rows include guesses."""
        self._drafted.note(num_rows, seconds, self._step)

    def note_drafts(self, num_requests: int, num_guesses: int, seconds: float) -> None:
        """Take in the time of drafting this number of tokens for each of these requests."""
        self._drafts[num_guesses - 1].note(num_requests, seconds, self._step)

    def note_right(self, tried: Sequence[int], right: Sequence[int]) -> None:
        """Take in the numbers of first, second, ... guesses that were tried, and that were right."""
        for guess, (num_tried, num_right) in enumerate(zip(tried, right, strict=True)):
            if num_tried:
                self._tried[guess] += num_tried
                news = min(1.0, max(_LEAST_NEWS, 1 / (1 + self._tried[guess])) * num_tried)
                self._right[guess] += news * (num_right / num_tried - self._right[guess])

    def tokens_per_request(self, num_guesses: int) -> float:
        """Return the expected number of tokens per request and step."""
        tokens = chance = 1.0
        for right in self._right[:num_guesses]:
            chance *= right
            tokens += chance
        return tokens

    def _decision(self, num_requests: int) -> _Decision:
        name = _class_of(num_requests)
        kept = self._kept.get(name)
        if kept is None or self._step >= kept.end_step:
            kept = self._kept[name] = self._rest_of_fewer(name) or self._decide(num_requests)
        return kept

    def _rest_of_fewer(self, name: int) -> _Decision | None:
        """Return a current decision against guesses with fewer requests, which holds for more, too; else None."""
        rests = [kept for other, kept in self._kept.items() if other < name and kept.is_rest]
        return next((kept for kept in rests if self._step < kept.end_step), None)

    def _decide(self, num_requests: int) -> _Decision:
        step, name = self._step, _class_of(num_requests)
        plain_s = self._plain.of(num_requests, step)
        if plain_s is None or self._plain.age(num_requests, step) > _PLAIN_AGE:
            return _Decision(0, True, step + 1)
        self._hope()
        may_try = num_requests <= _FEW_REQUESTS or step - self._last_trial >= _TRIAL_STEPS
        best, least_s, is_trial = 0, plain_s / LEAST_GAIN, False
        for guesses in range(1, MOST_GUESSES + 1):
            num_rows = num_requests * (1 + guesses)
            step_s = self._drafted.hoped(num_rows, step, (num_requests, plain_s))
            is_known = self._drafted.of(num_rows, step, (num_requests, plain_s)) is not None
            if step_s is None or not (is_known or may_try):
                break
            draft_s = self._drafts[guesses - 1].hoped(num_requests, step) or 0.0
            token_s = (step_s + draft_s) / self.tokens_per_request(guesses)
            if token_s < least_s:
                best, least_s, is_trial = guesses, token_s, not is_known
        if best == 0:
            rest = self._rests[name] = min(_LONGEST_REST, 2 * self._rests.get(name, _PLAIN_AGE // 2))
            return _Decision(0, False, step + rest)
        self._rests.pop(name, None)
        if is_trial:
            self._last_trial = step
        return _Decision(best, False, step + (1 if is_trial else _KEPT_STEPS))

    def _hope(self) -> None:
        share = (1 - _HOPE) ** (self._step - self._hoped_step)
        self._right = [1 - share * (1 - right) for right in self._right]
        self._hoped_step = self._step


@dataclass(frozen=True, slots=True)
class _Decision:
    num_guesses: int
    is_open: bool  # steps without guesses are to be measured first
    end_step: int  # the step in which it is decided again

    @property
    def is_rest(self) -> bool:
        return self.num_guesses == 0 and not self.is_open


def _class_of(size: int) -> int:
    """Return the class of sizes that are measured together: 1 .. 8, then sizes with the same first three bits."""
    dropped = max(0, size.bit_length() - 3)
    return size >> dropped << dropped
