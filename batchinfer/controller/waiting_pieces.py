"""Queues of prompt pieces that fill the prefill steps of several ranks evenly."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from batchinfer.balance.branch_points import branch_points
from batchinfer.balance.prefill_steps import MOST_OPEN, PrefillSteps, plan_rank_steps
from batchinfer.balance.prefix_groups import request_sizes
from batchinfer.config import PAGE_TOKENS, ClusterConfig
from batchinfer.protocol.messages import PromptPiece
from batchinfer.records import Request

FEWER_OPEN = (MOST_OPEN, 4, 2, 1)  # open branches to try, fewer for less KV


@dataclass(frozen=True, slots=True)
class TakenWork:
    """Work that a rank has taken."""

    requests: list[Request]  # whose prompts begin, in that order
    pieces: list[PromptPiece]  # of these and of prompts begun earlier, in the order in which they run

    @property
    def num_tokens(self) -> int:
        """Prompt tokens to compute."""
        return sum(piece.num_tokens for piece in self.pieces)


class WaitingPiece(NamedTuple):
    """A piece of a prompt that waits for its rank; `place` is that of its request in the order of the prefix tree."""

    request: Request
    place: int
    start: int  # prompt tokens that have run before it
    piece: PromptPiece


@dataclass(frozen=True, slots=True)
class RankRoom:
    """Capacity of a rank.

    prefill_tokens: prompt tokens per step.
    decode_requests: requests that decode at once; None: the rank does not decode.
    num_pages: KV pages; None: not known yet.
    keeps_states: the model's requests have states, which are kept where prompts branch.
    """

    prefill_tokens: int
    decode_requests: int | None
    num_pages: int | None = None
    keeps_states: bool = False

    @classmethod
    def of(cls, cluster: ClusterConfig, *, keeps_states: bool = False) -> "RankRoom":
        """Return the room of a rank that runs prefill."""
        decode_requests = cluster.running_requests if cluster.mode == "colocated" else None
        return cls(cluster.prefill_tokens, decode_requests, keeps_states=keeps_states)

    @property
    def with_decode(self) -> bool:
        """Whether the rank decodes what it prefills."""
        return self.decode_requests is not None

    def pages_of(self, request: Request) -> int:
        """Return the pages that a request takes when its prompt begins."""
        answer_tokens = 0 if self.decode_requests is None else max(0, request.sampling.max_tokens - 1)
        return -(-(len(request.token_ids) + answer_tokens) // PAGE_TOKENS)

    def holds(self, steps: PrefillSteps, pages_N: np.ndarray) -> bool:
        """Return whether the KV pages suffice for these steps and for the prefixes that later steps reuse.

        Args:
            pages_N: [N] `pages_of` the rank's requests.
        """
        if self.num_pages is None or pages_N.sum() <= self.num_pages:
            return True
        if self.decode_requests is None:
            running = 2 * -(-self.prefill_tokens // PAGE_TOKENS)  # of two steps, until other ranks have read it
        else:
            running = int(np.mean(pages_N) * min(len(pages_N), self.decode_requests))
        under_way = int(np.sort(pages_N)[len(pages_N) - min(len(pages_N), steps.num_open) :].sum())
        return running + under_way - (-steps.prefix_tokens // PAGE_TOKENS) <= self.num_pages


class WaitingPieces:
    """Waiting pieces of each rank.

    Args:
        ranks: ranks that run prefill.
        room: capacity of each rank.
    """

    def __init__(self, ranks: list[int], room: RankRoom) -> None:
        self.room = room
        self.has_uneven_steps = False  # prompts had to run one after the other, because KV pages were too few
        self._ranks = ranks
        self._of_rank: dict[int, deque[WaitingPiece]] = {rank: deque() for rank in ranks}
        self._num_placed = 0
        self._after_of_rank = [0] * len(ranks)  # tokens that its last prompt shares with the next unit

    def __getitem__(self, rank: int) -> deque[WaitingPiece]:
        return self._of_rank[rank]

    def clear(self) -> None:
        """Remove all waiting pieces."""
        for waiting in self._of_rank.values():
            waiting.clear()

    def append(
        self,
        requests: list[Request],
        index_of_rank: np.ndarray,
        expected_tokens: np.ndarray,
        *,
        after_tokens: int | None = None,
    ) -> None:
        """Cut the prompts of each rank into steps and append their pieces to the queues.

        Args:
            requests: in the order of the prefix tree.
            index_of_rank: [number of requests] place of each request's rank in the list of ranks.
            expected_tokens: [number of requests] expected output tokens.
            after_tokens: tokens that the last request shares with the next unit; None: as known before.
        """
        if after_tokens is not None:
            after: dict[int, int] = {}
            for request, index in zip(reversed(requests), reversed(index_of_rank.tolist()), strict=True):
                after.setdefault(index, after_tokens)
                after_tokens = min(after_tokens, request.shared_tokens)
            self._after_of_rank = [after.get(index, 0) for index in range(len(self._ranks))]
        pieces, are_even = cut_into_pieces(
            requests,
            index_of_rank,
            num_ranks=len(self._ranks),
            room=self.room,
            answer_tokens=expected_tokens if expected_tokens.min() < expected_tokens.max() else None,
            first_place=self._num_placed,
            after_of_rank=self._after_of_rank,
        )
        self.has_uneven_steps = self.has_uneven_steps or not are_even
        for rank, of_rank in zip(self._ranks, pieces, strict=True):
            self._of_rank[rank].extend(of_rank)
        self._num_placed += len(requests)

    def whole(self, rank: int) -> list[Request]:
        """Return the requests whose prompts have not begun, in the order of the prefix tree."""
        begins = (item for item in self._of_rank[rank] if item.piece.begins)
        return [item.request for item in sorted(begins, key=lambda item: item.place)]

    def remove(self, rank: int, requests: list[Request]) -> None:
        """Remove requests whose prompts have not begun."""
        keys = {request.key for request in requests}
        self._of_rank[rank] = deque(item for item in self._of_rank[rank] if item.request.key not in keys)

    def keep_to_pages(self, num_pages: int, expected: Callable[[Request], float]) -> None:
        """Take the number of KV pages of a rank; cut the waiting prompts again if it is less than known before.

        Args:
            expected: returns the expected output tokens of a request.
        """
        if self.room.num_pages is not None and self.room.num_pages <= num_pages:
            return
        self.room = replace(self.room, num_pages=num_pages)
        whole = [self.whole(rank) for rank in self._ranks]
        for rank, requests in zip(self._ranks, whole, strict=True):
            self.remove(rank, requests)
        requests = [request for of_rank in whole for request in of_rank]
        if requests:
            index_of_rank = np.repeat(np.arange(len(whole)), list(map(len, whole)))
            self.append(requests, index_of_rank, np.array(list(map(expected, requests))))


def cut_into_pieces(
    requests: list[Request],
    index_of_rank: np.ndarray,
    *,
    num_ranks: int,
    room: RankRoom,
    answer_tokens: np.ndarray | None,
    first_place: int,
    after_of_rank: list[int],
) -> tuple[list[list[WaitingPiece]], bool]:
    """Cut the prompts of each rank into steps (balance/prefill_steps.py).

    If a rank has too few KV pages for that, prompts stay whole and in the order of the prefix tree, which needs the
    least memory. So do those of a lone rank, whose steps no other rank waits for.

    Args:
        requests: in the order of the prefix tree.
        index_of_rank: [number of requests] rank of each, from 0.
        answer_tokens: [number of requests] expected output tokens; None: equal for all.
        first_place: place of the first request in the order of all requests.
        after_of_rank: tokens that the last request of each rank shares with the next unit.

    Returns:
        The pieces of each rank in the order in which they run, and whether no rank has to wait for another.
    """
    shared = [own_shared(request) for request in requests]
    is_alone = num_ranks == 1
    plans = (
        None if is_alone else _plan_within(requests, np.array(shared), index_of_rank, num_ranks, room, answer_tokens)
    )
    pieces: list[list[WaitingPiece]] = [[] for _ in range(num_ranks)]
    if plans is None:
        for place, (request, index) in enumerate(zip(requests, index_of_rank.tolist(), strict=True)):
            start, end = shared[place], len(request.token_ids)
            piece = PromptPiece(request.key, end, end - start, begins=True, ends_step=False)
            pieces[index].append(WaitingPiece(request, first_place + place, start, piece))
        return (_with_branch_points(pieces, after_of_rank) if room.keeps_states else pieces), is_alone
    for of_rank, steps in zip(pieces, plans, strict=True):
        ends_step_P = np.diff(steps.step_P, append=steps.num_steps) > 0
        columns = (steps.prompt_P, steps.start_P, steps.end_P, ends_step_P)
        for prompt, start, end, ends_step in zip(*(column.tolist() for column in columns), strict=True):
            request = requests[prompt]
            piece = PromptPiece(request.key, end, end - start, start == shared[prompt], ends_step)
            of_rank.append(WaitingPiece(request, first_place + prompt, start, piece))
    return (_with_branch_points(pieces, after_of_rank) if room.keeps_states else pieces), True


def _with_branch_points(pieces: list[list[WaitingPiece]], after_of_rank: list[int]) -> list[list[WaitingPiece]]:
    """Return the pieces with the branch points of their requests: prompt lengths after which later prompts branch off.

    Args:
        after_of_rank: tokens that the last request of each rank shares with the next unit.
    """
    return [_branched(of_rank, after) for of_rank, after in zip(pieces, after_of_rank, strict=True)]


def _branched(pieces: list[WaitingPiece], after_tokens: int) -> list[WaitingPiece]:
    in_tree = sorted((item.place, begin) for begin, item in enumerate(pieces) if item.piece.begins)
    requests = [pieces[begin].request for _, begin in in_tree]
    if not requests:
        return pieces
    points = branch_points(
        np.array([own_shared(request) for request in requests]),
        np.argsort(np.argsort([begin for _, begin in in_tree])),
        after_tokens=after_tokens,
    )
    by_key = {
        request.key: msgspec.structs.replace(request, branch_points=found)
        for request, found in zip(requests, points, strict=True)
    }
    return [item._replace(request=by_key[item.request.key]) for item in pieces]


def _plan_within(
    requests: list[Request],
    shared_N: np.ndarray,
    index_of_rank: np.ndarray,
    num_ranks: int,
    room: RankRoom,
    answer_tokens: np.ndarray | None,
) -> list[PrefillSteps] | None:
    """Return steps for which every rank has enough KV pages; None: there are none."""
    pages_N = np.array([room.pages_of(request) for request in requests])
    for most_open in FEWER_OPEN:
        plans = plan_rank_steps(
            np.array([len(request.token_ids) for request in requests]),
            shared_N,
            index_of_rank,
            num_ranks=num_ranks,
            most_tokens=room.prefill_tokens,
            answer_tokens=answer_tokens,
            page_tokens=PAGE_TOKENS,
            most_open=most_open,
        )
        if all(room.holds(steps, pages_N[index_of_rank == rank]) for rank, steps in enumerate(plans)):
            return plans
    return None


def take_pieces(waiting: deque[WaitingPiece], count: int, num_tokens: int | None) -> TakenWork:
    """Remove the first pieces and return them with the requests that begin.

    Args:
        count: most requests that begin.
        num_tokens: prompt tokens to compute after which no further piece is taken; None: no limit.
    """
    taken = TakenWork([], [])
    while waiting and (num_tokens is None or num_tokens > 0):
        if waiting[0].piece.begins:
            if len(taken.requests) == count:
                break
            taken.requests.append(waiting[0].request)
        taken.pieces.append(waiting.popleft().piece)
        if num_tokens is not None:
            num_tokens -= taken.pieces[-1].num_tokens
    return taken


def pieces_sizes(waiting: Iterable[WaitingPiece], outputs: list[float]) -> np.ndarray:
    """Return [4], the sum of `request_sizes` over pieces.

    Args:
        outputs: tokens to generate after each piece.
    """
    ends = np.array([item.piece.end for item in waiting], dtype=np.int64)
    starts = np.array([item.start for item in waiting], dtype=np.int64)
    return request_sizes(ends, starts, np.array(outputs)).sum(axis=0)


def own_shared(request: Request) -> int:
    """Return the prompt tokens that the request's rank is expected to have in memory."""
    return request.shared_tokens - request.replicated_tokens
