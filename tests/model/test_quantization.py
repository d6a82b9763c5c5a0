"""quantization_config: how published checkpoints say that they are packed, and every way of storing that is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchinfer.model.config import load_model_config
from batchinfer.model.integer_forms import IntegerForm
from batchinfer.records import ModelError
from support.checkpoints import edit_config, make_checkpoint
from support.packed_weights import AUTOROUND, AWQ, GPTQ, KIMI_INT4, int4_config

WEIGHTS = "quantization_config.config_groups.group_0.weights"
SCHEME = KIMI_INT4["config_groups"]["group_0"]


def load(folder, quantization: Any):
    make_checkpoint(folder, "v3")
    edit_config(folder, quantization_config=quantization)
    return load_model_config(folder)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def of_groups(**groups: Any) -> dict[str, Any]:
    return KIMI_INT4 | {"config_groups": groups}


ACCEPTED: dict[str, tuple[dict[str, Any], int]] = {
    "as Kimi-K2-Thinking says it": (KIMI_INT4, 32),
    "groups of 128": (int4_config(group_size=128), 128),
    "GPTQ by llm-compressor": (int4_config(actorder="static", group_size=128), 128),
    "the same by its other name": (int4_config(actorder="weight"), 32),
    "as newer releases write it": (
        without(KIMI_INT4, "kv_cache_scheme", "quantization_status")
        | {"config_groups": {"experts": SCHEME | {"format": "pack-quantized"}}, "version": "0.14.0"}
        | {"sparsity_config": {}, "transform_config": {}, "global_compression_ratio": 1.9, "run_compressed": False},
        32,
    ),
    "as AutoRound writes it": (KIMI_INT4 | {"provider": "auto-round"}, 32),
    "the least": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 64}}},
        },
        64,
    ),
}
ACTIVATIONS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
REFUSED: list[tuple[Any, str]] = [
    # other methods and formats
    *(
        ({"quant_method": name, "bits": 4}, f'quantization_config.quant_method is "{name}", but supported is "fp8"')
        for name in ("aqlm", "fbgemm_fp8", "modelopt", "bitsandbytes")
    ),
    *(
        (int4_config(format=name), f'quantization_config.format is "{name}", but supported is "pack-quantized"')
        for name in (
            *("naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
            *("marlin-24", "dense"),
        )
    ),
    (int4_config(format="int-quantized", num_bits=8), f'{WEIGHTS}.strategy is "group", but supported is "channel"'),
    (
        int4_config(format="int-quantized", num_bits=8, type="float"),
        f'{WEIGHTS}.type is "float", but supported is "int"',
    ),
    (int4_config(format="float-quantized"), f"{WEIGHTS}.num_bits is 4, but supported is 8"),
    (int4_config(format="float-quantized", num_bits=8), f'{WEIGHTS}.type is "int", but supported is "float"'),
    (
        int4_config(format="float-quantized", num_bits=8, type="float", strategy="group"),
        f'{WEIGHTS}.strategy is "group", but supported is "block" or "channel" or "tensor"',
    ),
    (
        int4_config(format="float-quantized", num_bits=8, type="float", strategy="block"),
        f"{WEIGHTS}.block_structure is missing",
    ),
    (without(KIMI_INT4, "format"), "quantization_config.format is missing or null"),
    (without(KIMI_INT4, "quant_method"), "quantization_config.quant_method is missing or null"),
    (KIMI_INT4 | {"quantization_status": "frozen"}, 'quantization_status is "frozen", but supported is "compressed"'),
    (
        of_groups(group_0=SCHEME | {"format": "nvfp4-pack-quantized"}),
        'config_groups.group_0.format is "nvfp4-pack-quantized"',
    ),
    # AWQ and GPTQ
    *((AWQ | {key: value}, f"quantization_config.{key} is ") for key, value in (("bits", 8), ("version", "gemv"))),
    (AWQ | {"group_size": -1}, "quantization_config.group_size is -1"),
    (AWQ | {"odd": 1}, "quantization_config.odd is 1, which changes"),
    (GPTQ | {"bits": 3}, "quantization_config.bits is 3, but supported is 4"),
    (GPTQ | {"checkpoint_format": "marlin"}, 'checkpoint_format is "marlin", but supported is "gptq" or "gptq_v2"'),
    (GPTQ | {"is_marlin_format": True}, "quantization_config.is_marlin_format is true"),
    (
        GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}},
        'dynamic is ["+:.*down.*"], but supported is patterns that begin',
    ),
    (GPTQ | {"format": "gptq_v2"}, 'format is "gptq_v2", but supported is the same as quantization_config.checkpoint_'),
    (
        without(GPTQ, "checkpoint_format") | {"format": "marlin"},
        'quantization_config.format is "marlin", but supported',
    ),
    (GPTQ | {"method": "qqq"}, 'quantization_config.method is "qqq", but supported is "gptq"'),
    (AWQ | {"method": "qqq"}, 'quantization_config.method is "qqq", but supported is "awq"'),
    (AWQ | {"format": "gemv_fast"}, 'quantization_config.format is "gemv_fast", but supported is "gemm"'),
    (AWQ | {"dynamic": {"+:.*": {"bits": 8}}}, 'dynamic is ["+:.*"], but supported is patterns that begin'),
    (GPTQ | {"rotation": "hadamard"}, 'quantization_config.rotation is "hadamard", which changes'),
    # AutoRound
    (without(AUTOROUND, "packing_format"), 'quantization_config.packing_format is "", but supported is "auto_round:'),
    (AUTOROUND | {"packing_format": "auto_round:llm_compressor"}, 'packing_format is "auto_round:llm_compressor", but'),
    (AUTOROUND | {"bits": 2}, "quantization_config.bits is 2, but supported is 4"),
    (AUTOROUND | {"data_type": "mx_fp"}, 'quantization_config.data_type is "mx_fp", but supported is "int"'),
    *(
        (form | {"act_bits": 8}, "quantization_config.act_bits is 8, but supported is")
        for form in (AUTOROUND, AWQ, GPTQ)
    ),
    (
        AUTOROUND | {"rotation_config": {"r1": True}},
        'quantization_config.rotation_config is {"r1": true}, which changes',
    ),
    (
        AUTOROUND | {"extra_config": {"lm_head": {"bits": 8}}},
        "extra_config.lm_head.bits is 8, but supported is a whole",
    ),
    (AUTOROUND | {"extra_config": {".*down.*": {"group_size": 64}}}, "extra_config..*down.*.bits is missing or null"),
    # other groups
    (of_groups(), "quantization_config.config_groups is [], but supported is one group with weights"),
    (of_groups(a=SCHEME, b=SCHEME), 'quantization_config.config_groups is ["a", "b"], but supported is one group'),
    (of_groups(W4A16=["Linear"]), 'config_groups.W4A16 is ["Linear"], but supported is a JSON object'),
    (of_groups(group_0={"targets": ["Linear"]}), 'config_groups is ["group_0"], but supported is one group with'),
    # other weights
    (int4_config(num_bits=8), f"{WEIGHTS}.num_bits is 8, but supported is 4"),
    (int4_config(num_bits=None), f"{WEIGHTS}.num_bits is missing or null"),
    (int4_config(type="float"), f'{WEIGHTS}.type is "float", but supported is "int"'),
    (int4_config(symmetric=False), f"{WEIGHTS}.symmetric is false, but supported is true: there are no zero points"),
    (int4_config(strategy="channel"), f'{WEIGHTS}.strategy is "channel", but supported is "group"'),
    (int4_config(strategy="tensor_group"), f'{WEIGHTS}.strategy is "tensor_group"'),
    (int4_config(group_size=-1), f"{WEIGHTS}.group_size is -1"),
    (int4_config(group_size=None), f"{WEIGHTS}.group_size is missing or null"),
    *(
        (int4_config(actorder=value), f'{WEIGHTS}.actorder is {json.dumps(value)}, but supported is "static"')
        for value in ("group", "dynamic", True)
    ),
    (int4_config(dynamic=True), f"{WEIGHTS}.dynamic is true, which changes"),
    (int4_config(block_structure=[128, 128]), f"{WEIGHTS}.block_structure is [128, 128], which changes"),
    (of_groups(group_0=SCHEME | {"weights": SCHEME["weights"] | {"odd": 1}}), f"{WEIGHTS}.odd is 1, which changes"),
    # what is computed with them
    (int4_config(input_activations=ACTIVATIONS), "group_0.input_activations is {"),
    (int4_config(output_activations=ACTIVATIONS), "group_0.output_activations is {"),
    (int4_config(kv_cache_scheme={"num_bits": 8}), 'quantization_config.kv_cache_scheme is {"num_bits": 8}, which'),
    (KIMI_INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "quantization_config.sparsity_config is {"),
    (KIMI_INT4 | {"transform_config": {"config_groups": {"u": 1}}}, "quantization_config.transform_config is {"),
]


@pytest.mark.parametrize("name", ACCEPTED)
def test_symmetric_groups_of_4_bit_integers_are_accepted_without_a_word(tmp_path, name):
    quantization, group = ACCEPTED[name]
    config = load(tmp_path, quantization)
    assert config.integers == IntegerForm("compressed-tensors", group)
    assert (config.fp8_block, config.unknown_keys) == (None, ())


# keys that GPTQModel 5 and later write in addition
OF_GPTQMODEL = {"lm_head": False, "desc_act": False, "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:5.8.0"]}}


# what AutoRound writes into the forms of others, as in OPEA's DeepSeek-R1
OF_AUTOROUND = {
    "act_bits": 16, "act_data_type": "int", "act_dynamic": True, "act_group_size": 128, "act_sym": True, "amp": True,
    "autoround_version": "0.5.1", "batch_size": 8, "data_type": "int", "enable_minmax_tuning": True,
    "enable_norm_bias_tuning": False, "enable_quanted_input": True, "gradient_accumulate_steps": 1, "iters": 1000,
    "low_gpu_mem_usage": True, "lr": 0.001, "minmax_lr": 0.001, "nsamples": 512, "provider": "auto-round",
    "scale_dtype": "torch.float16", "seqlen": 2048, "super_bits": None, "super_group_size": None, "sym": True,
    "to_quant_block_names": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("quantization", "form"),
    [
        (without(GPTQ, "checkpoint_format") | OF_AUTOROUND, IntegerForm("gptq", 32, zero_shift=1)),
        (AWQ | OF_AUTOROUND | {"zero_point": False}, IntegerForm("awq", 32)),
        (AUTOROUND | OF_AUTOROUND, IntegerForm("gptq", 32, zero_shift=1)),
        (AUTOROUND | {"packing_format": "auto_round", "quant_method": "intel/auto-round"}, IntegerForm("gptq", 32)),
        (AUTOROUND | {"packing_format": "auto_round:auto_awq", "extra_config": {}}, IntegerForm("awq", 32)),
        (GPTQ | OF_GPTQMODEL | {"method": "gptq", "format": "gptq"}, IntegerForm("gptq", 32, zero_shift=1)),
        (without(GPTQ, "checkpoint_format") | {"format": "gptq_v2"}, IntegerForm("gptq", 32)),
        (
            AWQ | OF_GPTQMODEL | {"method": "awq", "format": "gemm", "checkpoint_format": "gemm", "sym": False},
            IntegerForm("awq", 32),
        ),
        (AWQ | {"dynamic": {r"-:.*\.self_attn\..*": {}}}, IntegerForm("awq", 32)),
        (AWQ | {"group_size": 128, "modules_to_not_convert": ["mlp.gate."]}, IntegerForm("awq", 128)),
        (GPTQ, IntegerForm("gptq", 32, zero_shift=1)),
        (
            GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2", "dynamic": {r"-:.*\.self_attn\..*": {}}},
            IntegerForm("gptq", 32, in_any_order=True),
        ),
    ],
)
def test_awq_gptq_and_autoround_are_accepted_without_a_word(tmp_path, quantization, form):
    config = load(tmp_path, quantization)
    assert (config.integers, config.fp8_block, config.unknown_keys) == (form, None, ())


@pytest.mark.parametrize(("quantization", "words"), REFUSED)
def test_other_ways_of_storing_are_refused_by_key_and_value(tmp_path, quantization, words):
    with pytest.raises(ModelError) as error:
        load(tmp_path, quantization)
    message = str(error.value)
    assert words in message
    assert message.startswith(f"{tmp_path / 'config.json'}: ")
    assert json.dumps(message).count("\\n") == 0
