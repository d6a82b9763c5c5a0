"""Full units: their time for a workload, and the cheapest EP size and batch when latency does not matter.

Steady state: every unit is full. Prefill and decode are searched separately, since each is paid for by its own
GPU-seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import sqrt
from statistics import NormalDist
from typing import Literal

import numpy as np

from batchinfer.balance.experts import place_experts
from batchinfer.model.config import ModelConfig
from batchinfer.model.page_format import BFLOAT16
from batchinfer.records import ConfigError
from batchinfer.sim.attention import BF16
from batchinfer.sim.dealing import Deals, Skews
from batchinfer.sim.hardware import Accelerator
from batchinfer.sim.memory import kv_tokens_per_gpu, state_tokens
from batchinfer.sim.steps import Batch, Step, Unit, decode_step, prefill_batch
from batchinfer.sim.workload import Workload

SAMPLED_LAYERS = 4
# github.com/NVIDIA/TensorRT-LLM, examples/wide_ep/ep_load_balancer/README.md at 2a595f8 (DeepSeek-R1 on a data set,
# experts placed by statistics of the same data set; 288 slots on 36 GPUs; per step, averaged over steps and layers):
# rows of a GPU have the mean 1024.0 and the standard deviation 53.98; the busiest one has 0.115 times the mean more
MEASURED_ROWS, MEASURED_DEVIATION, MEASURED_SLOTS = 1024.0, 53.976442, 8
# variance of one slot's load by its mean squared, without the variance of counting (rows are Poisson)
DRIFT_VARIANCE = MEASURED_SLOTS * ((MEASURED_DEVIATION / MEASURED_ROWS) ** 2 - 1 / MEASURED_ROWS)


def routing_skew(rows_per_gpu: float, slots_per_gpu: int, num_gpus: int) -> float:
    """Return the rows of the busiest GPU by the mean, from drift and counting.

    Args:
        rows_per_gpu: that one micro-batch sends to a GPU on average; 0: nothing to spread.
        slots_per_gpu: experts on a GPU; the drift of many evens out.
    """
    if num_gpus == 1 or rows_per_gpu <= 0:
        return 1.0
    deviation = sqrt(DRIFT_VARIANCE / slots_per_gpu + 1 / rows_per_gpu)
    return min(float(num_gpus), 1.0 + deviation * largest_of_normals(num_gpus))


def largest_of_normals(num: int) -> float:
    """Return the expected largest of `num` standard normal variables (Blom 1958)."""
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25))


@cache
def placement_skew(spread: float, *, num_experts: int, num_slots: int, num_gpus: int, seed: int) -> float:
    """Return the busiest GPU's load by the mean after expert placement, for lognormal loads; 1.0 if all are equal."""
    if spread == 0 or num_gpus == 1 or num_experts == 0:
        return 1.0
    load = np.random.default_rng(seed).lognormal(0.0, spread, (SAMPLED_LAYERS, num_experts))
    return float(place_experts(load, num_slots=num_slots, num_gpus=num_gpus).max_over_mean.mean())


Stage = Literal["prefill", "decode"]

EP_SIZES = (8, 16, 32, 64, 72, 96, 128, 144, 256, 320)
PREFILL_TOKENS = (4096, 8192, 16384, 32768, 65536, 131072)
ACTIVATION_ROWS = 4  # rows of a prefill token in BF16 that a step holds; those of experts come in slices
DECODE_REQUESTS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
LARGEST_BATCH = 256  # default requests per GPU


@dataclass(frozen=True, slots=True)
class Rated:
    """One way to run a stage, with full units."""

    ep_size: int
    redundant_experts: int
    batch: int  # prefill: new tokens per GPU and step; decode: requests per GPU
    step: Step  # of the busiest GPU
    gpu_seconds: float  # for the whole workload, waits for disk and network included
    overlap: bool = True
    gathered: bool = False


