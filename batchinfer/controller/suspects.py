"""Which requests run alone after ranks have died, until one is found that brings them down.

A unit in which the ranks died twice holds a suspect: what ran last is then run in halves, and nothing else meanwhile,
until one request alone has brought the ranks down twice. That one is given up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from batchinfer.records import Request, RequestKey

DEATHS_BEFORE_HALVING = 2
DEATHS_ALONE = 2


class Suspects:
    """Lists of requests, of which one at a time is run alone."""

    def __init__(self) -> None:
        self._deaths_of_unit: Counter[int] = Counter()
        self._deaths_alone: Counter[RequestKey] = Counter()
        self._lists: list[list[Request]] = []  # the next one last

    def __bool__(self) -> bool:
        return bool(self._lists)

    @property
    def next(self) -> list[Request]:
        """What is to be run now, finished requests included."""
        return self._lists[-1]

    def ranks_died(self, running: list[Request]) -> Request | None:
        """Narrow the suspicion to what was running; the request to give up, if it is found."""
        if self._lists and running:
            return self._narrow(running)
        self._deaths_of_unit.update({request.unit for request in running})
        self._lists += _halves([r for r in running if self._deaths_of_unit[r.unit] >= DEATHS_BEFORE_HALVING])
        return None

    def clear_finished(self, is_open: Callable[[Request], bool]) -> bool:
        """Go on with the next list once this one is finished; after the last one all are cleared. True if it was."""
        if any(map(is_open, self._lists[-1])):
            return False
        self._lists.pop()
        if not self._lists:
            self._deaths_of_unit.clear()
        return True

    def _narrow(self, running: list[Request]) -> Request | None:
        """The list under suspicion brought the ranks down again."""
        self._lists.pop()
        if len(running) > 1:
            self._lists += _halves(running)
            return None
        (alone,) = running
        self._deaths_alone[alone.key] += 1
        if self._deaths_alone[alone.key] >= DEATHS_ALONE:
            return alone
        self._lists.append([alone])
        return None


def _halves(requests: list[Request]) -> list[list[Request]]:
    """The second half first: lists are taken from the end."""
    middle = (len(requests) + 1) // 2
    return [half for half in (requests[middle:], requests[:middle]) if half]
