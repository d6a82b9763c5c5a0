"""Convert a DeepSeek-V3 checkpoint to llama.cpp's GGUF, bfloat16. Started by peers.py, in the peers' environment.

    python tests/bench/gguf_model.py MODEL FILE

Prompts are token ids, so the file holds no tokenizer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

ARCHITECTURE = gguf.MODEL_ARCH.DEEPSEEK2  # llama.cpp's name of V2 and V3


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The shape of the model, with attention over latents: one key head as wide as a latent and its rotary part."""
    rope = config["rope_parameters"]
    latent, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])

    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotary)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
    writer.add_value_length_mla(config["v_head_dim"])

    writer.add_rope_dimension_count(rotary)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])

    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def renamed(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors as llama.cpp wants them: the experts of a layer as one, the latent's projection as keys' and values'."""
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
    for name, tensor in tensors.items():
        if ".experts.0." in name:
            experts = [name.replace(".experts.0.", f".experts.{e}.") for e in range(config["n_routed_experts"])]
            yield name.replace(".experts.0.", ".experts."), torch.stack([tensors[expert] for expert in experts])
        elif "kv_b_proj" in name:
            kv_b = tensor.unflatten(0, (heads, -1))
            yield name.replace("kv_b_proj", "k_b_proj"), kv_b[:, :nope].transpose(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), kv_b[:, nope:]
        elif ".experts." not in name:
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def write_gguf(model: Path, file: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    tensors = {name: tensor for shard in model.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    names = gguf.get_tensor_name_map(ARCHITECTURE, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[ARCHITECTURE])
    add_config(writer, config)
    for name, tensor in renamed(tensors, config):
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        # llama.cpp wants norms, biases and routers in float32
        plain = tensor.ndim == 1 or name.endswith("mlp.gate.weight")
        kind = gguf.GGMLQuantizationType.F32 if plain else gguf.GGMLQuantizationType.BF16
        values = gguf.quants.quantize(tensor.float().contiguous().numpy(), kind)
        writer.add_tensor(new_name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
