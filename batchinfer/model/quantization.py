"""The storage of weights by config.json: FP8, in blocks or with one scale, or integers of 4 bits.

The headers of the files name the weights that are stored so. Other variants of a format (other bits, another packing,
rounded activations) would change the model's mathematics and are refused by name.
"""

from typing import Any, Literal

from batchinfer.model.config_keys import judge_unread_keys
from batchinfer.model.config_reader import ConfigReader
from batchinfer.model.integer_forms import IntegerForm

INT4_FORMAT, FP8_FORMAT, INT8_FORMAT = "pack-quantized", "float-quantized", "int-quantized"  # of compressed-tensors
_FP8_STRATEGIES = "block", "channel", "tensor"
FP8, INT8 = "F8_E4M3", "I8"  # as files name them
# How scales were rounded or found when they were made, and which tensors have none, as their headers say.
_FP8_NOTES = ("scale_fmt", "modules_to_not_convert", "ignored_layers", "dequantize")
FP8_BLOCK = 128, 128
_FP8_ROW = 1, 2**31 - 1  # a block is a row of any length
_COMPRESSED_NOTES = (
    *("ignore", "targets", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    *("global_compression_ratio", "run_compressed", "version", "provider"),
)
# In which GPTQ rounded columns: each is stored in its place, and neighbours make a group.
_GPTQ_ORDERS = ("static", "weight")
# What AWQ and GPTQ keep of how they were made, and of how kernels on GPUs are to run.
_AWQ_NOTES = (
    *("modules_to_not_convert", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config"),
    *("duo_scaling", "sym", "lm_head", "meta"),
)
_GPTQ_NOTES = (
    *("sym", "lm_head", "true_sequential", "static_groups", "damp_percent", "damp_auto_increment", "mse", "meta"),
    *("quantizer", "model_name_or_path", "model_file_base_name", "dataset", "tokenizer", "batch_size", "model_seqlen"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize", "pad_token_id"),
    *("backend", "use_exllama", "disable_exllama", "exllama_config", "max_input_length", "use_cuda_fp16"),
    "cache_block_outputs",
)
# Of AutoRound's own form: which other one packs like it, and what is added to its zero points.
_AUTOROUND_PACKINGS: dict[str, tuple[Literal["gptq", "awq"], int]] = {
    "auto_round:auto_gptq": ("gptq", 1),
    "auto_round:gptqmodel": ("gptq", 0),
    "auto_round": ("gptq", 0),
    "auto_round:auto_awq": ("awq", 0),
}
# What AutoRound keeps of how a checkpoint was made, also in one that it writes as AWQ's or GPTQ's.
_AUTOROUND_NOTES = (
    *("autoround_version", "provider", "backend", "sym", "amp", "batch_size", "dataset", "iters", "lr", "minmax_lr"),
    *("nsamples", "seqlen", "scale_dtype", "low_gpu_mem_usage", "gradient_accumulate_steps", "model_free"),
    *("enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "supported_types"),
    *("to_quant_block_names", "block_name_to_quantize", "quant_block_list"),
    *("act_data_type", "act_dynamic", "act_group_size", "act_sym"),
    *("static_kv_granularity", "static_attention_granularity"),
)


def read_quantization(section: ConfigReader | None) -> dict[str, Any]:
    """Return the fields of ModelConfig about stored weights.

    Raises:
        ModelError: the weights are stored in another way; the message names the key and its value.
    """
    fields: dict[str, Any] = {"fp8_block": None, "fp8_per_tensor": False, "integers": None, "has_fp4_experts": False}
    fields["eight_bits"] = FP8
    if section is None:
        return fields
    method = section.text("quant_method", default="")
    if method == "compressed-tensors" and section.text("format", default="") in (FP8_FORMAT, INT8_FORMAT):
        return fields | _read_8_bit_groups(section)
    if method == "mxfp4":
        section.pass_over("modules_to_not_convert", "dequantize")
        judge_unread_keys(section, refuse_unknown=True)
        return fields | {"has_fp4_experts": True}
    if method in _INTEGERS:
        return fields | {"integers": _INTEGERS[method](section)}
    return fields | {"fp8_block": FP8_BLOCK, "fp8_per_tensor": not _has_fp8_blocks(section)}


def _has_fp8_blocks(section: ConfigReader) -> bool:
    """Return whether each block has a scale (DeepSeek-V3 report section 3.3.2); otherwise each weight has.

    Where inputs have fixed scales (static) weights have one each, too; inputs are rounded by their own values here.
    """
    in_4_bits = '"compressed-tensors", "awq", "gptq" or "auto-round" in 4 bits'
    supported = f'"fp8" with blocks of [128, 128]; "mxfp4"; {in_4_bits}'
    section.expect("quant_method", "fp8", supported=supported, needed=True)
    section.expect("fmt", "e4m3", "float8_e4m3fn", supported='"e4m3"')
    section.pass_over(*_FP8_NOTES)
    if not section.has("weight_block_size") and section.text("activation_scheme", default="") == "static":
        return False
    section.expect("activation_scheme", "dynamic", supported='"dynamic"')
    section.expect("weight_block_size", list(FP8_BLOCK), supported="[128, 128]", needed=True)
    return True


def _read_8_bit_groups(section: ConfigReader) -> dict[str, Any]:
    """Read compressed-tensors' weights in 8 bits: FP8 with a scale per block, row or weight, integers with one per row.

    Inputs are rounded by their own values here, also where a weight with one scale has a fixed one for its inputs.
    """
    scheme, weights = _one_group(section)
    name = section.text("format", default="")
    is_fp8 = name == FP8_FORMAT
    scheme.expect("format", name, supported=f'"{name}"')
    weights.expect("num_bits", 8, supported="8", needed=True)
    kind = "float" if is_fp8 else "int"
    weights.expect("type", kind, supported=f'"{kind}"', needed=True)
    known = _FP8_STRATEGIES if is_fp8 else ("channel",)
    weights.expect("strategy", *known, supported=" or ".join(f'"{one}"' for one in known), needed=True)
    strategy = weights.text("strategy", default="")
    if strategy == "block":
        weights.expect("block_structure", list(FP8_BLOCK), supported="[128, 128]", needed=True)
    weights.expect("symmetric", True, supported="true: there are no zero points")
    if strategy != "tensor" and (inputs := scheme.section("input_activations")) is not None:
        inputs.expect("dynamic", True, supported="true: inputs are rounded by their own values")
    scheme.pass_over("input_activations")
    _judge_groups(section, scheme, weights)
    return {
        "fp8_block": _FP8_ROW if strategy == "channel" else FP8_BLOCK,
        "fp8_per_tensor": strategy == "tensor",
        "eight_bits": FP8 if is_fp8 else INT8,
    }


def _read_compressed_tensors(section: ConfigReader) -> IntegerForm:
    """Return the form of compressed-tensors' weights, which must be symmetric 4-bit integers."""
    section.expect("format", INT4_FORMAT, supported=f'"{INT4_FORMAT}", "{FP8_FORMAT}" or "{INT8_FORMAT}"', needed=True)
    scheme, weights = _one_group(section)
    scheme.expect("format", INT4_FORMAT, supported=f'"{INT4_FORMAT}"')
    weights.expect("num_bits", 4, supported="4", needed=True)
    weights.expect("type", "int", supported='"int"')
    weights.expect("symmetric", True, supported="true: there are no zero points")
    weights.expect("strategy", "group", supported='"group"')
    group = weights.size("group_size")
    _judge_groups(section, scheme, weights)
    return IntegerForm("compressed-tensors", group)


def _one_group(section: ConfigReader) -> tuple[ConfigReader, ConfigReader]:
    """Return the only scheme of compressed-tensors, and its section on weights."""
    section.expect("quantization_status", "compressed", supported='"compressed"')
    groups = section.section("config_groups")
    names = [] if groups is None else list(groups.unread())
    scheme = groups.section(names[0]) if groups is not None and len(names) == 1 else None
    weights = None if scheme is None else scheme.section("weights")
    if scheme is None or weights is None:
        raise section.unsupported("config_groups", names, "one group with weights")
    return scheme, weights


def _judge_groups(section: ConfigReader, scheme: ConfigReader, weights: ConfigReader) -> None:
    """Raise for unsupported settings of a scheme."""
    order = weights.unread().get("actorder")
    if order and order not in _GPTQ_ORDERS:
        raise weights.unsupported("actorder", order, '"static", "weight" or null: groups are of neighbouring columns')
    weights.pass_over("actorder")
    parts = section, scheme, weights
    for part in parts[::-1]:
        part.pass_over(*_COMPRESSED_NOTES, *(key for key, value in part.unread().items() if not value))
        judge_unread_keys(part, refuse_unknown=True)


def _check_gptqmodel_keys(section: ConfigReader, method: str) -> None:
    """Raise for unsupported settings of GPTQModel's configuration, which writes both methods."""
    section.expect("method", method, supported=f'"{method}"')
    section.expect("bits", 4, supported="4", needed=True)
    section.expect("pack_dtype", "int32", supported='"int32"')
    exceptions = section.section("dynamic")  # by pattern of modules; "-:" leaves them as they are
    if exceptions is not None and not all(pattern.startswith("-:") for pattern in exceptions.unread()):
        raise section.unsupported("dynamic", list(exceptions.unread()), 'patterns that begin with "-:"')


def _read_awq(section: ConfigReader) -> IntegerForm:
    """Read the configuration of AutoAWQ or GPTQModel: with zero points, packed in AutoAWQ's "gemm" order."""
    _check_gptqmodel_keys(section, "awq")
    for name in ("version", "format", "checkpoint_format"):
        section.expect(name, "gemm", supported='"gemm"')
    section.expect("desc_act", False, supported="false")
    group = section.size("group_size")
    _pass_over_autoround(section)
    section.pass_over("zero_point", *_AWQ_NOTES)  # AutoRound stores zero points that are all 8, too
    judge_unread_keys(section, refuse_unknown=True)
    return IntegerForm("awq", group)


def _read_gptq(section: ConfigReader) -> IntegerForm:
    """Read the configuration of AutoGPTQ or GPTQModel, whose first format stores zero points less one."""
    _check_gptqmodel_keys(section, "gptq")
    section.expect("is_marlin_format", False, supported="false")
    known = {"gptq": 1, "gptq_v2": 0}
    name = section.text("checkpoint_format", "format", default="gptq")  # GPTQModel writes both from its version 5 on
    if name not in known:
        key = "checkpoint_format" if section.has("checkpoint_format") else "format"
        raise section.unsupported(key, name, '"gptq" or "gptq_v2"')
    group, in_any_order = section.size("group_size"), section.flag("desc_act", default=False)
    _pass_over_autoround(section)
    section.pass_over(*_GPTQ_NOTES)
    judge_unread_keys(section, refuse_unknown=True)
    return IntegerForm("gptq", group, zero_shift=known[name], in_any_order=in_any_order)


def _read_autoround(section: ConfigReader) -> IntegerForm:
    """Read the configuration of AutoRound, which packs as GPTQ or AWQ."""
    section.expect("bits", 4, supported="4", needed=True)
    name = section.text("packing_format", default="")
    if name not in _AUTOROUND_PACKINGS:
        supported = ", ".join(f'"{packing}"' for packing in _AUTOROUND_PACKINGS)
        raise section.unsupported("packing_format", name, supported)
    if (exceptions := section.section("extra_config")) is not None:  # by module, or pattern of modules
        for modules in exceptions.unread():
            if (scheme := exceptions.section(modules)) is not None:
                scheme.size("bits", minimum=16)
    group = section.size("group_size")
    _pass_over_autoround(section)
    judge_unread_keys(section, refuse_unknown=True)
    method, zero_shift = _AUTOROUND_PACKINGS[name]
    return IntegerForm(method, group, zero_shift)


def _pass_over_autoround(section: ConfigReader) -> None:
    """Mark AutoRound's other keys as read; raise if inputs are rounded, too."""
    section.expect("data_type", "int", supported='"int"')
    section.size("act_bits", default=16, minimum=16)
    section.pass_over(*_AUTOROUND_NOTES)


_INTEGERS = {
    "compressed-tensors": _read_compressed_tensors,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "auto-round": _read_autoround,
    "intel/auto-round": _read_autoround,
}
