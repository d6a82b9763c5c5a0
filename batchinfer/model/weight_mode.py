"""Whether a job's weights can be streamed, and the memory of a rank that streams them; no torch here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from batchinfer.config import PAGE_TOKENS, VALUE_BYTES, JobConfig
from batchinfer.config.cluster import SWEEP_STEPS
from batchinfer.host_info import has_gpu
from batchinfer.model.config import ModelConfig
from batchinfer.model.layer_pieces import layers_of_rank
from batchinfer.model.memory_split import MemorySplit, SplitError, split_memory
from batchinfer.model.packed_folder import ENDS, MTP, PackedFolder, read_packed
from batchinfer.model.page_format import PageFormat
from batchinfer.model.weight_bytes import PROCESS_BYTES, step_bytes
from batchinfer.records import ConfigError

FREE_SHARE = 0.9  # of free memory that a rank without cluster.memory_bytes takes
_MTP_SHARE = 0.125  # largest share of a rank's memory that the layer for multi-token prediction may take
_STATE_SHARE = 1.25  # memory of the steps between two layers / their hidden states and angles
_DEALT_SHARE = 1.25  # most KV of a rank / the mean over ranks, as requests are dealt
_GPU_BACKENDS = ("hopper", "hopper-invariant", "triton", "sdpa")
MOST_KEPT = 128  # requests' states kept where prompts branch, in addition to those of running requests
KEPT_SHARE = 0.125  # largest share of the memory for KV that they may take


def runs_on_gpus(job: JobConfig) -> bool:
    """Return whether the ranks of this host will probably compute on GPUs."""
    return has_gpu() and job.cluster.backend not in ("cpu", "reference")


def streams_to_device(job: JobConfig) -> bool:
    """Return whether a job that streams its weights does so to a GPU, or with a GPU's operations."""
    return runs_on_gpus(job) or job.cluster.backend in _GPU_BACKENDS


def why_not_to_device(job: JobConfig, config: ModelConfig, packed: PackedFolder | None) -> str | None:
    """Return why weights cannot be streamed to a GPU, with the remedy; None if they can.

    Args:
        packed: the folder's manifest; None: it is not converted.
    """
    model = job.model
    if not config.attention.cuts_anywhere:
        return f"{config.family} models run on CPUs alone"
    if model.dtype == "float32":
        return "weights are streamed to GPUs in bfloat16 or fewer bits; set model.dtype to 'bfloat16'"
    if packed is not None and not packed.for_gpus:
        return (
            f"{model.path} is converted for CPUs; set model.path to {packed.source} if it fits into the host's memory, "
            f"or to DIR of `batchinfer convert {packed.source} DIR --gpu --dtype {model.dtype}`, or set "
            "cluster.backend to 'cpu'"
        )
    return None


def why_not_streamed(job: JobConfig, config: ModelConfig) -> str | None:
    """Return why the weights of a job cannot be streamed, on a CPU or to a GPU, with the remedy; None if they can."""
    cluster, model = job.cluster, job.model
    packed = read_packed(Path(model.path))
    if cluster.mode == "disaggregated":
        return "weights are streamed by ranks that run prompts and answers; set cluster.mode = 'colocated'"
    if cluster.backend == "reference":
        return "weights are streamed for the C++ operations on a CPU and for GPUs, not for backend 'reference'"
    if streams_to_device(job):
        if cluster.num_ranks > 1:
            return (
                f"weights are streamed to a GPU by one rank, and the job has {cluster.num_ranks}; "
                "set cluster.prefill_ranks = 1"
            )
        return why_not_to_device(job, config, packed)
    if packed is None or (packed.for_gpus and cluster.backend == "cpu"):
        return (
            f"weights are streamed from a converted folder; run `batchinfer convert {model.path} DIR --dtype "
            f"{model.dtype}` and set model.path to DIR"
        )
    return None


