"""The cheapest EP sizes and batch when latency does not matter, and the nodes to finish by a time. Called by answer.

Steady state: every unit is full. Prefill and decode are searched apart, since each is paid for by its own GPU-seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from batchinfer.model.config import ModelConfig
from batchinfer.records import ConfigError
from batchinfer.sim.hardware import Accelerator
from batchinfer.sim.memory import kv_tokens_per_gpu
from batchinfer.sim.steps import Step, Unit, decode_step, prefill_step, sampling_skew
from batchinfer.sim.workload import Workload, expert_skew

EP_SIZES = (8, 16, 32, 64, 72, 96, 128, 144, 256, 320)
PREFILL_TOKENS = (4096, 8192, 16384, 32768)
DECODE_REQUESTS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
LARGEST_BATCH = 256  # requests per GPU when nothing else is said


@dataclass(frozen=True, slots=True)
class Rated:
    """One way to run a stage, with full units."""

    ep_size: int
    redundant_experts: int
    batch: int  # prefill: new tokens per GPU and step; decode: requests per GPU
    step: Step
    gpu_seconds: float  # for the whole workload


def prefill_rated(workload: Workload, model: ModelConfig, gpu: Accelerator, unit: Unit, tokens_per_gpu: int) -> Rated:
    """Prefill of the workload in steps of so many new tokens per GPU."""
    new = float(workload.new_tokens.sum())
    share = tokens_per_gpu / new
    step = prefill_step(
        float(tokens_per_gpu),
        float(workload.attention_pairs.sum()) * share,
        float(workload.prompt_tokens.sum()) * share,
        len(workload) * share,
        model,
        gpu,
        unit,
    )
    return Rated(unit.ep_size, unit.redundant_experts, tokens_per_gpu, step, step.seconds / share)


def decode_rated(workload: Workload, model: ModelConfig, gpu: Accelerator, unit: Unit, requests_per_gpu: int) -> Rated:
    """Decode of the workload with so many requests per GPU."""
    step = decode_step(float(requests_per_gpu), requests_per_gpu * workload.mean_kv_tokens, model, gpu, unit)
    # the first token of each answer comes from prefill
    tokens = float(workload.output_tokens.sum() - len(workload))
    return Rated(unit.ep_size, unit.redundant_experts, requests_per_gpu, step, step.seconds * tokens / requests_per_gpu)


def requests_that_fit(workload: Workload, kv_tokens: float) -> int:
    """Requests per GPU whose whole KV fits: a request keeps room for its longest."""
    longest = workload.prompt_tokens + workload.output_tokens
    # in a running unit a request counts for as long as it stays, so long answers weigh more
    mean_longest = float((longest * workload.output_tokens).sum() / workload.output_tokens.sum())
    return int(kv_tokens / mean_longest)


def skewed_unit(base: Unit, model: ModelConfig, *, tokens_per_gpu: float, expert_spread: float, seed: int) -> Unit:
    """The unit with the skew that expert loads (after the balancer) and the noise of counting leave."""
    rows = tokens_per_gpu / (2 if base.overlap and base.ep_size > 1 else 1) * model.num_experts_per_tok
    slots = model.n_routed_experts + base.redundant_experts
    experts = expert_skew(
        expert_spread, num_experts=model.n_routed_experts, num_slots=slots, num_gpus=base.ep_size, seed=seed
    )
    return replace(base, skew=experts * sampling_skew(rows, base.ep_size))


def best_prefill(
    workload: Workload,
    model: ModelConfig,
    gpu: Accelerator,
    base: Unit,
    *,
    reserve: float,
    expert_spread: float,
    seed: int,
) -> Rated:
    """The fewest GPU-seconds over EP sizes and step sizes; weights and the KV of a step must fit.

    Raises:
        ConfigError: no EP size fits.
    """
    found = []
    for unit, kv_tokens in _fitting(model, gpu, base, reserve):
        for tokens in PREFILL_TOKENS:
            if tokens <= kv_tokens:
                rated = skewed_unit(unit, model, tokens_per_gpu=tokens, expert_spread=expert_spread, seed=seed)
                found.append(prefill_rated(workload, model, gpu, rated, tokens))
    return _cheapest(found, gpu)


def best_decode(
    workload: Workload,
    model: ModelConfig,
    gpu: Accelerator,
    base: Unit,
    *,
    reserve: float,
    expert_spread: float,
    seed: int,
) -> Rated:
    """The fewest GPU-seconds over EP sizes and batches whose KV fits.

    Raises:
        ConfigError: no EP size fits.
    """
    found = []
    for unit, kv_tokens in _fitting(model, gpu, base, reserve):
        most = requests_that_fit(workload, kv_tokens)
        for requests in sorted({*(size for size in DECODE_REQUESTS if size <= most), min(most, DECODE_REQUESTS[-1])}):
            if requests:
                rated = skewed_unit(unit, model, tokens_per_gpu=requests, expert_spread=expert_spread, seed=seed)
                found.append(decode_rated(workload, model, gpu, rated, requests))
    return _cheapest(found, gpu)


def _fitting(model: ModelConfig, gpu: Accelerator, base: Unit, reserve: float) -> Iterator[tuple[Unit, float]]:
    """EP sizes whose weights fit, each with the redundant experts that fill its slots, and the KV tokens per GPU."""
    for ep_size in EP_SIZES:
        if ep_size > 2 * model.n_routed_experts:
            continue
        redundant = -model.n_routed_experts % ep_size
        unit = replace(base, ep_size=ep_size, redundant_experts=redundant)
        try:
            yield unit, kv_tokens_per_gpu(model, unit, gpu, reserve)
        except ConfigError:
            continue  # the weights do not fit: not a choice


def _cheapest(found: list[Rated], gpu: Accelerator) -> Rated:
    if not found:
        raise ConfigError(
            f"no EP size up to {EP_SIZES[-1]} leaves room for this workload on an {gpu.name}; use another gpu"
        )
    return min(found, key=lambda rated: rated.gpu_seconds)
