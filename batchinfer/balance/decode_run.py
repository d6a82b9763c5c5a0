"""Simulated decode ranks: the controller's own balancer (decode_loads.py) driven with known output lengths.

Ranks step together, as those of a job do. Requests come and move between turns of some steps; if answers are short, a
turn is one step. As in a job, a rank gives a request away a step after the search, and the request is under way for
another step. Prefill is assumed to keep up: every request that may begin has run.
"""

# N requests in the order in which they are prefilled, R ranks, S turns

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Protocol

import numpy as np

from batchinfer.balance.decode_loads import DecodeLoads, DecodeRequest
from batchinfer.balance.decode_series import Balance, balance_of_steps
from batchinfer.balance.output_lengths import OutputLengths
from batchinfer.balance.prefix_groups import num_kept
from batchinfer.balance.request_load import RequestLoad
from batchinfer.config import FREE_SHARE

TURNS_PER_ANSWER = 64  # of a mean answer


@dataclass(frozen=True, slots=True)
class Answers:
    """Requests to decode."""

    prompt_tokens: np.ndarray  # [N] int64
    output_tokens: np.ndarray  # [N] int64, tokens generated
    max_tokens: np.ndarray  # [N] int64, limits
    expected_tokens: np.ndarray  # [N] float, expectations of the balancer; NaN: unknown
    groups: np.ndarray | None = None  # [N] int64, prompt groups; None: requests with equal expectations


@dataclass(slots=True)
class DecodeSeries:
    """Turns of a simulated run: loads of the decode ranks, as in the `steps` records of real ranks."""

    num_steps: list[int] = field(default_factory=list)
    kv_tokens: list[np.ndarray] = field(default_factory=list)  # [R] each
    num_requests: list[np.ndarray] = field(default_factory=list)  # [R] each
    largest_kv_tokens: list[float] = field(default_factory=list)
    is_full: list[bool] = field(default_factory=list)  # whether every slot is taken, or requests wait for one

    def kv_balance(self, *, only_full: bool = False) -> Balance | None:
        """Return KV tokens of the busiest rank by the mean; None without decode steps (or, if chosen, full ones)."""
        chosen = np.array(self.is_full, dtype=bool) | (not only_full)
        if not chosen.any():
            return None
        kv_SR = np.array(self.kv_tokens)[chosen]
        largest_S, num_S = np.array(self.largest_kv_tokens)[chosen], np.array(self.num_steps)[chosen]
        return balance_of_steps(kv_SR.max(axis=1), kv_SR.mean(axis=1), largest_S, num_S)


class Source(Protocol):
    """The supply of requests."""

    def fill(self, ranks: "PaperRanks") -> None:
        """Start or send the requests that may begin."""

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""