@dataclass(frozen=True, slots=True)
class Rater:
    """The rates at which full units run a workload."""

    workload: Workload
    deals: Deals
    model: ModelConfig
    gpu: Accelerator
    memory_reserve: float  # share of a GPU's memory that neither weights nor KV may take
    disk_bytes_per_s: float  # per node
    expert_spread: float  # sigma of the experts' lognormal loads
    seed: int

    def with_skew(self, unit: Unit, batch: int) -> Unit:
        """Return the unit with the skew of its busiest GPU for this number of tokens per GPU and step."""
        if unit.gathered:
            return unit  # every GPU has all experts
        rows = batch / unit.micro_batches(self.model) * self.model.num_experts_per_tok
        slots_per_gpu = unit.slots_per_gpu(self.model)
        placed = placement_skew(
            self.expert_spread,
            num_experts=self.model.n_routed_experts,
            num_slots=slots_per_gpu * unit.ep_size,
            num_gpus=unit.ep_size,
            seed=self.seed,
        )
        return replace(unit, skew=placed * routing_skew(rows, slots_per_gpu, unit.ep_size))

    def rate(self, stage: Stage, unit: Unit, batch: int) -> Rated:
        """Return the figures of the workload on full units like this one, with the unit's skew."""
        if stage == "prefill":
            step, gpu_seconds = self._prefill(unit, batch, self.deals.prefill(unit.ep_size, batch))
        else:
            step, gpu_seconds = self._decode(unit, batch)
        return _rated(unit, batch, step, gpu_seconds)

    def better(self, stage: Stage, unit: Unit, batch: int) -> Rated:
        """Return the better figures of one and two micro-batches per step."""
        both = [replace(unit, overlap=overlap) for overlap in (True, False)]
        rated = [self.rate(stage, self.with_skew(one, batch), batch) for one in both]
        return min(rated, key=lambda rated: rated.gpu_seconds)

    def rate_arriving(self, unit: Unit, batch: int) -> Rated:
        """Return the figures of prefill on units of a server, which deals prompts as they arrive."""
        return _rated(unit, batch, *self._prefill(unit, batch, self.deals.arriving(unit.ep_size, batch)))

    def cheapest(self, stage: Stage, base: Unit) -> Rated:
        """Return the fewest GPU-seconds over EP sizes, batches and micro-batches; weights and KV must fit.

        Args:
            base: a unit whose EP size, redundant experts and overlap are replaced.

        Raises:
            ConfigError: no EP size fits.
        """
        return min(self.by_size(stage, base, EP_SIZES).values(), key=lambda rated: rated.gpu_seconds)

    def by_size(self, stage: Stage, base: Unit, sizes: Sequence[int]) -> dict[int, Rated]:
        """Return the fewest GPU-seconds of each EP size that fits, over batches.

        Raises:
            ConfigError: no EP size fits.
        """
        found: dict[int, Rated] = {}
        for unit, kv_tokens in self._fitting(base, sizes):
            batches = self._batches(stage, unit, kv_tokens)
            if batches:
                rated = [self.better(stage, unit, batch) for batch in batches]
                found[unit.ep_size] = min(rated, key=lambda rated: rated.gpu_seconds)
        if not found:
            raise ConfigError(
                f"no EP size up to {max(sizes)} leaves room for this workload on an {self.gpu.name}; use another gpu"
            )
        return found

    def requests_that_fit(self, kv_tokens: float) -> int:
        """Return the requests per GPU whose KV and state fit: a request keeps room for its longest."""
        longest = self.workload.prompt_tokens + self.workload.output_tokens + state_tokens(self.model, BFLOAT16)
        # in a running unit a request counts for as long as it stays, so long answers weigh more
        mean_longest = (longest * self.workload.output_tokens).sum() / self.workload.output_tokens.sum()
        return int(kv_tokens / float(mean_longest))

    def _prefill(self, unit: Unit, tokens_per_gpu: int, skews: Skews) -> tuple[Step, float]:
        work = self.workload
        num_steps = float(work.new_tokens.sum()) / (tokens_per_gpu * unit.ep_size)
        batch = Batch(
            prompts=len(work) / num_steps,
            prompt_tokens=float(work.prompt_tokens.sum()) / num_steps,
            new_tokens=float(work.new_tokens.sum()) / num_steps,
            attention_pairs=float(work.attention_pairs.sum()) / num_steps,
            expanded_tokens=float(work.expanded_tokens.sum()) / num_steps,
        )
        seconds, _, step = prefill_batch(batch, skews, self.model, self.gpu, unit, self.disk_bytes_per_s)
        return step, seconds * num_steps * unit.ep_size

    def _decode(self, unit: Unit, requests_per_gpu: int) -> tuple[Step, float]:
        kv_tokens = (
            requests_per_gpu
            * self.workload.mean_kv_tokens
            * self.deals.decode(unit.ep_size, requests_per_gpu).max_over_mean
        )
        step = decode_step(float(requests_per_gpu), kv_tokens, self.model, self.gpu, unit)
        # the first token of each answer comes from prefill
        tokens = float(self.workload.output_tokens.sum() - len(self.workload))
        return step, step.seconds * tokens / requests_per_gpu

    def _fitting(self, base: Unit, sizes: Sequence[int]) -> Iterator[tuple[Unit, float]]:
        """Yield EP sizes whose weights fit, with redundant experts that fill their slots, and the KV tokens per GPU."""
        for ep_size in sizes:
            if 0 < 2 * self.model.n_routed_experts < ep_size:
                continue
            unit = replace(base, ep_size=ep_size, redundant_experts=-self.model.n_routed_experts % ep_size)
            try:
                yield unit, kv_tokens_per_gpu(self.model, unit, self.gpu, self.memory_reserve)
            except ConfigError:
                continue  # the weights do not fit: not a choice

    def _batches(self, stage: Stage, unit: Unit, kv_tokens: float) -> list[int]:
        if stage == "prefill":
            kv_per_token = float(self.workload.prompt_tokens.sum() / self.workload.new_tokens.sum())
            rows = ACTIVATION_ROWS * BF16 * self.model.hidden_size / unit.pages.bytes_per_token(self.model)
            return [tokens for tokens in PREFILL_TOKENS if tokens * (kv_per_token + rows) <= kv_tokens]
        most = min(self.requests_that_fit(kv_tokens), DECODE_REQUESTS[-1])
        return sorted({*(size for size in DECODE_REQUESTS if size <= most), most} - {0})


def _rated(unit: Unit, batch: int, step: Step, gpu_seconds: float) -> Rated:
    return Rated(unit.ep_size, unit.redundant_experts, batch, step, gpu_seconds, unit.overlap, unit.gathered)
