"""The checkpoints that people run: their config.json is accepted, or refused by what the model needs and is not there.

The values are those of the published files, without keys that say nothing about the model.
"""

import json
import math
import shutil
from typing import Any

import pyarrow as pa
import pytest
import torch

from batchinfer.model.config import ModelConfig, load_model_config
from batchinfer.model.families import FAMILIES, NOT_IMPLEMENTED
from batchinfer.model.headers import read_headers
from batchinfer.model.indexer_config import IndexerConfig
from batchinfer.model.integer_forms import IntegerForm
from batchinfer.model.rope_config import QueryScale
from batchinfer.records import ModelError
from support.checkpoints import edit_config, make_checkpoint, read_tensors, write_tensors
from support.jobs import batchinfer, outputs, write_job, write_shard
from support.mistral_files import LARGE_3
from support.model_configs import value
from support.packed_weights import KIMI_INT4
from support.paths import RANDOM_MODEL

KIMI_FORM = IntegerForm("compressed-tensors", 32)
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
YARN = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
GATE = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 1, "topk_group": 1}


def of_type(model_type: str, architecture: str, hidden: int, layers: int, heads: int, **values: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_act": "silu",
        **values,
    }


def experts(count: int, chosen: int, width: int, scaling: float, **values: Any) -> dict[str, Any]:
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "routed_scaling_factor": scaling,
        "n_shared_experts": 1,
        **values,
    }


V3 = of_type(
    *("deepseek_v3", "DeepseekV3ForCausalLM", 7168, 61, 128),
    **MLA,
    **experts(256, 8, 2048, 2.5, first_k_dense_replace=3, moe_layer_freq=1),
    **(GATE | {"n_group": 8, "topk_group": 4}),
    intermediate_size=18432,
    vocab_size=129280,
    max_position_embeddings=163840,
    num_nextn_predict_layers=1,
    rope_theta=10000,
    rope_scaling=YARN | {"factor": 40, "original_max_position_embeddings": 4096},
    quantization_config=FP8,
)
MOONLIGHT = of_type(
    *("deepseek_v3", "DeepseekV3ForCausalLM", 2048, 27, 16),
    **(MLA | {"q_lora_rank": None}),
    **experts(64, 6, 1408, 2.446, first_k_dense_replace=1, moe_layer_freq=1),
    **(GATE),
    intermediate_size=11264,
    vocab_size=163840,
    max_position_embeddings=8192,
    num_nextn_predict_layers=0,
    rope_theta=50000.0,
    rope_scaling=None,
)
KIMI_K2 = of_type(
    *("kimi_k2", "DeepseekV3ForCausalLM", 7168, 61, 64),
    **MLA,
    **experts(384, 8, 2048, 2.827, first_k_dense_replace=1, moe_layer_freq=1),
    **GATE,
    intermediate_size=18432,
    vocab_size=163840,
    max_position_embeddings=131072,
    num_nextn_predict_layers=0,
    rope_theta=50000.0,
    rope_scaling=YARN | {"beta_fast": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
    eos_token_id=163585,
    quantization_config=FP8,
)
KIMI_K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {key: value for key, value in KIMI_K2.items() if key not in ("quantization_config", "eos_token_id")},
    "vision_config": {"vt_num_hidden_layers": 27},
    "eos_token_id": 163586,
    "media_placeholder_token_id": 163605,
    "ignore_index": -100,
    "tie_word_embeddings": False,
}
GLM_FLASH = of_type(
    *("glm4_moe_lite", "Glm4MoeLiteForCausalLM", 2048, 47, 20),
    **(MLA | {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}),
    **experts(64, 4, 1536, 1.8),
    topk_method="noaux_tc",
    norm_topk_prob=True,
    n_group=1,
    topk_group=1,
    attention_bias=False,
    intermediate_size=10240,
    vocab_size=154880,
    max_position_embeddings=202752,
    num_nextn_predict_layers=1,
    partial_rotary_factor=1.0,
    rms_norm_eps=1e-5,
    rope_theta=1000000,
    rope_scaling=None,
    eos_token_id=[154820, 154827, 154829],
)
YOUTU = of_type(
    *("youtu", "YoutuForCausalLM", 2048, 32, 16),
    **MLA,
    intermediate_size=6144,
    vocab_size=128256,
    max_position_embeddings=131072,
    rope_theta=1600000,
    rope_interleave=True,
    eos_token_id=128001,
    attention_bias=False,
)


