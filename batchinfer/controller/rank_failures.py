"""Decision whether deaths of ranks end the run, and which request caused them."""

import time

from batchinfer.controller.dealer import Dealer
from batchinfer.launch.dead_ranks import RanksDiedError
from batchinfer.records import BatchinferError, Completion, Request

GRACE_S = 2.0  # ranks notice a silent rank first; the controller acts only when no rank can
# If ranks die repeatedly before they have any request, no request is the cause: end after this many starts in a row
EXPLAINED_STARTS = 3  # in which a rank reported an error
KILLED_STARTS = 50  # in which a rank was killed without an error,
KILLED_STARTS_LONG = 10  # or this many, if they took longer than
KILLED_STARTS_S = 600.0
GIVEN_UP = 3  # requests without a result, if no step has succeeded yet


class RanksFailError(BatchinferError):
    """Error: the ranks fail independently of their requests, so restarting them does not help."""


class RankFailures:
    """Counter of failed starts and of requests that ended as errors because ranks died.

    Args:
        collective_s: seconds after which a rank notices that another rank does not answer.
    """

    def __init__(self, dealer: Dealer, collective_s: float) -> None:
        self._dealer = dealer
        self._collective_s = collective_s
        self._failed_starts = self._explained_starts = 0  # in a row
        self._num_given_up = 0
        self._has_stepped = False
        self._last_step_s = self._last_signal_s = time.monotonic()

    def ranks_started(self) -> None:
        """Begin to watch for silence, since the ranks begin to step."""
        self._last_signal_s = time.monotonic()

    def step_ended(self) -> None:
        """Reset the count of failed starts, since a rank has ended a step."""
        self._has_stepped = True
        self._failed_starts = self._explained_starts = 0
        self._last_step_s = time.monotonic()

    def silence(self, *, has_heard: bool) -> str | None:
        """Return why all ranks must be ended, if they have work but have ended no step for too long; else None.

        Args:
            has_heard: whether a rank has sent a message since the last call.
        """
        if has_heard or not self._dealer.num_running:
            self._last_signal_s = time.monotonic()
        silence_s = time.monotonic() - self._last_signal_s
        return f"no rank has ended a step for {silence_s:,.0f} s" if silence_s > self._collective_s + GRACE_S else None

    def ranks_died(self, death: RanksDiedError) -> Completion | None:
        """Put back the running requests.

        Returns:
            The error row of the request that is the cause, or None.

        Raises:
            RanksFailError: no request is the cause, or every one would be.
        """
        is_failed_start = not self._dealer.num_running
        self._failed_starts = self._failed_starts + 1 if is_failed_start else 0
        self._explained_starts = self._explained_starts + 1 if is_failed_start and death.has_reason else 0
        took_long = time.monotonic() - self._last_step_s > KILLED_STARTS_S
        limit = KILLED_STARTS_LONG if took_long else KILLED_STARTS
        if self._explained_starts >= EXPLAINED_STARTS or self._failed_starts >= limit:
            raise RanksFailError(
                f"the ranks ended {self._failed_starts} times in a row before they had anything to do; the last time: "
                f"{death}"
            )
        request = self._dealer.ranks_died()
        if request is None:
            return None
        self._num_given_up += 1
        if self._num_given_up >= GIVEN_UP and not self._has_stepped:
            raise RanksFailError(f"the ranks end with whatever request they run; the last time: {death}")
        return _given_up(request, str(death))


def _given_up(request: Request, reason: str) -> Completion:
    """Return the error row of a request that kills the ranks."""
    return Completion(
        key=request.key,
        unit=request.unit,
        text="",
        token_ids=[],
        finish_reason="error",
        stop_reason=None,
        prompt_tokens=len(request.token_ids),
        cached_memory_tokens=0,
        cached_disk_tokens=0,
        kv_tokens_sum=0,
        error=f"the ranks ended twice while only this request was running; the last time: {reason}",
        structured_valid=None if request.sampling.structured is None else False,
    )