class PaperRanks:
    """Simulated decode ranks and their requests.

    Args:
        max_requests, request_load, move_steps: as for DecodeLoads.
    """

    def __init__(
        self, answers: Answers, num_ranks: int, *, max_requests: int, request_load: RequestLoad, move_steps: float
    ) -> None:
        self.max_requests = max_requests
        self.num_R = np.zeros(num_ranks, dtype=np.int64)  # requests that run
        self.lengths = OutputLengths()
        self.loads: DecodeLoads[int] = DecodeLoads(
            range(num_ranks),
            self.lengths,
            max_requests=max_requests,
            request_load=request_load,
            move_steps=move_steps,
        )
        self.num_sent = 0  # requests on their way to a rank
        self._prompts, self._outputs = answers.prompt_tokens.tolist(), answers.output_tokens.tolist()
        self._limits, self._expected = answers.max_tokens.tolist(), answers.expected_tokens.tolist()
        self._groups = None if answers.groups is None else answers.groups.tolist()
        self._inbox: list[deque[tuple[int, int]]] = [deque() for _ in range(num_ranks)]  # (request, tokens it has)
        self._step = 0
        self._ends: list[tuple[int, int]] = []  # heap of (step after which it ends, request)
        self._end_of: dict[int, tuple[int, int]] = {}  # request -> (that step, rank)
        self._turn_steps = max(
            1, int(answers.output_tokens.sum()) // max(1, len(answers.output_tokens)) // TURNS_PER_ANSWER
        )
        self._step_turns = round(1 / self._turn_steps)  # turns per step: 1, or 0 for turns of several steps
        self._asked: deque[tuple[int, int, int]] = deque()  # (turn, request, its rank): to be given away in that turn
        self._under_way: deque[tuple[int, int, int, int]] = deque()  # (turn of arrival, request, rank, tokens)
        self._turn = 0

    @property
    def free_R(self) -> np.ndarray:
        """[R] free slots."""
        return self.max_requests - self.num_R

    def request(self, number: int) -> DecodeRequest[int]:
        """Return the facts about a request that the balancer knows."""
        expected = self._expected[number]
        known = None if isnan(expected) else expected
        group = known if self._groups is None else self._groups[number]
        return DecodeRequest(number, self._prompts[number], self._limits[number], group, known)

    def start(self, number: int, rank: int, num_generated: int = 1) -> None:
        """Decode a request on a rank from now on; prefill has given its first token, which may be its only one."""
        end = self._step + self._outputs[number] - num_generated
        if end == self._step:
            self._end(number)
            return
        self.loads.start(self.request(number), rank, num_generated)
        self.num_R[rank] += 1
        self._end_of[number] = end, rank
        heapq.heappush(self._ends, (end, number))

    def _end(self, number: int) -> None:
        self.loads.finish(number)
        self.lengths.finish(self.request(number).prompt_group, self._outputs[number])

    def send(self, number: int, rank: int, num_generated: int = 1) -> None:
        """Queue a request at a rank, which runs it as soon as a slot is free."""
        self._inbox[rank].append((number, num_generated))
        self.num_sent += 1

    def run(self, source: Source) -> DecodeSeries:
        """Run until all requests have ended."""
        series = DecodeSeries()
        while True:
            source.fill(self)
            self._take_sent()
            self._move()
            self._take_sent()
            if not self.num_R.any():
                if not self._under_way:
                    return series
                self._turn += 1  # ranks wait
                continue
            series.is_full.append(bool(source.num_waiting or not self.free_R.any()))
            kv_R, num_R, largest = self.loads.kv_of_rank()
            kv_R += num_R * (self._turn_steps - 1) / 2
            ended_kv_R, ended_R = self._advance()
            series.num_steps.append(self._turn_steps)
            series.kv_tokens.append(kv_R - ended_kv_R)
            series.num_requests.append(num_R - ended_R)
            series.largest_kv_tokens.append(min(largest, float((kv_R - ended_kv_R).max())))

    def _take_sent(self) -> None:
        for rank, inbox in enumerate(self._inbox):
            while inbox and self.num_R[rank] < self.max_requests:
                self.num_sent -= 1
                number, num_generated = inbox.popleft()
                self.start(number, rank, num_generated)

    def _move(self) -> None:
        """Search for moves, give away the requests asked for, and deliver those under way."""
        self._asked += ((self._turn + self._step_turns, number, rank) for number, rank in self.loads.moves())
        while self._asked and self._asked[0][0] <= self._turn:
            _, number, from_rank = self._asked.popleft()
            if number in self._end_of:
                to_rank = self.loads.give_away(number)
                assert to_rank is not None
                end, _ = self._end_of.pop(number)
                self.num_R[from_rank] -= 1
                num_generated = self._outputs[number] - (end - self._step)
                self._under_way.append((self._turn + self._step_turns, number, to_rank, num_generated))
        while self._under_way and self._under_way[0][0] <= self._turn:
            _, number, to_rank, num_generated = self._under_way.popleft()
            self.send(number, to_rank, num_generated)

    def _advance(self) -> tuple[np.ndarray, np.ndarray]:
        """Run a turn; return [R] KV tokens and requests, per step, that ended before the turn was over."""
        self._step += self._turn_steps
        self._turn += 1
        kv_R, num_R = np.zeros(len(self.num_R)), np.zeros(len(self.num_R))
        for rank in range(len(self.num_R)):
            self.loads.step(rank, self._turn_steps)
        while self._ends and self._ends[0][0] <= self._step:
            end, number = heapq.heappop(self._ends)
            if self._end_of.get(number, (None,))[0] != end:
                continue  # it has moved, and ends later
            rank, num_over = self._end_of.pop(number)[1], self._step - end
            kv_R[rank] += num_over * (self._prompts[number] + self._outputs[number] + (num_over - 1) / 2)
            num_R[rank] += num_over
            self._end(number)
            self.num_R[rank] -= 1
        return kv_R / self._turn_steps, num_R / self._turn_steps


class ReadyPrompts:
    """Prompts that run on separate ranks: at most as many as the decode ranks hold have run and wait for a slot.

    Args:
        num_requests: of the answers, in their order.
    """

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self.num_waiting = num_requests

    def fill(self, ranks: PaperRanks) -> None:
        """Run prompts, and send them to ranks with free slots."""
        loads, most = ranks.loads, ranks.max_requests * len(ranks.num_R)
        first = self._num_requests - self.num_waiting + loads.num_ready
        last = min(self._num_requests, first + most - loads.num_ready - ranks.num_sent)
        for number in range(first, last):
            loads.add_ready(ranks.request(number))
        for number, rank in loads.assign_ready():
            ranks.send(number, rank)
            self.num_waiting -= 1


class DealtPrompts:
    """Prompts that decode on the rank that runs them: queues by rank, unit after unit.

    Args:
        units: by rank, the requests of each unit in the order in which the rank begins them.
        work: [N] tokens to run for each request.
    """

    def __init__(self, units: Sequence[Sequence[Sequence[int]]], work: np.ndarray) -> None:
        self._units = deque(units)
        self._work = work.tolist()
        self._queues: list[deque[int]] = [deque() for _ in (units[0] if units else ())]
        self.num_waiting = sum(len(queue) for unit in units for queue in unit)

    def fill(self, ranks: PaperRanks) -> None:
        """Start queued prompts; ranks prefill together when one has enough free slots, or nothing else to do."""
        free_R = ranks.free_R
        for rank in np.flatnonzero(free_R).tolist():
            while not self._queues[rank] and self._units:
                for queue, more in zip(self._queues, self._units.popleft(), strict=True):
                    queue.extend(more)
            if not self._queues[rank]:
                self._take_over(rank)
        waits_R = np.array([len(queue) for queue in self._queues])
        is_due_R = (free_R * FREE_SHARE >= ranks.max_requests) | (ranks.num_R == 0)
        if not (is_due_R & (waits_R > 0)).any():
            return
        for rank, count in enumerate(np.minimum(free_R, waits_R).tolist()):
            self.num_waiting -= count
            for _ in range(count):
                ranks.start(self._queues[rank].popleft(), rank)

    def _take_over(self, rank: int) -> None:
        """Move half of the longest queue's work to a rank without requests."""
        busiest = max(self._queues, key=lambda queue: sum(self._work[number] for number in queue))
        # a single remaining request may begin at its own rank
        if len(busiest) > 1:
            kept = num_kept(self._work[number] for number in busiest)
            self._queues[rank].extend([busiest.pop() for _ in range(len(busiest) - kept)][::-1])
