"""Events of a simulated cluster: prefill units, KV under way, decode units, nodes held.

Prefill units take the next requests in order, as many as a step holds. The prefilled requests go to the fullest decode
unit with room; while more wait than one decode unit holds, prefill waits, too. A decode unit gives each of its requests
one token per step; requests come in and leave every few steps. A unit that has been idle long enough releases its
nodes.
"""

import heapq
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from math import ceil, exp, log

import numpy as np

from batchinfer.model.config import ModelConfig
from batchinfer.sim.dealing import Deals
from batchinfer.sim.hardware import Accelerator
from batchinfer.sim.memory import state_tokens
from batchinfer.sim.steps import Batch, Step, Unit, decode_step, prefill_batch
from batchinfer.sim.workload import Workload

TURNS_PER_ANSWER = 32  # times that a decode unit takes new requests during a mean answer
LONGEST_TURN = 64  # steps


@dataclass(frozen=True, slots=True)
class Cluster:
    """The units of a cluster and their limits."""

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
    max_wait_s: float  # a prefill step that is not full starts when its first request has waited this long
    release_after_s: float

    def nodes_of(self, unit: Unit) -> float:
        """Return the nodes that a unit takes."""
        return unit.ep_size / self.gpu.gpus_per_node


@dataclass(slots=True)
class History:
    """The results of a simulation."""

    end_s: float
    held: list[tuple[float, float, float]]  # (from, to, nodes)
    prefill_busy_s: float  # unit-seconds
    decode_busy_s: float
    num_events: int
    prefill_limits: dict[str, float]  # seconds of prefill steps by bottleneck
    decode_limits: dict[str, float]
    first_token_s: np.ndarray  # [N] end of prefill
    finished_s: np.ndarray  # [N]

    def nodes_at(self, times_s: np.ndarray) -> np.ndarray:
        """Return the nodes held at these times."""
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
        """The most nodes held at once."""
        changes = sorted([(start, num) for start, _, num in self.held] + [(end, -num) for _, end, num in self.held])
        return float(np.cumsum([num for _, num in changes]).max())


def simulate(workload: Workload, cluster: Cluster, deals: Deals | None = None) -> History:
    """Run all requests; deterministic.

    Args:
        deals: of this workload, to be shared by several calls.
    """
    deals = deals or Deals(workload)
    log = _Log(cluster, len(workload))
    prefill, decode = _Prefill(workload, cluster, deals, log), _Decode(workload, cluster, deals, log)
    prefill.start(0.0)
    while log.due:
        now, _, kind, unit = heapq.heappop(log.due)
        if kind == "arrival":
            prefill.wake_s = None
        elif kind == "prefill":
            decode.take_over(prefill.finish(unit, now), now)
        else:
            decode.units[unit].is_running = False
        decode.advance(now)
        if decode.waiting_kv <= decode.max_kv:
            prefill.start(now)
    return log.finish()


class _Log:
    """The events so far, and the events due: a heap of (time, order, kind, unit)."""

    def __init__(self, cluster: Cluster, num_requests: int) -> None:
        self.cluster = cluster
        self.due: list[tuple[float, int, str, int]] = []
        self.history = History(0.0, [], 0.0, 0.0, 0, {}, {}, np.zeros(num_requests), np.zeros(num_requests))
        self._busy: dict[tuple[str, int], list[list[float]]] = {}

    def expect(self, time_s: float, kind: str, unit: int) -> None:
        """Add an event to the heap."""
        self.history.num_events += 1
        heapq.heappush(self.due, (time_s, self.history.num_events, kind, unit))

    def work(self, kind: str, unit: int, start: float, seconds: float) -> None:
        """Record that a unit works from `start` on; it keeps its nodes over idle times below the release time."""
        end = start + seconds
        spans = self._busy.setdefault((kind, unit), [])
        if spans and start - spans[-1][1] <= self.cluster.release_after_s:
            spans[-1][1] = end
        else:
            spans.append([start, end])
        self.expect(end, kind, unit)

    def finish(self) -> History:
        """Return the whole history, with the nodes held until they were released or all work ended."""
        history, cluster = self.history, self.cluster
        history.end_s = end_s = float(history.finished_s.max())
        for (kind, _), spans in self._busy.items():
            nodes = cluster.nodes_of(cluster.prefill if kind == "prefill" else cluster.decode)
            history.held += [
                (start, min(end + cluster.release_after_s, max(end, end_s)), nodes) for start, end in spans
            ]
        return history


