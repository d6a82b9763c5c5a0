"""Forecast of a run whose weights are streamed: requests at once, sweeps, and their time by disk and products."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

from batchinfer.config import VALUE_BYTES, JobConfig
from batchinfer.config.cluster import SWEEP_STEPS
from batchinfer.model.config import ModelConfig
from batchinfer.model.memory_split import MemorySplit, sweep_seconds
from batchinfer.model.sweep_schedule import SweepSchedule, SweepSpeed, SweptJob, schedule
from batchinfer.model.weight_mode import computes_prompts_alone, kv_bytes_per_token
from batchinfer.progress import duration
from batchinfer.records import ConfigError

MOST_HOURS = 24.0  # that "auto" begins unasked
SHORT_S = 5.0  # of reads in all: as long as it takes to measure products


@dataclass(frozen=True, slots=True)
class JobTokens:
    """Requests of a plan and their tokens.

    prompt, new: prompt tokens, and those of them that have to be computed.
    output, longest: tokens of all answers, and of the longest one, at most.
    kv: most KV tokens, in whole pages.
    """

    num_requests: int
    prompt: int
    new: int
    output: int
    longest: int
    kv: int

    @classmethod
    def of(cls, units: Sequence[Mapping[str, Any]]) -> JobTokens:
        """Return the sums over rows of plan/units."""
        names = ("num_requests", "prompt_tokens", "new_tokens", "max_output_tokens", "kv_tokens")
        num_requests, prompt, new, output, kv = (sum(unit[name] for unit in units) for name in names)
        longest = max((unit["largest_output_tokens"] for unit in units), default=0)
        return cls(max(1, num_requests), prompt, new, output, longest, kv)

    def share(self, num_ranks: int) -> JobTokens:
        """Return the requests and tokens of one of several ranks."""
        sums = (self.num_requests, self.prompt, self.new, self.output, self.kv)
        num_requests, prompt, new, output, kv = (-(-count // num_ranks) for count in sums)
        return JobTokens(num_requests, prompt, new, output, self.longest, kv)

    @property
    def mean_prompt(self) -> float:
        """Tokens of a prompt."""
        return self.prompt / self.num_requests

    @property
    def mean_answer(self) -> float:
        """Tokens of an answer, at most."""
        return self.output / self.num_requests


@dataclass(frozen=True, slots=True)
class ProductSpeeds:
    """Tokens per second of a rank that never waits for weights."""

    prompt_tokens_per_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class StreamForecast:
    """A planned run with streamed weights; disk and products were measured.

    split, job, disk_bytes_per_s, speeds: of each rank.
    tokens: of all ranks.
    speeds: None: the reads of the whole run are too short for a measurement.
    """

    split: MemorySplit
    tokens: JobTokens
    job: SweptJob
    disk_bytes_per_s: float
    speeds: ProductSpeeds | None = None
    num_ranks: int = 1

    @property
    def read_s(self) -> float:
        """Seconds of a sweep's reads."""
        return self.split.sweep_bytes / self.disk_bytes_per_s

    @property
    def schedule(self) -> SweepSchedule:
        """The sweeps of the run, at most."""
        speeds = () if self.speeds is None else astuple(self.speeds)
        return schedule(self.job, SweepSpeed(self.split.sweep_bytes, self.disk_bytes_per_s, *speeds))

    @property
    def prompts_s(self) -> float:
        """Seconds of the products of a sweep's prompts."""
        if self.speeds is None:
            return 0.0
        return self.tokens.new / self.num_ranks / self.schedule.num_prompt_sweeps / self.speeds.prompt_tokens_per_s

    @property
    def answers_s(self) -> float:
        """Seconds of the products of a token for every request that runs at once."""
        if self.speeds is None or self.tokens.longest <= 1:
            return 0.0
        return self.job.num_at_once / self.speeds.output_tokens_per_s

    @property
    def answer_sweep_s(self) -> float:
        """Seconds of a sweep without prompts."""
        return sweep_seconds(self.split.sweep_bytes, self.answers_s, disk_bytes_per_s=self.disk_bytes_per_s)

    @property
    def seconds(self) -> float:
        """Seconds of all sweeps."""
        return self.schedule.seconds

    @property
    def decides(self) -> Literal["disk", "processor"]:
        """The slower of the two, over all sweeps."""
        return "disk" if self.schedule.num_sweeps * self.read_s >= self.schedule.product_s else "processor"

    def __str__(self) -> str:
        stay, at_once, seconds = self.split.num_resident, self.job.num_at_once * self.num_ranks, self.seconds
        done = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + seconds))
        parts = [
            f"weights are streamed: {self.split.sweep_bytes / 1e9:,.2f} GB per sweep"
            + (f" on each of {self.num_ranks} ranks" if self.num_ranks > 1 else "")
            + (f" ({stay} of {len(self.split.slot_of_layer)} layers stay in memory)" if stay else "")
            + f", read in {self.read_s:,.1f} s at {self.disk_bytes_per_s / 1e9:,.2f} GB/s, as measured",
            *self._product_parts(),
            f"{at_once:,} requests at once, at most {self.schedule.num_sweeps:,} sweeps: {duration(seconds)}, "
            f"{self.tokens.output / seconds:,.3g} output and {self.tokens.prompt / seconds:,.3g} prompt tokens/s, "
            f"done at {done}",
        ]
        if self.tokens.longest > 1:
            alone = self.tokens.longest * self.read_s
            parts.append(f"the longest answer ({self.tokens.longest:,} tokens) alone takes {duration(alone)}")
        return "; ".join(parts)

    def _product_parts(self) -> list[str]:
        """Return the time of products and the slower of disk and processor; empty if products were not measured."""
        if self.speeds is None:
            return []
        of_answers = ""
        if self.answers_s:
            of_answers = f" and {self.answers_s:,.1f} s elsewhere ({self.speeds.output_tokens_per_s:,.1f} tokens/s)"
        return [
            f"products take {self.prompts_s:,.1f} s where prompts run ({self.speeds.prompt_tokens_per_s:,.1f} "
            f"tokens/s){of_answers}, as measured; the {self.decides} decides"
        ]


