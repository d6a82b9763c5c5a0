"""Jobs on paper whose weights are streamed on a CPU: the memory, sweeps and time that plan and ranks compute, too.

[model]     path = "…"                   config.json alone is needed
[workload]  requests = …                 as for a cluster of GPUs
[stream]    dtype = "bfloat16"
            memory_bytes = 24e9          of the rank
            disk_bytes_per_s = 1.5e9     as `batchinfer plan` and `doctor --model` measure it
            prompt_tokens_per_s = 300    of products alone, also measured there
            output_tokens_per_s = 30
            ranks = 2                    hosts like this one, over which experts are spread
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from batchinfer.config import PAGE_TOKENS, ClusterConfig, JobConfig, checked, read_toml
from batchinfer.config.part import Part
from batchinfer.model.config import ModelConfig, load_model_config
from batchinfer.model.packed_folder import ENDS, LAYOUT, PackedFolder, layer_name
from batchinfer.model.stream_forecast import JobTokens, ProductSpeeds, StreamForecast, swept_job
from batchinfer.model.weight_bytes import weight_bytes
from batchinfer.model.weight_mode import experts_of_rank, split_for
from batchinfer.sim.spec import ModelSpec, WorkloadSpec
from batchinfer.sim.workload import HOUR_S, Workload, make_workload

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=2**20)]


class StreamSpec(Part):
    """A rank that streams its weights."""

    dtype: Literal["float32", "bfloat16", "fp8", "int4", "fp4"] = "bfloat16"
    memory_bytes: Positive = Field(description="of the rank: weights, KV pages and steps")
    disk_bytes_per_s: Positive = Field(description="at which layers are read")
    prompt_tokens_per_s: Positive = Field(description="of products alone")
    output_tokens_per_s: Positive = Field(description="of products alone, with all requests at once")
    prefill_tokens: Count = Field(ClusterConfig().prefill_tokens, description="of a step")
    decode_requests: Count = Field(ClusterConfig().decode_requests, description="of a step")
    ranks: Count = Field(1, description="one per host, with such memory, disk and speeds; experts are spread over them")


class StreamedSpec(Part):
    """A simulated job whose weights are streamed."""

    model: ModelSpec
    workload: WorkloadSpec
    stream: StreamSpec

    @model_validator(mode="after")
    def _all_at_once(self) -> StreamedSpec:
        for name in ("arrival", "peak_over_mean", "expert_spread"):
            if name in self.workload.model_fields_set:
                raise ValueError(f"workload.{name} does not count where weights are streamed; leave it out")
        return self


def load_streamed(path: Path) -> StreamedSpec | None:
    """Return the spec of a file with a table [stream]; None if the file has none.

    Raises:
        ConfigError: one sentence with the file, the key, the value and the remedy.
    """
    table = read_toml(path, "spec")
    if "stream" not in table:
        return None
    spec, folder = checked(StreamedSpec, table, path), path.absolute().parent
    update: dict[str, Part] = {"model": ModelSpec(path=str(folder / spec.model.path))}
    if spec.workload.plan is not None:
        update["workload"] = spec.workload.model_copy(update={"plan": str(folder / spec.workload.plan)})
    return spec.model_copy(update=update)


def streamed_answer(spec: StreamedSpec) -> dict[str, Any]:
    """Return all figures of a spec as one JSON-ready document.

    Raises:
        ConfigError: the model or the plan cannot be used, or memory is too small.
    """
    started_s = time.perf_counter()
    found = forecast_of(spec)
    split, tokens = found.split, found.tokens
    return {
        "requests": tokens.num_requests,
        "input_tokens": tokens.prompt,
        "output_tokens": tokens.output,
        "sweep_bytes": split.sweep_bytes,
        "slot_bytes": sum(split.slot_bytes),
        "resident_layers": split.num_resident,
        "kv_bytes": split.kv_bytes,
        "ranks": found.num_ranks,
        "requests_at_once": found.job.num_at_once * found.num_ranks,
        "sweeps": found.schedule.num_sweeps,
        "read_s": found.read_s,
        "prompts_s": found.prompts_s,
        "answers_s": found.answers_s,
        "decides": found.decides,
        "hours": found.seconds / HOUR_S,
        "input_tokens_per_s": tokens.prompt / found.seconds,
        "output_tokens_per_s": tokens.output / found.seconds,
        "longest_answer_hours": tokens.longest * found.read_s / HOUR_S,
        "simulated_in_s": time.perf_counter() - started_s,
    }


def forecast_of(spec: StreamedSpec) -> StreamForecast:
    """Return the forecast that a plan of these requests would make on such a host.

    Raises:
        ConfigError: the model or the plan cannot be used, or memory is too small.
    """
    stream, model = spec.stream, load_model_config(Path(spec.model.path))
    work = make_workload(spec.workload)
    tokens = job_tokens(work)
    job = JobConfig.model_validate(
        {
            "input": {"files": ["rows.parquet"], "prompt": "prompt"},
            "output": {"dir": "run"},
            "model": {"path": spec.model.path, "dtype": stream.dtype},
            "sampling": {"max_tokens": tokens.longest},
            "cluster": {
                "weights": "stream",
                "memory_bytes": int(stream.memory_bytes),
                "prefill_tokens": stream.prefill_tokens,
                "decode_requests": stream.decode_requests,
                "prefill_ranks": stream.ranks,
            },
        }
    )
    largest = int((work.prompt_tokens + work.output_tokens).max())
    packed = packed_on_paper(model, stream.dtype, num_experts=experts_of_rank(job, model))
    split = split_for(
        job,
        model,
        packed,
        free_bytes=int(stream.memory_bytes),
        most_tokens=tokens.kv,
        largest_tokens=largest,
        layer_bytes=[packed.layer_bytes(layer) for layer in range(model.num_hidden_layers)],
    )
    speeds = ProductSpeeds(stream.prompt_tokens_per_s, stream.output_tokens_per_s)
    swept = swept_job(job, model, split, tokens.share(stream.ranks))
    return StreamForecast(split, tokens, swept, stream.disk_bytes_per_s, speeds, stream.ranks)


def job_tokens(work: Workload) -> JobTokens:
    """Return the sums over the requests of a workload, KV in whole pages."""
    pages = -(-(work.prompt_tokens + work.output_tokens - 1) // PAGE_TOKENS)
    sums = (work.prompt_tokens, work.new_tokens, work.output_tokens)
    prompt, new, output = (int(np.sum(tokens)) for tokens in sums)
    return JobTokens(len(work), prompt, new, output, int(work.output_tokens.max()), int(pages.sum()) * PAGE_TOKENS)


def packed_on_paper(model: ModelConfig, dtype: str, *, num_experts: int | None = None) -> PackedFolder:
    """Return the manifest of the model's converted folder, with sizes computed from its config.

    Args:
        num_experts: of each layer; None: all.
    """
    up_to = [
        weight_bytes(replace(model, num_hidden_layers=count), dtype, num_experts=num_experts)
        for count in range(model.num_hidden_layers + 1)
    ]
    sizes = {layer_name(layer): after - before for layer, (before, after) in enumerate(pairwise(up_to))}
    return PackedFolder(Path("paper"), dtype, LAYOUT, "paper", {ENDS: up_to[0], **sizes})