def check_streaming(job: JobConfig, config: ModelConfig) -> None:
    """Refuse weights = "stream" where weights cannot be streamed.

    Raises:
        ConfigError: says why, and what can be done.
    """
    if job.cluster.weights == "stream" and (reason := why_not_streamed(job, config)) is not None:
        raise ConfigError(f"cluster.weights is 'stream', but {reason}")


def computes_prompts_alone(job: JobConfig, model: ModelConfig) -> bool:
    """Return whether no request of a streamed job takes a second token and no KV is stored.

    Then KV of a layer is of no use once all prompts of a sweep have passed the layer, and pages of one layer serve all.
    """
    return (
        job.cluster.weights == "stream"
        and job.sampling.max_tokens <= 1
        and job.input.sampling is None
        and job.input.format != "openai"
        and job.kv.dir is None
        and model.attention.cuts_anywhere
    )


def kv_bytes_per_token(job: JobConfig, model: ModelConfig) -> int:
    """Return the bytes of a token's KV, in all layers for which pages are kept."""
    num_layers = model.num_hidden_layers if computes_prompts_alone(job, model) else 1
    return PageFormat.of(job).bytes_per_token(model) // num_layers


def mtp_stays(job: JobConfig, packed: PackedFolder, *, free_bytes: int) -> bool:
    """Return whether the layer for multi-token prediction is kept in memory, where it drafts tokens.

    Args:
        free_bytes: of the host.
    """
    memory = job.cluster.memory_bytes or int(free_bytes * FREE_SHARE)
    is_alone = job.cluster.num_ranks == 1  # ranks with a part of the experts do not draft
    return is_alone and job.cluster.drafts_tokens and packed.has_mtp and packed.sizes[MTP] <= _MTP_SHARE * memory


