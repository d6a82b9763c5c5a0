"""Events of a cluster on paper: prefill units, KV under way, decode units, nodes held. Called by answer.

Prefill units take the next requests in order, as many as a step holds. What they have computed goes to the fullest
decode unit with room; while more waits than one decode unit holds, prefill waits too. A decode unit gives each of its
requests one token per step; requests come in and leave every few steps. A unit that has been idle long enough gives
its nodes back.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from math import ceil, exp, log

import numpy as np

from batchinfer.model.config import ModelConfig
from batchinfer.sim.dealing import Deals
from batchinfer.sim.hardware import Accelerator
from batchinfer.sim.steps import Step, Unit, decode_step
from batchinfer.sim.unit_steps import Batch, prefill_batch
from batchinfer.sim.workload import Workload

TURNS_PER_ANSWER = 32  # a decode unit looks for new requests so often during a mean answer
LONGEST_TURN = 64  # steps


@dataclass(frozen=True, slots=True)
class Cluster:
    """What there is."""

    model: ModelConfig
    gpu: Accelerator
    prefill: Unit
    decode: Unit
    num_prefill_units: int
    num_decode_units: int
    prefill_tokens_per_gpu: int
    decode_requests_per_gpu: int
    kv_tokens_per_gpu: float  # memory for KV of a decode rank
    disk_bytes_per_s: float  # per node
    max_wait_s: float  # a prefill step that is not full waits until its first request has waited so long
    release_after_s: float

    def nodes_of(self, unit: Unit) -> float:
        """Nodes that a unit takes."""
        return unit.ep_size / self.gpu.gpus_per_node


@dataclass(slots=True)
class History:
    """What happened."""

    end_s: float
    held: list[tuple[float, float, float]]  # (from, to, nodes)
    prefill_busy_s: float  # unit-seconds
    decode_busy_s: float
    num_events: int
    num_prefill_steps: int
    prefill_limits: dict[str, float]  # seconds of prefill steps by what limited them
    decode_limits: dict[str, float]
    first_token_s: np.ndarray  # [N] end of prefill
    finished_s: np.ndarray  # [N]

    def nodes_at(self, times_s: np.ndarray) -> np.ndarray:
        """Nodes held at these times."""
        nodes = np.zeros(len(times_s))
        for start, end, num in self.held:
            nodes += num * ((times_s >= start) & (times_s < end))
        return nodes

    @property
    def node_seconds(self) -> float:
        """Nodes times seconds held."""
        return sum((end - start) * num for start, end, num in self.held)

    @property
    def peak_nodes(self) -> float:
        """Most nodes held at once."""
        changes = sorted([(start, num) for start, _, num in self.held] + [(end, -num) for _, end, num in self.held])
        return float(np.cumsum([num for _, num in changes]).max())


def simulate(workload: Workload, cluster: Cluster, deals: Deals | None = None) -> History:
    """Run all requests; deterministic.

    Args:
        deals: of this workload, to be shared by several calls.
    """
    return _Events(workload, cluster, deals or Deals(workload)).run()


@dataclass(slots=True)
class _DecodeUnit:
    """Requests in a decode unit. All advance together, so that a request ends when the unit's steps reach a number."""

    index: int
    steps: int = 0
    kv_tokens: float = 0.0  # in use now
    reserved: float = 0.0  # what its requests will need at their longest
    ends: list[tuple[int, int]] = field(default_factory=list)  # heap of (step, request)
    joining: list[int] = field(default_factory=list)  # requests that come in when the next turn begins
    is_running: bool = False

    @property
    def num_requests(self) -> int:
        """Those that come in included."""
        return len(self.ends) + len(self.joining)


