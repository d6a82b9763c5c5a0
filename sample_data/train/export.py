"""Write a trained model as a Hugging Face folder with the published names, formats and keys; called by train.py.

Weights become bfloat16 exactly as they were rounded in training; the correction bias stays float32.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from card import write_card
from chat import BOS, BOS_ID, CHAT_TEMPLATE, EOS, EOS_ID
from safetensors.torch import load_file, save
from shape import ModelShape

from model import SampleModel

if TYPE_CHECKING:
    from train import Run


def export_model(run: Run, out: Path) -> None:
    """Write config, weights, tokenizer and model card to `out`."""
    model, tokenizer = run.model, run.maker.tokenizer
    out.mkdir(parents=True, exist_ok=True)
    write_bytes(out / "model.safetensors", save(published_weights(model), metadata={"format": "pt"}))
    write_json(out / "config.json", config_json(model.shape))
    write_json(out / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": False})
    write_bytes(out / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    write_json(out / "tokenizer_config.json", tokenizer_config(model.shape))
    write_card(model, run.maker, asdict(run.recipe), run.log, out)


def published_weights(model: SampleModel) -> dict[str, torch.Tensor]:
    """All tensors under their published names: experts one by one, and the MTP layer's shared tables again."""
    weights: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            weights[name] = value.float()
        elif name.endswith("experts.gate_up_proj"):
            for expert, gate_up in enumerate(value):
                gate, up = gate_up.chunk(2)
                at = f"{name.removesuffix('.gate_up_proj')}.{expert}"
                weights |= {f"{at}.gate_proj.weight": gate, f"{at}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            at = name.removesuffix(".down_proj")
            weights |= {f"{at}.{expert}.down_proj.weight": down for expert, down in enumerate(value)}
        else:
            weights[name] = value
    mtp = f"model.layers.{model.shape.num_hidden_layers}"
    weights[f"{mtp}.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    weights[f"{mtp}.shared_head.head.weight"] = weights["lm_head.weight"]
    return {
        name: (value if name.endswith("e_score_correction_bias") else value.to(torch.bfloat16)).detach().clone()
        for name, value in sorted(weights.items())
    }


def read_published(folder: Path) -> SampleModel:
    """Load the model of an exported folder, to measure it again."""
    stored = load_file(folder / "model.safetensors")
    model = SampleModel(ModelShape())
    experts = range(model.shape.n_routed_experts)
    state = {}
    for name in model.state_dict():
        at = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            pairs = [[stored[f"{at}.{expert}.{part}_proj.weight"] for part in ("gate", "up")] for expert in experts]
            state[name] = torch.stack([torch.cat(pair) for pair in pairs])
        elif name.endswith("experts.down_proj"):
            state[name] = torch.stack([stored[f"{at}.{expert}.down_proj.weight"] for expert in experts])
        else:
            state[name] = stored[name]
    model.load_state_dict(state)
    return model


def config_json(shape: ModelShape) -> dict[str, object]:
    """config.json in the style of the original release."""
    sizes = asdict(shape)
    theta, factor, original = (sizes.pop(f"rope_{key}") for key in ("theta", "factor", "original_positions"))
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **sizes,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_theta": theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "use_cache": True,
    }


def tokenizer_config(shape: ModelShape) -> dict[str, object]:
    """tokenizer_config.json with the chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "bos_token": {"__type": "AddedToken", "content": BOS, "special": True},
        "eos_token": {"__type": "AddedToken", "content": EOS, "special": True},
        "pad_token": EOS,
        "chat_template": CHAT_TEMPLATE,
    }


def write_json(path: Path, value: dict[str, object]) -> None:
    """Write JSON beside `path`, then rename."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write beside `path`, then rename, so that no reader sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
