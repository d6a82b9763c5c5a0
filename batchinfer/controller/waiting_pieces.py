"""Pieces of prompts that fill the prefill steps of ranks evenly, as they wait for their ranks."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from batchinfer.balance.prefill_steps import plan_rank_steps
from batchinfer.balance.prefix_groups import request_sizes
from batchinfer.config import PAGE_TOKENS
from batchinfer.protocol.messages import PromptPiece
from batchinfer.records import Request


@dataclass(frozen=True, slots=True)
class TakenWork:
    """Work that a rank has taken."""

    requests: list[Request]  # whose prompts begin, in that order
    pieces: list[PromptPiece]  # of these and of prompts begun earlier, in the order in which they run


@dataclass(frozen=True, slots=True)
class WaitingPiece:
    """A piece of a prompt that waits for its rank."""

    request: Request
    place: int  # of the request in the order of the prefix tree
    start: int  # prompt tokens that have run before it
    piece: PromptPiece


def cut_into_pieces(
    requests: list[Request],
    index_of_rank: np.ndarray,
    *,
    num_ranks: int,
    prefill_tokens: int,
    answer_tokens: np.ndarray | None,
    first_place: int,
) -> list[list[WaitingPiece]]:
    """Cut the prompts of each rank into steps (balance/prefill_steps.py).

    Args:
        requests: in the order of the prefix tree.
        index_of_rank: [number of requests] rank of each, from 0.
        prefill_tokens: most prompt tokens of a rank in a step.
        answer_tokens: [number of requests] tokens to expect; None: the same of all.
        first_place: place of the first request in the order of all requests.

    Returns:
        The pieces of each rank in the order in which they run.
    """
    plans = plan_rank_steps(
        np.array([len(request.token_ids) for request in requests]),
        np.array([own_shared(request) for request in requests]),
        index_of_rank,
        num_ranks=num_ranks,
        most_tokens=prefill_tokens,
        answer_tokens=answer_tokens,
        page_tokens=PAGE_TOKENS,
    )
    pieces: list[list[WaitingPiece]] = [[] for _ in plans]
    for of_rank, steps in zip(pieces, plans, strict=True):
        ends_step_P = np.diff(steps.step_P, append=steps.num_steps) > 0
        columns = (steps.prompt_P, steps.start_P, steps.end_P, ends_step_P)
        for prompt, start, end, ends_step in zip(*(column.tolist() for column in columns), strict=True):
            begins = start == own_shared(requests[prompt])
            piece = PromptPiece(requests[prompt].key, end, end - start, begins, ends_step)
            of_rank.append(WaitingPiece(requests[prompt], first_place + prompt, start, piece))
    return pieces


def take_pieces(waiting: deque[WaitingPiece], count: int, num_tokens: int | None) -> TakenWork:
    """Remove the first pieces and return them with the requests that begin.

    Args:
        count: most requests that begin.
        num_tokens: no more once the pieces have this many prompt tokens to compute; None: no limit.
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
    """[4] `request_sizes` of pieces, added up.

    Args:
        outputs: tokens to generate behind each piece.
    """
    ends = np.array([item.piece.end for item in waiting], dtype=np.int64)
    starts = np.array([item.start for item in waiting], dtype=np.int64)
    return request_sizes(ends, starts, np.array(outputs)).sum(axis=0)


def own_shared(request: Request) -> int:
    """Return the prompt tokens that the request's rank is expected to have in memory."""
    return request.shared_tokens - request.replicated_tokens
