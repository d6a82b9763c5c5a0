"""Memory split and forecast of a rank that streams its weights to a GPU; no torch here."""

# L layers

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchinfer.config import PAGE_TOKENS, JobConfig
from batchinfer.model.config import ModelConfig
from batchinfer.model.device_split import DeviceSplit, split_device_memory, split_host_memory
from batchinfer.model.memory_split import MemorySplit, SplitError
from batchinfer.model.packed_folder import PackedFolder
from batchinfer.model.weight_bytes import weight_bytes
from batchinfer.model.weight_mode import FREE_SHARE, kv_needs, sweep_step_bytes
from batchinfer.model.weight_stream import read_speed
from batchinfer.records import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceForecast:
    """The sweeps of a job that streams its weights to a GPU, whose memory is not known yet.

    sweep_bytes: copied to the GPU in a sweep, at most.
    host: of the host's memory.
    disk_bytes_per_s: as measured; None: nothing is read from disk after the first sweep.
    """

    sweep_bytes: int
    host: MemorySplit
    disk_bytes_per_s: float | None

    def __str__(self) -> str:
        words = f"weights are streamed to the GPU: at most {self.sweep_bytes / 1e9:,.2f} GB per sweep"
        if self.disk_bytes_per_s is None:
            return f"{words}, from a copy in the host's memory; the GPU's link or products decide"
        from_disk = self.host.sweep_bytes
        return (
            f"{words}, of which {from_disk / 1e9:,.2f} GB are read from disk in "
            f"{from_disk / self.disk_bytes_per_s:,.1f} s at {self.disk_bytes_per_s / 1e9:,.2f} GB/s, as measured; the "
            "disk, the GPU's link or products decide"
        )


def host_bytes_for(job: JobConfig, free_bytes: int) -> int:
    """Return the bytes of the host that a rank takes for weights.

    Args:
        free_bytes: of the host.

    Raises:
        ConfigError: cluster.memory_bytes is more than is free.
    """
    allowed = job.cluster.memory_bytes
    if allowed is not None and allowed > free_bytes:
        raise ConfigError(
            f"cluster.memory_bytes is {allowed / 1e9:.2f} GB, and {free_bytes / 1e9:.2f} GB is free; lower it or free "
            "memory"
        )
    return allowed or int(free_bytes * FREE_SHARE)


def host_split(job: JobConfig, model: ModelConfig, packed: PackedFolder | None, *, free_bytes: int) -> MemorySplit:
    """Return the host's memory if no layer stays on the GPU: a copy of all layers, or a ring read from disk.

    Args:
        packed: the folder's manifest; None: it is not converted, and there is one part for all layers.
        free_bytes: of the host.

    Raises:
        ConfigError: it is too small.
    """
    memory, path = host_bytes_for(job, free_bytes), job.model.path
    if packed is None:
        needed = weight_bytes(model, job.model.dtype)
        if needed > memory:
            raise ConfigError(
                f"{path} takes {needed / 1e9:.2f} GB of the host's memory, of which {memory / 1e9:.2f} GB may be used; "
                f"run `batchinfer convert {path} DIR --gpu --dtype {job.model.dtype}` and set model.path to DIR: then "
                "its layers are read from disk"
            )
        return split_host_memory([needed], memory)
    try:
        return split_host_memory(layer_sizes(packed, model), memory)
    except SplitError as error:
        raise ConfigError(f"{path} cannot be streamed to the GPU: {error}; free memory") from None


def device_forecast(
    job: JobConfig, model: ModelConfig, packed: PackedFolder | None, *, free_bytes: int
) -> DeviceForecast:
    """Return the forecast of a job's sweeps before its rank runs; measure the disk if layers are read from it.

    Raises:
        ConfigError, ModelError: as of host_split; a file cannot be read.
    """
    host = host_split(job, model, packed, free_bytes=free_bytes)
    sizes = [weight_bytes(model, job.model.dtype)] if packed is None else layer_sizes(packed, model)
    speed = None
    if packed is not None and host.sweep_bytes:
        speed = read_speed([packed.layer(layer) for layer in range(model.num_hidden_layers)])
    return DeviceForecast(sum(sizes), host, speed)


def device_split_for(
    job: JobConfig,
    model: ModelConfig,
    layer_bytes: Sequence[int],
    end_bytes: int,
    *,
    device_bytes: int,
    host_bytes: int,
    most_tokens: int | None = None,
    largest_tokens: int = PAGE_TOKENS,
) -> DeviceSplit:
    """Return the memory of a rank that streams these layers to its GPU.

    Args:
        layer_bytes: [L] size of each layer.
        end_bytes: of embedding, norm and head, which stay on the GPU.
        device_bytes, host_bytes: for this rank.
        most_tokens, largest_tokens: as of split_for.

    Raises:
        ConfigError: memory is too small.
    """
    least, useful = kv_needs(job, model, most_tokens, largest_tokens)
    try:
        return split_device_memory(
            layer_bytes,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            fixed_bytes=end_bytes + sweep_step_bytes(job, model),
            least_kv_bytes=least,
            useful_kv_bytes=useful,
        )
    except SplitError as error:
        raise ConfigError(
            f"{job.model.path} cannot be streamed to a GPU with {device_bytes / 1e9:.2f} GB: {error}; lower "
            "cluster.prefill_tokens or cluster.decode_requests, or use a smaller dtype"
        ) from None


def layer_sizes(packed: PackedFolder, model: ModelConfig) -> list[int]:
    """Return [L] bytes of each layer's file."""
    return [packed.layer_bytes(layer) for layer in range(model.num_hidden_layers)]
