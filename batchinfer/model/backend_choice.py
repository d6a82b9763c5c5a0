"""Which backend a model's widths allow; no torch here, plans ask as well as ranks."""

from __future__ import annotations

from batchinfer.model.config import ModelConfig
from batchinfer.records import ModelError


def fitting_backend(backend: str, config: ModelConfig) -> str:
    """The backend for a model of these widths: C++ attention takes values in pairs.

    Raises:
        ModelError: C++ was asked for by name and cannot take them.
    """
    if config.qk_head_dim % 2 == 0 and config.kv_lora_rank % 2 == 0:
        return backend
    if backend == "cpu":
        raise ModelError(
            f"backend 'cpu' takes even widths of queries and latents; config.json has {config.qk_head_dim} and "
            f"{config.kv_lora_rank}. Use backend 'auto'."
        )
    return "reference" if backend == "auto" else backend
