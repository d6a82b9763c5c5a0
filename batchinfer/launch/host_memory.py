"""The check that the weights of a host's ranks fit into its memory or can be streamed, before any weight is read.

Without this check the kernel kills the ranks one by one, after minutes of reading, and again after each restart.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchinfer.config import JobConfig
from batchinfer.config.rank_layout import RankPlace, rank_places
from batchinfer.host_info import free_memory_bytes
from batchinfer.launch.nodes import this_node
from batchinfer.launch.product_speed import measure_products
from batchinfer.model.config import ModelConfig, load_model_config
from batchinfer.model.device_memory import device_forecast, host_split
from batchinfer.model.memory_split import MemorySplit
from batchinfer.model.packed_folder import read_packed
from batchinfer.model.page_format import check_kv
from batchinfer.model.stream_forecast import SHORT_S, JobTokens, StreamForecast, swept_job
from batchinfer.model.weight_bytes import rank_bytes
from batchinfer.model.weight_mode import (
    check_streaming,
    kv_bytes_per_token,
    runs_on_gpus,
    split_for,
    streams_to_device,
    why_not_streamed,
)
from batchinfer.model.weight_stream import read_speed
from batchinfer.records import ConfigError
from batchinfer.sanitize import size_text

_DTYPES = ("bfloat16", "fp8", "int4", "fp4")  # smaller than float32


def with_weights(job: JobConfig, ranks: Iterable[int]) -> JobConfig:
    """Return the job with its `cluster.weights` decided: "resident", or "stream".

    "auto" streams where the weights of these ranks, and KV for a step of prompts, do not fit into this host's memory.
    Memory of GPUs is not checked.

    Raises:
        ConfigError: the weights do not fit and cannot be streamed. Names the bytes of the weights, the free bytes, and
            the dtypes in which they would fit.
        ModelError: config.json cannot be used.
    """
    folder = Path(job.model.path)
    model, free = load_model_config(folder), free_memory_bytes()
    check_kv(job, model)
    check_streaming(job, model)
    if job.cluster.weights == "stream" and streams_to_device(job):
        host_split(job, model, read_packed(folder), free_bytes=free)  # raises if this does not fit
        return job
    if runs_on_gpus(job):
        return decided(job, "resident")
    places = [place for place in rank_places(job.cluster) if place.rank in set(ranks)]
    needed, allowed = _bytes_of(job, model, places, job.model.dtype), free
    if job.cluster.memory_bytes is not None:
        allowed = min(free, len(places) * job.cluster.memory_bytes)
    for_kv = job.cluster.prefill_tokens * kv_bytes_per_token(job, model)
    packed, why_not = read_packed(folder), why_not_streamed(job, model)
    if job.cluster.weights == "stream" or (job.cluster.weights == "auto" and packed is not None and why_not is None):
        assert packed is not None
        if job.cluster.weights == "stream" or needed + for_kv > allowed:
            split_for(job, model, packed, free_bytes=free, num_local_ranks=len(places))  # raises if this does not fit
            return decided(job, "stream")
    if needed <= allowed:
        return decided(job, "resident")
    others = {dtype: _bytes_of(job, model, places, dtype) for dtype in _DTYPES if model.may_run_in(dtype)}
    fitting = [
        f'model.dtype = "{dtype}" ({size_text(size)})' for dtype, size in others.items() if size < min(needed, allowed)
    ]
    raise ConfigError(
        f"{job.model.path} in {job.model.dtype} takes {size_text(needed)} of memory for {len(places)} "
        f"{'rank' if len(places) == 1 else 'ranks'} on this host, and {size_text(free)} is free"
        + ("" if allowed == free else f", of which cluster.memory_bytes allows {size_text(allowed)}")
        + "; "
        + (f"use {' or '.join(fitting)}" if fitting else "it fits in no dtype")
        + ("; or free memory, or spread its ranks over more hosts" if model.num_moe_layers else "; or free memory")
        + ("" if why_not is None else f"; or read weights from disk again and again: {why_not}")
    )


def stream_words(job: JobConfig, units: Sequence[Mapping[str, Any]]) -> tuple[str, int | None]:
    """Return a sentence on the cost of streaming, and the most sweeps; None on a GPU, where they are not known yet.

    Args, Raises: as of stream_forecast.
    """
    if streams_to_device(job):
        folder = Path(job.model.path)
        model, packed = load_model_config(folder), read_packed(folder)
        return str(device_forecast(job, model, packed, free_bytes=free_memory_bytes())), None
    found = stream_forecast(job, units)
    return str(found), found.schedule.num_sweeps


def stream_forecast(job: JobConfig, units: Sequence[Mapping[str, Any]]) -> StreamForecast:
    """Return the forecast of a planned job that streams its weights on this host; disk and products are measured.

    Args:
        units: rows of plan/units.

    Raises:
        ConfigError, ModelError: memory is too small, a layer cannot be read, or the folder cannot be run here.
    """
    folder = Path(job.model.path)
    model, packed = load_model_config(folder), read_packed(folder)
    assert packed is not None, "with_weights has checked it"
    tokens = JobTokens.of(units)
    largest = max((unit["largest_kv_tokens"] for unit in units), default=1)
    num_local = len(this_node(job.cluster.num_ranks).ranks)
    split = split_for(
        *(job, model, packed),
        free_bytes=free_memory_bytes(),
        num_local_ranks=num_local,
        most_tokens=tokens.kv,
        largest_tokens=largest,
    )
    return measured_forecast(job, split, tokens, num_local_ranks=num_local)


def measured_forecast(
    job: JobConfig, split: MemorySplit, tokens: JobTokens, *, num_local_ranks: int = 1
) -> StreamForecast:
    """Return the forecast of a job that streams its weights on this host; disk and products are measured.

    Args:
        num_local_ranks: ranks that share the host's disk and cores; other hosts are taken to be alike.

    Raises:
        ConfigError, ModelError: a layer cannot be read, or the folder cannot be run here.
    """
    folder = Path(job.model.path)
    model, packed = load_model_config(folder), read_packed(folder)
    assert packed is not None, "with_weights has checked it"
    disk = read_speed([packed.layer(layer) for layer in range(model.num_hidden_layers)]) / num_local_ranks
    num_ranks = job.cluster.num_ranks
    share = tokens.share(num_ranks)
    found = StreamForecast(split, tokens, swept_job(job, model, split, share), disk, num_ranks=num_ranks)
    if found.seconds < SHORT_S:
        return found
    return replace(found, speeds=measure_products(job, share, found.job.num_at_once, num_local_ranks))


def decided(job: JobConfig, weights: str) -> JobConfig:
    """Return the job with these weights: "resident" or "stream"."""
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"weights": weights})})


def _bytes_of(job: JobConfig, model: ModelConfig, places: list[RankPlace], dtype: str) -> int:
    slots = model.n_routed_experts + job.cluster.redundant_experts
    held = [-(-slots // place.group_size) if place.group_size > 1 else model.n_routed_experts for place in places]
    return sum(rank_bytes(model, dtype, num_experts=count) for count in held)
