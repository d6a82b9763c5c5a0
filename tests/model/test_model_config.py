"""Reading config.json: the spellings that exist, the values that follow from it, and every refusal."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from batchinfer.model import config_keys
from batchinfer.model.config import load_model_config
from batchinfer.records import ModelError
from support.model_configs import value

# The 671B model as first published (original key names, YaRN from 4K to 160K).
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
# V2-Lite, original key names.
V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
REMOVE = object()
YARN = V3["rope_scaling"]


def load(folder, base, **patch):
    values = {key: value for key, value in (base | patch).items() if value is not REMOVE}
    (folder / "config.json").write_text(json.dumps(values))
    return load_model_config(folder)


def test_the_671b_model(tmp_path):
    config = load(tmp_path, V3)
    assert config.family == "deepseek_v3"
    assert config.attention.latent_dim == 576
    assert config.attention.qk_head_dim == 192
    assert config.kv_bytes_per_token(2) == 70_272
    assert config.num_moe_layers == 58
    assert [config.is_moe_layer(layer) for layer in (0, 2, 3, 60)] == [False, False, True, True]
    assert config.max_positions == 163_840
    assert config.eos_token_ids == (1,)
    assert config.fp8_block == (128, 128)
    assert config.num_mtp_layers == 1
    # 192 ** -0.5 * (0.1 * ln 40 + 1) ** 2
    assert config.attention.softmax_scale == pytest.approx(0.1352, abs=1e-4)
    assert config.attention.rope.cos_sin_scale == 1.0


def test_v2_lite(tmp_path):
    config = load(tmp_path, V2)
    assert (config.family, config.topk_method) == ("deepseek_v2", "greedy")
    assert config.attention.q_lora_rank is None
    assert config.fp8_block is None
    assert config.num_mtp_layers == 0
    assert config.attention.softmax_scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)


def test_new_key_names_mean_the_same_as_the_original_ones(tmp_path):
    renamed = {
        "rope_theta": REMOVE,
        "rope_scaling": REMOVE,
        "rope_parameters": {key: value for key, value in YARN.items() if key != "type"}
        | {"rope_type": "yarn", "rope_theta": 10000.0},
        "num_nextn_predict_layers": REMOVE,
        "num_mtp_layers": 1,
        "n_routed_experts": REMOVE,
        "num_local_experts": 256,
        "topk_method": REMOVE,
        "scoring_func": REMOVE,
        "qk_head_dim": 192,
        "head_dim": 64,
    }
    assert load(tmp_path, V3, **renamed) == load(tmp_path, V3)
    assert load(tmp_path, V3, n_routed_experts=REMOVE, num_experts=256) == load(tmp_path, V3)
    assert load(tmp_path, V2, topk_method=REMOVE, scoring_func=None) == load(tmp_path, V2)


@pytest.mark.parametrize(
    ("base", "patch", "expected"),
    [
        (V3, {"rope_scaling": None}, {"softmax_scale": 192**-0.5}),
        (V3, {"rope_scaling": {"type": "default"}}, {"softmax_scale": 192**-0.5}),
        (V3, {"rope_scaling": {}}, {"softmax_scale": 192**-0.5}),
        (V3, {"eos_token_id": [1, 5, 1]}, {"eos_token_ids": (1, 5)}),
        (V3, {"eos_token_id": None}, {"eos_token_ids": ()}),
        (V3, {"num_key_value_heads": None}, {"num_attention_heads": 128}),
        (V3, {"n_shared_experts": None}, {"n_shared_experts": 0}),
        (V3, {"n_routed_experts": None}, {"num_moe_layers": 0}),
        (V3, {"first_k_dense_replace": 61}, {"num_moe_layers": 0}),
        (V3, {"moe_layer_freq": 2}, {"num_moe_layers": 29}),
        (V3, {"n_group": 1, "topk_group": 1}, {"n_group": 1}),
        (V3, {"model_type": REMOVE}, {"family": "deepseek_v3"}),
        (V3, {"architectures": REMOVE}, {"family": "deepseek_v3"}),
        (V3, {"quantization_config": None}, {"fp8_block": None}),
        (V3, {"rms_norm_eps": REMOVE}, {"rms_norm_eps": 1e-6}),
        (V2, {"n_group": None, "topk_group": None}, {"n_group": 1, "topk_group": 1}),
        (V2, {"mlp_bias": True}, {"mlp_bias": True}),
        (V2, {"norm_topk_prob": REMOVE}, {"norm_topk_prob": False}),
        # no layer mixes: the number of experts says nothing, and need not be there
        (V3, {"n_routed_experts": 0}, {"num_moe_layers": 0, "n_routed_experts": 0, "num_experts_per_tok": 0}),
        (V3, {"first_k_dense_replace": 61, "n_routed_experts": REMOVE}, {"num_moe_layers": 0}),
        (V3, {"first_k_dense_replace": 61}, {"n_routed_experts": 0, "n_shared_experts": 0}),
        (V3, {"moe_layer_freq": 100}, {"num_moe_layers": 0, "n_routed_experts": 0}),
    ],
)
def test_accepted_variations(tmp_path, base, patch, expected):
    config = load(tmp_path, base, **patch)
    assert {key: value(config, key) for key in expected} == expected


REFUSED = [
    # the family
    (V3, {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, ["model_type", '"gemma2"', "deepseek_v3"]),
    (V3, {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]}, ["model_type", "kimi_linear"]),
    (V3, {"model_type": REMOVE, "architectures": REMOVE}, ["model_type", "null"]),
    (V3, {"model_type": "deepseek_v2"}, ["model_type", "architectures", "DeepseekV3ForCausalLM"]),
    (V3, {"model_type": 3}, ["model_type", "3", "string"]),
    (V3, {"architectures": "DeepseekV3ForCausalLM"}, ["architectures", "list"]),
    # attention
    (V3, {"hidden_act": "gelu"}, ["hidden_act", '"gelu"', '"silu"']),
    (V3, {"num_key_value_heads": 8}, ["num_key_value_heads", "8", "num_attention_heads"]),
    (V3, {"qk_rope_head_dim": 63}, ["qk_rope_head_dim", "63", "even"]),
    (V3, {"qk_head_dim": 128}, ["qk_head_dim", "128", "qk_nope_head_dim + qk_rope_head_dim"]),
    (V3, {"rope_scaling": {"type": "linear", "factor": 2}}, ["rope_scaling.rope_type", '"linear"', '"yarn"']),
    (V3, {"rope_scaling": YARN | {"rope_type": "default"}}, ["rope_scaling.type", '"yarn"', "rope_type"]),
    (V3, {"rope_scaling": YARN | {"factor": 0.5}}, ["rope_scaling.factor", "0.5", "at least 1"]),
    (V3, {"rope_scaling": YARN | {"factor": None}}, ["rope_scaling.factor", "missing"]),
    (V3, {"rope_scaling": YARN | {"factor": True}}, ["rope_scaling.factor", "true", "number"]),
    (V3, {"rope_scaling": YARN | {"beta_fast": 0.5}}, ["rope_scaling.beta_fast", "0.5", "beta_slow"]),
    (
        V3,
        {"rope_scaling": YARN | {"original_max_position_embeddings": None}},
        ["rope_scaling.original_max_position_embeddings", "missing"],
    ),
    (
        V3,
        {"rope_scaling": YARN | {"original_max_position_embeddings": 200_000}},
        ["original_max_position_embeddings", "200000", "163840"],
    ),
    (V3, {"rope_scaling": "yarn"}, ["rope_scaling", '"yarn"', "object"]),
    (V3, {"rope_scaling": YARN | {"rope_theta": 5e5}}, ["rope_scaling.rope_theta", "500000", "10000"]),
    (V3, {"rope_parameters": {"rope_type": "default"}}, ["rope_parameters and rope_scaling", "different"]),
    (V3, {"rope_theta": -1}, ["rope_theta", "-1", "above 1"]),
    (V3, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "1.0"]),
    (V2, {"rope_interleave": False}, ["rope_interleave", "false"]),
    (V3, {"rope_interleave": 1}, ["rope_interleave", "1", "true or false"]),
    (V3, {"rms_norm_eps": 0}, ["rms_norm_eps", "0", "above 0"]),
    # experts
    (V3, {"scoring_func": "softmax"}, ["scoring_func", '"softmax"', "sigmoid"]),
    (V2, {"scoring_func": "sigmoid"}, ["scoring_func", '"sigmoid"', "softmax", "greedy"]),
    (V3, {"scoring_func": "tanh"}, ["scoring_func", '"tanh"']),
    (V3, {"topk_method": "greedy"}, ["topk_method", '"greedy"', "noaux_tc"]),
    (V2, {"topk_method": "noaux_tc"}, ["topk_method", '"noaux_tc"', "greedy or group_limited_greedy"]),
    (V3, {"n_group": 7}, ["n_group", "7", "divisor", "256"]),
    (V3, {"topk_group": 9}, ["topk_group", "9", "at most", "8"]),
    (V3, {"num_experts_per_tok": 129}, ["num_experts_per_tok", "129", "128"]),
    (V2, {"num_experts_per_tok": 65}, ["num_experts_per_tok", "65", "64"]),
    (V3, {"n_group": 256, "topk_group": 8}, ["n_group", "256", "groups of at least 2"]),
    (V2, {"topk_method": "group_limited_greedy", "n_group": None}, ["n_group", "missing"]),
    (V3, {"n_group": REMOVE}, ["n_group is missing"]),  # transformers and the release take 8 of which 4 are used
    (V3, {"topk_group": REMOVE}, ["topk_group is missing"]),
    (V3, {"n_group": None, "topk_group": None}, ["n_group is missing"]),
    (V3, {"norm_topk_prob": None}, ["norm_topk_prob is null", "true or false"]),  # transformers norms no weights then
    (V3, {"rope_interleave": None}, ["rope_interleave is null"]),
    (V2, {"norm_topk_prob": True}, ["norm_topk_prob is true", "false"]),
    (V3, {"first_k_dense_replace": 62}, ["first_k_dense_replace", "62", "61"]),
    (V3, {"num_local_experts": 128}, ["num_local_experts", "128", "n_routed_experts = 256"]),
    (V3, {"num_mtp_layers": 2}, ["num_mtp_layers", "2", "num_nextn_predict_layers = 1"]),
    (V3, {"mlp_bias": True}, ["mlp_bias", "true", "false"]),
    (V3, {"moe_layer_freq": 0}, ["moe_layer_freq", "0"]),
    (V3, {"routed_scaling_factor": "2.5"}, ["routed_scaling_factor", '"2.5"', "number"]),
    (V3, {"routed_scaling_factor": REMOVE}, ["routed_scaling_factor", "missing"]),
    # sizes and kinds
    (V3, {"hidden_size": REMOVE}, ["hidden_size", "missing"]),
    (V3, {"hidden_size": None}, ["hidden_size", "null"]),
    (V3, {"hidden_size": "7168"}, ["hidden_size", '"7168"', "whole number"]),
    (V3, {"hidden_size": 7168.0}, ["hidden_size", "7168.0", "whole number"]),
    (V3, {"hidden_size": True}, ["hidden_size", "true", "whole number"]),
    (V3, {"hidden_size": -1}, ["hidden_size", "-1"]),
    (V3, {"vocab_size": 10**30}, ["vocab_size", "1000000"]),
    (V3, {"vocab_size": 2**19}, ["vocab_size", "524288", "524287"]),
    (V3, {"num_hidden_layers": 10**6}, ["num_hidden_layers", "1000000", "1000"]),
    (V3, {"n_routed_experts": REMOVE}, ["n_routed_experts", "missing"]),
    (V3, {"n_shared_experts": -1}, ["n_shared_experts", "-1"]),
    (V3, {"eos_token_id": 129_280}, ["eos_token_id", "129280", "129279"]),
    (V3, {"eos_token_id": [1, True]}, ["eos_token_id", "true"]),
    (V3, {"tie_word_embeddings": "no"}, ["tie_word_embeddings", '"no"', "true or false"]),
    # quantisation
    (V3, {"quantization_config": {"quant_method": "aqlm"}}, ["quantization_config.quant_method", "aqlm", "gptq"]),
    (V3, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization_config.group_size", "missing"]),
    (V3, {"quantization_config": {"quant_method": "fp8"}}, ["weight_block_size", "missing", "[128, 128]"]),
    (
        V3,
        {"quantization_config": V3["quantization_config"] | {"weight_block_size": [1, 128]}},
        ["quantization_config.weight_block_size", "[1, 128]", "[128, 128]"],
    ),
    (
        V3,
        {"quantization_config": V3["quantization_config"] | {"activation_scheme": "static"}},
        ["activation_scheme", "static", "dynamic"],
    ),
    (V3, {"quantization_config": V3["quantization_config"] | {"fmt": "e5m2"}}, ["fmt", "e5m2", "e4m3"]),
    (V3, {"quantization_config": [8]}, ["quantization_config", "[8]", "object"]),
]


def test_a_folder_with_an_adapter_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ModelError, match="adapters are not applied; merge it into the weights"):
        load(tmp_path, V3)


@pytest.mark.parametrize(
    ("base", "patch", "words"), REFUSED, ids=[f"{k}-{'+'.join(p)}" for k, (_, p, _) in enumerate(REFUSED)]
)
def test_refusals_name_file_key_value_and_what_is_supported(tmp_path, base, patch, words):
    with pytest.raises(ModelError) as error:
        load(tmp_path, base, **patch)
    message = str(error.value)
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"hidden_size": NaN}', "NaN"),
        (b'{"rope_theta": -Infinity}', "Infinity"),
        (b"[1]", "JSON object"),
        (b"\xff\xfe", "cannot be read"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_file_that_is_no_json_object(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=words):
        load_model_config(tmp_path)


SWITCHED_OFF = {
    **{
        "swiglu_limit": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "index_topk": 0,
        "qk_layernorm": False,
    },
    **{"layer_types": ["full_attention"] * 61, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58, "pruned_heads": {}},
    **{"mlp_only_layers": [], "num_hash_layers": 0, "logit_scale": 1.0, "use_mla": True, "text_config": None},
}


def test_keys_of_parts_that_are_switched_off_pass(tmp_path):
    assert load(tmp_path, V3, **SWITCHED_OFF) == load(tmp_path, V3)
    assert load(tmp_path, V3, **SWITCHED_OFF).unknown_keys == ()


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ({"swiglu_limit": 7.0}, ["swiglu_limit is 7.0,", "remove the key"]),
        ({"swiglu_limits": [0, 10.0]}, ["swiglu_limits is [0, 10.0]"]),
        ({"sliding_window": 4096}, ["sliding_window is 4096"]),
        ({"use_sliding_window": True}, ["use_sliding_window is true"]),
        (
            {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
            ["index_topk is 2048, index_n_heads is 64, index_head_dim is 128, which change", "remove the keys"],
        ),
        ({"indexer_types": ["full"]}, ['indexer_types is ["full"]']),
        ({"qk_layernorm": True}, ["qk_layernorm is true"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping is 50.0"]),
        ({"hc_mult": 4}, ["hc_mult is 4"]),
        ({"linear_attn_config": {"kda_layers": [1]}}, ["linear_attn_config is"]),
        ({"o_lora_rank": 1024}, ["o_lora_rank is 1024"]),
        ({"num_hash_layers": 3}, ["num_hash_layers is 3"]),
        ({"zero_expert_num": 256}, ["zero_expert_num is 256"]),
        ({"per_layer_config": {"3": {"intermediate_size": 9}}}, ["per_layer_config is"]),
        ({"text_config": {"hidden_size": 64}}, ["text_config is"]),
        ({"vision_config": {"depth": 2}}, ["vision_config is"]),
        ({"is_encoder_decoder": True}, ["is_encoder_decoder is true"]),
        ({"logit_scale": 0.5}, ["logit_scale is 0.5"]),
        ({"scale_emb": True}, ["scale_emb is true"]),
        ({"use_mla": False}, ["use_mla is false"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types is", "full_attention"]),
        ({"mlp_layer_types": ["sparse"] * 61}, ["mlp_layer_types is", "dense"]),
        ({"partial_rotary_factor": 0.5, "rope_scaling": None}, ["partial_rotary_factor is 0.5"]),
        # in RoPE every key counts
        ({"rope_scaling": YARN | {"llama_4_scaling_beta": 0.1}}, ["rope_scaling.llama_4_scaling_beta is 0.1"]),
        ({"rope_scaling": {"type": "default", "factor": 40}}, ["rope_scaling.factor is 40"]),
        ({"swiglu_" + str(number): 1 for number in range(9)}, ["swiglu_5 is 1 (and 3 more), which change"]),
        ({"hc_" + "x\n" * 5000: 1}, ["hc_x"]),
    ],
    ids=lambda value: "+".join(value)[:40] if isinstance(value, dict) else "",
)
def test_keys_that_change_the_model_are_refused_by_name(tmp_path, patch, words):
    with pytest.raises(ModelError) as error:
        load(tmp_path, V3, **patch)
    message = str(error.value)
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in message
    assert "\n" not in message
    assert len(message) < 2000


def test_keys_that_nobody_knows_are_named(tmp_path):
    quantization = V3["quantization_config"] | {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"], "odd": 1}
    config = load(tmp_path, V3, colour="blue", nothing=None, quantization_config=quantization)
    assert config.unknown_keys == ("colour", "quantization_config.odd")
    assert config == load(tmp_path, V3)


# What published files have besides the keys above. Notes of training and of the code that saved them.
V3_NOTES = {
    **{"aux_loss_alpha": 0.001, "attention_dropout": 0.0, "ep_size": 1, "initializer_range": 0.02, "seq_aux": True},
    **{"pretraining_tp": 1, "torch_dtype": "bfloat16", "transformers_version": "4.46.3", "use_cache": True},
}
UE8M0 = {"quantization_config": V3["quantization_config"] | {"scale_fmt": "ue8m0"}}
MOONLIGHT = {
    **{"first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264, "max_position_embeddings": 8192},
    **{"moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, "n_routed_experts": 64, "n_shared_experts": 2},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27},
    **{"num_nextn_predict_layers": 0, "q_lora_rank": None, "quantization_config": REMOVE, "rms_norm_eps": 1e-05},
    **{"rope_scaling": None, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "vocab_size": 163840},
    **{"bos_token_id": 163584, "eos_token_id": 163585},
}
V25 = {
    **{"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8, "topk_group": 3},
    **{"n_routed_experts": 160, "num_attention_heads": 128, "num_hidden_layers": 60, "num_key_value_heads": 128},
    **{"q_lora_rank": 1536, "routed_scaling_factor": 16.0, "topk_method": "group_limited_greedy"},
}


@pytest.mark.parametrize(
    ("base", "patch"),
    [(V3, {}), (V3, UE8M0), (V3, MOONLIGHT), (V2, {}), (V2, V25), (V3, {"auto_map": {"AutoModel": "x.Y"}})],
    ids=["V3 and R1", "V3.1", "Moonlight", "V2-Lite", "V2 and V2.5", "with code"],
)
def test_published_models_are_accepted_without_a_word(tmp_path, base, patch):
    config = load(tmp_path, base, **V3_NOTES | patch)
    assert config.num_moe_layers > 0
    assert config.unknown_keys == ()


def test_no_name_is_of_two_kinds():
    kinds = (config_keys.HARMLESS, config_keys.OFF, config_keys.ONE, config_keys.ON)
    assert len(frozenset().union(*kinds)) == sum(map(len, kinds))
    assert not any(name.startswith(config_keys.OFF_PREFIXES) for name in config_keys.HARMLESS)


def test_numbers_too_large_for_a_float_are_refused(tmp_path):
    text = json.dumps(V3).replace('"rope_theta": 10000', '"rope_theta": 1e999')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="rope_theta is Infinity"):
        load_model_config(tmp_path)


def test_a_missing_file_or_folder(tmp_path):
    with pytest.raises(
        ModelError, match=r"there is no model folder .*/nowhere; give the path of one with config"
    ) as no:
        load_model_config(tmp_path / "nowhere")
    assert "hf download" not in str(no.value)
    with pytest.raises(ModelError, match="`hf download owner/name` puts it into the cache"):
        load_model_config(tmp_path / "owner" / "name")
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match="cannot be read"):
        load_model_config(tmp_path)


def test_reading_a_config_does_not_import_torch():
    code = "import sys, batchinfer.model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
