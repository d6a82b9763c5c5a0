"""Checkpoints whose routed experts are 4-bit integers, in the form in which Kimi-K2-Thinking is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from support.checkpoints import edit_config, read_tensors, write_tensors

# quantization_config of Kimi-K2-Thinking's config.json (compressed-tensors, "pack-quantized")
KIMI_INT4: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        *("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def int4_config(**changes: Any) -> dict[str, Any]:
    """quantization_config with other keys, of the weights of its one group where it has them there."""
    config = json.loads(json.dumps(KIMI_INT4))
    scheme = config["config_groups"]["group_0"]
    for key, value in changes.items():
        holder = next((part for part in (scheme["weights"], scheme) if key in part), config)
        holder[key] = value
    return config


def pack_int4(
    folder: Path, *, group: int = 32, words: str = ".experts.", scale_dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Pack the projections with `words` in their names; returns all tensors multiplied out again."""
    stored, plain = {}, {}
    for name, tensor in read_tensors(folder).items():
        if words in name and name.endswith("_proj.weight"):
            values, scale = _rounded(tensor, group, scale_dtype)
            plain[name] = (values.unflatten(1, (-1, group)) * scale.float()[:, :, None]).flatten(1)
            stored[f"{name}_packed"] = pack(values)
            stored[f"{name}_scale"] = scale
            stored[f"{name}_shape"] = torch.tensor(tensor.shape)
        else:
            stored[name] = plain[name] = tensor
    write_tensors(folder, stored)
    edit_config(folder, quantization_config=int4_config(group_size=group))
    return plain


def pack(values: torch.Tensor) -> torch.Tensor:
    """[N, M] of values from -8 to 7 as int32 [N, ceil(M / 8)], the first in the lowest bits, each plus 8."""
    filled = torch.nn.functional.pad(values.long(), (0, -values.shape[1] % 8), value=-8) + 8
    return (filled.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


def _rounded(weight: torch.Tensor, group: int, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.float().unflatten(1, (-1, group))
    scale = (groups.abs().amax(-1) / 7.5).to(scale_dtype)
    return (groups / scale.float()[:, :, None]).round().clamp(-8, 7).flatten(1), scale
