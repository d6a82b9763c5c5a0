"""Predicted speeds of a planned job's ranks, when full, on GPUs that are not here."""

from dataclasses import dataclass
from math import ceil

import numpy as np

from batchinfer.balance.request_load import RequestLoad
from batchinfer.model.config import ModelConfig
from batchinfer.model.page_format import BFLOAT16, PageFormat
from batchinfer.records import ConfigError
from batchinfer.sim.dealing import Deals
from batchinfer.sim.hardware import Accelerator, accelerator
from batchinfer.sim.memory import kv_tokens_per_gpu
from batchinfer.sim.search import Rater, Stage
from batchinfer.sim.spec import ClusterSpec
from batchinfer.sim.steps import Unit, decode_step
from batchinfer.sim.workload import Workload

DEFAULTS = ClusterSpec(nodes=1)  # of a spec, for values that a job does not have


@dataclass(frozen=True, slots=True)
class Ranks:
    """A group of ranks as its job describes it, one GPU each."""

    gpu: str
    prefill_ranks: int
    decode_ranks: int
    redundant_experts: int
    overlap: bool | None  # None: where it pays
    prefill_tokens: int  # new tokens per rank and step, and the most of one prompt
    decode_requests: int  # per rank, if their KV fits
    page_bytes: int | None  # for KV of a rank; None: all memory that the weights leave
    pages: PageFormat = BFLOAT16


@dataclass(frozen=True, slots=True)
class PaperSpeeds:
    """Predicted tokens per second of one rank, and the time of the longest answer, which more ranks do not shorten."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None  # None: nothing is decoded
    longest_answer_s: float


def paper_speeds(
    prompt_tokens: np.ndarray, cached_tokens: np.ndarray, output_tokens: np.ndarray, model: ModelConfig, ranks: Ranks
) -> PaperSpeeds:
    """Return the speeds at which the ranks run these requests.

    Args:
        prompt_tokens, cached_tokens, output_tokens: [N] int64, N at least 1, outputs at least 1.

    Raises:
        ConfigError: the model cannot be simulated, or it does not fit onto the GPUs.
    """
    gpu = accelerator(ranks.gpu, None)
    prefill, decode = (
        Unit(size, ranks.redundant_experts, overlap=ranks.overlap is not False, pages=ranks.pages)
        for size in (ranks.prefill_ranks, ranks.decode_ranks)
    )
    work = Workload(
        prompt_tokens, cached_tokens, output_tokens, np.zeros(len(prompt_tokens)), part_tokens=ranks.prefill_tokens
    )
    rater = rater_of(work, model, gpu)
    kv_tokens_per_gpu(model, prefill, gpu, rater.memory_reserve)  # only whether the weights fit
    kv_tokens = kv_tokens_per_gpu(model, decode, gpu, rater.memory_reserve)
    if ranks.page_bytes is not None:
        kv_tokens = min(kv_tokens, ranks.page_bytes / ranks.pages.bytes_per_token(model))
    fitting = rater.requests_that_fit(kv_tokens)
    if fitting < 1:
        raise ConfigError(f"a rank has room for {kv_tokens:,.0f} KV tokens, less than one request needs")
    requests = min(ranks.decode_requests, fitting, ceil(len(work) / ranks.decode_ranks))

    def gpu_seconds(stage: Stage, unit: Unit, batch: int) -> float:
        if ranks.overlap is None:
            return rater.better(stage, unit, batch).gpu_seconds
        return rater.rate(stage, rater.with_skew(unit, batch), batch).gpu_seconds

    prefill_s = gpu_seconds("prefill", prefill, ranks.prefill_tokens)
    decode_s = gpu_seconds("decode", decode, requests)
    decoded = float((work.output_tokens - 1).sum())
    alone = decode_step(1.0 / ranks.decode_ranks, 1.0, model, gpu, decode)
    return PaperSpeeds(
        prefill_tokens_per_s=float(work.new_tokens.sum()) / prefill_s,
        decode_tokens_per_s=decoded / decode_s if decoded else None,
        longest_answer_s=float(work.output_tokens.max() - 1) * alone.seconds,
    )


def rater_of(work: Workload, model: ModelConfig, gpu: Accelerator) -> Rater:
    """Return the rater of a job's work, with the defaults of a spec for values that a job does not have."""
    return Rater(
        workload=work,
        deals=Deals(work, request_load=RequestLoad(*model.decode_loads)),
        model=model,
        gpu=gpu,
        memory_reserve=DEFAULTS.memory_reserve,
        disk_bytes_per_s=DEFAULTS.disk_bytes_per_s,
        expert_spread=0.0,
        seed=0,
    )
