"""How config.json says that weights are stored: FP8 in blocks, or 4-bit integers in groups (compressed-tensors).

Which weights are stored so, the headers of the files say. What else the format may mean (other bits, zero points,
columns in another order, rounded activations) would change what the model computes and is refused by name.
"""

from typing import Any

from batchinfer.model.config_keys import judge_unread_keys
from batchinfer.model.config_reader import ConfigReader

INT4_FORMAT = "pack-quantized"
# How scales were rounded or found when they were made, and which tensors have none, as their headers say.
_FP8_NOTES = ("scale_fmt", "modules_to_not_convert", "ignored_layers", "dequantize")
_INT4_NOTES = (
    *("ignore", "targets", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    *("global_compression_ratio", "run_compressed", "version"),
)


def read_quantization(section: ConfigReader | None) -> dict[str, Any]:
    """The fields fp8_block and int4_group of ModelConfig.

    Raises:
        ModelError: the weights are stored in another way; the sentence names the key and its value.
    """
    if section is None:
        return {"fp8_block": None, "int4_group": None}
    if section.text("quant_method", default="") == "compressed-tensors":
        return {"fp8_block": None, "int4_group": _read_int4_group(section)}
    return {"fp8_block": _read_fp8_block(section), "int4_group": None}


def _read_fp8_block(section: ConfigReader) -> tuple[int, int]:
    """Rows and columns of one scale (DeepSeek-V3 report section 3.3.2)."""
    supported = '"fp8" with blocks of [128, 128], "compressed-tensors" in 4 bits, or no quantization_config'
    section.expect("quant_method", "fp8", supported, needed=True)
    section.expect("fmt", "e4m3", '"e4m3"')
    section.expect("activation_scheme", "dynamic", '"dynamic"')
    section.expect("weight_block_size", [128, 128], "[128, 128]", needed=True)
    section.pass_over(*_FP8_NOTES)
    return 128, 128


def _read_int4_group(section: ConfigReader) -> int:
    """Columns that share a scale, where all quantised weights are symmetric 4-bit integers."""
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
    return group
