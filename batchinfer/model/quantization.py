"""How config.json says that weights are stored: FP8 in blocks, or 4-bit integers (compressed-tensors, AWQ, GPTQ).

Which weights are stored so, the headers of the files say. What else a format may mean (other bits, another packing,
rounded activations) would change what the model computes and is refused by name.
"""

from typing import Any

from batchinfer.model.config_keys import judge_unread_keys
from batchinfer.model.config_reader import ConfigReader
from batchinfer.model.integer_forms import IntegerForm

INT4_FORMAT = "pack-quantized"
# How scales were rounded or found when they were made, and which tensors have none, as their headers say.
_FP8_NOTES = ("scale_fmt", "modules_to_not_convert", "ignored_layers", "dequantize")
_INT4_NOTES = (
    *("ignore", "targets", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    *("global_compression_ratio", "run_compressed", "version"),
)
# What AWQ and GPTQ keep of how they were made, and of how kernels on GPUs are to run.
_AWQ_NOTES = (
    *("modules_to_not_convert", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config"),
    "duo_scaling",
)
_GPTQ_NOTES = (
    *("sym", "lm_head", "true_sequential", "static_groups", "damp_percent", "damp_auto_increment", "mse", "meta"),
    *("quantizer", "model_name_or_path", "model_file_base_name", "dataset", "tokenizer", "batch_size", "model_seqlen"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize", "pad_token_id"),
    *("backend", "use_exllama", "disable_exllama", "exllama_config", "max_input_length", "use_cuda_fp16"),
    "cache_block_outputs",
)


def read_quantization(section: ConfigReader | None) -> dict[str, Any]:
    """The fields fp8_block and integers of ModelConfig.

    Raises:
        ModelError: the weights are stored in another way; the sentence names the key and its value.
    """
    if section is None:
        return {"fp8_block": None, "integers": None}
    read = _INTEGERS.get(section.text("quant_method", default=""))
    if read is not None:
        return {"fp8_block": None, "integers": read(section)}
    return {"fp8_block": _read_fp8_block(section), "integers": None}


def _read_fp8_block(section: ConfigReader) -> tuple[int, int]:
    """Rows and columns of one scale (DeepSeek-V3 report section 3.3.2)."""
    supported = '"fp8" with blocks of [128, 128]; "compressed-tensors", "awq" or "gptq" in 4 bits; or none'
    section.expect("quant_method", "fp8", supported, needed=True)
    section.expect("fmt", "e4m3", '"e4m3"')
    section.expect("activation_scheme", "dynamic", '"dynamic"')
    section.expect("weight_block_size", [128, 128], "[128, 128]", needed=True)
    section.pass_over(*_FP8_NOTES)
    return 128, 128


def _read_compressed_tensors(section: ConfigReader) -> IntegerForm:
    """All quantised weights are symmetric 4-bit integers."""
    section.expect("format", INT4_FORMAT, f'"{INT4_FORMAT}"', needed=True)
    section.expect("quantization_status", "compressed", '"compressed"')
    groups = section.section("config_groups")
    names = [] if groups is None else list(groups.unread())
    scheme = groups.section(names[0]) if groups is not None and len(names) == 1 else None
    weights = None if scheme is None else scheme.section("weights")
    if scheme is None or weights is None:
        raise section.unsupported("config_groups", names, "one group with weights")
    scheme.expect("format", INT4_FORMAT, f'"{INT4_FORMAT}"')
    weights.expect("num_bits", 4, "4", needed=True)
    weights.expect("type", "int", '"int"')
    weights.expect("symmetric", True, "true: there are no zero points")
    weights.expect("strategy", "group", '"group"')
    group = weights.size("group_size")
    for part in (weights, scheme, section):
        part.pass_over(*_INT4_NOTES, *(key for key, value in part.unread().items() if not value))
        judge_unread_keys(part, refuse_unknown=True)
    return IntegerForm("compressed-tensors", group)


def _read_awq(section: ConfigReader) -> IntegerForm:
    """AutoAWQ's: with zero points, packed in its "gemm" order."""
    section.expect("bits", 4, "4", needed=True)
    section.expect("version", "gemm", '"gemm"')
    section.expect("zero_point", True, "true")
    group = section.size("group_size")
    section.pass_over(*_AWQ_NOTES)
    judge_unread_keys(section, refuse_unknown=True)
    return IntegerForm("awq", group)


def _read_gptq(section: ConfigReader) -> IntegerForm:
    """AutoGPTQ's and GPTQModel's; their first format keeps zero points less one."""
    section.expect("bits", 4, "4", needed=True)
    section.expect("pack_dtype", "int32", '"int32"')
    section.expect("is_marlin_format", False, "false")
    known = {"gptq": 1, "gptq_v2": 0}
    name = section.text("checkpoint_format", default="gptq")
    if name not in known:
        raise section.unsupported("checkpoint_format", name, '"gptq" or "gptq_v2"')
    group, in_any_order = section.size("group_size"), section.flag("desc_act", default=False)
    exceptions = section.section("dynamic")  # by pattern of modules; "-:" leaves them as they are
    if exceptions is not None and not all(pattern.startswith("-:") for pattern in exceptions.unread()):
        raise section.unsupported("dynamic", list(exceptions.unread()), 'patterns that begin with "-:"')
    section.pass_over(*_GPTQ_NOTES)
    judge_unread_keys(section, refuse_unknown=True)
    return IntegerForm("gptq", group, zero_shift=known[name], in_any_order=in_any_order)


_INTEGERS = {"compressed-tensors": _read_compressed_tensors, "awq": _read_awq, "gptq": _read_gptq}