class _Events:
    """The queues between the units, and a heap of (time, order, kind, unit)."""

    def __init__(self, workload: Workload, cluster: Cluster, deals: Deals) -> None:
        self.work, self.cluster = workload, cluster
        self.prefill_skews = deals.prefill(cluster.prefill.ep_size, cluster.prefill_tokens_per_gpu)
        self.decode_skew = deals.decode(cluster.decode.ep_size, cluster.decode_requests_per_gpu)
        self.prompt_before = _sums_before(workload.prompt_tokens)
        self.new_before = _sums_before(workload.new_tokens)
        self.pairs_before = _sums_before(workload.attention_pairs)
        self.expanded_before = _sums_before(workload.expanded_tokens)
        self.new_list, self.arrival_list = self.new_before.tolist(), workload.arrival_s.tolist()
        self.prompts, self.outputs = workload.prompt_tokens.tolist(), workload.output_tokens.tolist()
        self.next_request = 0
        self.waiting: deque[int] = deque()  # prefilled, not in a decode unit
        self.waiting_kv = 0.0
        self.idle_prefill = list(range(cluster.num_prefill_units))
        self.decode_units = [_DecodeUnit(index) for index in range(cluster.num_decode_units)]
        self.max_requests = cluster.decode_requests_per_gpu * cluster.decode.ep_size
        self.max_kv = cluster.kv_tokens_per_gpu * cluster.decode.ep_size
        mean_output = float(workload.output_tokens.mean())
        self.turn = int(min(LONGEST_TURN, max(1, mean_output // TURNS_PER_ANSWER)))
        self.events: list[tuple[float, int, str, int]] = []
        self.busy: dict[tuple[str, int], list[list[float]]] = {}
        self.history = History(0.0, [], 0.0, 0.0, 0, 0, {}, {}, np.zeros(len(workload)), np.zeros(len(workload)))
        self.in_prefill: dict[int, tuple[int, int]] = {}
        self.wake_s: float | None = None

    def run(self) -> History:
        self._start_prefill(0.0)
        while self.events:
            now, _, kind, unit = heapq.heappop(self.events)
            if kind == "arrival":
                self.wake_s = None
            elif kind == "prefill":
                first, end = self.in_prefill.pop(unit)
                heapq.heappush(self.idle_prefill, unit)
                self.history.first_token_s[first:end] = now
                self._hand_over(first, end, now)
            else:
                self.decode_units[unit].is_running = False
            self._admit()
            for decode_unit in self.decode_units:
                if decode_unit.num_requests and not decode_unit.is_running:
                    self._turn(decode_unit, now)
            self._start_prefill(now)
        history = self.history
        history.end_s = float(history.finished_s.max())
        history.held = self._held()
        return history

    def _push(self, time_s: float, kind: str, unit: int) -> None:
        self.history.num_events += 1
        heapq.heappush(self.events, (time_s, self.history.num_events, kind, unit))

    def _start_prefill(self, now: float) -> None:
        """Give the next requests to idle prefill units, the first units first."""
        while self.idle_prefill and self.next_request < len(self.work) and self.waiting_kv <= self.max_kv:
            first = self.next_request
            end, due_s = self._next_batch(first)
            if due_s > now:
                if self.wake_s is None or due_s < self.wake_s:
                    self.wake_s = due_s
                    self._push(due_s, "arrival", 0)
                return
            end = min(end, bisect_right(self.arrival_list, now, lo=first))
            unit = heapq.heappop(self.idle_prefill)
            seconds, limit = self._prefill_seconds(first, end)
            self.next_request = end
            self.in_prefill[unit] = (first, end)
            self._was_busy(("prefill", unit), now, now + seconds)
            self.history.prefill_busy_s += seconds
            self.history.num_prefill_steps += 1
            self.history.prefill_limits[limit] = self.history.prefill_limits.get(limit, 0.0) + seconds
            self._push(now + seconds, "prefill", unit)

    def _next_batch(self, first: int) -> tuple[int, float]:
        """(first request that a full step has no room for, when the step is full or its first one has waited)."""
        room = self.cluster.prefill_tokens_per_gpu * self.cluster.prefill.ep_size
        end = bisect_right(self.new_list, self.new_list[first] + room, lo=first + 1) - 1
        end = max(end, first + 1)
        full_s = self.arrival_list[end - 1]
        return end, min(full_s, self.arrival_list[first] + self.cluster.max_wait_s)

    def _prefill_seconds(self, first: int, end: int) -> tuple[float, str]:
        """Of a step with requests first .. end - 1, and what limits it."""
        cluster = self.cluster
        batch = Batch(
            prompts=end - first,
            prompt_tokens=float(self.prompt_before[end] - self.prompt_before[first]),
            new_tokens=float(self.new_before[end] - self.new_before[first]),
            attention_pairs=float(self.pairs_before[end] - self.pairs_before[first]),
            expanded_tokens=float(self.expanded_before[end] - self.expanded_before[first]),
        )
        seconds, limit, _ = prefill_batch(
            batch, self.prefill_skews, cluster.model, cluster.gpu, cluster.prefill, cluster.disk_bytes_per_s
        )
        return seconds, limit

    def _hand_over(self, first: int, end: int, now: float) -> None:
        for request in range(first, end):
            if self.outputs[request] == 1:  # prefill has given the only token
                self.history.finished_s[request] = now
            else:
                self.waiting.append(request)
                self.waiting_kv += self.prompts[request] + self.outputs[request]

    def _admit(self) -> None:
        """Fill decode units, the fullest first."""
        if not self.waiting:
            return
        for unit in sorted(self.decode_units, key=lambda unit: (-unit.num_requests, unit.index)):
            while self.waiting and unit.num_requests < self.max_requests:
                request = self.waiting[0]
                need = self.prompts[request] + self.outputs[request]
                if unit.num_requests and unit.reserved + need > self.max_kv:
                    break
                self.waiting.popleft()
                self.waiting_kv -= need
                unit.reserved += need
                unit.joining.append(request)

    def _turn(self, unit: _DecodeUnit, now: float) -> None:
        """Run a few steps of a decode unit; requests that end within it leave after it."""
        cluster = self.cluster
        for request in unit.joining:
            unit.kv_tokens += self.prompts[request] + 1
            heapq.heappush(unit.ends, (unit.steps + self.outputs[request] - 1, request))
        unit.joining.clear()
        num_running, ranks = len(unit.ends), cluster.decode.ep_size
        num_steps = min(self.turn, unit.ends[-1][0] - unit.steps) if num_running == 1 else self.turn
        num_steps = max(1, num_steps)
        mean_kv = unit.kv_tokens + num_running * (num_steps - 1) / 2
        step = _decode_step(num_running / ranks, mean_kv / ranks * self.decode_skew, cluster)
        turn_s = step.seconds * num_steps
        start_steps = unit.steps
        unit.steps += num_steps
        unit.kv_tokens += num_running * num_steps
        while unit.ends and unit.ends[0][0] <= unit.steps:
            end_step, request = heapq.heappop(unit.ends)
            self.history.finished_s[request] = now + (end_step - start_steps) * step.seconds
            total = self.prompts[request] + self.outputs[request]
            unit.kv_tokens -= total + (unit.steps - end_step)
            unit.reserved -= total
        self.history.decode_busy_s += turn_s
        self.history.decode_limits[step.bottleneck] = self.history.decode_limits.get(step.bottleneck, 0.0) + turn_s
        self._was_busy(("decode", unit.index), now, now + turn_s)
        unit.is_running = True
        self._push(now + turn_s, "decode", unit.index)

    def _was_busy(self, unit: tuple[str, int], start: float, end: float) -> None:
        """Note it; idle times below the release time are held on to."""
        spans = self.busy.setdefault(unit, [])
        if spans and start - spans[-1][1] <= self.cluster.release_after_s:
            spans[-1][1] = end
        else:
            spans.append([start, end])

    def _held(self) -> list[tuple[float, float, float]]:
        """Spans with nodes: until released, or the end of all work."""
        held = []
        end_s = self.history.end_s
        for (kind, _), spans in self.busy.items():
            nodes = self.cluster.nodes_of(self.cluster.prefill if kind == "prefill" else self.cluster.decode)
            held += [(start, min(end + self.cluster.release_after_s, max(end, end_s)), nodes) for start, end in spans]
        return held


def _sums_before(values: np.ndarray) -> np.ndarray:
    """[N + 1] sums of the values before each place, and of all."""
    return np.concatenate([[0], np.cumsum(values)])


def _decode_step(requests: float, kv_tokens: float, cluster: Cluster) -> Step:
    """`decode_step` at figures rounded to steps of one percent, so that most calls are known ones."""
    return decode_step(_rounded(requests), _rounded(kv_tokens), cluster.model, cluster.gpu, cluster.decode)


def _rounded(value: float) -> float:
    return exp(round(log(value) * 100) / 100)


def nodes_for(units: int, gpus_per_node: int, unit: Unit) -> int:
    """Nodes that so many units take."""
    return ceil(units * unit.ep_size / gpus_per_node)
