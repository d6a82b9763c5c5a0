"""Checkpoints with weights of 4-bit integers: as Kimi-K2-Thinking is published, as AutoAWQ and AutoGPTQ write them."""

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
AWQ: dict[str, Any] = {
    "bits": 4,
    "group_size": 32,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
GPTQ: dict[str, Any] = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "damp_percent": 0.01,
    "desc_act": False,
    "group_size": 32,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:1.7.0"]},
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "sym": True,
    "true_sequential": True,
}
AUTOROUND: dict[str, Any] = {
    "autoround_version": "0.12.3",
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "extra_config": {"model.layers.0.mlp.gate_proj": {"bits": 16, "data_type": "float"}},
    "group_size": 32,
    "iters": 0,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "seqlen": 512,
    "sym": True,
}
# where AutoAWQ puts eight values into a word, from the lowest four bits on
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


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


def pack_with_zeros(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Pack projections of whole groups, as AWQ's, GPTQ's or AutoRound's `config` says; returns them multiplied out.

    GPTQ's in no order have the groups of their inputs listed, and a symmetric one has 8 for all its zero points.
    AutoRound's symmetric scales have the sign that makes a group's largest magnitude the lowest integer.
    """
    stored, plain = {}, {}
    for name, tensor in read_tensors(folder).items():
        if not name.endswith("_proj.weight") or tensor.shape[0] % 8 or tensor.shape[1] % config["group_size"]:
            stored[name] = plain[name] = tensor
            continue
        num_in, num_groups = tensor.shape[1], tensor.shape[1] // config["group_size"]
        group_M = torch.arange(num_in) // config["group_size"]
        if config.get("desc_act"):
            group_M = group_M[torch.randperm(num_in, generator=torch.Generator().manual_seed(num_in))]
        packing = config.get("packing_format", config["quant_method"])
        least, most = (
            torch.stack([getattr(tensor[:, group_M == group], bound)(1) for group in range(num_groups)], 1)
            for bound in ("amin", "amax")
        )
        scale = (torch.maximum(most, -least) / 7.5).half()
        if config.get("sym") and packing.startswith("auto_round"):
            scale = torch.where(most < -least, scale, -scale)
        spread = torch.arange(scale.numel()).view(scale.shape) % 6 + 5
        zeros = torch.full(scale.shape, 8) if config.get("sym") else spread
        values = (tensor / scale[:, group_M].float()).round().long().add(zeros[:, group_M]).clamp(0, 15)
        plain[name] = (values - zeros[:, group_M]).float() * scale[:, group_M].float()
        prefix = name.removesuffix(".weight")
        if packing.endswith("awq"):
            stored |= {f"{prefix}.qweight": awq_words(values.t()), f"{prefix}.qzeros": awq_words(zeros.t())}
        else:
            shift = int(packing.endswith("gptq") and config.get("checkpoint_format") != "gptq_v2")
            stored |= {f"{prefix}.qweight": gptq_words(values), f"{prefix}.qzeros": words(zeros.t()) - shift * ONES}
            if packing == "gptq":  # AutoRound's own form has no list
                stored[f"{prefix}.g_idx"] = group_M.int()
        stored[f"{prefix}.scales"] = scale.t()
    write_tensors(folder, stored)
    edit_config(folder, quantization_config=config)
    return plain


ONES = 0x11111111


def awq_words(values: torch.Tensor) -> torch.Tensor:
    """[..., N] of 0 to 15 as int32 [..., N / 8]."""
    return words(values.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1))


def gptq_words(values_NM: torch.Tensor) -> torch.Tensor:
    """[N, M] of 0 to 15 as int32 [M / 8, N]."""
    return words(values_NM).t()


def words(values: torch.Tensor) -> torch.Tensor:
    """[R, 8 W] of 0 to 15 as int32 [R, W], the first in the lowest bits."""
    return (values.long().unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


def pack(values: torch.Tensor) -> torch.Tensor:
    """[N, M] of values from -8 to 7 as int32 [N, ceil(M / 8)], the first in the lowest bits, each plus 8."""
    return words(torch.nn.functional.pad(values.long(), (0, -values.shape[1] % 8), value=-8) + 8)


def _rounded(weight: torch.Tensor, group: int, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.float().unflatten(1, (-1, group))
    scale = (groups.abs().amax(-1) / 7.5).to(scale_dtype)
    return (groups / scale.float()[:, :, None]).round().clamp(-8, 7).flatten(1), scale
