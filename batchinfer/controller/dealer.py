"""Which rank runs which request, and what is run again when ranks have died. Called by the controller; no I/O here.

The requests of a unit run branch by branch of their prefix tree, the longest answers first, spread over the ranks by
work (balance/). A prefix that several ranks need is computed by each (`replicated_tokens`). A rank that has run out of
requests takes over half of what another one has left.

When ranks die, all that was running goes back. A unit in which this happened twice holds a suspect: what ran last is
then run in halves, nothing beside it, until one request alone has brought the ranks down twice. That one is given up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

import numpy as np

from batchinfer.balance.decode import OutputLengths
from batchinfer.balance.prefill import attention_work
from batchinfer.balance.prefix_groups import deal_prefixes
from batchinfer.balance.prefix_order import longest_first
from batchinfer.records import Request, RequestKey

DEATHS_BEFORE_HALVING = 2
DEATHS_ALONE = 2


class Dealer:
    """Requests of the open units: waiting, running, or suspected.

    Args:
        ranks: those that run prefill.
        lengths: what is known of output lengths.
        with_decode: these ranks also decode what they prefill, which is work, too.
    """

    def __init__(self, ranks: Iterable[int], lengths: OutputLengths | None = None, *, with_decode: bool = True) -> None:
        self._ranks = list(ranks)
        self._lengths = lengths or OutputLengths()
        self._with_decode = with_decode
        self._open: dict[int, dict[RequestKey, Request]] = {}  # unit -> unfinished requests in the plan's order
        self._waiting: dict[int, deque[Request]] = {rank: deque() for rank in self._ranks}
        self._running: dict[RequestKey, Request] = {}
        self._last_of_rank: dict[int, Request] = {}
        self._last_dealt: Request | None = None
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

    def add_unit(self, unit: int, requests: list[Request], *, is_fresh: bool = False, after_tokens: int = 0) -> None:
        """Open a unit.

        Args:
            requests: in the plan's order.
            is_fresh: nobody has run any of them: what its first request shares with the unit before was computed there.
            after_tokens: what the last request shares with the first of the next unit.
        """
        self._open[unit] = {request.key: request for request in requests}
        if not self._suspects:
            self._deal(requests, is_fresh=is_fresh, after_tokens=after_tokens)

    def take(self, rank: int, count: int, num_tokens: int | None = None) -> list[Request]:
        """The next requests of a rank; they run from now on.

        Args:
            count: at most so many.
            num_tokens: no more once they have so many prompt tokens to compute.
        """
        waiting = self._waiting[rank]
        taken: list[Request] = []
        while waiting and len(taken) < count and (num_tokens is None or num_tokens > 0):
            request = waiting.popleft()
            taken.append(request)
            self._running[request.key] = request
            if num_tokens is not None:
                num_tokens -= _new_tokens(request)
        return taken

    def take_over(self, rank: int) -> None:
        """Give a rank without requests the later half, by work, of those of the rank that has most left."""
        busiest = max(self._ranks, key=self._waiting_work)
        waiting = self._waiting[busiest]
        if rank == busiest or not waiting or self._waiting[rank]:
            return
        before = [0.0, *accumulate(map(self._work, waiting))]
        num_left = sum(done < before[-1] / 2 for done in before[:-1])
        # the only one left goes, too: its rank has not asked for it yet
        num_left = min(num_left, len(waiting) - 1)
        taken = [waiting.pop() for _ in range(len(waiting) - num_left)][::-1]
        first = taken[0]
        found = _shared_tokens(self._last_of_rank[rank], first) if rank in self._last_of_rank else 0
        replicated = max(0, first.shared_tokens - found)
        taken[0] = self._open[first.unit][first.key] = replace(first, replicated_tokens=replicated)
        self._waiting[rank].extend(taken)
        self._last_of_rank[rank] = taken[-1]
        if waiting:
            self._last_of_rank[busiest] = waiting[-1]
        else:
            del self._last_of_rank[busiest]

    def running_request(self, key: RequestKey) -> Request:
        """The request that a rank got under this key."""
        return self._running[key]

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
        self._last_dealt = None
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
            self._running[request.key] = request  # until the caller finishes it with an error
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

    def _deal(self, requests: list[Request], *, is_fresh: bool = False, after_tokens: int = 0) -> None:
        """Put requests, which stand in the plan's order, behind what the ranks have waiting."""
        if not requests:
            return
        before = _shared_tokens(self._last_dealt, requests[0]) if self._last_dealt is not None else 0
        if is_fresh:
            before = requests[0].cached_tokens
        order = longest_first(
            np.array([0, *map(_shared_tokens, requests, requests[1:])]),
            np.array([self._expected(request) for request in requests]),
            before_tokens=before,
            after_tokens=after_tokens,
        )
        ordered = [requests[place] for place in order]
        shared = [before, *map(_shared_tokens, ordered, ordered[1:])]
        self._last_dealt = ordered[-1]
        rank_of_request = deal_prefixes(
            np.array([len(request.token_ids) for request in ordered]),
            np.array(shared),
            np.array([self._expected(request) * self._with_decode for request in ordered]),
            num_ranks=len(self._ranks),
            load_of_rank=np.array([self._load(rank) for rank in self._ranks]),
        )
        for request, shared_tokens, place in zip(ordered, shared, rank_of_request.tolist(), strict=True):
            rank = self._ranks[place]
            last = self._last_of_rank.get(rank)
            own = 0 if last is None else _shared_tokens(last, request)
            replicated = max(0, shared_tokens - own)
            dealt = replace(request, shared_tokens=shared_tokens, replicated_tokens=replicated)
            self._open[dealt.unit][dealt.key] = dealt
            self._waiting[rank].append(dealt)
            self._last_of_rank[rank] = dealt

    def _expected(self, request: Request) -> float:
        """Output tokens to expect."""
        return self._lengths.expected(request.prompt_group, request.sampling.max_tokens, request.expected_tokens)

    def _work(self, request: Request) -> float:
        """Tokens to run through the model."""
        return _new_tokens(request) + self._expected(request) * self._with_decode

    def _waiting_work(self, rank: int) -> float:
        return sum(map(self._work, self._waiting[rank]))

    def _load(self, rank: int) -> tuple[float, float]:
        """New tokens and attention work of what a rank has waiting."""
        waiting = self._waiting[rank]
        new = np.array([self._work(request) for request in waiting])
        cached = np.array([request.shared_tokens - request.replicated_tokens for request in waiting])
        return float(new.sum()), float(attention_work(new, cached).sum())


def _halves(requests: list[Request]) -> list[list[Request]]:
    """The second half first: lists are taken from the end."""
    middle = (len(requests) + 1) // 2
    return [half for half in (requests[middle:], requests[:middle]) if half]


def _new_tokens(request: Request) -> int:
    """Prompt tokens that its rank has to compute."""
    return len(request.token_ids) - request.shared_tokens + request.replicated_tokens


def _shared_tokens(first: Request, second: Request) -> int:
    """Tokens that the second prompt finds in memory after the first; its last one always runs."""
    most = min(len(first.token_ids), len(second.token_ids) - 1)
    for place in range(most):
        if first.token_ids[place] != second.token_ids[place]:
            return place
    return most
