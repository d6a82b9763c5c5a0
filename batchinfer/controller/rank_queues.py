"""Queues of waiting requests by rank, in pieces that fill the prefill steps of several ranks evenly.

Requests are spread over the ranks by work, branch by branch of their prefix tree (balance/prefix_groups.py). A prefix
that several ranks need is computed by each (`replicated_tokens`). Each rank's prompts are then cut into steps of equal
tokens and attention work (balance/prefill_steps.py). A rank without requests takes over half of another rank's rest.
"""

from itertools import pairwise

import numpy as np
from msgspec.structs import replace

from batchinfer.balance.output_lengths import OutputLengths
from batchinfer.balance.prefix_groups import deal_prefixes, num_kept
from batchinfer.balance.prefix_order import longest_first
from batchinfer.controller.counted_prefixes import CountedPrompt, common_tokens, counted_tokens
from batchinfer.controller.waiting_pieces import (
    RankRoom,
    TakenWork,
    WaitingPieces,
    own_shared,
    pieces_sizes,
    take_pieces,
)
from batchinfer.records import Request


class RankQueues:
    """Waiting requests by rank.

    Args:
        ranks: ranks that run prefill.
        lengths: expected output lengths.
        room: capacity of each rank.

    Attributes:
        counts_as_dealt: whether statistics count the tokens that requests share as dealt here, not by the plan, which
            includes requests that are not computed.
    """

    def __init__(self, ranks: list[int], lengths: OutputLengths, room: RankRoom) -> None:
        self._ranks = ranks
        self._lengths = lengths
        self._waiting = WaitingPieces(ranks, room)
        self._with_decode = room.with_decode
        self._last_of_rank: dict[int, Request] = {}
        self._last_dealt: Request | None = None
        self.counts_as_dealt = False

    @property
    def has_uneven_steps(self) -> bool:
        """Whether prompts had to run one after the other because ranks have too few KV pages."""
        return self._waiting.has_uneven_steps

    def has_waiting(self, rank: int) -> bool:
        """Return whether requests wait for a rank."""
        return bool(self._waiting[rank])

    def clear(self) -> None:
        """Remove all waiting requests."""
        self._waiting.clear()

    def keep_to_pages(self, num_pages: int) -> None:
        """Order the prompts of every rank so that they need at most `num_pages` KV pages at once."""
        self._waiting.keep_to_pages(num_pages, self._expected)

    def ranks_died(self) -> None:
        """Drop the records of the prefixes that the ranks had in memory."""
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
        """Append requests to the queues, and return them with the tokens that each shares with the one before it.

        Args:
            requests: in the plan's order.
            is_fresh, after_tokens: see Dealer.add_unit.
            results: prompts of these units that have results.
        """
        if not requests:
            return []
        before = _shared_tokens(self._last_dealt, requests[0]) if self._last_dealt is not None else 0
        if is_fresh:
            before = requests[0].cached_tokens
        prompts = [request.token_ids for request in requests]
        common = [0, *map(common_tokens, prompts, prompts[1:])]
        most_cached = [request.most_cached_tokens for request in requests]
        expected = np.array(list(map(self._expected, requests)))
        order_N = longest_first(
            np.array(common),
            expected,
            most_cached_tokens=np.array(most_cached),
            before_tokens=before,
            after_tokens=after_tokens,
        )
        order, expected = order_N.tolist(), expected[order_N]
        ordered = [requests[index] for index in order]
        shared = [min(before, most_cached[order[0]])]
        for previous, index in pairwise(order):
            is_known = index == previous + 1  # most requests stay behind the one before them
            found = common[index] if is_known else common_tokens(prompts[previous], prompts[index])
            shared.append(min(found, most_cached[index]))
        self._last_dealt = ordered[-1]
        choices = np.zeros(len(ordered), dtype=np.int64)
        if len(self._ranks) > 1:
            choices = deal_prefixes(
                np.array([len(request.token_ids) for request in ordered]),
                np.array(shared),
                expected * self._with_decode,
                num_ranks=len(self._ranks),
                load_of_rank=np.array([self._load(rank) for rank in self._ranks]),
            )
        counted = counted_tokens([request.token_ids for request in ordered], shared, results or [])
        dealt: list[Request] = []
        rank_before = None
        columns = (ordered, order, shared, counted, choices.tolist())
        for request, place, shared_tokens, end, index in zip(*columns, strict=True):
            rank = self._ranks[index]
            # the rank of the request before finds what the two share
            found = shared_tokens if rank == rank_before else self._found(rank, request)
            self._last_of_rank[rank] = replace(
                request,
                shared_tokens=shared_tokens,
                replicated_tokens=max(0, shared_tokens - found),
                counted_tokens=min(end, most_cached[place]),
                cached_tokens=shared_tokens if self.counts_as_dealt else request.cached_tokens,
            )
            dealt.append(self._last_of_rank[rank])
            rank_before = rank
        self._waiting.append(dealt, choices, expected, after_tokens=after_tokens)
        return dealt

    def take(self, rank: int, count: int, num_tokens: int | None = None) -> TakenWork:
        """See Dealer.take."""
        return take_pieces(self._waiting[rank], count, num_tokens)

    def take_over(self, rank: int) -> list[Request]:
        """Give an idle rank the later half, by work, of the busiest rank's waiting requests.

        Returns:
            The requests, with the prefixes that they find there; empty if there is none to take over.
        """
        # prompt tokens and tokens to generate
        busiest = max(self._ranks, key=lambda other: float(self._load(other)[[0, 2]].sum()))
        if rank == busiest or self._waiting[rank]:
            return []
        whole = self._waiting.whole(busiest)
        given = whole[num_kept(map(self._work, whole)) :]
        if not given:
            return []
        self._waiting.remove(busiest, given)
        del self._last_of_rank[busiest]
        if left := self._waiting[busiest]:
            self._last_of_rank[busiest] = max(left, key=lambda item: item.place).request
        taken = []
        for request in given:
            replicated = max(0, request.shared_tokens - self._found(rank, request))
            taken.append(replace(request, replicated_tokens=replicated))
            self._last_of_rank[rank] = taken[-1]
        self._waiting.append(
            taken, np.full(len(taken), self._ranks.index(rank)), np.array(list(map(self._expected, taken)))
        )
        return taken

    def _found(self, rank: int, request: Request) -> int:
        """Return the prompt tokens that a rank has computed with its last request."""
        last = self._last_of_rank.get(rank)
        return 0 if last is None else _shared_tokens(last, request)

    def _expected(self, request: Request) -> float:
        """Return the expected number of output tokens."""
        return self._lengths.expected(request.prompt_group, request.sampling.max_tokens, request.expected_tokens)

    def _work(self, request: Request) -> float:
        """Return the number of tokens to run through the model."""
        return len(request.token_ids) - own_shared(request) + self._expected(request) * self._with_decode

    def _load(self, rank: int) -> np.ndarray:
        """Return [4], the sum of `request_sizes` over the rank's queue."""
        items = self._waiting[rank]
        return pieces_sizes(items, [self._expected(i.request) * (self._with_decode and i.piece.begins) for i in items])


def _shared_tokens(first: Request, second: Request) -> int:
    """Return the tokens that the second prompt finds in memory after the first."""
    return common_tokens(first.token_ids, second.token_ids, second.most_cached_tokens)
