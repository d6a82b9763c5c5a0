"""Checkpoints of tiny models with weights in FP8 or tensors that were changed, and their weights as they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from batchinfer.model.config import load_model_config
from batchinfer.model.ops import Ops
from batchinfer.model.weight_loading import load_weights
from batchinfer.model.weights import ModelWeights
from batchinfer_kernels.reference import dequantize_fp8_block, quantize_fp8_block
from support.checkpoints import edit_config, read_tensors, write_tensors

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
# larger than a block in some dims and never a multiple of it
RAGGED = {"hidden_size": 144, "intermediate_size": 200, "moe_intermediate_size": 40, "kv_lora_rank": 136}
WHOLE_GROUPS = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 96}
IN_BFLOAT16: dict[str, Any] = {"dtype": torch.bfloat16, "ops": Ops.select("reference", torch.bfloat16, eight_bit=True)}


def load(folder: Path, **options: Any) -> ModelWeights:
    """In float32, unless options say something else."""
    return load_weights(folder, load_model_config(folder), **{"dtype": torch.float32} | options)


def quantise(folder: Path) -> dict[str, torch.Tensor]:
    """Turn the linear weights of a checkpoint into FP8 with scales; return its tensors multiplied out again."""
    tensors = read_tensors(folder)
    stored, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight", "indexer.wq_b.weight", "indexer.wk.weight")):
            stored[name], scale = quantize_fp8_block(tensor)
            stored[f"{name}_scale_inv"] = scale
            plain[name] = dequantize_fp8_block(stored[name], scale, torch.float32)
    write_tensors(folder, stored)
    edit_config(folder, quantization_config=FP8)
    return plain


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors by name ("__" for "."); None removes one."""
    tensors = read_tensors(folder)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    write_tensors(folder, tensors)
