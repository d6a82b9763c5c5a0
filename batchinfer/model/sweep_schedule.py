"""A schedule of the sweeps of a streamed job: the requests that begin in each one, and its seconds.

requests        ┌ begin: their prompts run ─ a token in each sweep ─ … ─ end ┐
  waiting  ──►  └ as many as KV holds, and as reads leave time for           ┘

The schedule takes all requests to be alike. A fraction of a request may begin, as prompts are cut between sweeps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from batchinfer.model.memory_split import sweep_seconds

_MOST_SWEEPS = 20_000  # to go through one by one; jobs of more go on as in the middle of these
_LEAST_WAVES = 4


@dataclass(frozen=True, slots=True)
class SweptJob:
    """The requests of a streamed job, and the bounds of its sweeps.

    new_tokens, answer_tokens: of a request; an answer has one token at least, the first of which its prompt gives.
    longest_answer: tokens.
    num_at_once: requests that may run at once.
    sweep_tokens: most prompt tokens of a sweep.
    spread_tokens: prompt tokens of a step, if a sweep takes only the prompts that its reads leave time for, one step at
        least, as in the first sweep; None: it takes all for which there is room.
    """

    num_requests: float
    new_tokens: float
    answer_tokens: int
    longest_answer: int
    num_at_once: int
    sweep_tokens: int
    spread_tokens: int | None


@dataclass(frozen=True, slots=True)
class SweepSpeed:
    """Bytes of a sweep, and speeds; products that were not measured take no time."""

    sweep_bytes: int
    disk_bytes_per_s: float
    prompt_tokens_per_s: float = float("inf")
    output_tokens_per_s: float = float("inf")

    @property
    def read_s(self) -> float:
        """Seconds of a sweep's reads."""
        return self.sweep_bytes / self.disk_bytes_per_s


@dataclass(frozen=True, slots=True)
class SweepSchedule:
    """The number of sweeps of a job, their seconds, and the seconds of their products alone."""

    num_sweeps: int
    num_prompt_sweeps: int  # in which prompts run
    seconds: float
    product_s: float


@lru_cache(maxsize=8)
def schedule(job: SweptJob, speed: SweepSpeed) -> SweepSchedule:
    """Return the sweeps of a job."""
    most_waves = max(_LEAST_WAVES, _MOST_SWEEPS // job.answer_tokens)
    most_requests = most_waves * job.num_at_once
    if job.num_requests <= most_requests:
        found = _one_by_one(job, speed)
    else:
        half, whole = (_one_by_one(replace(job, num_requests=most_requests * share), speed) for share in (0.5, 1.0))
        times = (job.num_requests - most_requests) / (most_requests / 2)
        found = SweepSchedule(
            whole.num_sweeps + ceil(times * (whole.num_sweeps - half.num_sweeps)),
            whole.num_prompt_sweeps + ceil(times * (whole.num_prompt_sweeps - half.num_prompt_sweeps)),
            whole.seconds + times * (whole.seconds - half.seconds),
            whole.product_s + times * (whole.product_s - half.product_s),
        )
    if (missing := job.longest_answer - found.num_sweeps) <= 0:
        return found
    of_one = sweep_seconds(speed.sweep_bytes, 0.0, disk_bytes_per_s=speed.disk_bytes_per_s)
    return replace(found, num_sweeps=job.longest_answer, seconds=found.seconds + missing * of_one)


def _one_by_one(job: SweptJob, speed: SweepSpeed) -> SweepSchedule:
    new_tokens = max(job.new_tokens, 1e-9)
    waiting, running = float(job.num_requests), 0.0
    ends: deque[tuple[int, float]] = deque()  # the sweep before which requests are gone, and their number
    num_sweeps = num_prompt_sweeps = 0
    seconds = product_s = 0.0
    while waiting > 1e-6 or running > 1e-6:
        while ends and ends[0][0] <= num_sweeps:
            running -= ends.popleft()[1]
        if waiting <= 1e-6 and running <= 1e-6:
            break
        room = _prompt_room(job, speed, is_first=num_sweeps == 0)
        begun = max(0.0, min(waiting, job.num_at_once - running, room / new_tokens))
        of_sweep = begun * job.new_tokens / speed.prompt_tokens_per_s + running / speed.output_tokens_per_s
        product_s += of_sweep
        seconds += sweep_seconds(speed.sweep_bytes, of_sweep, disk_bytes_per_s=speed.disk_bytes_per_s)
        num_sweeps += 1
        if begun > 1e-6:
            num_prompt_sweeps += 1
            waiting -= begun
            if job.answer_tokens > 1:
                running += begun
                ends.append((num_sweeps + job.answer_tokens - 1, begun))
    return SweepSchedule(num_sweeps, num_prompt_sweeps, seconds, product_s)


def _prompt_room(job: SweptJob, speed: SweepSpeed, *, is_first: bool) -> float:
    """Return the prompt tokens of a sweep, if enough wait."""
    step, meanwhile = job.spread_tokens, speed.read_s * speed.prompt_tokens_per_s
    if step is None or (meanwhile >= job.sweep_tokens and not is_first):
        return job.sweep_tokens
    return min(job.sweep_tokens, step if is_first else max(step, meanwhile // step * step))
