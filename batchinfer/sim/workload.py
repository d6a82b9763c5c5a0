"""Requests to simulate: drawn from a described distribution, or those of a planned run."""

# N requests

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.balance.prefill import attention_work
from batchinfer.records import ConfigError
from batchinfer.rundir import RunDir, read_state
from batchinfer.sanitize import first_line
from batchinfer.sim.spec import WorkloadSpec

DAY_S, HOUR_S = 86_400.0, 3600.0
PART_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Delivered:
    """Tokens that a job delivers, as its report counts them; rows answered by a duplicate's request are included."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def new_tokens(self) -> int:
        return self.input_tokens - self.cached_tokens


@dataclass(frozen=True)
class Workload:
    """Requests as columns, in the order in which they are prefilled."""

    prompt_tokens: np.ndarray  # [N] int64
    cached_tokens: np.ndarray  # [N] int64, below the prompt's
    output_tokens: np.ndarray  # [N] int64, at least 1
    arrival_s: np.ndarray  # [N] float64, rising
    part_tokens: int = PART_TOKENS  # a prompt with more new tokens is prefilled in parts of this size
    of_plan: Delivered | None = None  # None: the simulated requests themselves

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @cached_property
    def delivered(self) -> Delivered:
        """The tokens reported and priced; a prompt that is only scored has no output, though prefill gives a token."""
        sums = (int(tokens.sum()) for tokens in (self.prompt_tokens, self.cached_tokens, self.output_tokens))
        return Delivered(*sums) if self.of_plan is None else self.of_plan

    @cached_property
    def new_tokens(self) -> np.ndarray:
        """Prompt tokens to compute, [N]."""
        return self.prompt_tokens - self.cached_tokens

    @cached_property
    def attention_pairs(self) -> np.ndarray:
        """(query, key) pairs of prefill, [N]."""
        return attention_work(self.new_tokens, self.cached_tokens)

    @cached_property
    def expanded_tokens(self) -> np.ndarray:
        """Tokens whose keys and values prefill expands, [N]; each part of a prompt expands all earlier tokens, too."""
        num_parts = -(-self.new_tokens // self.part_tokens)
        earlier = self.part_tokens * (num_parts * (num_parts - 1) // 2)
        return num_parts * self.cached_tokens + earlier + self.new_tokens

    @cached_property
    def mean_kv_tokens(self) -> float:
        """The KV length that an output token attends to, on average over output tokens."""
        attended = self.output_tokens * (self.prompt_tokens + (self.output_tokens + 1) / 2)
        return float(attended.sum() / self.output_tokens.sum())


def make_workload(spec: WorkloadSpec, *, part_tokens: int = PART_TOKENS) -> Workload:
    """Return the requests of a spec; the same spec always gives the same ones.

    Raises:
        ConfigError: the plan's tables are missing.
    """
    if spec.plan is not None:
        return _planned(Path(spec.plan), part_tokens)
    if spec.requests is None or spec.prompt_tokens is None or spec.output_tokens is None:
        raise ConfigError("workload: requests, prompt_tokens and output_tokens are needed; add them")
    rng = np.random.default_rng(spec.seed)
    prompts = _lengths(rng, spec.requests, spec.prompt_tokens, spec.prompt_spread)
    outputs = _lengths(rng, spec.requests, spec.output_tokens, spec.output_spread)
    if spec.longest_prompt is not None:
        prompts = np.minimum(prompts, spec.longest_prompt)
    hits = prompts * spec.hit_share
    if spec.hit_depth is not None:
        hits = np.where(rng.random(spec.requests) < spec.hit_share / spec.hit_depth, prompts * spec.hit_depth, 0.0)
    cached = np.minimum(np.round(hits).astype(np.int64), prompts - 1)
    arrival = _arrivals(spec.requests, spec.peak_over_mean) if spec.arrival == "day" else np.zeros(spec.requests)
    return Workload(prompts, cached, outputs, arrival, part_tokens)


def _lengths(rng: np.random.Generator, num: int, mean: float, spread: float) -> np.ndarray:
    """Draw lognormal lengths of this mean, at least 1, [num]."""
    if spread == 0:
        return np.full(num, max(1, round(mean)), dtype=np.int64)
    drawn = rng.lognormal(np.log(mean) - spread**2 / 2, spread, num)
    return np.maximum(1, np.round(drawn)).astype(np.int64)


def _arrivals(num: int, peak_over_mean: float) -> np.ndarray:
    """Return arrival seconds in a day, [num], with the rate 1 - a cos(2 pi t / day), evenly spaced in its integral."""
    at = np.linspace(0, DAY_S, 10_001)
    swing = peak_over_mean - 1
    arrived = at / DAY_S - swing * np.sin(2 * np.pi * at / DAY_S) / (2 * np.pi)
    return np.interp((np.arange(num) + 0.5) / num, arrived, at)


def _planned(run_folder: Path, part_tokens: int) -> Workload:
    """Read the requests of plan/requests.parquet; answers are as long as expected, or else as allowed."""
    run = RunDir(run_folder)
    path = run.requests
    columns = ["shard", "row", "sample", "cached_tokens", "max_tokens", "expected_tokens", "token_ids"]
    try:
        batches = list(pq.ParquetFile(path).iter_batches(columns=columns))
        duplicates = pq.read_table(run.duplicates, columns=["of_shard", "of_row", "of_sample"])
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(
            f"workload.plan: cannot read {path} ({first_line(error)}); run `batchinfer plan` first"
        ) from None
    if read_state(run).get("counts", {}).get("reused_requests"):
        raise ConfigError(
            f"workload.plan: {run_folder} takes over answers of an earlier run, which are no work to simulate; "
            "plan the job without --reuse in another folder"
        )
    if not sum(map(len, batches)):
        raise ConfigError(f"workload.plan: {path} holds no request to simulate; plan a job with rows")
    prompts = np.concatenate([pc.list_value_length(batch["token_ids"]).to_numpy(False) for batch in batches])
    cached = np.concatenate([batch["cached_tokens"].to_numpy(False) for batch in batches])
    allowed = np.concatenate([batch["max_tokens"].to_numpy(False) for batch in batches])
    expected = np.concatenate([batch["expected_tokens"].to_numpy(False) for batch in batches]).astype(np.float64)
    outputs = np.where(np.isnan(expected), allowed, np.minimum(np.ceil(expected), allowed)).astype(np.int64)
    keys = {name: pa.concat_arrays([batch[name] for batch in batches]) for name in ("shard", "row", "sample")}
    answered = _answered_by(pa.table({**keys, "place": np.arange(len(prompts))}), duplicates)
    of_duplicates = int(prompts[answered].sum())
    return Workload(
        prompts.astype(np.int64),
        cached.astype(np.int64),
        np.maximum(1, outputs),
        np.zeros(len(prompts)),
        part_tokens,
        Delivered(
            input_tokens=int(prompts.sum()) + of_duplicates,
            cached_tokens=int(cached.sum()) + of_duplicates,
            output_tokens=int(outputs.sum() + outputs[answered].sum()),
        ),
    )


def _answered_by(requests: pa.Table, duplicates: pa.Table) -> np.ndarray:
    """Return places of the requests that answer the duplicates, [D], in any order."""
    names = ["shard", "row", "sample"]
    joined = duplicates.join(requests, [f"of_{name}" for name in names], names, join_type="inner")
    return np.asarray(joined["place"].to_numpy())
