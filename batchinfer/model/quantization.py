"""How config.json says that weights are stored: FP8 in blocks or with one scale, or 4-bit integers in groups.

Which weights are stored so, the headers of the files say. What else the format may mean (other bits, zero points,
columns in another order, rounded activations) would change what the model computes and is refused by name.
"""

from typing import Any

from batchinfer.model.config_keys import judge_unread_keys
from batchinfer.model.config_reader import ConfigReader

INT4_FORMAT, FP8_FORMAT = "pack-quantized", "float-quantized"  # of compressed-tensors
# How scales were rounded or found when they were made, and which tensors have none, as their headers say.
_FP8_NOTES = ("scale_fmt", "modules_to_not_convert", "ignored_layers", "dequantize")
_FP8_BLOCK = 128, 128
_COMPRESSED_NOTES = (
    *("ignore", "targets", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    *("global_compression_ratio", "run_compressed", "version"),
)


def read_quantization(section: ConfigReader | None) -> dict[str, Any]:
    """The fields fp8_block, fp8_per_tensor and int4_group of ModelConfig.

    Raises:
        ModelError: the weights are stored in another way; the sentence names the key and its value.
    """
    read: dict[str, Any] = {"fp8_block": None, "fp8_per_tensor": False, "int4_group": None}
    if section is None:
        return read
    if section.text("quant_method", default="") != "compressed-tensors":
        return read | {"fp8_block": _FP8_BLOCK, "fp8_per_tensor": not _has_fp8_blocks(section)}
    if section.text("format", default="") == FP8_FORMAT:
        _check_fp8_groups(section)
        return read | {"fp8_block": _FP8_BLOCK}
    return read | {"int4_group": _read_int4_group(section)}


def _has_fp8_blocks(section: ConfigReader) -> bool:
    """Whether each block has a scale (DeepSeek-V3 report section 3.3.2); otherwise each weight has.

    Where inputs have fixed scales (static) weights have one each, too; inputs are rounded by their own values here.
    """
    supported = '"fp8" with blocks of [128, 128], "compressed-tensors" in 4 bits or FP8, or no quantization_config'
    section.expect("quant_method", "fp8", supported, needed=True)
    section.expect("fmt", "e4m3", '"e4m3"')
    section.pass_over(*_FP8_NOTES)
    if not section.has("weight_block_size") and section.text("activation_scheme", default="") == "static":
        return False
    section.expect("activation_scheme", "dynamic", '"dynamic"')
    section.expect("weight_block_size", list(_FP8_BLOCK), "[128, 128]", needed=True)
    return True


def _check_fp8_groups(section: ConfigReader) -> None:
    """Blocks of FP8 as compressed-tensors describes them, inputs rounded by their own values."""
    scheme, weights = _one_group(section)
    scheme.expect("format", FP8_FORMAT, f'"{FP8_FORMAT}"')
    weights.expect("num_bits", 8, "8", needed=True)
    weights.expect("type", "float", '"float"', needed=True)
    weights.expect("strategy", "block", '"block"', needed=True)
    weights.expect("block_structure", list(_FP8_BLOCK), "[128, 128]", needed=True)
    weights.expect("symmetric", True, "true: there are no zero points")
    if (inputs := scheme.section("input_activations")) is not None:
        inputs.expect("dynamic", True, "true: inputs are rounded by their own values")
    _judge_groups(section, scheme, weights)


def _read_int4_group(section: ConfigReader) -> int:
    """Columns that share a scale, where all quantised weights are symmetric 4-bit integers."""
    section.expect("format", INT4_FORMAT, f'"{INT4_FORMAT}" or "{FP8_FORMAT}"', needed=True)
    scheme, weights = _one_group(section)
    scheme.expect("format", INT4_FORMAT, f'"{INT4_FORMAT}"')
    weights.expect("num_bits", 4, "4", needed=True)
    weights.expect("type", "int", '"int"')
    weights.expect("symmetric", True, "true: there are no zero points")
    weights.expect("strategy", "group", '"group"')
    group = weights.size("group_size")
    _judge_groups(section, scheme, weights)
    return group


def _one_group(section: ConfigReader) -> tuple[ConfigReader, ConfigReader]:
    """The only scheme of compressed-tensors, and what it says of weights."""
    section.expect("quantization_status", "compressed", '"compressed"')
    groups = section.section("config_groups")
    names = [] if groups is None else list(groups.unread())
    scheme = groups.section(names[0]) if groups is not None and len(names) == 1 else None
    weights = None if scheme is None else scheme.section("weights")
    if scheme is None or weights is None:
        raise section.unsupported("config_groups", names, "one group with weights")
    return scheme, weights


def _judge_groups(*parts: ConfigReader) -> None:
    """Refuse what else a scheme says."""
    for part in parts[::-1]:
        part.pass_over(*_COMPRESSED_NOTES, *(key for key, value in part.unread().items() if not value))
        judge_unread_keys(part, refuse_unknown=True)
