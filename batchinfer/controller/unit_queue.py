"""Units claimed one after the other, with their unfinished requests."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from batchinfer.controller.counted_prefixes import CountedPrompt
from batchinfer.controller.dealer import Dealer
from batchinfer.controller.experts.calibration import MOST_UNITS, num_calibration_tokens, prompt_pieces, spread
from batchinfer.controller.open_units import OpenUnits
from batchinfer.controller.results import Results
from batchinfer.controller.units import PlannedRequests
from batchinfer.controller.work_progress import WorkProgress
from batchinfer.progress import note
from batchinfer.records import Request
from batchinfer.run.units.claims import Claim, UnitClaims
from batchinfer.run.units.result_files import is_reused, memory_tokens
from batchinfer.sanitize import count_text

_CHECK_RUN_S = 1.0


@dataclass(slots=True)
class UnitQueue:
    """Queue of units that are claimed and opened for the dealer.

    reuses: whether rows have answers of an earlier run, so that some tokens that the plan shares are not computed.
    """

    requests: PlannedRequests
    units: OpenUnits
    claims: UnitClaims
    results: Results
    dealer: Dealer
    progress: WorkProgress
    reuses: bool = False
    _has_noted_waiting: bool = False
    _next_check_s: float = 0.0

    @property
    def num_unfinished(self) -> int:
        """Number of requests of open units without a result."""
        return self.dealer.num_unfinished

    def open_next(self) -> bool:
        """Claim a unit with unfinished requests; return False if there is none now.

        Raises:
            ConfigError: the run is gone.
        """
        now_s = time.monotonic()
        if now_s >= self._next_check_s:  # ranks without work ask at every step
            self.results.check_run()
            self._next_check_s = now_s + _CHECK_RUN_S
        while (found := self.units.claim(self.claims, self.results.open_units)) is not None:
            row, claim = found
            unit = claim.unit
            self.progress.reopened(self.units.take_reopened())
            rows = self.units.all_rows
            after_tokens = rows[unit + 1]["shared_tokens"] if unit + 1 < len(rows) else 0
            requests = self.requests.of_unit(row, after_tokens=after_tokens)
            missing = self.results.open_unit(claim, {request.key for request in requests})
            self.progress.opened(unit, len(missing))
            if missing:
                self.dealer.add_unit(
                    unit,
                    [request for request in requests if request.key in missing],
                    is_fresh=len(missing) == len(requests) and not self.reuses,
                    after_tokens=after_tokens,
                    results=_results(requests, claim, with_before=not self.reuses),
                )
                return True
        return False

    @property
    def can_claim(self) -> bool:
        """Whether it is known if these ranks accept the run's reused answers: claims depend on that."""
        return self.claims.accepts_reused is not None

    def prompt_pieces(self) -> list[list[int]]:
        """Return pieces of the remaining prompts, from at most MOST_UNITS units spread over the plan."""
        rows = self.units.rows
        num_tokens = num_calibration_tokens(sum(row["new_tokens"] for row in rows))
        rows = [rows[index] for index in spread(len(rows), MOST_UNITS)]
        requests = [request for row in rows for request in self.requests.of_unit(row)]
        return prompt_pieces(requests, num_tokens)

    def is_done(self) -> bool:
        """Return whether all units of the job are done; other workers' units may still have to be taken over."""
        if self.dealer.num_unfinished or self.results.num_open:
            return False
        if self.units.are_all_done(self.claims.completed):
            return True
        self.progress.reopened(self.units.take_reopened())
        for unit in self.units.take_done_elsewhere():
            self.progress.done_elsewhere(unit)
        if self.units.is_waiting and not self._has_noted_waiting:
            are = "is" if self.units.num_open == 1 else "are"
            note(f"{count_text(self.units.num_open, 'unit')} {are} held by other controllers; waiting for them")
            self._has_noted_waiting = True
        return False


def _results(requests: list[Request], claim: Claim, *, with_before: bool) -> Iterator[CountedPrompt]:
    """Yield the prefix of the unit's first prompt that the unit before has counted, then the prompts with results.

    The result files are read when the first prompt with results is taken.

    Args:
        with_before: whether to yield that prefix.
    """
    first = requests[0]
    if with_before:
        yield CountedPrompt(first.token_ids[: first.cached_tokens], 0)
    computed = [path for path in claim.inherited if not is_reused(path)]
    counted_from = {key: count for path in computed for key, count in memory_tokens(path).items()}
    for request in requests:
        if request.key in counted_from:
            yield CountedPrompt(request.token_ids, counted_from[request.key])
