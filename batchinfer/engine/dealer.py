"""Which rank runs which request, and what is run again when ranks have died. Called by the controller; no I/O here.

A unit is cut into one stretch of the plan's order per rank, near equal work, where neighbours share least: a prefix
that crosses a cut is computed on both sides (`replicated_tokens`).

When ranks die, all that was running goes back. A unit in which this happened twice holds a suspect: what ran last is
then run in halves, nothing beside it, until one request alone has brought the ranks down twice. That one is given up.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, pairwise

from batchinfer.records import Request, RequestKey

DEATHS_BEFORE_HALVING = 2
DEATHS_ALONE = 2
CUT_WINDOW = 8  # a cut may move by this fraction (1/8) of a rank's share to where neighbours share less


class Dealer:
    """Requests of the open units: waiting, running, or suspected.

    Args:
        ranks: those that run prefill.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = list(ranks)
        self._open: dict[int, dict[RequestKey, Request]] = {}  # unit -> unfinished requests in the plan's order
        self._waiting: dict[int, deque[Request]] = {rank: deque() for rank in self._ranks}
        self._running: dict[RequestKey, tuple[int, Request]] = {}  # with its rank
        self._last_of_rank: dict[int, Request] = {}
        self._last_added: tuple[Request, int] | None = None  # and its rank
        self._deaths_of_unit: Counter[int] = Counter()
        self._deaths_alone: Counter[RequestKey] = Counter()
        self._suspects: list[list[Request]] = []  # lists to run alone, the next one last

    @property
    def num_unfinished(self) -> int:
        return sum(map(len, self._open.values()))

    @property
    def is_isolating(self) -> bool:
        """Whether suspects run, so that no new unit should be opened."""
        return bool(self._suspects)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add_unit(self, unit: int, requests: list[Request]) -> None:
        """Open a unit: its requests in the plan's order."""
        self._open[unit] = {request.key: request for request in requests}
        if not self._suspects:
            self._deal(requests)

    def take(self, rank: int, count: int) -> list[Request]:
        """The next requests of a rank, at most `count`; they run from now on."""
        waiting = self._waiting[rank]
        taken = [waiting.popleft() for _ in range(min(count, len(waiting)))]
        for request in taken:
            self._running[request.key] = (rank, request)
        return taken

    def rank_of(self, key: RequestKey) -> int | None:
        """The rank that got a running request; None when it has finished meanwhile."""
        running = self._running.get(key)
        return None if running is None else running[0]

    def running_request(self, key: RequestKey) -> Request:
        """The request that a rank got under this key."""
        return self._running[key][1]

    def finish(self, unit: int, key: RequestKey) -> None:
        """A request has its result."""
        del self._running[key], self._open[unit][key]
        if not self._open[unit]:
            del self._open[unit]
        if self._suspects:
            self._next_suspects()

    def ranks_died(self) -> list[Request]:
        """All ranks start anew: put back what was running.

        Returns:
            Requests to give up: each has brought the ranks down twice while it ran alone.
        """
        running = [
            request for requests in self._open.values() for key, request in requests.items() if key in self._running
        ]
        self._running.clear()
        self._last_of_rank.clear()
        self._last_added = None
        given_up = []
        if self._suspects and running:
            given_up = self._narrow(running)
        elif running:
            units = {request.unit for request in running}
            self._deaths_of_unit.update(units)
            suspects = [r for r in running if self._deaths_of_unit[r.unit] >= DEATHS_BEFORE_HALVING]
            if suspects:
                self._suspects = _halves(suspects)
        for request in given_up:
            self._running[request.key] = (self._ranks[0], request)  # until the caller finishes it with an error
        self._deal_anew()
        return given_up

    def _narrow(self, running: list[Request]) -> list[Request]:
        """The list under suspicion brought the ranks down again."""
        self._suspects.pop()
        if len(running) > 1:
            self._suspects += _halves(running)
            return []
        alone = running[0]
        self._deaths_alone[alone.key] += 1
        if self._deaths_alone[alone.key] >= DEATHS_ALONE:
            return [alone]
        self._suspects.append([alone])
        return []

    def _next_suspects(self) -> None:
        """Go on with the next list once all of this one is finished; after the last one, with everything else."""
        if any(request.key in self._open.get(request.unit, {}) for request in self._suspects[-1]):
            return
        self._suspects.pop()
        if not self._suspects:
            self._deaths_of_unit.clear()
        self._deal_anew()

    def _deal_anew(self) -> None:
        for waiting in self._waiting.values():
            waiting.clear()
        if self._suspects:
            self._deal([r for r in self._suspects[-1] if r.key in self._open.get(r.unit, {})])
            return
        for requests in self._open.values():
            self._deal([request for request in requests.values() if request.key not in self._running])

    def _deal(self, requests: list[Request]) -> None:
        for rank, stretch in zip(self._ranks, cut_evenly(requests, len(self._ranks)), strict=True):
            if not stretch:
                continue
            first = replace(stretch[0], replicated_tokens=self._replicated_tokens(stretch[0], rank))
            stretch[0] = self._open[first.unit][first.key] = first
            self._waiting[rank].extend(stretch)
            self._last_of_rank[rank] = stretch[-1]
            self._last_added = (stretch[-1], rank)

    def _replicated_tokens(self, request: Request, rank: int) -> int:
        """Tokens before the cut that this rank has to compute although its neighbour in the plan's order has them."""
        if self._last_added is None or self._last_added[1] == rank:
            return 0
        shared = min(request.cached_tokens, _common_length(self._last_added[0], request))
        own = self._last_of_rank.get(rank)
        return max(0, shared - (0 if own is None else _common_length(own, request)))


def cut_evenly(requests: list[Request], num_parts: int) -> list[list[Request]]:
    """Consecutive parts of near equal work (tokens to compute and generate), cut where neighbours share least."""
    before = [0, *accumulate(len(r.token_ids) - r.cached_tokens + r.sampling.max_tokens for r in requests)]
    share = before[-1] / num_parts
    cuts = [0]
    for part in range(1, num_parts):
        goal = share * part
        near = range(
            max(bisect_left(before, goal - share / CUT_WINDOW), cuts[-1] + 1),
            min(bisect_right(before, goal + share / CUT_WINDOW), len(requests)),
        )
        place = bisect_left(before, goal)
        if near:
            # of several that share equally little, the one nearest to equal work
            place = min(near, key=lambda cut: (requests[cut].cached_tokens, abs(before[cut] - goal)))
        cuts.append(max(cuts[-1], min(place, len(requests))))
    cuts.append(len(requests))
    return [requests[start:end] for start, end in pairwise(cuts)]


def _halves(requests: list[Request]) -> list[list[Request]]:
    """The second half first: lists are taken from the end."""
    middle = (len(requests) + 1) // 2
    return [half for half in (requests[middle:], requests[:middle]) if half]


def _common_length(first: Request, second: Request) -> int:
    for place, (left, right) in enumerate(zip(first.token_ids, second.token_ids, strict=False)):
        if left != right:
            return place
    return min(len(first.token_ids), len(second.token_ids))
