"""A twin of the sample model with random weights: its text means nothing, but every row's is different."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def make_random_twin(source: Path, target: Path, *, seed: int = 0) -> Path:
    """Copy a model folder with every weight replaced by noise of a size that keeps logits near 1."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    generator = torch.Generator().manual_seed(seed)
    weights = sorted(load_file(source / "model.safetensors").items())
    tensors = {name: _noise(name, tensor, generator) for name, tensor in weights}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def skew_experts(folder: Path) -> Path:
    """Give some experts of a model folder far more tokens than others, by the bias of its routers."""
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "e_score_correction_bias" in name:
            tensors[name] = 0.15 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _noise(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(tensor.shape, generator=generator)
    if "norm" in name:
        values = 1 + 0.1 * values
    elif "e_score_correction_bias" in name:
        values = 0.05 * values
    elif "embed_tokens" not in name:
        values = 1.2 * values / tensor.shape[-1] ** 0.5
    return values.to(tensor.dtype).contiguous()