class _Prefill:
    """The prefill units and the requests that have not been prefilled, in order."""

    def __init__(self, workload: Workload, cluster: Cluster, deals: Deals, log: _Log) -> None:
        self._cluster, self._log = cluster, log
        self._skews = deals.prefill(cluster.prefill.ep_size, cluster.prefill_tokens_per_gpu)
        self._sums_before = {
            name: _sums_before(getattr(workload, name))
            for name in ("prompt_tokens", "new_tokens", "attention_pairs", "expanded_tokens")
        }
        self._new_before, self._arrivals = self._sums_before["new_tokens"].tolist(), workload.arrival_s.tolist()
        self._next = 0
        self._idle = list(range(cluster.num_prefill_units))
        self._running: dict[int, range] = {}  # unit -> requests
        self.wake_s: float | None = None  # the earliest arrival that the log expects

    def start(self, now: float) -> None:
        """Give the next requests to idle units, the first units first."""
        history = self._log.history
        while self._idle and self._next < len(self._arrivals):
            end, due_s = self._next_batch()
            if due_s > now:
                if self.wake_s is None or due_s < self.wake_s:
                    self.wake_s = due_s
                    self._log.expect(due_s, "arrival", 0)
                return
            requests = range(self._next, min(end, bisect_right(self._arrivals, now, lo=self._next)))
            unit = heapq.heappop(self._idle)
            seconds, limit = self._seconds(requests)
            self._next = requests.stop
            self._running[unit] = requests
            history.prefill_busy_s += seconds
            history.prefill_limits[limit] = history.prefill_limits.get(limit, 0.0) + seconds
            self._log.work("prefill", unit, now, seconds)

    def finish(self, unit: int, now: float) -> range:
        """Mark a unit as idle and return the requests that it has prefilled."""
        requests = self._running.pop(unit)
        heapq.heappush(self._idle, unit)
        self._log.history.first_token_s[requests.start : requests.stop] = now
        return requests

    def _next_batch(self) -> tuple[int, float]:
        """Return the first request that does not fit into the next full step, and the time at which the step starts."""
        first, new_before = self._next, self._new_before
        room = self._cluster.prefill_tokens_per_gpu * self._cluster.prefill.ep_size
        end = max(bisect_right(new_before, new_before[first] + room, lo=first + 1) - 1, first + 1)
        return end, min(self._arrivals[end - 1], self._arrivals[first] + self._cluster.max_wait_s)

    def _seconds(self, requests: range) -> tuple[float, str]:
        """Return the seconds of a step with these requests, and its bottleneck."""
        cluster = self._cluster
        sums = {name: float(sums[requests.stop] - sums[requests.start]) for name, sums in self._sums_before.items()}
        batch = Batch(prompts=len(requests), **sums)
        seconds, limit, _ = prefill_batch(
            batch, self._skews, cluster.model, cluster.gpu, cluster.prefill, cluster.disk_bytes_per_s
        )
        return seconds, limit


@dataclass(slots=True)
class _DecodeUnit:
    """The requests in a decode unit; all advance together, so a request ends at a known number of steps of the unit."""

    index: int
    steps: int = 0
    kv_tokens: float = 0.0  # in use now
    reserved: float = 0.0  # KV tokens of its requests at their longest
    ends: list[tuple[int, int]] = field(default_factory=list)  # heap of (step, request)
    joining: list[int] = field(default_factory=list)  # requests that come in when the next turn begins
    is_running: bool = False

    @property
    def num_requests(self) -> int:
        """The number of requests, joining ones included."""
        return len(self.ends) + len(self.joining)


