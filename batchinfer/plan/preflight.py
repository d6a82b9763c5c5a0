"""Checks of a job against its model, before a row is tokenised and without torch.

Checks that depend on the machine (GPU, libraries, compiler) are made by its ranks: launch/can_run_here.py.
"""

import os
from pathlib import Path

from batchinfer.config import VALUE_BYTES, ClusterConfig, JobConfig
from batchinfer.config.rank_layout import rank_places
from batchinfer.data.overrides import check_token_ids
from batchinfer.model.config import ModelConfig
from batchinfer.model.headers import read_headers
from batchinfer.model.packed_folder import read_packed
from batchinfer.model.page_format import PageFormat, check_kv
from batchinfer.model.tensor_names import check_tensors
from batchinfer.model.weight_bytes import weight_bytes
from batchinfer.model.weight_mode import check_streaming
from batchinfer.parallel.exchange_rules import check_device, check_group, check_rows
from batchinfer.records import ConfigError, Shard, slots_per_rank
from batchinfer.rundir import RunDir, output_files
from batchinfer.sanitize import size_text

# The device of ranks with these backends; for other backends it depends on the machine.
DEVICE_OF_BACKEND = {"cpu": "cpu", "reference": "cpu", "hopper": "cuda", "hopper-invariant": "cuda", "sdpa": "cuda"}


def check_job(job: JobConfig, model: ModelConfig) -> None:
    """Refuse a job that ranks would refuse on any machine.

    Raises:
        ModelError: the tensors in the headers of the model's files do not fit config.json.
        ConfigError: experts do not spread evenly, exchange, backend and dtype do not go together, kv.dtype does not go
            with the model, or sampling names tokens that the model does not have.
    """
    try:
        check_token_ids(job.sampling.to_sampling(), model.vocab_size)
    except ConfigError as error:
        raise ConfigError(f"sampling.{error}") from None
    folder = Path(job.model.path)
    if (packed := read_packed(folder)) is not None:
        packed.check(job.model.dtype)
    else:
        check_tensors(read_headers(folder, model.carrier), model)
    check_kv(job, model)
    check_streaming(job, model)
    model.check_dtype(job.model.dtype)
    _check_experts(job.cluster, model)
    device_type = DEVICE_OF_BACKEND.get(job.cluster.backend)
    groups = {(place.exchange(job.cluster), place.group_size) for place in rank_places(job.cluster)}
    for exchange, num_ranks in sorted(group for group in groups if group[1] > 1):
        if device_type is not None:
            check_device(exchange, device_type)
        if model.num_moe_layers:
            _check_exchange(exchange, num_ranks, job, model)


def memory_note(job: JobConfig, model: ModelConfig) -> str | None:
    """Return the memory that a model takes, as a sentence; None if its requests take KV pages alone."""
    pages = PageFormat.of(job)
    state_bytes = model.attention.state_bytes(VALUE_BYTES[pages.dtype])
    if not state_bytes:
        return None
    return (
        f"the model takes {size_text(weight_bytes(model, job.model.dtype))} of weights in all, "
        f"{pages.bytes_per_token(model):,} bytes of KV per token, and {size_text(state_bytes)} per running request"
    )


def check_names(run: RunDir, shards: list[Shard], form: str) -> None:
    """Refuse shards whose output files would have the same name or a name too long for the file system.

    Args:
        form: output.format.

    Raises:
        ConfigError: names the first such shard.
    """
    most_name, most_path = os.pathconf(run.root, "PC_NAME_MAX"), os.pathconf(run.root, "PC_PATH_MAX")
    shard_of: dict[Path, Shard] = {}
    for target, shard in [(file, one) for one in shards for file in output_files(run, one.name, form)]:
        other = shard_of.setdefault(target, shard)
        if other is not shard:
            raise ConfigError(
                f"{other.path} and {shard.path} would share the output file {target.name}; rename one of them"
            )
        if len(os.fsencode(target)) >= most_path or any(len(os.fsencode(part)) > most_name for part in target.parts):
            raise ConfigError(
                f"the output of {shard.path} would have a longer name than the {most_name} bytes of a name and "
                f"{most_path} of a path that {run.root} takes; rename the shard or choose a shorter output.dir"
            )


def _check_exchange(exchange: str, num_ranks: int, job: JobConfig, model: ModelConfig) -> None:
    check_rows(exchange, job.model.dtype, model.hidden_size)
    num_slots = slots_per_rank(model.n_routed_experts, job.cluster.redundant_experts, num_ranks)
    check_group(
        exchange,
        num_ranks=num_ranks,
        slots_per_rank=num_slots,
        topk=model.num_experts_per_tok,
        hidden=model.hidden_size,
    )


def _check_experts(cluster: ClusterConfig, model: ModelConfig) -> None:
    """Refuse experts that do not spread evenly over each group of ranks."""
    if model.num_moe_layers == 0 and cluster.redundant_experts:
        raise ConfigError(
            f"cluster.redundant_experts is {cluster.redundant_experts}, but the model has no experts; leave it out"
        )
    if model.num_moe_layers:
        for num_ranks in {cluster.num_prefill_ranks, cluster.num_decode_ranks} - {1}:
            slots_per_rank(model.n_routed_experts, cluster.redundant_experts, num_ranks)
