"""How many tokens to draft for each running request: what pays by the times and guesses measured so far on this rank.

A step of the model over B requests with J guesses each runs B * (1 + J) rows and gives 1 + c1 + c1 c2 + ... tokens per
request, where c is how often a guess is right of which those before it were. Where a step waits for weights more rows
cost little; where it computes, or a step is full, they cost as much as they give.

What was never measured is taken to be as good as it can be, so that it is tried once; what was measured long ago is
forgotten. The plain step is measured first at each number of requests.
"""

from collections import deque
from statistics import median

MOST_GUESSES = 4
LEAST_GAIN = 1.03  # of tokens per second, by which drafting must be better than none
_MOST_AGE = 256  # steps after which a time is measured anew
_TIMES = 5  # of which the median counts
_KEPT_STEPS = 8  # for which a decision holds while as many requests run
_NEWS = 1 / 32  # weight of one guess
_HOPE = 1 / 512  # per step, in which an unused guess is trusted more


class StepTimes:
    """Seconds of steps by their number of rows (or anything else), the latest few of each."""

    def __init__(self) -> None:
        self._times: dict[int, tuple[deque[float], int]] = {}  # and the step in which the last came

    def note(self, size: int, seconds: float, step: int) -> None:
        """A step of this size has run."""
        times, _ = self._times.get(_class_of(size), (deque(maxlen=_TIMES), 0))
        times.append(seconds)
        self._times[_class_of(size)] = times, step

    def of(self, size: int, step: int) -> float | None:
        """As measured not long ago; None: it was not."""
        times, last = self._times.get(_class_of(size), (None, 0))
        return None if times is None or step - last > _MOST_AGE else median(times)

    def hoped(self, size: int, step: int) -> float:
        """As measured, else that of the next smaller size that was: more rows may cost nothing."""
        known = [name for name in self._times if name <= _class_of(size) and self.of(name, step) is not None]
        return self.of(max(known), step) or 0.0 if known else 0.0


class DraftRule:
    """Chooses by what it is told of each decode step; decides about speed and never about a token."""

    def __init__(self) -> None:
        self._step = 0
        self._steps, self._drafts = StepTimes(), [StepTimes() for _ in range(MOST_GUESSES)]
        self._right = [1.0] * MOST_GUESSES  # how often each guess is right of which those before it were
        self._kept: tuple[int, int, int] | None = None  # decision, for how many requests, until which step

    def choose(self, num_requests: int) -> int:
        """Guesses for each of so many requests in the coming step, 0 .. MOST_GUESSES."""
        if self._kept is None or self._kept[1] != num_requests or self._step >= self._kept[2]:
            self._kept = self._best(num_requests), num_requests, self._step + _KEPT_STEPS
        return self._kept[0]

    def note(self, num_rows: int, step_s: float) -> None:
        """A decode step of so many rows took this long, drafting left out."""
        self._steps.note(num_rows, step_s, self._step)
        self._step += 1
        for guess, right in enumerate(self._right):
            self._right[guess] = right + _HOPE * (1 - right)

    def note_drafts(self, num_requests: int, num_guesses: int, draft_s: float) -> None:
        """Drafting so many tokens for each of these requests took this long."""
        self._drafts[num_guesses - 1].note(num_requests, draft_s, self._step)

    def note_right(self, drafted: int, right: int) -> None:
        """Of a request's guesses so many were right before the first wrong one."""
        for guess in range(min(right + 1, drafted)):
            self._right[guess] += _NEWS * ((guess < right) - self._right[guess])

    def tokens_per_request(self, num_guesses: int) -> float:
        """That a step is expected to give."""
        tokens = chance = 1.0
        for guess in range(num_guesses):
            chance *= self._right[guess]
            tokens += chance
        return tokens

    def _best(self, num_requests: int) -> int:
        plain_s = self._steps.of(num_requests, self._step)
        if plain_s is None:
            return 0
        best, least_s = 0, plain_s / LEAST_GAIN
        for guesses in range(1, MOST_GUESSES + 1):
            draft_s = self._drafts[guesses - 1].of(num_requests, self._step) or 0.0
            step_s = max(plain_s, self._steps.hoped(num_requests * (1 + guesses), self._step))
            token_s = (draft_s + step_s) / self.tokens_per_request(guesses)
            if token_s < least_s:
                best, least_s = guesses, token_s
        return best


def _class_of(size: int) -> int:
    """Sizes that are measured together: 1 .. 8, then every number with three significant bits."""
    dropped = max(0, size.bit_length() - 3)
    return size >> dropped << dropped
