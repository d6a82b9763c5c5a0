"""Whether a rank drafts tokens with the model's layer for multi-token prediction, or why it does not."""

from pathlib import Path

import torch

from batchinfer.config import JobConfig
from batchinfer.config.rank_layout import RankPlace
from batchinfer.host_info import free_memory_bytes
from batchinfer.model.config import load_model_config
from batchinfer.model.headers import read_headers
from batchinfer.model.packed_folder import read_packed
from batchinfer.model.page_format import PageFormat
from batchinfer.model.tensor_names import why_no_mtp
from batchinfer.model.weight_bytes import mtp_bytes, weight_bytes

_MEMORY_SHARE = 0.25  # of what is free beside the model's weights, at most, goes to the layer


def is_asked_for(job: JobConfig, place: RankPlace) -> bool:
    """Whether anybody expects it of this rank: a model without such a layer has nothing to draft with."""
    has_layer = load_model_config(Path(job.model.path)).num_mtp_layers > 0
    return job.cluster.speculate == "auto" and place.runs_decode and has_layer


def why_not(job: JobConfig, place: RankPlace, device: torch.device) -> str | None:
    """Why a rank of which it is asked cannot do it; None: it loads the layer and drafts."""
    if place.group_size > 1:
        return f"experts are spread over {place.group_size} ranks"
    if device.type != "cpu":
        return "decode steps on a GPU draft nothing"
    if PageFormat.of(job).is_fp8:
        return "KV is in fp8, which the steps that check drafts cannot read"
    folder, dtype = Path(job.model.path), job.model.dtype
    config = load_model_config(folder)
    if (packed := read_packed(folder)) is not None:
        return None if packed.has_mtp else "the converted folder does not have the layer"
    missing = why_no_mtp(read_headers(folder, config.carrier), config)
    if missing is not None:
        return missing
    needed = mtp_bytes(config, dtype)
    free = free_memory_bytes() - weight_bytes(config, dtype)
    if needed > _MEMORY_SHARE * free:
        return f"the layer takes {needed / 1e9:.1f} GB, and {max(0, free) / 1e9:.1f} GB are free after the weights"
    return None
