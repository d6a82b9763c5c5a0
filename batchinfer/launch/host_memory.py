"""The check that the weights of a host's ranks fit into its memory, before any weight is read.

Without this check the kernel kills the ranks one by one, after minutes of reading, and again after each restart.
"""

from collections.abc import Iterable
from pathlib import Path

from batchinfer.config import JobConfig
from batchinfer.config.rank_layout import RankPlace, rank_places
from batchinfer.host_info import free_memory_bytes, has_gpu
from batchinfer.model.config import ModelConfig, load_model_config
from batchinfer.model.weight_bytes import rank_bytes
from batchinfer.records import ConfigError

_DTYPES = ("bfloat16", "fp8", "int4", "fp4")  # smaller than float32


def refuse_too_large(job: JobConfig, ranks: Iterable[int]) -> None:
    """Raise unless the weights of these ranks of this host fit into its free memory; ranks on GPUs are not checked.

    Raises:
        ConfigError: names the bytes of the weights, the free bytes, and the dtypes in which they would fit.
        ModelError: config.json cannot be used.
    """
    if has_gpu() and job.cluster.backend not in ("cpu", "reference"):
        return
    model, free = load_model_config(Path(job.model.path)), free_memory_bytes()
    places = [place for place in rank_places(job.cluster) if place.rank in set(ranks)]
    needed = _bytes_of(job, model, places, job.model.dtype)
    if needed <= free:
        return
    others = {dtype: _bytes_of(job, model, places, dtype) for dtype in _DTYPES if model.may_run_in(dtype)}
    fitting = [f'model.dtype = "{dtype}" ({_gb(size)})' for dtype, size in others.items() if size < min(needed, free)]
    raise ConfigError(
        f"{job.model.path} in {job.model.dtype} takes {_gb(needed)} of memory for {len(places)} "
        f"{'rank' if len(places) == 1 else 'ranks'} on this host, and {_gb(free)} is free; "
        + (f"use {' or '.join(fitting)}" if fitting else "it fits in no dtype")
        + ("; or free memory, or spread its ranks over more hosts" if model.num_moe_layers else "; or free memory")
    )


def _bytes_of(job: JobConfig, model: ModelConfig, places: list[RankPlace], dtype: str) -> int:
    slots = model.n_routed_experts + job.cluster.redundant_experts
    held = [-(-slots // place.group_size) if place.group_size > 1 else model.n_routed_experts for place in places]
    return sum(rank_bytes(model, dtype, num_experts=count) for count in held)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
