"""The requests that wait for each rank: branch by branch of their prefix tree, the longest answers first.

They are spread over the ranks by work (balance/). A prefix that several ranks need is computed by each
(`replicated_tokens`). A rank that has run out of requests takes over half of what another one has left.
"""

from collections import deque
from dataclasses import replace

import numpy as np

from batchinfer.balance.output_lengths import OutputLengths
from batchinfer.balance.prefill import attention_work
from batchinfer.balance.prefix_groups import deal_prefixes, num_kept
from batchinfer.balance.prefix_order import longest_first
from batchinfer.controller.counted_prefixes import CountedPrompt, common_tokens, counted_tokens
from batchinfer.records import Request


class RankQueues:
    """Waiting requests by rank.

    Args:
        ranks: those that run prefill.
        lengths: what is known of output lengths.
        with_decode: these ranks also decode what they prefill, which is work, too.
    """

    def __init__(self, ranks: list[int], lengths: OutputLengths, *, with_decode: bool) -> None:
        self._ranks = ranks
        self._lengths = lengths
        self._with_decode = with_decode
        self._waiting: dict[int, deque[Request]] = {rank: deque() for rank in ranks}
        self._last_of_rank: dict[int, Request] = {}
        self._last_dealt: Request | None = None

    def has_waiting(self, rank: int) -> bool:
        """Whether anything waits for a rank."""
        return bool(self._waiting[rank])

    def clear(self) -> None:
        """Nothing waits any more."""
        for waiting in self._waiting.values():
            waiting.clear()

    def ranks_died(self) -> None:
        """The ranks start anew, without any prefix."""
        self._last_of_rank.clear()
        self._last_dealt = None

    def add(
        self,
        requests: list[Request],
        *,
        is_fresh: bool = False,
        after_tokens: int = 0,
        results: list[CountedPrompt] | None = None,
    ) -> list[Request]:
        """Put requests behind what waits; returns them with what each shares with the one before it.

        Args:
            requests: in the plan's order.
            is_fresh, after_tokens: see Dealer.add_unit.
            results: of their units, which count what they share with them.
        """
        if not requests:
            return []
        prompts = [request.token_ids for request in requests]
        before = _shared_tokens(self._last_dealt, requests[0]) if self._last_dealt is not None else 0
        if is_fresh:
            before = requests[0].cached_tokens
        order = longest_first(
            np.array([0, *map(common_tokens, prompts, prompts[1:])]),
            np.array([self._expected(request) for request in requests]),
            most_cached_tokens=np.array([request.most_cached_tokens for request in requests]),
            before_tokens=before,
            after_tokens=after_tokens,
        )
        ordered = [requests[index] for index in order]
        shared = [min(before, ordered[0].most_cached_tokens), *map(_shared_tokens, ordered, ordered[1:])]
        self._last_dealt = ordered[-1]
        choices = deal_prefixes(
            np.array([len(request.token_ids) for request in ordered]),
            np.array(shared),
            np.array([self._expected(request) * self._with_decode for request in ordered]),
            num_ranks=len(self._ranks),
            load_of_rank=np.array([self._load(rank) for rank in self._ranks]),
        )
        counted = counted_tokens([request.token_ids for request in ordered], shared, results or [])
        dealt = []
        for request, shared_tokens, end, index in zip(ordered, shared, counted, choices.tolist(), strict=True):
            rank = self._ranks[index]
            replicated = max(0, shared_tokens - self._found(rank, request))
            changes = {"replicated_tokens": replicated, "counted_tokens": min(end, request.most_cached_tokens)}
            dealt.append(replace(request, shared_tokens=shared_tokens, **changes))
            self._waiting[rank].append(dealt[-1])
            self._last_of_rank[rank] = dealt[-1]
        return dealt

    def take(self, rank: int, count: int, num_tokens: int | None = None) -> list[Request]:
        """See Dealer.take."""
        waiting = self._waiting[rank]
        taken: list[Request] = []
        while waiting and len(taken) < count and (num_tokens is None or num_tokens > 0):
            taken.append(waiting.popleft())
            if num_tokens is not None:
                num_tokens -= _new_tokens(taken[-1])
        return taken

    def take_over(self, rank: int) -> Request | None:
        """Give a rank without requests the later half, by work, of those of the rank that has most left.

        Returns:
            The first of them, which finds another prefix there; None: there is nothing to take over.
        """
        busiest = max(self._ranks, key=lambda other: sum(map(self._work, self._waiting[other])))
        waiting = self._waiting[busiest]
        if rank == busiest or not waiting or self._waiting[rank]:
            return None
        taken = [waiting.pop() for _ in range(len(waiting) - num_kept(map(self._work, waiting)))][::-1]
        replicated = max(0, taken[0].shared_tokens - self._found(rank, taken[0]))
        taken[0] = replace(taken[0], replicated_tokens=replicated)
        self._waiting[rank].extend(taken)
        self._last_of_rank[rank] = taken[-1]
        if waiting:
            self._last_of_rank[busiest] = waiting[-1]
        else:
            del self._last_of_rank[busiest]
        return taken[0]

    def _found(self, rank: int, request: Request) -> int:
        """Prompt tokens that a rank has computed by what it got last."""
        last = self._last_of_rank.get(rank)
        return 0 if last is None else _shared_tokens(last, request)

    def _expected(self, request: Request) -> float:
        """Output tokens to expect."""
        return self._lengths.expected(request.prompt_group, request.sampling.max_tokens, request.expected_tokens)

    def _work(self, request: Request) -> float:
        """Tokens to run through the model."""
        return _new_tokens(request) + self._expected(request) * self._with_decode

    def _load(self, rank: int) -> tuple[float, float]:
        """New tokens and attention work of what a rank has waiting."""
        waiting = self._waiting[rank]
        new = np.array([self._work(request) for request in waiting])
        cached = np.array([request.shared_tokens - request.replicated_tokens for request in waiting])
        return float(new.sum()), float(attention_work(new, cached).sum())


def _new_tokens(request: Request) -> int:
    """Prompt tokens that its rank has to compute."""
    return len(request.token_ids) - request.shared_tokens + request.replicated_tokens


def _shared_tokens(first: Request, second: Request) -> int:
    """Tokens that the second prompt finds in memory after the first."""
    return common_tokens(first.token_ids, second.token_ids, second.most_cached_tokens)