def swept_job(job: JobConfig, model: ModelConfig, split: MemorySplit, tokens: JobTokens) -> SweptJob:
    """Return the requests of a planned run whose answers are as long as they may be, and the bounds of its sweeps.

    Args:
        split, tokens: of one rank.
    """
    kv_tokens = max(1.0, tokens.kv / tokens.num_requests)
    most, step_tokens = job.cluster.running_requests, SWEEP_STEPS * job.cluster.prefill_tokens
    is_alone = computes_prompts_alone(job, model)
    if is_alone:
        most = int(step_tokens / kv_tokens)
    state_bytes = model.attention.state_bytes(VALUE_BYTES[job.model.dtype])
    in_memory = int(split.kv_bytes / (kv_tokens * kv_bytes_per_token(job, model) + state_bytes))
    spreads = in_memory < tokens.num_requests and not is_alone
    return SweptJob(
        num_requests=tokens.num_requests,
        new_tokens=tokens.new / tokens.num_requests,
        answer_tokens=max(1, round(tokens.mean_answer)),
        longest_answer=tokens.longest,
        num_at_once=max(1, min(tokens.num_requests, most, in_memory)),
        sweep_tokens=step_tokens,
        spread_tokens=job.cluster.prefill_tokens if spreads else None,
    )


def check_hours(found: StreamForecast, *, is_asked: bool) -> None:
    """Refuse to stream for days unless the job asks for it by name.

    Raises:
        ConfigError: names the hours.
    """
    if not is_asked and found.seconds > MOST_HOURS * 3600:
        raise ConfigError(
            f"the weights do not fit into memory, and streaming them takes {found.seconds / 3600:,.0f} hours; set "
            'cluster.weights = "stream" to do so all the same, or use a smaller dtype or more memory'
        )