V32 = V3 | {
    "model_type": "deepseek_v32",
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "quantization_config": FP8 | {"scale_fmt": "ue8m0"},
}
GLM_5 = of_type(
    *("glm_moe_dsa", "GlmMoeDsaForCausalLM", 6144, 78, 64),
    **(MLA | {"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256}),
    **experts(256, 8, 2048, 2.5, first_k_dense_replace=3, moe_layer_freq=1),
    **GATE,
    intermediate_size=12288,
    vocab_size=154880,
    max_position_embeddings=202752,
    num_nextn_predict_layers=1,
    rms_norm_eps=1e-5,
    rope_interleave=True,
    rope_parameters={"rope_theta": 1000000, "rope_type": "default"},
    index_topk=2048,
    index_n_heads=32,
    index_head_dim=128,
    indexer_rope_interleave=True,
    eos_token_id=[154820, 154827, 154829],
)


MISTRAL_4 = of_type(
    *("mistral4", "Mistral4ForCausalLM", 4096, 36, 32),
    **(MLA | {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64}),
    **experts(128, 4, 2048, 1.0, first_k_dense_replace=0, n_group=1, topk_group=1, norm_topk_prob=True),
    intermediate_size=12288,
    vocab_size=131072,
    max_position_embeddings=1048576,
    rope_interleave=True,
    rope_parameters=YARN
    | {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
    | {"max_position_embeddings": 1048576, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5},
    head_dim=128,
    qk_head_dim=128,
    eos_token_id=2,
)
FP8_STATIC = {
    "activation_scheme": "static",
    "dequantize": False,
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    "quant_method": "fp8",
    "weight_block_size": None,
}
SMALL_4 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": MISTRAL_4,
    "vision_config": {"model_type": "pixtral", "num_hidden_layers": 24},
    "image_token_index": 10,
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "vision_feature_layer": -1,
    "tie_word_embeddings": False,
    "quantization_config": FP8_STATIC,
}


def mistral_rope(**changes: Any) -> dict[str, Any]:
    return MISTRAL_4 | {"rope_parameters": MISTRAL_4["rope_parameters"] | changes}


def indexer(num_heads: int, *, rope_interleave: bool = False, sharing_layers: frozenset[int] = frozenset()) -> Any:
    return IndexerConfig(num_heads, 128, 2048, rope_interleave, sharing_layers)


# every fourth layer from the second on has an indexer, and the first one
SHARED = indexer(32, rope_interleave=True, sharing_layers=frozenset(layer for layer in range(1, 78) if (layer - 1) % 4))


def load(folder, values: dict[str, Any], file: str = "config.json") -> ModelConfig:
    (folder / file).write_text(json.dumps(values))
    return load_model_config(folder)


ACCEPTED = {
    "v3": (V3, {"num_moe_layers": 58, "num_mtp_layers": 1}),
    "v3.1": (V3 | {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}, {"fp8_block": (128, 128)}),
    "moonlight": (MOONLIGHT, {"num_moe_layers": 26, "q_lora_rank": None, "num_mtp_layers": 0}),
    "kimi-k2": (KIMI_K2, {"num_moe_layers": 60, "eos_token_ids": (163585,), "fp8_block": (128, 128)}),
    "kimi-k2-thinking": (
        KIMI_K2 | {"quantization_config": KIMI_INT4},
        {"integers": KIMI_FORM, "fp8_block": None},
    ),
    "kimi-k2.5": (KIMI_K25, {"num_moe_layers": 60, "eos_token_ids": (163586,), "family": "kimi_k2"}),
    "kimi-k2.5-int4": (
        KIMI_K25 | {"text_config": KIMI_K25["text_config"] | {"quantization_config": KIMI_INT4}},
        {"integers": KIMI_FORM, "fp8_block": None},
    ),
    "kimi-k2.5-int4-outside": (
        KIMI_K25 | {"quantization_config": KIMI_INT4},
        {"integers": KIMI_FORM, "fp8_block": None},
    ),
    "glm-4.7-flash": (GLM_FLASH | {"first_k_dense_replace": 1}, {"num_moe_layers": 46, "rms_norm_eps": 1e-5}),
    "glm-4.7-flash-lists": (GLM_FLASH | {"mlp_layer_types": ["dense"] + ["sparse"] * 46}, {"num_moe_layers": 46}),
    "glm-4.7-flash-says-nothing": (GLM_FLASH, {"num_moe_layers": 46, "num_router_groups": 1, "max_positions": 202752}),
    "youtu": (YOUTU, {"num_moe_layers": 0, "n_routed_experts": 0, "tie_word_embeddings": True}),
    "v3.2": (V32, {"num_moe_layers": 58, "num_mtp_layers": 1, "row_width": 704, "indexer": indexer(64)}),
    "glm-5": (GLM_5, {"num_moe_layers": 75, "row_width": 704, "indexer": indexer(32, rope_interleave=True)}),
    "glm-5-says-where-indexers-are": (
        GLM_5 | {"layer_types": ["indexed_attention"] * 78, "indexer_types": ["full"] * 78, "index_topk_freq": 1},
        {"indexer": indexer(32, rope_interleave=True)},
    ),
    "v3.2-as-older-libraries-name-layers": (
        V32 | {"layer_types": ["deepseek_sparse_attention"] * 61},
        {"indexer": indexer(64)},
    ),
    "glm-5.2-frequency": (GLM_5 | {"index_topk_freq": 4}, {"indexer": SHARED}),
    "glm-5.2-pattern": (GLM_5 | {"index_topk_pattern": "F" + 19 * "FSSS" + "F"}, {"indexer": SHARED}),
    "mistral-small-4": (
        SMALL_4,
        {"num_moe_layers": 36, "fp8_per_tensor": True, "topk_method": "group_top2", "family": "mistral4"}
        | {"softmax_scale": pytest.approx(128**-0.5 * 1.485203**2, rel=1e-6), "eos_token_ids": (2,)},
    ),
    "mistral-small-4-text": (MISTRAL_4, {"fp8_block": None, "carrier": None, "latent_dim": 320}),
    "youtu-untied": (YOUTU | {"tie_word_embeddings": False}, {"tie_word_embeddings": False}),
}
REFUSED = {
    "v3.2-without-topk": (V32 | {"index_topk": None}, ["index_topk is missing"]),
    "v3.2-without-query-compression": (V32 | {"q_lora_rank": None}, ["q_lora_rank", "indexer"]),
    "v3.2-narrow": (V32 | {"index_head_dim": 32}, ["index_head_dim is 32", "from 64"]),
    "v3.2-half-split": (V32 | {"rope_interleave": False}, ["rope_interleave is false"]),
    "v3.2-shares": (V32 | {"indexer_types": ["full"] * 61}, ["indexer_types", "changes what the model computes"]),
    "glm-5-half-split": (GLM_5 | {"indexer_rope_interleave": False}, ["indexer_rope_interleave is false"]),
    "glm-5-full-attention": (GLM_5 | {"layer_types": ["full_attention"] * 78}, ["layer_types", "indexed_attention"]),
    "v3.2-of-two-names": (
        V32 | {"layer_types": ["deepseek_sparse_attention"] * 60 + ["indexed_attention"]},
        ["layer_types", '"indexed_attention" for every layer'],
    ),
    "glm-5-shares-from-nobody": (GLM_5 | {"indexer_types": ["shared"] * 78}, ["indexer_types", "the first one"]),
    "glm-5-pattern-of-others": (GLM_5 | {"index_topk_pattern": "FX" * 39}, ["indexer_types", '"X"']),
    "v3-as-v4": (V3 | {"model_type": "deepseek_v4", "architectures": None}, ["scoring_func", "sqrtsoftplus"]),
    "mistral-large-4": (V3 | {"model_type": "mistral_large4"}, ["mistral_large4", "share latents"]),
    "ministral-3": (
        SMALL_4 | {"text_config": {"model_type": "ministral3", "hidden_size": 5120}},
        ['text_config.model_type is "ministral3"', "mistral4"],
    ),
    "mistral-4-without-beta": (mistral_rope(llama_4_scaling_beta=None), ["llama_4_scaling_beta is missing"]),
    "mistral-4-without-yarn": (mistral_rope(type=None, rope_type="default"), ["rope_type", '"yarn"']),
    "mistral-4-without-rope": (MISTRAL_4 | {"rope_parameters": None}, ["rope_parameters is null", "llama_4_scaling"]),
    "mistral-4-half-rotated": (mistral_rope(partial_rotary_factor=0.25), ["partial_rotary_factor is 0.25", "0.5"]),
    "mistral-4-many-windows": (
        mistral_rope(original_max_position_embeddings=15),
        ["original_max_position_embeddings is 15", "at least 16"],
    ),
    "mistral-4-other-rope": (mistral_rope(mrope_section=[1]), ["mrope_section", "changes what the model computes"]),
    "mistral-4-groups-of-one": (MISTRAL_4 | {"n_group": 128, "topk_group": 4}, ["n_group is 128", "best two"]),
    "mistral-4-v3-gate": (MISTRAL_4 | {"topk_method": "noaux_tc"}, ["topk_method", "group_top2"]),
    "mistral-4-static-blocks": (
        MISTRAL_4 | {"quantization_config": FP8_STATIC | {"weight_block_size": [128, 128]}},
        ['activation_scheme is "static"'],
    ),
    "kimi-linear": (V3 | {"model_type": "kimi_linear"}, ["kimi_linear", "linear-attention"]),
    "longcat-flash": (V3 | {"model_type": "longcat_flash"}, ["longcat_flash", "two attentions"]),
    "v3-with-an-indexer": (V3 | {"index_topk": 2048}, ["index_topk is 2048", "changes what the model computes"]),
    "youtu-with-experts": (YOUTU | {"n_routed_experts": 8}, ["n_routed_experts is 8", "from 0 to 0"]),
    "glm-lists-that-disagree": (
        GLM_FLASH | {"first_k_dense_replace": 2, "mlp_layer_types": ["dense"] + ["sparse"] * 46},
        ["mlp_layer_types", '"sparse"'],
    ),
    "kimi-k2-of-another-architecture": (KIMI_K2 | {"architectures": ["YoutuForCausalLM"]}, ["kimi_k2", "Youtu"]),
    "carrier-without-text": (KIMI_K25 | {"text_config": None}, ["text_config", "null", "language model"]),
    "carrier-of-another-text": (
        KIMI_K25 | {"text_config": KIMI_K2 | {"model_type": "llama"}},
        ["text_config.model_type"],
    ),
    "carrier-of-another-architecture": (KIMI_K25 | {"architectures": ["LlavaForCausalLM"]}, ["architectures", "Llava"]),
    "carrier-with-an-indexer": (
        KIMI_K25 | {"text_config": KIMI_K25["text_config"] | {"index_topk": 64}},
        ["text_config.index_topk is 64"],
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_published_config_is_accepted(tmp_path, name):
    values, expected = ACCEPTED[name]
    config = load(tmp_path, values)
    assert config.unknown_keys == ()
    assert {key: value(config, key) for key in expected} == expected


def test_mistral_large_3_is_read_from_its_params(tmp_path):
    config = load(tmp_path, LARGE_3, "params.json")
    assert config.unknown_keys == ()
    expected = {
        **{"family": "mistral4", "num_moe_layers": 58, "n_routed_experts": 128, "num_experts_per_tok": 4},
        **{"fp8_block": (128, 128), "fp8_per_tensor": False, "eos_token_ids": (2,), "max_positions": 294912},
        **{"intermediate_size": 16384, "moe_intermediate_size": 4096, "first_k_dense_replace": 3},
        **{"norm_topk_prob": True, "topk_method": "group_top2", "tie_word_embeddings": False, "rope_interleave": True},
        # `apply_scale` is false: YaRN changes angles only
        **{"softmax_scale": 192**-0.5, "rms_norm_eps": 1e-6},
    }
    assert {key: value(config, key) for key in expected} == expected
    assert config.attention.rope.query_scale == QueryScale(beta=0.1, window=8192, num_windows=38)
    assert (config.attention.rope.factor, config.attention.rope.beta_fast, config.attention.rope.beta_slow) == (
        36.0,
        32.0,
        1.0,
    )
    assert config.attention.rope.cos_sin_scale == 1.0
    assert config.carrier is not None
    assert config.carrier.skipped[0] == "vision_encoder."
    scaled = load(tmp_path, LARGE_3 | {"yarn": LARGE_3["yarn"] | {"apply_scale": True}}, "params.json")
    assert scaled.attention.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(36) + 1) ** 2)
    per_tensor = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    old = LARGE_3 | {"quantization_config": None, "quantization": per_tensor, "vision_encoder": None}
    assert load(tmp_path, old, "params.json").fp8_per_tensor


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": None}, ["kv_lora_rank is missing"]),
        ({"dim": -1}, ["dim is -1"]),
        ({"head_dim": 128}, ["head_dim is 128"]),
        ({"sliding_window": 4096}, ["sliding_window is 4096"]),
        ({"yarn": LARGE_3["yarn"] | {"apply_scale": 1}}, ["yarn.apply_scale is 1", "true or false"]),
        ({"yarn": LARGE_3["yarn"] | {"beta": 0}}, ["yarn.beta is 0"]),
        ({"yarn": LARGE_3["yarn"] | {"gamma": 2}}, ["yarn.gamma is 2", "changes what the model computes"]),
        ({"yarn": [1]}, ["yarn is [1]", "a JSON object"]),
        ({"llama_4_scaling": None}, ["llama_4_scaling.beta is missing"]),
        ({"llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 4096}}, ["is 4096", "8192"]),
        ({"moe": LARGE_3["moe"] | {"renorm_strategy": "NONE"}}, ['moe.renorm_strategy is "NONE"', '"WEIGHTS"']),
        ({"moe": LARGE_3["moe"] | {"num_experts": 0.5}}, ["moe.num_experts is 0.5"]),
        ({"quantization": {"qformat_weight": "int8"}}, ['quantization.qformat_weight is "int8"', "fp8_e4m3"]),
        (
            {"quantization_config": LARGE_3["quantization_config"] | {"format": "nvfp4-pack-quantized"}},
            ["nvfp4-pack-quantized"],
        ),
    ],
)
def test_params_that_say_something_else_are_refused_in_their_own_words(tmp_path, changes, words):
    with pytest.raises(ModelError) as refused:
        load(tmp_path, LARGE_3 | changes, "params.json")
    for word in (str(tmp_path / "params.json"), *words):
        assert word in str(refused.value)


def test_params_of_another_architecture_are_refused_and_config_json_goes_first(tmp_path):
    with pytest.raises(ModelError, match="no kv_lora_rank or no moe"):
        load(tmp_path, {"dim": 4096, "n_layers": 32}, "params.json")
    assert load(tmp_path, MISTRAL_4).hidden_size == 4096


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_is_refused_by_what_it_needs(tmp_path, name):
    values, words = REFUSED[name]
    with pytest.raises(ModelError) as refused:
        load(tmp_path, values)
    for word in (str(tmp_path / "config.json"), *words):
        assert word in str(refused.value)


def test_the_rows_are_whole():
    assert set(NOT_IMPLEMENTED).isdisjoint(FAMILIES)
    for name, family in FAMILIES.items():
        assert family.architectures, name
        assert family.topk_methods, name


def test_a_missing_type_is_the_family_whose_architecture_it_is(tmp_path):
    assert load(tmp_path, {key: KIMI_K2[key] for key in KIMI_K2 if key != "model_type"}).family == "deepseek_v3"
    assert load(tmp_path, {key: YOUTU[key] for key in YOUTU if key != "model_type"}).family == "youtu"


def test_tensors_of_images_are_left_out_and_others_are_not(tmp_path):
    make_checkpoint(tmp_path / "model", "kimi-k25")
    stored = read_tensors(tmp_path / "model")
    assert any(name.startswith("vision_tower.") for name in stored)
    config = load_model_config(tmp_path / "model")
    headers = read_headers(tmp_path / "model", config.carrier)
    assert all(name.startswith(("model.", "lm_head.")) for name in headers)
    assert headers.info("lm_head.weight").stored_name == "language_model.lm_head.weight"
    write_tensors(tmp_path / "model", stored | {"audio_tower.weight": stored["language_model.lm_head.weight"].clone()})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RANDOM_MODEL / file, tmp_path / "model" / file)
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": ["a"]})
    ended = batchinfer("plan", write_job(tmp_path, model={"path": "model"}))
    assert ended.code == 2
    assert "unknown: audio_tower.weight" in ended.err


@pytest.fixture(
    scope="module",
    params=[
        *("v32", "mistral3"),  # Kimi-K2.5 in several layouts: test_packed_jobs
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("kimi-k25", "glm", "glm-dsa-shared", "mistral-params")
        ),
    ],
)
def folder(request, tmp_path_factory):
    """A checkpoint, prompts that partly begin alike, and the answers of one rank."""
    folder = tmp_path_factory.mktemp("family")
    make_checkpoint(folder / "model", request.param)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RANDOM_MODEL / file, folder / "model" / file)
    generator = torch.Generator().manual_seed(2)
    draw = [torch.randint(0, 96, (length,), generator=generator).tolist() for length in (130, 5, 64, 1, 131)]
    prompts = [*draw, *(draw[0] + prompt for prompt in draw)]
    write_shard(folder / "prompts" / "a.parquet", {"ids": pa.array(prompts, pa.list_(pa.int32()))})
    ended = run(folder, "one")
    assert ended.code == 0, ended.err
    (folder / "said.txt").write_text(ended.err)
    return folder


def run(folder, name, **parts):
    given = {"input": {"prompt": None, "token_ids": "ids"}, "model": {"path": "model"}, "output": {"dir": name}}
    return batchinfer("run", write_job(folder, name=f"{name}.toml", **given, **parts))


def answers(folder, name):
    return [(row["token_ids"], row["text"]) for row in outputs(folder / name)["a.parquet"]]


def test_a_plan_says_which_part_of_a_model_of_images_runs(folder):
    has_images = load_model_config(folder / "model").carrier is not None
    said = "only the language model of " in (folder / "said.txt").read_text()
    assert said == has_images


def test_a_model_of_images_that_ties_its_embeddings_has_no_head(tmp_path):
    make_checkpoint(tmp_path / "model", "kimi-k25")
    edit_config(tmp_path / "model", tie_word_embeddings=True)
    assert load_model_config(tmp_path / "model").tie_word_embeddings is False  # the language model's own word counts
