"""Moves of running requests between decode ranks: those that shorten steps by more than the move costs."""

# N requests, R ranks

from dataclasses import dataclass

import numpy as np

from batchinfer.balance.decode import best_pair, check_lengths, checked_counts
from batchinfer.balance.request_load import ONE_PER_TOKEN, RequestLoad

START_MOVING = 1.03  # busiest rank / mean: below, no request moves
STOP_MOVING = 1.01
LASTING = 0.08  # busiest rank / mean - 1, by move_steps, that lasts as long as requests run; less evens out sooner
DELAY_STEPS = 2  # a rank gives a request away one step after the search, and another rank runs it one step later
NOWHERE = -1  # in place of the rank of a request that stays, or has none yet


@dataclass(frozen=True, slots=True)
class Move:
    """A change of a running request's rank at a step boundary, with its KV."""

    request: int
    from_rank: int
    to_rank: int
    kv_tokens: int


def propose_moves(
    rank_of_request: np.ndarray,
    kv_tokens: np.ndarray,
    remaining_tokens: np.ndarray,
    *,
    max_requests_of_rank: np.ndarray,
    move_steps: float,
    request_load: RequestLoad = ONE_PER_TOKEN,
    can_move: np.ndarray | None = None,
) -> list[Move]:
    """Return moves that make steps so much shorter that they pay; none while the ranks are about equal.

    Repeatedly, the busiest rank gives the idlest a request of about half their difference, or two requests change
    places. The proposal is the first part of these moves that saves most. Saved is the reduction of the busiest rank's
    load, for as long as the moved requests are expected to run after they have arrived; the time that the busiest link
    is sending is subtracted. Ranks that differ little even out as requests come and end, so a small difference counts
    for a part of that
    time: the dearer sending is, the smaller is the part.

    Args:
        rank_of_request: [N] ranks of the running requests.
        kv_tokens: [N] their KV tokens now.
        remaining_tokens: [N] tokens still to come (`OutputLengths.remaining_each`).
        max_requests_of_rank: [R] slots of each rank.
        move_steps: sending a KV token takes as long as reading it in this many steps.
        request_load: the cost of a request in a step.
        can_move: [N] whether each may move; None: all may.

    Raises:
        ConfigError: arrays that should have the same length have not, or there is no rank.
    """
    num_ranks = len(max_requests_of_rank)
    kv_N, rank_N = checked_counts(kv_tokens, num_ranks), np.array(rank_of_request, dtype=np.int64)
    stays_N = np.zeros(len(kv_N), dtype=bool) if can_move is None else ~can_move
    check_lengths(kv_tokens=kv_N, rank_of_request=rank_N, remaining_tokens=remaining_tokens, can_move=stays_N)
    steps_N = np.maximum(np.asarray(remaining_tokens) - DELAY_STEPS, 0)
    size_N = request_load.of(kv_N)
    load_R, num_R = np.bincount(rank_N, size_N, num_ranks), np.bincount(rank_N, minlength=num_ranks)
    load_before, mean = load_R.max(), load_R.mean()
    if load_before <= START_MOVING * mean:
        return []
    rank_N[stays_N] = NOWHERE
    running = _Running(rank_N, kv_N, size_N, load_R, num_R, np.asarray(max_requests_of_rank), request_load.row)
    lasting_share = min(1.0, (load_before / mean - 1) / (LASTING * move_steps)) if move_steps else 1.0
    sent_R = np.zeros(num_ranks)
    moves: list[Move] = []
    best_num, best_net = 0, 0.0
    while load_R.max() > STOP_MOVING * mean and (found := running.next_moves()):
        for move in found:
            running.move(move)
            sent_R[[move.from_rank, move.to_rank]] += move.kv_tokens
        moves += found
        num_steps = np.mean([steps_N[move.request] for move in moves]) * lasting_share
        net = (load_before - load_R.max()) * num_steps - move_steps * sent_R.max()
        if net > best_net:
            best_num, best_net = len(moves), net
    return moves[:best_num]


@dataclass(frozen=True, slots=True)
class _Running:
    """Requests that may move, and the loads of ranks; `move` changes the arrays."""

    rank_N: np.ndarray  # NOWHERE: the request stays at its rank
    kv_N: np.ndarray
    size_N: np.ndarray
    load_R: np.ndarray
    num_R: np.ndarray
    most_R: np.ndarray
    row: float  # load of a request without attention

    def next_moves(self) -> list[Move]:
        """Return the move, or exchange, that levels the busiest rank and the idlest, in attention and in requests.

        An exchange of two requests is tried if one move alone leaves more than half of the gap.
        """
        busiest, idlest = int(self.load_R.argmax()), int(self.load_R.argmin())
        gap, more = self.load_R[busiest] - self.load_R[idlest], int(self.num_R[busiest] - self.num_R[idlest])
        attention_N, attention_gap = self.size_N - self.row, gap - self.row * more
        mine, theirs = (np.flatnonzero(self.rank_N == rank) for rank in (busiest, idlest))
        moves, left = [], np.inf
        fitting = mine[self.size_N[mine] < gap]
        if len(fitting) and self.num_R[idlest] < self.most_R[idlest]:
            left_each = np.abs(attention_gap - 2 * attention_N[fitting]) + self.row * abs(more - 2)
            left = float(left_each.min())
            moves = [self._move(fitting[left_each.argmin()], busiest, idlest)]
        if left > gap / 2:
            theirs = theirs[np.argsort(attention_N[theirs], kind="stable")]
            pair = best_pair(attention_N[mine], attention_N[theirs], attention_gap)
            if pair is not None:
                given, taken = mine[pair[0]], theirs[pair[1]]
                difference = attention_N[given] - attention_N[taken]
                if abs(attention_gap - 2 * difference) + self.row * abs(more) < left:
                    moves = [self._move(given, busiest, idlest), self._move(taken, idlest, busiest)]
        return moves

    def move(self, move: Move) -> None:
        """Move a request to its new rank, where it stays."""
        ranks = [move.from_rank, move.to_rank]
        self.load_R[ranks] += np.array([-1.0, 1.0]) * self.size_N[move.request]
        self.num_R[ranks] += [-1, 1]
        self.rank_N[move.request] = NOWHERE

    def _move(self, request: int, from_rank: int, to_rank: int) -> Move:
        return Move(int(request), from_rank, to_rank, int(self.kv_N[request]))
