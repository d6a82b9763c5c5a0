"""Forecast of a run whose weights are streamed: requests at once, sweeps, and the least time by the disk alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from batchinfer.config import JobConfig
from batchinfer.config.cluster import SWEEP_STEPS
from batchinfer.model.config import ModelConfig
from batchinfer.model.memory_split import MemorySplit, sweep_seconds
from batchinfer.model.weight_mode import computes_prompts_alone, kv_bytes_per_token
from batchinfer.model.weight_stream import read_speed
from batchinfer.records import ConfigError

MOST_HOURS = 24.0  # of reading that "auto" begins unasked


@dataclass(frozen=True, slots=True)
class StreamForecast:
    """A planned run with streamed weights; seconds are what the disk alone takes, products may take longer."""

    split: MemorySplit
    num_requests_at_once: int
    num_sweeps: int
    answer_tokens: float  # of one request, at most, as a mean
    disk_bytes_per_s: float  # measured

    @property
    def sweep_s(self) -> float:
        """Seconds of a sweep's reads."""
        return sweep_seconds(self.split.sweep_bytes, 0, disk_bytes_per_s=self.disk_bytes_per_s, tokens_per_s=1)

    @property
    def seconds(self) -> float:
        """Seconds of all reads."""
        return self.num_sweeps * self.sweep_s

    def __str__(self) -> str:
        stay = self.split.num_resident
        done = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + self.seconds))
        return (
            f"weights are streamed: {self.split.sweep_bytes / 1e9:,.2f} GB per sweep"
            + (f" ({stay} of {len(self.split.slot_of_layer)} layers stay in memory)" if stay else "")
            + f", {self.sweep_s:,.1f} s at {self.disk_bytes_per_s / 1e9:,.2f} GB/s, as measured; "
            f"{self.num_requests_at_once:,} requests at once, at most {self.num_sweeps:,} sweeps: "
            f"{_duration(self.seconds)} of reading, done at {done} or later if products take longer"
            + (
                f"; an answer of {self.answer_tokens:,.0f} tokens alone takes "
                f"{_duration(self.answer_tokens * self.sweep_s)}"
                if self.answer_tokens > 1
                else ""
            )
        )


def forecast(
    job: JobConfig,
    model: ModelConfig,
    split: MemorySplit,
    units: Sequence[Mapping[str, Any]],
    *,
    disk_bytes_per_s: float,
) -> StreamForecast:
    """Return the forecast of a planned run.

    Args:
        units: rows of plan/units; answers count with their limits.
    """
    num_requests, output, kv_tokens = (
        sum(unit[name] for unit in units) for name in ("num_requests", "max_output_tokens", "kv_tokens")
    )
    num_requests = max(1, num_requests)
    mean_tokens = max(1.0, kv_tokens / num_requests)
    most = job.cluster.running_requests
    if computes_prompts_alone(job, model):
        most = int(SWEEP_STEPS * job.cluster.prefill_tokens / mean_tokens)
    in_memory = int(split.kv_bytes / (mean_tokens * kv_bytes_per_token(job, model)))
    at_once = max(1, min(num_requests, most, in_memory))
    answer = output / num_requests
    num_sweeps = max(1, ceil(answer), ceil(output / at_once), ceil(num_requests / at_once))
    return StreamForecast(split, at_once, num_sweeps, answer, disk_bytes_per_s)


def check_hours(found: StreamForecast, *, is_asked: bool) -> None:
    """Refuse to stream for days unless the job asks for it by name.

    Raises:
        ConfigError: names the hours.
    """
    if not is_asked and found.seconds > MOST_HOURS * 3600:
        raise ConfigError(
            f"the weights do not fit into memory, and streaming them takes {found.seconds / 3600:,.0f} hours of "
            'reading at least; set cluster.weights = "stream" to do so all the same, or use a smaller dtype or more '
            "memory"
        )


def disk_speed(files: Sequence[Path]) -> float:
    """Return the bytes per second at which the largest of these files is read past the page cache."""
    return read_speed(max(files, key=lambda path: path.stat().st_size))


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds:,.0f} s"
