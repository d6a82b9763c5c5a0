"""The requests of each decode rank, and the choice of the rank for a new or moved request.

Driven by the controller with the ranks' reports, and by plan and simulator with known lengths (decode_run.py):

    add_ready --assign_ready--> on its way --start--> running --finish-->
                                     ^---- give_away ----'        (`moves` has asked for it)

Every decode step adds a token to each of a rank's requests. decode.py and decode_moves.py make the decisions.
"""

# N requests that are on their way or run, W ready ones, R ranks

from collections.abc import Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from batchinfer.balance.decode import admit
from batchinfer.balance.decode_moves import NOWHERE, propose_moves
from batchinfer.balance.output_lengths import OutputLengths
from batchinfer.balance.request_load import RequestLoad
from batchinfer.records import Request, RequestKey

LOOK_EVERY = 8  # decode steps between searches for moves while ranks are about level
LOOK_NOW = 1.1  # busiest rank / mean: above, every step
READY_SHARE = 8  # requests may wait at a rank for a slot, this fraction (1/8) of its slots, so that none stays empty
# Sending a KV token takes as long as reading it in this many decode steps: two copies, or memory against network speed
MOVE_STEPS = 4.0
MOVE_STEPS_BETWEEN_HOSTS = 64.0

Key = TypeVar("Key", bound=Hashable)

_ROW = np.dtype(
    [
        ("rank", np.int64),  # index into the list of ranks
        ("is_running", np.bool_),  # else on its way to the rank
        ("prompt_tokens", np.int64),
        ("since", np.int64),  # tokens generated: while running less the rank's steps, on its way all of them
        ("max_tokens", np.int64),
        ("group", np.int64),  # its number in the output lengths
        ("expected", np.float64),  # in an earlier run; NaN: not known
    ]
)


class DecodeRequest(NamedTuple, Generic[Key]):
    """The facts about a request that balancing needs."""

    key: Key
    prompt_tokens: int
    max_tokens: int
    prompt_group: Hashable = 0
    expected_tokens: float | None = None  # mean of the group in an earlier run


def decode_request(request: Request) -> DecodeRequest[RequestKey]:
    """Return the facts that balancing needs about a request of a job."""
    return DecodeRequest(
        request.key,
        len(request.token_ids),
        request.sampling.max_tokens,
        request.prompt_group,
        request.expected_tokens,
    )


class _Table(Generic[Key]):
    """Rows of requests that come and go, in any order."""

    def __init__(self) -> None:
        self.keys: list[Key] = []  # of the rows
        self._place_of: dict[Key, int] = {}
        self._all = np.zeros(64, _ROW)

    @property
    def rows(self) -> np.ndarray:
        return self._all[: len(self.keys)]

    def row(self, key: Key) -> np.ndarray:
        """Return the row of a request, [1], a view to be changed."""
        place = self._place_of[key]
        return self._all[place : place + 1]

    def put(self, key: Key, row: Any) -> None:
        """Add a request, or replace its row."""
        place = self._place_of.setdefault(key, len(self.keys))
        if place == len(self.keys):
            self.keys.append(key)
            if place == len(self._all):
                self._all = np.concatenate([self._all, np.zeros_like(self._all)])
        self._all[place] = row

    def remove(self, key: Key) -> None:
        """Remove a request, if it is there; the last row moves to its place."""
        place = self._place_of.pop(key, None)
        if place is None:
            return
        last = self.keys.pop()
        if last != key:
            self._all[place] = self._all[len(self.keys)]
            self.keys[place] = last
            self._place_of[last] = place