def streamed_states(job: JobConfig, model: ModelConfig, kv_bytes: int, largest_tokens: int) -> int:
    """Return how many requests' states a rank with this memory for KV has, those kept for shared prefixes among them.

    Args:
        largest_tokens: KV tokens of the largest request.
    """
    cluster = job.cluster
    state_bytes = _state_bytes(job, model)
    if not state_bytes:
        return 0
    most = cluster.running_requests + MOST_KEPT
    if cluster.page_bytes is not None:
        return max(1, min(most, (kv_bytes - cluster.page_bytes) // state_bytes))
    request_bytes = state_bytes + _whole_pages(largest_tokens) * kv_bytes_per_token(job, model)
    kept = min(MOST_KEPT, int(kv_bytes * KEPT_SHARE) // state_bytes)
    running = (kv_bytes - kept * state_bytes) // request_bytes
    return max(1, min(cluster.running_requests, running)) + kept


def _state_bytes(job: JobConfig, model: ModelConfig) -> int:
    return model.attention.state_bytes(VALUE_BYTES[job.model.dtype])


def split_for(
    job: JobConfig,
    model: ModelConfig,
    packed: PackedFolder,
    *,
    free_bytes: int,
    most_tokens: int | None = None,
    largest_tokens: int = PAGE_TOKENS,
    num_local_ranks: int = 1,
    layer_bytes: Sequence[int] | None = None,
) -> MemorySplit:
    """Return the memory of a rank that streams the layers of a converted folder.

    Args:
        free_bytes: of the host.
        most_tokens: KV tokens of all requests of all ranks; None: not known.
        largest_tokens: KV tokens of the largest request.
        num_local_ranks: ranks that share the host's memory.
        layer_bytes: [L] that the rank reads; None: those of a rank with experts in order.

    Raises:
        ConfigError: memory is too small, or cluster.memory_bytes is more than is free.
    """
    cluster = job.cluster
    memory = cluster.memory_bytes or int(free_bytes * FREE_SHARE) // num_local_ranks
    if memory * num_local_ranks > free_bytes:
        of_ranks = "" if num_local_ranks == 1 else f" for each of {num_local_ranks} ranks"
        raise ConfigError(
            f"cluster.memory_bytes is {memory / 1e9:.2f} GB{of_ranks}, and {free_bytes / 1e9:.2f} GB is free; lower it "
            "or free memory"
        )
    if layer_bytes is None:
        layer_bytes = [layer.num_bytes for layer in layers_of_rank(packed, model, _experts_in_order(job, model))]
    parts = [ENDS, MTP] if mtp_stays(job, packed, free_bytes=free_bytes) else [ENDS]
    of_parts = sum(packed.sizes[part] for part in parts)
    least, useful = kv_needs(job, model, most_tokens, largest_tokens)
    try:
        return split_memory(
            layer_bytes,
            memory_bytes=memory,
            fixed_bytes=PROCESS_BYTES + of_parts + sweep_step_bytes(job, model),
            least_kv_bytes=least,
            useful_kv_bytes=useful,
        )
    except SplitError as error:
        raise ConfigError(
            f"{job.model.path} cannot be streamed in {memory / 1e9:.2f} GB of memory: {error}; lower "
            "cluster.prefill_tokens or cluster.decode_requests, use a smaller dtype, or free memory"
        ) from None


def experts_of_rank(job: JobConfig, model: ModelConfig) -> int:
    """Return the routed experts that a rank holds of each MoE layer, redundant ones among them."""
    num_slots = model.n_routed_experts + job.cluster.redundant_experts
    return model.n_routed_experts if job.cluster.num_ranks == 1 else -(-num_slots // job.cluster.num_ranks)


def _experts_in_order(job: JobConfig, model: ModelConfig) -> list[range] | None:
    if job.cluster.num_ranks == 1 or not model.num_moe_layers:
        return None
    return [range(min(model.n_routed_experts, experts_of_rank(job, model)))] * model.num_moe_layers


def kv_needs(
    job: JobConfig, model: ModelConfig, most_tokens: int | None, largest_tokens: int
) -> tuple[int, int | None]:
    """Return the bytes of KV and states of the largest request, and of all that a rank runs at once; None: not known.

    Args:
        most_tokens, largest_tokens: as of split_for.
    """
    cluster, state_bytes = job.cluster, _state_bytes(job, model)
    if cluster.page_bytes is not None:
        least = cluster.page_bytes + 2 * cluster.decode_requests * state_bytes  # half of them may be kept
        return least, least
    per_token = kv_bytes_per_token(job, model)
    least = _whole_pages(largest_tokens) * per_token + state_bytes
    if most_tokens is None:
        return least, None
    share = int(most_tokens / cluster.num_ranks * (_DEALT_SHARE if cluster.num_ranks > 1 else 1))
    tokens = min(_whole_pages(share), 2 * cluster.running_requests * _whole_pages(largest_tokens))
    if computes_prompts_alone(job, model):
        tokens = min(tokens, 2 * SWEEP_STEPS * cluster.prefill_tokens + _whole_pages(largest_tokens))
    num_states = min(cluster.running_requests + MOST_KEPT, 2 * -(-most_tokens // PAGE_TOKENS))
    return least, tokens * per_token + num_states * state_bytes


def sweep_step_bytes(job: JobConfig, model: ModelConfig) -> int:
    """Return the rough bytes of the largest step, of logits, and of all steps of a sweep between two layers."""
    cluster, item_bytes = job.cluster, VALUE_BYTES[job.model.dtype]
    num_streams = 1 if model.hyper is None else model.hyper.num_streams
    per_token = model.hidden_size * num_streams * item_bytes + 8 * model.attention.rotary_dim
    between_layers = _STATE_SHARE * SWEEP_STEPS * (cluster.prefill_tokens + cluster.decode_requests) * per_token
    logits = 2 * cluster.decode_requests * model.vocab_size * 4
    return int(between_layers) + logits + step_bytes(model, cluster.prefill_tokens, item_bytes)


def _whole_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS
