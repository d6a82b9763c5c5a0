"""Convert a checkpoint of bench_models.py to llama.cpp's GGUF. Started by peers.py, in the peers' environment.

    python tests/bench/gguf_model.py MODEL FILE [BF16 | Q8_0]

Q8_0 has weights of 8 bits with a scale for every 32. Prompts are token ids, so the file holds no tokenizer.
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

ARCHITECTURES = {
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,  # llama.cpp's name of V2 and V3
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The shape of the model."""
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if "num_experts_per_tok" in config:
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] == "deepseek_v3":
        add_deepseek(writer, config)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        if "num_experts" in config:
            writer.add_expert_count(config["num_experts"])


def add_deepseek(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Attention over latents, one key head as wide as a latent and its rotary part, and how experts are chosen."""
    rope = config["rope_parameters"]
    latent, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])

    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotary)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
    writer.add_value_length_mla(config["v_head_dim"])

    writer.add_rope_dimension_count(rotary)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])

    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def renamed(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors as llama.cpp wants them: the experts of a layer as one, the latent's projection as keys' and values'."""
    num_experts = config.get("n_routed_experts", config.get("num_experts"))
    for name, tensor in tensors.items():
        if ".experts.0." in name:
            experts = [name.replace(".experts.0.", f".experts.{e}.") for e in range(num_experts)]
            yield name.replace(".experts.0.", ".experts."), torch.stack([tensors[expert] for expert in experts])
        elif "kv_b_proj" in name:
            nope = config["qk_nope_head_dim"]
            kv_b = tensor.unflatten(0, (config["num_attention_heads"], -1))
            yield name.replace("kv_b_proj", "k_b_proj"), kv_b[:, :nope].transpose(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), kv_b[:, nope:]
        elif ".experts." not in name:
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def write_gguf(model: Path, file: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write the file, with matrices of this kind; norms, biases and routers are in float32, as llama.cpp wants them."""
    config = json.loads((model / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    tensors = {name: tensor for shard in model.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.name}"])
    add_config(writer, config)
    for name, tensor in renamed(tensors, config):
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        is_plain = tensor.ndim == 1 or name.endswith("mlp.gate.weight")
        its_kind = gguf.GGMLQuantizationType.F32 if is_plain else kind
        values = gguf.quants.quantize(tensor.float().contiguous().numpy(), its_kind)
        writer.add_tensor(new_name, values, raw_dtype=its_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), gguf.GGMLQuantizationType[(*sys.argv, "BF16")[3]])
