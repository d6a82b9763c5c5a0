"""Requests to simulate: drawn from a described distribution, or those of a planned run. Called by answer."""

# N requests

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.balance.experts import place_experts
from batchinfer.balance.prefill import attention_work
from batchinfer.records import ConfigError
from batchinfer.rundir import RunDir
from batchinfer.sim.spec import WorkloadSpec

DAY_S = 86_400.0
SAMPLED_LAYERS = 4


@dataclass(frozen=True)
class Workload:
    """Requests as columns, in the order in which they are prefilled."""

    prompt_tokens: np.ndarray  # [N] int64
    cached_tokens: np.ndarray  # [N] int64, below the prompt's
    output_tokens: np.ndarray  # [N] int64, at least 1
    arrival_s: np.ndarray  # [N] float64, rising

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @cached_property
    def new_tokens(self) -> np.ndarray:
        """[N] prompt tokens to compute."""
        return self.prompt_tokens - self.cached_tokens

    @cached_property
    def attention_pairs(self) -> np.ndarray:
        """[N] (query, key) pairs of prefill."""
        return attention_work(self.new_tokens, self.cached_tokens)

    @cached_property
    def mean_kv_tokens(self) -> float:
        """KV length that an output token attends to, on average over output tokens."""
        attended = self.output_tokens * (self.prompt_tokens + (self.output_tokens + 1) / 2)
        return float(attended.sum() / self.output_tokens.sum())


def make_workload(spec: WorkloadSpec) -> Workload:
    """The requests that a spec asks for; the same spec always gives the same ones.

    Raises:
        ConfigError: the plan's tables are not there.
    """
    if spec.plan is not None:
        return _planned(Path(spec.plan))
    if spec.requests is None or spec.prompt_tokens is None or spec.output_tokens is None:
        raise ConfigError("workload: requests, prompt_tokens and output_tokens are needed; add them")
    rng = np.random.default_rng(spec.seed)
    prompts = _lengths(rng, spec.requests, spec.prompt_tokens, spec.prompt_spread)
    outputs = _lengths(rng, spec.requests, spec.output_tokens, spec.output_spread)
    cached = np.minimum(np.round(prompts * spec.hit_share).astype(np.int64), prompts - 1)
    arrival = _arrivals(spec.requests, spec.peak_over_mean) if spec.arrival == "day" else np.zeros(spec.requests)
    return Workload(prompts, cached, outputs, arrival)


@cache
def expert_skew(spread: float, *, num_experts: int, num_slots: int, num_gpus: int, seed: int) -> float:
    """Rows of the busiest GPU by the mean after the expert balancer, for lognormal loads; 1.0 when all are alike."""
    if spread == 0 or num_gpus == 1 or num_experts == 0:
        return 1.0
    load = np.random.default_rng(seed).lognormal(0.0, spread, (SAMPLED_LAYERS, num_experts))
    return float(place_experts(load, num_slots=num_slots, num_gpus=num_gpus).max_over_mean.mean())


def _lengths(rng: np.random.Generator, num: int, mean: float, spread: float) -> np.ndarray:
    """[num] lognormal lengths of this mean, at least 1."""
    if spread == 0:
        return np.full(num, max(1, round(mean)), dtype=np.int64)
    drawn = rng.lognormal(np.log(mean) - spread**2 / 2, spread, num)
    return np.maximum(1, np.round(drawn)).astype(np.int64)


def _arrivals(num: int, peak_over_mean: float) -> np.ndarray:
    """[num] seconds of a day with the rate 1 - a cos(2 pi t / day), evenly spaced in its integral."""
    at = np.linspace(0, DAY_S, 10_001)
    swing = peak_over_mean - 1
    arrived = at / DAY_S - swing * np.sin(2 * np.pi * at / DAY_S) / (2 * np.pi)
    return np.interp((np.arange(num) + 0.5) / num, arrived, at)


def _planned(run_folder: Path) -> Workload:
    """Requests of plan/requests.parquet; answers as long as expected, or else as allowed."""
    path = RunDir(run_folder).requests
    columns = ["cached_tokens", "max_tokens", "expected_tokens", "token_ids"]
    try:
        batches = list(pq.ParquetFile(path).iter_batches(columns=columns))
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(
            f"workload.plan: cannot read {path} ({str(error).splitlines()[0]}); run `batchinfer plan` first"
        ) from None
    if not sum(map(len, batches)):
        raise ConfigError(f"workload.plan: {path} holds no request to simulate; plan a job with rows")
    prompts = np.concatenate([pc.list_value_length(batch["token_ids"]).to_numpy(False) for batch in batches])
    cached = np.concatenate([batch["cached_tokens"].to_numpy(False) for batch in batches])
    allowed = np.concatenate([batch["max_tokens"].to_numpy(False) for batch in batches])
    expected = np.concatenate([batch["expected_tokens"].to_numpy(False) for batch in batches]).astype(np.float64)
    outputs = np.where(np.isnan(expected), allowed, np.minimum(np.ceil(expected), allowed))
    num = len(prompts)
    return Workload(
        prompts.astype(np.int64), cached.astype(np.int64), np.maximum(1, outputs).astype(np.int64), np.zeros(num)
    )
