"""Random-weight checkpoints of bench sizes and seeded workloads for them.

DeepSeek-V3, latent attention:
tiny    6 M parameters, 2.5 M active per token: bound by overhead on any machine
small   675 M parameters, 141 M active per token: bound by the matrix products of the machine
release 8 layers like small's with the release's latent (512 + 64), heads and vocabulary (129,280)

Grouped-query attention:
qwen3     Qwen3-0.6B's shape: dense, 28 layers, 16 heads on 8
qwen3-moe Qwen3-MoE, 694 M parameters, 146 M active per token: small's experts, 16 heads on 4
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
from transformers import (  # noqa: E402
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

TOKENIZER = TESTS.parent / "sample_data" / "model"
COMMON: dict[str, Any] = {
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    # the class's only values, which it does not write and other engines need
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
    },
    "small": {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 384,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 4,
    },
}
# The latent, heads' widths and vocabulary of the release.
SIZES["release"] = SIZES["small"] | {
    "vocab_size": 129280,
    "num_hidden_layers": 8,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
GROUPED_SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-moe": {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}
GROUPED_CLASSES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
NUM_REQUESTS = {"tiny": (256, 128)}  # shared, unshared
OTHER_REQUESTS = (64, 32)
PREFIX_TOKENS, NUM_PREFIXES, SHARED_OUTPUT = 384, 8, 64
FIRST_TOKEN = 8  # below are special tokens


def make_model(folder: Path, size: str, *, seed: int = 0, **other_shape: int) -> Path:
    """Write a bfloat16 checkpoint of random weights with the sample model's tokenizer; returns its folder.

    Args:
        other_shape: keys of config.json that differ from the size's.
    """
    torch.manual_seed(seed)
    if size in GROUPED_SIZES:
        config_class, model_class = GROUPED_CLASSES[size]
        config = config_class(max_position_embeddings=16384, **{**GROUPED_SIZES[size], **other_shape})
    else:
        config, model_class = DeepseekV3Config(**COMMON, **{**SIZES[size], **other_shape}), DeepseekV3ForCausalLM
    torch.set_default_dtype(torch.bfloat16)
    model = model_class(config).eval()
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                values = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(1 + 0.1 * values if "norm" in name else values / max(tensor.shape[-1], 1) ** 0.5)
    model.save_pretrained(folder)
    for file in TOKENIZER.iterdir():
        if file.suffix != ".safetensors" and file.name not in ("config.json", "generation_config.json", "README.md"):
            shutil.copy(file, folder)
    return folder


def make_int8_model(model: Path) -> Path:
    """Convert a checkpoint to int8 for vLLM, in the format of compressed-tensors; return the new folder.

    The weights of projections and experts are integers with one scale per row. vLLM computes the scales of activations
    itself. Head, router and embeddings stay in bfloat16, as in batchinfer's fp8.
    """
    folder = model.with_name(f"{model.name}-int8")
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    tensors = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, values in load_file(file).items():
            if name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
                scale = values.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
                tensors[name] = (values.float() / scale).round().to(torch.int8)
                tensors[name.replace(".weight", ".weight_scale")] = scale
            else:
                tensors[name] = values
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    of_linear = {
        "targets": ["Linear"],
        "weights": {**int8, "strategy": "channel", "dynamic": False},
        "input_activations": {**int8, "strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": of_linear},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def workload(size: str, kind: str, *, seed: int = 0) -> list[tuple[list[int], int]]:
    """Prompts with their output lengths.

    Args:
        kind: "shared": eight prefixes of 384 tokens, interleaved, 64 output tokens each; "unshared": 32 to 1,024
            prompt tokens, 16 to 128 output tokens.
    """
    rng = np.random.default_rng(seed + (kind == "shared"))
    vocab_size = (SIZES | GROUPED_SIZES)[size]["vocab_size"]

    def tokens(count: int) -> list[int]:
        return [int(token) for token in rng.integers(FIRST_TOKEN, vocab_size, count)]

    num_shared, num_unshared = NUM_REQUESTS.get(size, OTHER_REQUESTS)
    if kind == "shared":
        prefixes = [tokens(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
        return [
            (prefixes[number % NUM_PREFIXES] + tokens(int(rng.integers(16, 129))), SHARED_OUTPUT)
            for number in range(num_shared)
        ]
    return [
        (tokens(round(float(np.exp(rng.uniform(np.log(32), np.log(1024)))))), int(rng.integers(16, 129)))
        for _ in range(num_unshared)
    ]
