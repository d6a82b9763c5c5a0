"""The choice whether a rank drafts tokens with the model's layer for multi-token prediction, with the reason."""

from pathlib import Path

import torch

from batchinfer.config import JobConfig
from batchinfer.config.rank_layout import RankPlace
from batchinfer.host_info import free_memory_bytes
from batchinfer.model.config import load_model_config
from batchinfer.model.headers import read_headers
from batchinfer.model.packed_folder import MTP, read_packed
from batchinfer.model.page_format import PageFormat
from batchinfer.model.tensor_names import why_no_mtp
from batchinfer.model.weight_bytes import mtp_bytes, weight_bytes
from batchinfer.model.weight_mode import mtp_stays

_MEMORY_SHARE = 0.25  # largest share of the memory left by the model's weights that the layer may take


def should_draft(job: JobConfig, place: RankPlace) -> bool:
    """Return whether this rank should draft: the job drafts, the rank decodes and the model has an MTP layer."""
    has_layer = load_model_config(Path(job.model.path)).num_mtp_layers > 0
    return job.cluster.drafts_tokens and place.runs_decode and has_layer


def why_not(job: JobConfig, place: RankPlace, device: torch.device) -> str | None:
    """Return why a rank that should draft cannot; None if it can, and loads the layer."""
    if place.group_size > 1:
        return f"experts are spread over {place.group_size} ranks"
    if device.type != "cpu":
        return "decode steps on a GPU are run without drafts"
    if PageFormat.of(job).is_fp8:
        return "KV is in fp8, which the steps that check drafts cannot read"
    folder, dtype = Path(job.model.path), job.model.dtype
    config = load_model_config(folder)
    if (packed := read_packed(folder)) is not None:
        if not packed.has_mtp:
            return "the converted folder does not have the layer"
        if job.cluster.weights == "stream" and not mtp_stays(job, packed, free_bytes=free_memory_bytes()):
            return f"the layer takes {packed.sizes[MTP] / 1e9:.1f} GB, too much of the memory for KV"
        return None
    missing = why_no_mtp(read_headers(folder, config.carrier), config)
    if missing is not None:
        return missing
    needed = mtp_bytes(config, dtype)
    free = free_memory_bytes() - weight_bytes(config, dtype)
    if needed > _MEMORY_SHARE * free:
        return f"the layer takes {needed / 1e9:.1f} GB, and {max(0, free) / 1e9:.1f} GB are free after the weights"
    return None