class DecodeLoads(Generic[Key]):
    """The requests of each decode rank.

    Args:
        ranks: numbers of the decode ranks.
        max_requests: slots of each.
        request_load: the cost of a request in a step.
        move_steps: sending a KV token takes as long as reading it in this many steps.
        is_lone_rank: whether the only rank runs prompts and decode; then no request has to be noted.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        lengths: OutputLengths,
        *,
        max_requests: int,
        request_load: RequestLoad,
        move_steps: float,
        is_lone_rank: bool = False,
    ) -> None:
        self.is_lone_rank = is_lone_rank
        self._ranks = list(ranks)
        self._num_ranks = len(self._ranks)
        self._index_of = {rank: index for index, rank in enumerate(self._ranks)}
        self._lengths = lengths
        self._max_requests = max_requests
        self._request_load = request_load
        self._move_steps = move_steps
        self.clear()

    def clear(self) -> None:
        """Forget all requests: every rank starts empty."""
        self._table: _Table[Key] = _Table()
        self._moving: dict[Key, int] = {}  # asked to go to the rank with this index
        self._ready: list[Key] = []  # prompts that have run and have no decode rank yet
        self._ready_rows = np.zeros(0, _ROW)  # of the first ready prompts
        self._new_rows: list[tuple[object, ...]] = []  # of the other ready prompts
        self._steps_R = np.zeros(self._num_ranks, dtype=np.int64)
        self._last_look = 0

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def start(self, request: DecodeRequest[Key], rank: int, num_generated: int = 1) -> None:
        """Record that a request decodes on a rank from now on."""
        index = self._index_of[rank]
        self._table.put(request.key, self._row(request, index, num_generated - int(self._steps_R[index])))

    def step(self, rank: int, count: int = 1) -> None:
        """Record that a rank has run decode steps."""
        self._steps_R[self._index_of[rank]] += count

    def finish(self, key: Key) -> None:
        """Record that a request is complete, on any rank or between ranks."""
        self._moving.pop(key, None)
        self._table.remove(key)

    def add_ready(self, request: DecodeRequest[Key]) -> None:
        """Record that a prompt has run on a rank that does not decode."""
        self._ready.append(request.key)
        self._new_rows.append(self._row(request, NOWHERE, 0))

    def assign_ready(self) -> list[tuple[Key, int]]:
        """Return ranks for prompts that have run, if slots are free: the longest answers first."""
        rows = self._table.rows
        most = self._max_requests + self._max_requests // READY_SHARE + 1
        free_R = np.maximum(most - np.bincount(rows["rank"], minlength=self._num_ranks), 0)
        if not self._ready or not free_R.any():
            return []
        ready = np.concatenate([self._ready_rows, np.array(self._new_rows, _ROW)])
        rank_W = admit(
            self._lengths.expected_each(ready["group"], ready["max_tokens"], ready["expected"]),
            ready["prompt_tokens"],
            ready["group"],
            load_of_rank=self._load_of_rank(rows),
            requests_of_rank=np.bincount(rows["rank"], minlength=self._num_ranks),
            free_slots_of_rank=free_R,
            request_load=self._request_load,
        )
        ready["rank"] = rank_W
        assigned = []
        for place in np.flatnonzero(rank_W >= 0).tolist():
            self._table.put(self._ready[place], ready[place])
            assigned.append((self._ready[place], self._ranks[rank_W[place]]))
        waits_W = rank_W < 0
        self._ready = [self._ready[place] for place in np.flatnonzero(waits_W).tolist()]
        self._ready_rows, self._new_rows = ready[waits_W], []
        return assigned

    def moves(self) -> list[tuple[Key, int]]:
        """Return requests to ask for, with the rank that has each; `give_away` returns the new rank of each.

        Searches every LOOK_EVERY steps, and at once when the ranks are far from level. New requests are asked for only
        after all earlier ones have left their rank.
        """
        now = int(self._steps_R.max())
        if self._num_ranks < 2 or self._moving or now == self._last_look:
            return []
        # answers at their limits are complete, though not reported yet
        present_N = np.flatnonzero(self._num_generated(self._table.rows) < self._table.rows["max_tokens"])
        rows = self._table.rows[present_N]
        generated_N = self._num_generated(rows)
        load_R = self._load_of_rank(rows)
        if now - self._last_look < LOOK_EVERY and load_R.max() <= LOOK_NOW * load_R.mean():
            return []
        self._last_look = now
        proposed = propose_moves(
            rows["rank"],
            self._kv_tokens(rows),
            self._lengths.remaining_each(rows["group"], generated_N, rows["max_tokens"], rows["expected"]),
            max_requests_of_rank=np.full(self._num_ranks, self._max_requests),
            move_steps=self._move_steps,
            request_load=self._request_load,
            can_move=rows["is_running"],
        )
        keys = [self._table.keys[present_N[move.request]] for move in proposed]
        self._moving = {key: move.to_rank for key, move in zip(keys, proposed, strict=True)}
        return [(key, self._ranks[move.from_rank]) for key, move in zip(keys, proposed, strict=True)]

    def give_away(self, key: Key) -> int | None:
        """Record that a rank has packed a request; return its new rank, or None if the request was not asked for."""
        rank = self._moving.pop(key, None)
        if rank is None:
            return None
        row = self._table.row(key)
        row["since"] = self._num_generated(row)
        row["is_running"], row["rank"] = False, rank
        return self._ranks[rank]

    def kv_of_rank(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Return ([R] KV tokens of running requests, [R] their number, KV tokens of the largest of all)."""
        rows = self._table.rows[self._table.rows["is_running"]]
        kv_N = self._kv_tokens(rows)
        num_R = np.bincount(rows["rank"], minlength=self._num_ranks)
        return np.bincount(rows["rank"], kv_N, self._num_ranks), num_R, int(kv_N.max(initial=0))

    def _row(self, request: DecodeRequest[Key], index: int, since: int) -> tuple[object, ...]:
        """Return the row of a request that runs at a rank, or that has no rank yet (NOWHERE)."""
        group = self._lengths.number(request.prompt_group)
        expected = np.nan if request.expected_tokens is None else request.expected_tokens
        return index, index != NOWHERE, request.prompt_tokens, since, request.max_tokens, group, expected

    def _load_of_rank(self, rows: np.ndarray) -> np.ndarray:
        return np.bincount(rows["rank"], self._request_load.of(self._kv_tokens(rows)), self._num_ranks)

    def _num_generated(self, rows: np.ndarray) -> np.ndarray:
        """Return the generated tokens of each request; ranks step together, so the latest step counts for all."""
        return rows["since"] + np.where(rows["is_running"], self._steps_R.max(), 0)

    def _kv_tokens(self, rows: np.ndarray) -> np.ndarray:
        return rows["prompt_tokens"] + self._num_generated(rows)