class _Decode:
    """The decode units, and the prefilled requests that wait for one."""

    def __init__(self, workload: Workload, cluster: Cluster, deals: Deals, log: _Log) -> None:
        self._cluster, self._log = cluster, log
        self._skew = deals.decode(cluster.decode.ep_size, cluster.decode_requests_per_gpu).max_over_mean
        self._prompts, self._outputs = workload.prompt_tokens.tolist(), workload.output_tokens.tolist()
        self._waiting: deque[int] = deque()
        self.waiting_kv = 0.0
        self.units = [_DecodeUnit(index) for index in range(cluster.num_decode_units)]
        self._max_requests = cluster.decode_requests_per_gpu * cluster.decode.ep_size
        self.max_kv = cluster.kv_tokens_per_gpu * cluster.decode.ep_size
        self._state_tokens = state_tokens(cluster.model, cluster.decode.pages)
        mean_output = float(workload.output_tokens.mean())
        self._turn_steps = int(min(LONGEST_TURN, max(1, mean_output // TURNS_PER_ANSWER)))

    def take_over(self, requests: range, now: float) -> None:
        """Queue prefilled requests."""
        for request in requests:
            if self._outputs[request] == 1:  # prefill has given the only token
                self._log.history.finished_s[request] = now
            else:
                self._waiting.append(request)
                self.waiting_kv += self._most_kv(request)

    def advance(self, now: float) -> None:
        """Fill the units and start those that have requests and do not run."""
        self._admit()
        for unit in self.units:
            if unit.num_requests and not unit.is_running:
                self._turn(unit, now)

    def _admit(self) -> None:
        """Fill decode units, the fullest first."""
        if not self._waiting:
            return
        for unit in sorted(self.units, key=lambda unit: (-unit.num_requests, unit.index)):
            while self._waiting and unit.num_requests < self._max_requests:
                request = self._waiting[0]
                need = self._most_kv(request)
                if unit.num_requests and unit.reserved + need > self.max_kv:
                    break
                self._waiting.popleft()
                self.waiting_kv -= need
                unit.reserved += need
                unit.joining.append(request)

    def _most_kv(self, request: int) -> float:
        """Return the KV tokens of a request at its longest, with its state."""
        return self._prompts[request] + self._outputs[request] + self._state_tokens

    def _turn(self, unit: _DecodeUnit, now: float) -> None:
        """Run a few steps of a decode unit; requests that end within it leave after it."""
        cluster, history = self._cluster, self._log.history
        for request in unit.joining:
            unit.kv_tokens += self._prompts[request] + 1
            heapq.heappush(unit.ends, (unit.steps + self._outputs[request] - 1, request))
        unit.joining.clear()
        num_running, ranks = len(unit.ends), cluster.decode.ep_size
        num_steps = min(self._turn_steps, unit.ends[-1][0] - unit.steps) if num_running == 1 else self._turn_steps
        num_steps = max(1, num_steps)
        mean_kv = unit.kv_tokens + num_running * (num_steps - 1) / 2
        step = _decode_step(num_running / ranks, mean_kv / ranks * self._skew, cluster)
        turn_s = step.seconds * num_steps
        start_steps = unit.steps
        unit.steps += num_steps
        unit.kv_tokens += num_running * num_steps
        while unit.ends and unit.ends[0][0] <= unit.steps:
            end_step, request = heapq.heappop(unit.ends)
            history.finished_s[request] = now + (end_step - start_steps) * step.seconds
            total = self._prompts[request] + self._outputs[request]
            unit.kv_tokens -= total + (unit.steps - end_step)
            unit.reserved -= self._most_kv(request)
        history.decode_busy_s += turn_s
        history.decode_limits[step.bottleneck] = history.decode_limits.get(step.bottleneck, 0.0) + turn_s
        unit.is_running = True
        self._log.work("decode", unit.index, now, turn_s)


def _sums_before(values: np.ndarray) -> np.ndarray:
    """Return sums of the values before each index, and of all, [N + 1]."""
    return np.concatenate([[0], np.cumsum(values)])


def _decode_step(requests: float, kv_tokens: float, cluster: Cluster) -> Step:
    """Return `decode_step` of figures rounded to steps of one percent, so that most calls are cached."""
    return decode_step(_rounded(requests), _rounded(kv_tokens), cluster.model, cluster.gpu, cluster.decode)


def _rounded(value: float) -> float:
    return exp(round(log(value) * 100) / 100)


def nodes_for(unit: Unit, gpus_per_node: int) -> int:
    """Return the nodes that one unit takes."""
    return ceil(unit.ep_size / gpus_per_node)
