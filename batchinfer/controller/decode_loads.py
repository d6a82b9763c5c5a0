"""What each decode rank has to do, and which requests it gets or gives away. No I/O here.

The controller hears which requests run where; every decode step adds a token to each of a rank's. balance/decode.py
decides.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchinfer.balance.decode import OutputLengths, admit, propose_moves
from batchinfer.records import Request, RequestKey

LOOK_EVERY = 8  # decode steps between looks at what could move
READY_SHARE = 8  # requests may wait at a rank for a slot, this fraction (1/8) of its slots, so that none stays empty


@dataclass(slots=True)
class _Running:
    request: Request
    rank: int
    first_step: int  # of its rank


class DecodeLoads:
    """Running requests by decode rank.

    Args:
        ranks: those that decode.
        max_requests: slots of each.
        request_load: what a request costs a step besides its KV, as KV tokens.
        move_steps: sending a KV token takes as long as reading it in this many steps.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        lengths: OutputLengths,
        *,
        max_requests: int,
        request_load: float,
        move_steps: float,
    ) -> None:
        self._ranks = list(ranks)
        self._lengths = lengths
        self._max_requests = max_requests
        self._request_load = request_load
        self._move_steps = move_steps
        self.clear()

    def clear(self) -> None:
        """All ranks start anew."""
        self._running: dict[RequestKey, _Running] = {}
        self._sent: dict[RequestKey, tuple[int, Request]] = {}  # on the way to a rank
        self._moving: dict[RequestKey, int] = {}  # asked to go to this rank
        self._ready: deque[Request] = deque()  # prompts that have run and that no rank has got yet
        self._num_steps: Counter[int] = Counter()
        self._last_look: Counter[int] = Counter()

    def start(self, request: Request, rank: int, num_generated: int = 1) -> None:
        """A request decodes on a rank from now on."""
        self._sent.pop(request.key, None)
        self._running[request.key] = _Running(request, rank, self._num_steps[rank] + 1 - num_generated)

    def step(self, rank: int) -> None:
        """A rank has run a decode step."""
        self._num_steps[rank] += 1

    def finish(self, key: RequestKey) -> None:
        """A request is complete, wherever it was."""
        self._running.pop(key, None)
        self._moving.pop(key, None)

    def add_ready(self, request: Request) -> None:
        """A prompt has run on a rank that does not decode."""
        self._ready.append(request)

    def assign_ready(self) -> list[tuple[Request, int]]:
        """Ranks for prompts that have run, as slots come free: the longest answers first."""
        if not self._ready:
            return []
        free_R = np.array([self._max_requests + self._max_requests // READY_SHARE + 1] * len(self._ranks))
        load_R = np.zeros(len(self._ranks))
        index_of = {rank: index for index, rank in enumerate(self._ranks)}
        for item in self._running.values():
            free_R[index_of[item.rank]] -= 1
            load_R[index_of[item.rank]] += self._kv_tokens(item) + self._request_load
        for rank, request in self._sent.values():
            free_R[index_of[rank]] -= 1
            load_R[index_of[rank]] += len(request.token_ids) + self._request_load
        index_W = admit(
            np.array([self._expected(request) for request in self._ready]),
            np.array([len(request.token_ids) for request in self._ready]),
            load_of_rank=load_R,
            free_slots_of_rank=free_R,
            request_load=self._request_load,
        )
        choices = list(zip(self._ready, index_W.tolist(), strict=True))
        assigned = [(request, self._ranks[index]) for request, index in choices if index >= 0]
        self._ready = deque(request for request, index in choices if index < 0)
        for request, rank in assigned:
            self._sent[request.key] = (rank, request)
        return assigned

    def moves(self) -> list[tuple[RequestKey, int]]:
        """Requests to ask for, with the rank that has them; `arrived` says where each is to go."""
        now = max(self._num_steps.values(), default=0)
        if len(self._ranks) < 2 or self._moving or now - self._last_look[0] < LOOK_EVERY:
            return []
        self._last_look[0] = now
        items = list(self._running.values())
        index_of = {rank: index for index, rank in enumerate(self._ranks)}
        proposed = propose_moves(
            np.array([index_of[item.rank] for item in items], dtype=np.int64),
            np.array([self._kv_tokens(item) for item in items], dtype=np.int64),
            np.array([self._remaining(item) for item in items]),
            max_requests_of_rank=np.full(len(self._ranks), self._max_requests),
            move_steps=self._move_steps,
            request_load=self._request_load,
        )
        for move in proposed:
            self._moving[items[move.request].request.key] = self._ranks[move.to_rank]
        return [(items[move.request].request.key, self._ranks[move.from_rank]) for move in proposed]

    def give_away(self, key: RequestKey) -> tuple[Request, int] | None:
        """A rank has packed a request: the request, and where it goes; None for one that nobody has asked for."""
        rank = self._moving.pop(key, None)
        if rank is None:
            return None
        request = self._running.pop(key).request
        self._sent[key] = (rank, request)
        return request, rank

    def _num_generated(self, item: _Running) -> int:
        return self._num_steps[item.rank] + 1 - item.first_step

    def _kv_tokens(self, item: _Running) -> int:
        return len(item.request.token_ids) + self._num_generated(item)

    def _expected(self, request: Request) -> float:
        return self._lengths.expected(request.prompt_group, request.sampling.max_tokens, request.expected_tokens)

    def _remaining(self, item: _Running) -> float:
        sampling = item.request.sampling
        num_generated = min(self._num_generated(item), sampling.max_tokens)
        return self._lengths.remaining(
            item.request.prompt_group, num_generated, sampling.max_tokens, item.request.expected_tokens
        )
