"""Assignment of requests to ranks, and the search for a request that kills ranks. No I/O.

When ranks die, all running requests go back. A unit in which this happened twice holds a suspect: the requests that
ran last then run in halves, and nothing else meanwhile, until one request alone has killed the ranks twice. That
request is given up.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from batchinfer.balance.output_lengths import OutputLengths
from batchinfer.config import ClusterConfig
from batchinfer.controller.counted_prefixes import CountedPrompt
from batchinfer.controller.rank_queues import RankQueues
from batchinfer.controller.waiting_pieces import RankRoom, TakenWork
from batchinfer.records import Request, RequestKey

DEATHS_BEFORE_HALVING = 2
DEATHS_ALONE = 2
DEFAULT_ROOM = RankRoom.of(ClusterConfig())


class Dealer:
    """Requests of the open units: waiting, running, or suspected.

    Args:
        ranks, lengths, room: see RankQueues.
        with_store: whether requests report what they find in memory and in a KV store. Then prompts with results are
            kept, to count found tokens once.
        counts_as_dealt: see RankQueues.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        lengths: OutputLengths | None = None,
        *,
        room: RankRoom = DEFAULT_ROOM,
        with_store: bool = False,
        counts_as_dealt: bool = False,
    ) -> None:
        self._open: dict[int, dict[RequestKey, Request]] = {}  # by unit: unfinished requests in the plan's order
        self._queues = RankQueues(list(ranks), lengths or OutputLengths(), room)
        self._queues.counts_as_dealt = counts_as_dealt
        self._running: dict[RequestKey, Request] = {}
        self._with_store = with_store
        self._results: dict[int, list[CountedPrompt]] = {}  # of open units
        self._suspects = Suspects()

    @property
    def num_unfinished(self) -> int:
        return sum(map(len, self._open.values()))

    @property
    def is_isolating(self) -> bool:
        """Whether suspects run, so that no new unit may be opened."""
        return bool(self._suspects)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_uneven_steps(self) -> bool:
        """Whether prompts had to run one after the other because ranks have too few KV pages."""
        return self._queues.has_uneven_steps

    def has_waiting(self, rank: int) -> bool:
        """Return whether requests wait for this rank."""
        return self._queues.has_waiting(rank)

    def add_unit(
        self,
        unit: int,
        requests: list[Request],
        *,
        is_fresh: bool = False,
        after_tokens: int = 0,
        results: Iterable[CountedPrompt] = (),
    ) -> None:
        """Open a unit.

        Args:
            requests: in the plan's order.
            is_fresh: whether no request has run; then the unit before has the first prefix in memory.
            after_tokens: tokens that the last request shares with the first of the next unit.
            results: prompts of the unit with results, and the prefix that the unit before has counted.
        """
        self._open[unit] = {request.key: request for request in requests}
        self._results[unit] = list(results) if self._with_store else []
        if not self._suspects:
            known = [] if is_fresh else self._results[unit]
            self._note(self._queues.add(requests, is_fresh=is_fresh, after_tokens=after_tokens, results=known))

    def keep_to_pages(self, num_pages: int) -> None:
        """Order the prompts of every rank so that they need at most `num_pages` KV pages at once."""
        self._queues.keep_to_pages(num_pages)

    def take(self, rank: int, count: int, num_tokens: int | None = None) -> TakenWork:
        """Return the next pieces of prompts for a rank and the requests that begin, and count those as running.

        Args:
            count: most requests that begin.
            num_tokens: prompt tokens to compute after which no further piece is taken; None: no limit.
        """
        taken = self._queues.take(rank, count, num_tokens)
        self._running |= {request.key: request for request in taken.requests}
        return taken

    def take_over(self, rank: int) -> bool:
        """Give an idle rank the later half of the busiest rank's waiting work; return False if there is none."""
        taken = self._queues.take_over(rank)
        self._note(taken)
        return bool(taken)

    def running_request(self, key: RequestKey) -> Request:
        """Return the running request with this key."""
        return self._running[key]

    def finish(self, unit: int, key: RequestKey, counted_from: int | None = None) -> None:
        """Remove a request that has its result.

        Args:
            counted_from: prompt tokens that other results count; None: the request failed and counts nothing.
        """
        del self._open[unit][key]
        request = self._running.pop(key)
        if self._with_store and counted_from is not None:
            self._results[unit].append(CountedPrompt(request.token_ids, counted_from))
        if not self._open[unit]:
            del self._open[unit], self._results[unit]
        if self._suspects and self._suspects.clear_finished(self._is_open):
            self._deal_again()

    def ranks_died(self) -> Request | None:
        """Put back the running requests, since all ranks start again.

        Returns:
            A request to give up, because it killed the ranks twice while it ran alone.
        """
        running = [
            request for requests in self._open.values() for key, request in requests.items() if key in self._running
        ]
        self._running.clear()
        self._queues.ranks_died()
        given_up = self._suspects.ranks_died(running)
        if given_up is not None:
            self._running[given_up.key] = given_up  # until the caller finishes it with an error
        self._deal_again()
        return given_up

    def _deal_again(self) -> None:
        self._queues.clear()
        if self._suspects:
            suspects = list(filter(self._is_open, self._suspects.next))
            results = [result for unit in {request.unit for request in suspects} for result in self._results[unit]]
            self._note(self._queues.add(suspects, results=results))
            return
        for unit, requests in self._open.items():
            waiting = [request for key, request in requests.items() if key not in self._running]
            self._note(self._queues.add(waiting, results=self._results[unit]))

    def _is_open(self, request: Request) -> bool:
        return request.key in self._open.get(request.unit, {})

    def _note(self, dealt: list[Request]) -> None:
        """Keep the requests with the token counts that they were dealt with."""
        for request in dealt:
            self._open[request.unit][request.key] = request


class Suspects:
    """Stack of request lists, each run alone, until the request that kills the ranks is found."""

    def __init__(self) -> None:
        self._deaths_of_unit: Counter[int] = Counter()
        self._deaths_alone: Counter[RequestKey] = Counter()
        self._lists: list[list[Request]] = []  # the next one last

    def __bool__(self) -> bool:
        return bool(self._lists)

    @property
    def next(self) -> list[Request]:
        """The requests to run alone now, as one of them may have brought the ranks down; finished ones included."""
        return self._lists[-1]

    def ranks_died(self, running: list[Request]) -> Request | None:
        """Narrow the suspicion to the running requests; return the request to give up if it is found."""
        if self._lists and running:
            return self._narrow(running)
        self._deaths_of_unit.update({request.unit for request in running})
        self._lists += _halves([r for r in running if self._deaths_of_unit[r.unit] >= DEATHS_BEFORE_HALVING])
        return None

    def clear_finished(self, is_open: Callable[[Request], bool]) -> bool:
        """Drop the current list if it is finished; return whether it was. The last list clears all suspicion."""
        if any(map(is_open, self._lists[-1])):
            return False
        self._lists.pop()
        if not self._lists:
            self._deaths_of_unit.clear()
        return True

    def _narrow(self, running: list[Request]) -> Request | None:
        """Split the suspected list, which killed the ranks again, or return its only request to give up."""
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
    """Split requests in two lists, the second half first, because lists are taken from the end."""
    middle = (len(requests) + 1) // 2
    return [half for half in (requests[middle:], requests[:middle]) if half]
