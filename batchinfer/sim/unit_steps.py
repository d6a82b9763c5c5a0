"""Prefill of a batch of prompts on one unit: the busiest GPU, the disk or the network sets the pace."""

from dataclasses import dataclass

from batchinfer.model.config import ModelConfig
from batchinfer.sim.dealing import Skews
from batchinfer.sim.hardware import Accelerator
from batchinfer.sim.steps import Step, Unit, prefill_step

BF16 = 2  # bytes of a KV value


@dataclass(frozen=True, slots=True)
class Batch:
    """Sums over the prompts of a prefill step."""

    prompts: float
    prompt_tokens: float
    new_tokens: float
    attention_pairs: float
    expanded_tokens: float  # whose keys and values are expanded, see `Workload.expanded_tokens`


def prefill_batch(
    batch: Batch, skews: Skews, model: ModelConfig, gpu: Accelerator, unit: Unit, disk_bytes_per_s: float
) -> tuple[float, str, Step]:
    """(seconds, what they are spent on, the step of the busiest GPU).

    All GPUs of a unit meet in every exchange, so that the GPU with most attention holds up the others even if
    another one has most tokens.

    Args:
        disk_bytes_per_s: of a node, for KV that is in the cache.
    """
    share = skews.new_tokens / unit.ep_size
    step = prefill_step(
        batch.new_tokens * share,
        batch.attention_pairs * skews.attention / unit.ep_size,
        batch.expanded_tokens * share,
        batch.prompts * share,
        model,
        gpu,
        unit,
    )
    kv_bytes = model.kv_bytes_per_token(BF16)
    num_nodes = unit.ep_size / gpu.gpus_per_node
    limits = {
        step.bottleneck: step.seconds,
        "disk": (batch.prompt_tokens - batch.new_tokens) * kv_bytes / (disk_bytes_per_s * num_nodes),
        "KV to decode": batch.prompt_tokens * kv_bytes / (gpu.network_bytes_per_s * unit.ep_size),
    }
    limit = max(limits, key=limits.__getitem__)
    return limits[limit], limit, step
